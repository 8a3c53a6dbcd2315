"""Engines in processes of their own keep the contract: vLLM and SGLang through one code path."""

from __future__ import annotations

import pytest

from hybridengine.engines.rollout.sglang.traits import interpreter
from tests.distributed.ranks import run_ranks
from tests.engines.contract import NAMES, failures_by_check, run_contract
from tests.engines.subject import make_models


def sglang_is_installed() -> bool:
    try:
        interpreter()
    except ValueError:
        return False
    return True


needs_sglang = pytest.mark.skipif(not sglang_is_installed(), reason="needs SGLang's environment: make install-sglang")

#: id -> (engine, ranks = tensor-parallel size, architecture, configuration, further keys of the rollout section)
TIED = {"hidden_size": 128, "tie_word_embeddings": True, "vocab_size": 97}
SUBJECTS = [
    pytest.param(("vllm-separate", 2, "qwen2", TIED, {"engine_kwargs": {"block_size": 32}}), id="vllm-tp2-tied"),
    pytest.param(("sglang", 1, "qwen2", {"hidden_size": 128}, {}), id="sglang-tp1", marks=needs_sglang),
    pytest.param(("sglang", 2, "llama", TIED, {}), id="sglang-tp2-tied", marks=needs_sglang),
]


@pytest.fixture(scope="module", params=SUBJECTS)
def failures(request, tmp_path_factory):
    engine, ranks, arch, overrides, options = request.param
    paths = make_models(tmp_path_factory.mktemp("models"), arch, overrides)
    results = run_ranks(ranks, run_contract, engine, ranks, paths, options, timeout=280)
    return dict(failures_by_check(results))


@pytest.mark.engine
@pytest.mark.parametrize("check", NAMES)
def test_contract(failures, check):
    assert check not in failures, failures[check]
