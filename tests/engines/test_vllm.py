"""The real vLLM keeps the contract of every rollout engine, at one and two tensor-parallel ranks."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import run_ranks
from tests.engines.contract import NAMES, failures_by_check, run_contract
from tests.engines.subject import make_models

#: name -> (ranks = tensor-parallel size, architecture, configuration). Head sizes are those its CPU attention has.
MODELS = {
    "qwen2-tp1": (1, "qwen2", {"hidden_size": 128}),
    "qwen2-tied-odd-vocabulary-tp2": (2, "qwen2", {"hidden_size": 128, "tie_word_embeddings": True, "vocab_size": 97}),
    "qwen3-moe-tp2": (
        2,
        "qwen3_moe",
        {"hidden_size": 64, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def failures(request, tmp_path_factory):
    ranks, arch, overrides = MODELS[request.param]
    paths = make_models(tmp_path_factory.mktemp("models"), arch, overrides)
    results = run_ranks(ranks, run_contract, "vllm", ranks, paths, {"block_size": 32}, timeout=240)
    return dict(failures_by_check(results))


@pytest.mark.engine
@pytest.mark.parametrize("check", NAMES)
def test_contract(failures, check):
    assert check not in failures, failures[check]
