# Habana's PyTorch image with what a node of Nightgrid needs besides. Built on each server, or once
# and pushed to a registry, from the root of the repository:
#   docker build -t nightgrid-gaudi:1.24.0 -f clusters/gaudi.Dockerfile .
# The version must be that of the servers' driver (`hl-smi` prints it).
FROM vault.habana.ai/gaudi-docker/1.24.0/ubuntu22.04/habanalabs/pytorch-installer-2.10.0:latest

# Ray's launcher copies its files into the container by rsync, which Habana's image lacks.
RUN apt-get update \
    && apt-get install -y --no-install-recommends rsync \
    && rm -rf /var/lib/apt/lists/*

# Habana's image starts an SSH server in every interactive shell. With the host's network that would
# be one more open port of the host (3022), and Ray's launcher runs its commands in such shells.
RUN sed -i '/init\.d\/ssh start/d' ~/.bashrc

# Intel's torch stays: what is installed of it is a constraint, so pip fails rather than replace it.
COPY . /opt/nightgrid
RUN python3 -m pip list --format=freeze | grep -iE '^(torch|habana)' > /opt/keep.txt \
    && python3 -m pip install --no-cache-dir -c /opt/keep.txt -c /opt/nightgrid/constraints-hpu.txt \
       '/opt/nightgrid[hpu]' "ray[default]==2.60.0"
