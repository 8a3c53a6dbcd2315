"""vLLM comes and goes without a trace: a silent start, and a process group that outlives the engine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist

from hybridengine.config import RolloutConfig
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.generate import generate
from hybridengine.types import Prompt, SamplingParams
from tests.distributed.ranks import run_ranks
from tests.tiny import make_tiny

pytestmark = pytest.mark.engine


def start_twice(world: World, path: Path) -> tuple[str, list[list[int]]]:
    """What was written to the console, and the answers of two engines that lived one after the other."""
    from transformers import AutoModelForCausalLM

    from hybridengine.engines.rollout.vllm.engine import VLLMEngine

    weights = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    answers = []
    with tempfile.TemporaryFile() as console:
        kept = [os.dup(1), os.dup(2)]
        os.dup2(console.fileno(), 1)
        os.dup2(console.fileno(), 2)
        try:
            for _ in range(2):
                engine = VLLMEngine(path, RolloutConfig(kv_cache_gib=0.01), world=world, max_model_len=32)
                engine.begin_update()
                for name, parameter in weights.items():
                    engine.load_weight(name, parameter.detach())
                engine.finish_update(0)
                prompt = Prompt(index=0, token_ids=[5, 6, 7])
                (trajectory,) = generate(engine, [prompt], SamplingParams(max_tokens=8), seed=1, step=0)
                answers.append(trajectory.token_ids)
                engine.close()
                dist.barrier()
                dist.barrier(dist.new_group(list(range(world.size))))
        finally:
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
        console.seek(0)
        return console.read().decode(), answers


def test_start_is_silent_and_leaves_nothing(tmp_path: Path) -> None:
    ((console, answers),) = run_ranks(1, start_twice, make_tiny(tmp_path / "model", hidden_size=128))
    assert console == ""
    assert len(answers[0]) > 0 and answers[0] == answers[1]


def names_of_a_running_engine(world: World, path: Path, scratch: Path) -> set[str]:
    """What is in /dev/shm and in the temporary directory while two ranks serve, and was not before."""
    from hybridengine.engines.rollout.vllm.engine import VLLMEngine

    os.environ["TMPDIR"] = str(scratch)
    tempfile.tempdir = None
    before = {*os.listdir("/dev/shm"), *os.listdir(scratch)}
    dist.barrier()
    engine = VLLMEngine(path, RolloutConfig(kv_cache_gib=0.01, tp=2), world=world, max_model_len=32)
    dist.barrier()
    found = {*os.listdir("/dev/shm"), *os.listdir(scratch)} - before
    dist.barrier()
    engine.close()
    return found


def test_two_ranks_leave_no_name_behind_even_if_they_are_killed(tmp_path: Path) -> None:
    """Nothing has a name while the engine runs, so nothing can be left."""
    (tmp_path / "scratch").mkdir()
    model = make_tiny(tmp_path / "model", hidden_size=128)
    found = run_ranks(2, names_of_a_running_engine, model, tmp_path / "scratch", timeout=120)
    names = {name for names in found for name in names}
    assert not {name for name in names if name.startswith(("psm_", "hybridengine", "sem.")) or len(name) == 36}, names


def start_with_a_cache_that_cannot_be(world: World, path: Path) -> list[str]:
    from hybridengine.engines.rollout.vllm.engine import VLLMEngine

    told = []
    for gib in (1e-5, 2e-4, 1e6):  # not one block; fewer blocks than one sequence needs; more than there is
        try:
            VLLMEngine(path, RolloutConfig(kv_cache_gib=gib), world=world, max_model_len=128)
        except ValueError as error:
            told.append(str(error))
    return told


def test_a_kv_cache_that_is_too_small_or_too_large_is_refused_by_its_key(tmp_path: Path) -> None:
    (told,) = run_ranks(1, start_with_a_cache_that_cannot_be, make_tiny(tmp_path / "model", hidden_size=128))
    *small, large = told
    assert len(small) == 2
    for text in small:
        assert text.startswith("rollout.kv_cache_gib=") and "one sequence of 128 tokens" in text
        assert "data.max_prompt_tokens + rollout.max_tokens" in text
    assert large.startswith("rollout.kv_cache_gib=1000000.0: this machine has not got that much")
