#!/usr/bin/env bash
# FSDP2 over 8 GPUs for training, vLLM with tensor parallelism 2 (4 replicas) for generation, in the same processes.
#
#   MODEL=/models/Qwen2.5-7B-Instruct DATA=gsm8k.jsonl fsdp2_vllm_tp2.sh [key=value ...]
set -euo pipefail

torchrun --standalone --nproc-per-node 8 -m hybridengine.train \
    +experiment=qwen2_5_7b \
    name=qwen2_5_7b_tp2 \
    model.path="${MODEL:?the directory of a Hugging Face model}" \
    data.train="${DATA:?a JSONL file with the columns prompt and answer}" \
    rollout.tp=2 \
    "$@"
