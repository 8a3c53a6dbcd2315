#!/usr/bin/env bash
# Programs as a reward, on a CPU: two ranks, SmolLM2, functions that are run against test cases in a sandbox.
# Further overrides are passed on:  examples/code/run.sh steps=10 output_dir=outputs/short
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
model=$("$python" examples/smollm2/prepare.py)
tasks=${TASKS:-outputs/code-tasks}
"$python" examples/code/tasks.py "$tasks"
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "${RANKS:-2}" \
  -m hybridengine.train +experiment=code model.path="$model" data.train="$tasks/train.jsonl" \
  data.validation="$tasks/validation.jsonl" "$@"
