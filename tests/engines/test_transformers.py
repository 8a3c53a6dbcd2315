"""The transformers engine keeps the contract of every rollout engine."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import run_ranks
from tests.engines.contract import NAMES, failures_by_check, run_contract
from tests.engines.subject import make_models

MODELS = {
    "qwen2-untied": ("qwen2", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
}


@pytest.fixture(scope="module", params=MODELS)
def failures(request, tmp_path_factory):
    arch, overrides = MODELS[request.param]
    paths = make_models(tmp_path_factory.mktemp("models"), arch, overrides)
    return dict(failures_by_check(run_ranks(1, run_contract, "transformers", 1, paths, {})))


@pytest.mark.engine
@pytest.mark.parametrize("check", NAMES)
def test_contract(failures, check):
    assert check not in failures, failures[check]
