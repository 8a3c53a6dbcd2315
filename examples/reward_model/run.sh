#!/usr/bin/env bash
# A learned reward from end to end, on the embedded task: a reward model from pairs of answers, then PPO against it. The true
# verifier has weight 0: it is not trained on, and says whether the learned reward leads where it should.
set -euo pipefail
cd "$(dirname "$0")/../.."
BIN=${BIN:-.venv/bin}
MODEL=${MODEL:-outputs/reward_model}

[ -f "$MODEL/config.json" ] || "$BIN/python" examples/reward_model/train.py --out "$MODEL"
OMP_NUM_THREADS=1 "$BIN/torchrun" --standalone --nproc-per-node "${NPROC:-2}" -m hybridengine.train \
    +experiment=quickstart algorithm=ppo name=learned_reward \
    reward.fn=null reward.terms.right.fn=exact_match reward.terms.right.weight=0 \
    reward.model.path="$MODEL" 'reward.model.template="{prompt}{response}<eos>"' "$@"
