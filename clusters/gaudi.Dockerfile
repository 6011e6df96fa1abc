# Habana's PyTorch image with what a node of Nightgrid needs besides. Built on each server, or once
# and pushed to a registry, from the root of the repository:
#   docker build -t nightgrid-gaudi:1.24.0 -f clusters/gaudi.Dockerfile .
# The release must be that of the servers' driver (`hl-smi` prints it). Another one changes two
# numbers, and both releases come on either Ubuntu (22.04 with Python 3.10, 24.04 with 3.12):
#   docker build -t nightgrid-gaudi:1.24.1 --build-arg SOFTWARE=1.24.1 --build-arg TORCH=2.11.0 \
#     --build-arg UBUNTU=ubuntu24.04 -f clusters/gaudi.Dockerfile .
# KIND=pytorch-upstream-installer has stock torch: eager and compiled modes only, since lazy mode,
# optimum-habana's own, asserts Intel's fork. With stock transformers of today instead of
# optimum-habana, whose support ended on 2026-10-31 (docs/gaudi.md):
#   --build-arg KIND=pytorch-upstream-installer --build-arg EXTRAS=quant --build-arg PINS=constraints.txt
# vLLM: clusters/gaudi-vllm.Dockerfile.
ARG SOFTWARE=1.24.0
ARG TORCH=2.10.0
ARG UBUNTU=ubuntu22.04
ARG KIND=pytorch-installer
FROM vault.habana.ai/gaudi-docker/${SOFTWARE}/${UBUNTU}/habanalabs/${KIND}-${TORCH}:latest
ARG EXTRAS=hpu
ARG PINS=constraints-hpu.txt

# Ray's launcher copies its files into the container by rsync, which Habana's image lacks.
RUN apt-get update \
    && apt-get install -y --no-install-recommends rsync git \
    && rm -rf /var/lib/apt/lists/*

# Habana's image starts an SSH server in every interactive shell. With the host's network that would
# be one more open port of the host (3022), and Ray's launcher runs its commands in such shells.
RUN sed -i '/init\.d\/ssh start/d' ~/.bashrc

# The Python of Ubuntu 24.04 refuses packages beside its own unless told so.
ENV PIP_BREAK_SYSTEM_PACKAGES=1

# Habana's torch stays: what is installed of it is a constraint, so pip fails rather than replace it.
# DeepSpeed is Habana's fork, whose newest tag is 1.23.0; the stock one does not know hpu.
COPY . /opt/nightgrid
RUN python3 -m pip list --format=freeze | grep -iE '^(torch|habana)' > /opt/keep.txt \
    && grep -v '^torch==' "/opt/nightgrid/$PINS" > /opt/pins.txt \
    && python3 -m pip install --no-cache-dir -c /opt/keep.txt -c /opt/pins.txt \
       "/opt/nightgrid[$EXTRAS]" "ray[default]==2.60.0" \
    && python3 -m pip install --no-cache-dir -c /opt/keep.txt \
       "git+https://github.com/HabanaAI/DeepSpeed.git@1.23.0"
