#!/usr/bin/env bash
# A real pretrained model on CPU: two ranks, each with half of the training shards and a rollout replica of its own.
# Further overrides are passed on:  examples/smollm2/run.sh steps=10 output_dir=outputs/short
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
model=$("$python" examples/smollm2/prepare.py)
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "${RANKS:-2}" \
  -m hybridengine.train +experiment=smollm2 model.path="$model" "$@"
