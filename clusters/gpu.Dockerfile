# Ray's own CUDA image with what a node of Nightgrid needs besides; from the root of the repository:
#   docker build -t nightgrid-gpu:2.60.0 -f clusters/gpu.Dockerfile .
# Python 3.10, as in Habana's images: all nodes of one Ray cluster must have the same.
FROM rayproject/ray:2.60.0-py310-gpu

COPY --chown=ray:users . /opt/nightgrid
RUN python -m pip install --no-cache-dir -c /opt/nightgrid/constraints.txt \
    '/opt/nightgrid[quant,deepspeed,liger]' "ray[default]==2.60.0"
