#!/usr/bin/env bash
# Makes .venv-sglang: SGLang in an environment of its own, because its pins conflict with vLLM's.
#
#   scripts/install_sglang.sh [cpu|cuda|auto] [main venv, default .venv] [SGLang's venv, default .venv-sglang]
#
# cuda: a full installation, with the torch that SGLang asks for, and hybridengine in it.
# cpu:  SGLang's CUDA packages and its CUDA torch are of no use here. The environment sees everything `make install` put
#       into .venv (torch, transformers, hybridengine itself) and adds SGLang and what is missing: 400 MB.
set -euo pipefail
cd "$(dirname "$0")/.."

SGLANG_VERSION=0.5.23
# What SGLang imports at its start and the main environment does not have.
MISSING=(orjson==3.13.0 zstandard==0.25.0 scipy==1.17.1 ipython==9.18.1)
variant=${1:-auto}
main_venv=${2:-.venv}
venv=${3:-.venv-sglang}
if [ "$variant" = auto ]; then
    if nvidia-smi -L >/dev/null 2>&1; then variant=cuda; else variant=cpu; fi
fi
case "$variant" in cpu | cuda) ;; *) echo "install_sglang: '$variant' is not one of cpu, cuda, auto" >&2; exit 2 ;; esac
[ -x "$main_venv/bin/python" ] || { echo "install_sglang: $main_venv not found; run 'make install' first" >&2; exit 1; }
echo "install_sglang: $variant set into $venv"

if [ ! -x "$venv/bin/python" ]; then
    "$main_venv/bin/python" -m venv --without-pip "$venv"
fi
pip() { "$main_venv/bin/python" -m pip --disable-pip-version-check --python "$venv/bin/python" "$@"; }

if [ "$variant" = cpu ]; then
    # addsitedir rather than a plain path line: it also runs the .pth files of the main environment (editable installs).
    main_site=$("$main_venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    own_site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$main_site')" >"$own_site/main_environment.pth"
    # Wheels stay in pip's cache: a second installation on the same machine downloads nothing. SGLang comes last and
    # without its dependencies, so that pip does not complain about the CUDA packages that are left out.
    pip install --quiet "${MISSING[@]}"
    pip install --quiet --no-deps "sglang==$SGLANG_VERSION"
else
    pip install "sglang==$SGLANG_VERSION"
    pip install --no-deps --editable .
    pip install omegaconf hydra-core
fi

# The engine's process imports neither vLLM nor anything that was not asked for; this is all it needs to start.
"$venv/bin/python" -W ignore - <<'PY'
from importlib.metadata import version

import hybridengine.engines.rollout.sglang.host  # noqa: F401

print("sglang ready:", ", ".join(f"{name} {version(name)}" for name in ("sglang", "hybridengine", "torch", "transformers")))
PY
