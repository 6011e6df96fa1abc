# Ray's own CUDA image with what a node of Nightgrid needs besides; from the root of the repository:
#   docker build -t nightgrid-gpu:2.60.0 -f clusters/gpu.Dockerfile .
# Python 3.10, as in Habana's images: all nodes of one Ray cluster must have the same. torch 2.13 is
# built for CUDA 13, which needs NVIDIA's driver 580 or newer on the server; the doctor compares.
# vLLM: clusters/gpu-vllm.Dockerfile.
FROM rayproject/ray:2.60.0-py310-gpu

COPY --chown=ray:users . /opt/nightgrid
RUN python -m pip install --no-cache-dir -c /opt/nightgrid/constraints.txt \
    '/opt/nightgrid[gpu,quant,deepspeed,liger]' "ray[default]==2.60.0"
