"""Recovery over made-up engines: what happens between the death of an engine and the attempt that succeeds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridengine.config import Config, DataConfig, RolloutConfig
from hybridengine.data.loader import PromptLoader
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.base import EngineLostError, RestartsExhaustedError
from hybridengine.engines.rollout.streaming import empty_trajectory
from hybridengine.memory.phases import Phases
from hybridengine.memory.residency import Residency
from hybridengine.schedule.base import RolloutLostError
from hybridengine.schedule.colocated import ColocatedRollouts
from hybridengine.schedule.recovery import Recovery, restorer
from hybridengine.tracing import PhaseTimer
from hybridengine.types import Prompt, SamplingParams, Trajectory
from tests.unit.schedule.fakes import Scorer, Sharding, Stream, draw


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Processes:
    """Can be started again ``limit`` times."""

    is_leader = True

    def __init__(self, log: list[str], limit: int) -> None:
        self.log, self.left = log, limit

    def restart(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise RestartsExhaustedError("died 3 times, and rollout.max_restarts=2")
        self.log.append("restart")


def phases() -> Phases:
    return Phases.over(Residency({}), PhaseTimer(), torch.device("cpu"))


def recovery(log: list[str], *, limit: int | None = 2) -> Recovery:
    sharding: Any = Sharding(SimpleNamespace(version=0), log)
    sharding.processes = None if limit is None else Processes(log, limit)
    return Recovery(sharding, phases())


def attempt(made: Recovery, log: list[str], *ends: Exception | None) -> None:
    """Work that ends in the given ways, one after the other."""
    left = iter(ends)
    for one in made.attempts(lambda: log.append("undo")):
        with one:
            log.append("work")
            if (error := next(left)) is not None:
                raise error


LOST = EngineLostError("was killed by SIGKILL")


def test_after_each_death_undo_restart_and_distrust_of_the_memory() -> None:
    log: list[str] = []
    made = recovery(log)
    attempt(made, log, LOST, LOST, None)
    once = ["work", "undo", "restart", "invalidate"]
    assert log == [*once, *once, "work"] and made.restarts == 2


def test_work_that_succeeds_is_done_once() -> None:
    log: list[str] = []
    made = recovery(log)
    attempt(made, log, None)
    attempt(made, log, None)
    assert log == ["work", "work"] and made.restarts == 0


def test_one_death_too_many_ends_the_run_and_says_what_the_last_one_was() -> None:
    log: list[str] = []
    with pytest.raises(RolloutLostError, match="died 3 times, and rollout.max_restarts=2. Last: was killed by SIGKILL"):
        attempt(recovery(log), log, LOST, LOST, LOST)
    assert log[-2:] == ["work", "undo"]


@pytest.mark.parametrize("limit", [2, None], ids=["processes", "none"])
def test_other_errors_are_the_callers(limit: int | None) -> None:
    log: list[str] = []
    with pytest.raises(OSError, match="no disk"):
        attempt(recovery(log, limit=limit), log, OSError("no disk"))
    assert log == ["work"]


def test_an_engine_in_the_trainers_processes_has_nothing_to_start_again() -> None:
    log: list[str] = []
    with pytest.raises(EngineLostError):
        attempt(recovery(log, limit=None), log, LOST)
    assert log == ["work"]


def test_an_interruption_from_the_keyboard_is_not_held_back() -> None:
    log: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        attempt(recovery(log), log, KeyboardInterrupt())  # type: ignore[arg-type]
    assert log == ["work"]


def test_samples_go_back_to_what_they_were() -> None:
    """One had two tokens, one was empty; what a broken attempt added goes, reward and all."""
    samples = [empty_trajectory(Prompt(index=i, token_ids=[1]), 0) for i in range(2)]
    draw(samples[0], 2, 3)
    restore = restorer(samples)
    for sample in samples:
        draw(sample, 3, 4)
        sample.truncated, sample.reward, sample.rewards = True, 1.0, {"right": 1.0}
    restore()
    assert [(s.token_ids, s.logprobs, s.versions) for s in samples] == [([5] * 2, [-1.0] * 2, [3] * 2), ([], [], [])]
    assert all((s.truncated, s.reward, s.rewards) == (False, None, {}) for s in samples)


class Dying(Stream):
    """The engine dies before the third step of the first stream."""

    deaths = 1

    def step(self) -> list[Trajectory]:
        if len(self.occupied) == 2 and Dying.deaths:
            Dying.deaths -= 1
            raise LOST
        return super().step()


def colocated(tmp_path: Path, log: list[str]) -> ColocatedRollouts:
    config = Config(
        output_dir=str(tmp_path), data=DataConfig(prompts_per_step=2), rollout=RolloutConfig(samples_per_prompt=2)
    )
    sharding: Any = Sharding(SimpleNamespace(version=0), log)
    sharding.processes = Processes(log, 2)
    sharding.stream = lambda params, *, seed, interruptible: Dying(lambda prompt, sample: 1 + 2 * sample, log=log)
    prompts = [Prompt(index=i, token_ids=[1]) for i in range(4)]
    return ColocatedRollouts(
        config, World(), sharding=sharding, scorer=Scorer(log), phases=phases(),  # type: ignore[arg-type]
        loader=PromptLoader(prompts, prompts_per_step=2, shuffle=False, seed=1),
    )  # fmt: skip


def test_a_rollout_that_loses_its_engine_is_the_rollout_that_would_have_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short samples were finished and scored by then: they are generated again, and counted once."""
    monkeypatch.setattr(Dying, "deaths", 1)
    log: list[str] = []
    source = colocated(tmp_path, log)
    source.start_step()
    for one in source.attempts():
        with one:
            source.enter_rollout_mode()
            source.generate()
    batch = source.rewards()
    assert batch is not None
    assert log == ["rollout mode 0", "discard", "restart", "invalidate", "rollout mode 0", "scored 4"]
    assert [(t.prompt.index, t.sample_index, len(t.token_ids)) for t in batch[0]] == [
        (0, 0, 1), (0, 1, 3), (1, 0, 1), (1, 1, 3),
    ]  # fmt: skip
    assert source.metrics()["rollout/restarts"] == 1.0


def test_a_validation_that_loses_its_engine_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dying, "deaths", 1)
    log: list[str] = []
    source = colocated(tmp_path, log)
    prompts = [Prompt(index=i, token_ids=[1]) for i in range(2)]
    found = source.evaluate(prompts, SamplingParams(n=2))
    assert [(t.prompt.index, t.sample_index, len(t.token_ids)) for t in found] == [
        (0, 0, 1), (0, 1, 3), (1, 0, 1), (1, 1, 3),
    ]  # fmt: skip
    assert [entry for entry in log if entry in ("discard", "restart")] == ["discard", "restart"]
