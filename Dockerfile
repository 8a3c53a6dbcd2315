# A GPU node's image: the CUDA set of `make install-cuda`, with the same pins (scripts/constraints-cuda.txt). Not yet
# built or run anywhere; `docs/gpu.md` says what has been.
#
#   docker build -t hybridengine .
#   docker run --gpus all --ipc host --ulimit memlock=-1 -v /models:/models hybridengine \
#       torchrun --standalone --nproc-per-node 8 -m hybridengine.train model.path=/models/Qwen2.5-7B-Instruct ...
#
# Both images need CUDA 13.0, as torch 2.13.0 does, and Python 3.11 or later.
ARG BUILD_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04
ARG RUNTIME_IMAGE=nvidia/cuda:13.0.1-base-ubuntu24.04

# The box copies: nvcc stays behind in this stage.
FROM ${BUILD_IMAGE} AS native
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3 && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY csrc csrc
COPY hybridengine/native_build.py .
ARG CUDA_ARCH=all-major
RUN python3 -c "from pathlib import Path; import native_build as b; \
b.compile_cuda(Path('csrc'), Path('_boxes_cuda.so'), arch='${CUDA_ARCH}')"

# torch brings the CUDA libraries; the compilers are for Triton and torch.compile, which build kernels when they are used.
FROM ${RUNTIME_IMAGE} AS runtime
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update && apt-get install -y --no-install-recommends g++ make git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/hybridengine
COPY pyproject.toml setup.py README.md LICENSE Makefile ./
COPY scripts scripts
COPY csrc csrc
COPY conf conf
COPY hybridengine hybridengine
RUN PIP_NO_CACHE_DIR=1 make install-cuda VENV=/opt/venv
COPY --from=native /build/_boxes_cuda.so hybridengine/
COPY benchmarks benchmarks
COPY tests tests
COPY examples examples
COPY docs docs
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH
CMD ["hybridengine", "doctor"]
