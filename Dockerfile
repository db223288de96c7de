# An image for `unisono run --launcher kubernetes` (docs/clusters.md): Python, the wheel of `make dist`, and torch.
#
#     make dist && docker build -t registry/train:1 .
#     docker build -t registry/train:1 --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#
# The second is without CUDA. What a script needs besides goes into an image of its own: FROM registry/train:1.
ARG PYTHON=3.13
FROM python:${PYTHON}-slim
ARG TORCH_INDEX=https://pypi.org/simple
WORKDIR /work
COPY dist/*.whl /tmp/dist/
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" "$(ls /tmp/dist/unisono-*.whl)[torch]"
# The pods run as a user without a name or a home (kubernetes.user).
ENV HOME=/tmp PYTHONUNBUFFERED=1
USER 1000
RUN unisono --version && python -c "import unisono; unisono.Run"
CMD ["unisono", "--help"]
