"""The real vLLM keeps the contract of every rollout engine, at one and two tensor-parallel ranks."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pytest

from hybridengine.engines.rollout.streaming import empty_trajectory
from hybridengine.types import SamplingParams, Trajectory
from tests.distributed.ranks import run_ranks
from tests.engines.contract import NAMES, failures_by_check, run_contract
from tests.engines.subject import LONG, MAX_MODEL_LEN, TOLERANCE, Subject, make_models, prompts

#: With vLLM's sampler, which is what a GPU uses, in the place of ours.
OWN_SAMPLER = "qwen2-tp1-own-sampler"
#: name -> (ranks = tensor-parallel size, architecture, configuration). Head sizes are those its CPU attention has.
MODELS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "qwen2-tp1": (1, "qwen2", {"hidden_size": 128}),
    OWN_SAMPLER: (1, "qwen2", {"hidden_size": 128}),
    "qwen2-tied-odd-vocabulary-tp2": (2, "qwen2", {"hidden_size": 128, "tie_word_embeddings": True, "vocab_size": 97}),
    "qwen3-moe-tp2": (
        2,
        "qwen3_moe",
        {"hidden_size": 64, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
}


def scheduler_of(s: Subject) -> Any:
    return s.engine.llm.llm_engine.engine_core.engine_core.scheduler


def withheld_blocks_change_no_answer_and_take_no_memory(s: Subject) -> None:
    """Sequences wait, are preempted and computed again; then all blocks come back."""
    blocks, scheduler = s.engine.kv_blocks, scheduler_of(s)
    preempt, preempted = scheduler._preempt_request, list[str]()

    def recorded(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    def answers(usable: int) -> list[Trajectory]:
        s.engine.sleep(("kv_cache",))
        s.engine.wake(("kv_cache",))
        assert not blocks.planned
        blocks.allow(usable)
        assert blocks.planned and s.engine.nbytes("kv_cache") == usable * blocks.block_bytes
        asked = prompts(0, 1, 2, 3, 4, LONG)
        return s.generate(asked, temperature=0.0, max_tokens=MAX_MODEL_LEN) + s.generate(asked, n=4, max_tokens=60)

    few = blocks.minimum + 3
    assert blocks.minimum == 1 + MAX_MODEL_LEN // 32 and few < blocks.total // 4
    s.sync(0)
    scheduler._preempt_request = recorded
    try:
        expected = answers(blocks.total)
        assert not preempted and touched_above(s, few)
        found = answers(few)
        assert preempted and not touched_above(s, few)
        preempted.clear()
        again = answers(blocks.total)
        assert not preempted and touched_above(s, few)
    finally:
        scheduler._preempt_request = preempt
    for answer in (found, again):
        for one, other in zip(answer, expected, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)


def blocks_are_withheld_from_updates_to_updates(s: Subject) -> None:
    """The caches of older weights are dropped, though not all blocks are there; what runs can't lose its own."""
    blocks = s.engine.kv_blocks
    blocks.allow(blocks.minimum)
    for which in (0, 1):
        s.sync(which)
        s.check_serves(which)
    stream = s.engine.stream(SamplingParams(max_tokens=4), seed=1)
    stream.submit(empty_trajectory(*prompts(0), 0), step=0)
    stream.step()
    with pytest.raises(RuntimeError, match="requests are running"):
        blocks.allow(blocks.total)
    stream.interrupt()
    blocks.allow(blocks.total)
    s.check_serves(1)


def touched_above(s: Subject, block: int) -> int:
    """Pages with memory that belong wholly to blocks from this one on, over all layers."""
    pages, page = 0, mmap.PAGESIZE
    for layer in s.engine._runner.kv_caches:
        start = -(-layer[block].data_ptr() // page) * page
        end = layer.data_ptr() + layer.numel() * layer.element_size()
        there = (ctypes.c_ubyte * ((end - start) // page))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(there) * page), there) == 0
        pages += sum(flags & 1 for flags in there)
    return pages


OWN = (
    withheld_blocks_change_no_answer_and_take_no_memory,
    blocks_are_withheld_from_updates_to_updates,
)


@pytest.fixture(scope="module", params=MODELS)
def failures(request, tmp_path_factory):
    ranks, arch, overrides = MODELS[request.param]
    paths = make_models(tmp_path_factory.mktemp("models"), arch, overrides)
    options = {"engine_kwargs": {"block_size": 32}, "sampler": "engine" if request.param == OWN_SAMPLER else "auto"}
    results = run_ranks(ranks, run_contract, "vllm", ranks, paths, options, OWN, timeout=240)
    return dict(failures_by_check(results))


@pytest.mark.engine
@pytest.mark.parametrize("check", [*NAMES, *(check.__name__ for check in OWN)])
def test_contract(failures, check):
    assert check not in failures, failures[check]
