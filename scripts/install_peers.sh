#!/usr/bin/env bash
# Makes .venv-peers: TRL in an environment of its own that sees everything `make install` put into .venv.
#
# TRL comes without its dependencies, so that neither environment can change what the other measures: both
# arms of a benchmark run on the very same torch, vLLM and transformers.
#
#   scripts/install_peers.sh [main venv, default .venv] [peer venv, default .venv-peers]
set -euo pipefail
cd "$(dirname "$0")/.."

TRL_VERSION=1.16.0
main_venv=${1:-.venv}
peer_venv=${2:-.venv-peers}

[ -x "$main_venv/bin/python" ] || { echo "install_peers: $main_venv not found; run 'make install' first" >&2; exit 1; }

if [ ! -x "$peer_venv/bin/python" ]; then
    "$main_venv/bin/python" -m venv --without-pip "$peer_venv"
fi

# addsitedir rather than a plain path line: it also runs the .pth files of the main environment (editable installs).
main_site=$("$main_venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
peer_site=$("$peer_venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$main_site')" > "$peer_site/main_environment.pth"

pip() { "$main_venv/bin/python" -m pip --disable-pip-version-check --python "$peer_venv/bin/python" "$@"; }

pip install --quiet --no-deps "trl==$TRL_VERSION"

# What TRL imports beyond its own wheel; each only where the main environment lacks it.
missing=()
for module in accelerate datasets pandas pyarrow multiprocess xxhash; do
    "$peer_venv/bin/python" -c "import $module" 2>/dev/null || missing+=("$module")
done
if [ ${#missing[@]} -gt 0 ]; then
    pip install --quiet --no-deps "${missing[@]}"
fi

"$peer_venv/bin/python" -W ignore - <<'PY'
from importlib.metadata import version

import torch  # noqa: F401
from trl import GRPOConfig, GRPOTrainer  # noqa: F401

print("peers ready:", ", ".join(f"{name} {version(name)}" for name in ("trl", "transformers", "accelerate", "torch")))
PY
