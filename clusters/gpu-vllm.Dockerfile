# Ray's own CUDA image with vLLM and what a node of Nightgrid needs besides; from the root of the
# repository, for servers with NVIDIA's driver 580 or newer:
#   docker build -t nightgrid-gpu-vllm:2.60.0 -f clusters/gpu-vllm.Dockerfile .
# vLLM 0.33.0 pins torch 2.14.0 (CUDA 13), needs Python 3.11 or newer and other versions than
# clusters/gpu.Dockerfile, so it has an image and a cluster of its own: name this one in gpu.yaml.
FROM rayproject/ray:2.60.0-py312-gpu

COPY --chown=ray:users . /opt/nightgrid
RUN python -m pip install --no-cache-dir \
    '/opt/nightgrid[gpu]' "vllm==0.33.0" "ray[default]==2.60.0"
