# CPU:   docker build -t sglang-adaptive .
# GPUs:  docker build -t sglang-adaptive --build-arg DEVICE=cuda --build-arg EXTRAS=flashinfer .
# Run:   docker run -p 30000:30000 sglang-adaptive    (on GPUs with --gpus all)
# Compiled Triton kernels: docs/starting.md says how an image carries them.
# scripts/check_dockerfile.py runs the RUN lines of the CPU image without Docker.
ARG DEVICE=cpu

FROM python:3.12-slim AS cpu
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

# nvcc compiles the kernels, and FlashInfer's at the first start.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-dev g++ \
    && rm -rf /var/lib/apt/lists/*

FROM ${DEVICE}
ARG DEVICE
ARG EXTRAS=
ARG CUDA_ARCHITECTURES="80 89 90a"
WORKDIR /opt/sglang
ENV PATH=/opt/sglang/venv/bin:$PATH
COPY . source
RUN python3 -m venv venv
RUN venv/bin/pip install --no-cache-dir --disable-pip-version-check \
    -c source/constraints.txt "./source${EXTRAS:+[$EXTRAS]}"
RUN if [ "$DEVICE" = cuda ]; then python -m sgl_kernel.build --arch $CUDA_ARCHITECTURES; fi
RUN rm -rf source && sglang check-env --device cpu
EXPOSE 30000
ENTRYPOINT ["sglang", "serve", "--host", "0.0.0.0"]
CMD ["--model-path", "demo"]
