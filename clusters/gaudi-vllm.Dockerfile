# Habana's image of vLLM with its plugin vllm-gaudi, with what a node of Nightgrid needs besides;
# from the root of the repository, for servers whose driver is of release 1.24.1:
#   docker build -t nightgrid-gaudi-vllm:1.24.1 -f clusters/gaudi-vllm.Dockerfile .
# vllm-gaudi needs other versions of transformers than optimum-habana, so it has an image of its
# own, and a grid that compares the two runs once on each cluster.
FROM vault.habana.ai/gaudi-docker/1.24.1/ubuntu24.04/habanalabs/vllm-0.26.0-ptupstream-2.11.0:latest

# Ray's launcher copies its files into the container by rsync, which Habana's image lacks.
RUN apt-get update \
    && apt-get install -y --no-install-recommends rsync \
    && rm -rf /var/lib/apt/lists/*
RUN sed -i '/init\.d\/ssh start/d' ~/.bashrc
ENV PIP_BREAK_SYSTEM_PACKAGES=1

# Its entry point starts vLLM's server with whatever `docker run` gives it: it would swallow the
# command of `ray up` (ENTRYPOINT of vllm-gaudi's .cd/Dockerfile.ubuntu.pytorch.vllm).
ENTRYPOINT []
WORKDIR /root

# What vLLM was built with stays as it is.
COPY . /opt/nightgrid
RUN python3 -m pip list --format=freeze --exclude-editable \
       | grep -iE '^(torch|habana|transformers|tokenizers|huggingface)' > /opt/keep.txt \
    && python3 -m pip install --no-cache-dir -c /opt/keep.txt /opt/nightgrid "ray[default]==2.60.0"
