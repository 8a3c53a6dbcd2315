"""RolloutWorker over an engine whose processes are killed: a host without a model, a mailbox that follows a script."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from itertools import chain, cycle
from typing import Any

import pytest

from hybridengine.config import RolloutConfig
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.remote.engine import RemoteEngine
from hybridengine.schedule.base import RolloutLostError
from hybridengine.schedule.messages import (
    Done,
    Evaluate,
    Evaluated,
    Failed,
    Ready,
    Recall,
    Recalled,
    Stop,
    Submit,
    Update,
    Usage,
)
from hybridengine.schedule.pool import SamplePool
from hybridengine.schedule.recorder import RolloutRecorder
from hybridengine.schedule.worker import RolloutWorker
from hybridengine.sync.plan.spec import ParamSpec
from hybridengine.types import Prompt, SamplingParams, Trajectory
from tests.unit.engines.rollout.remote import fake_host
from tests.unit.engines.rollout.remote.fake_host import SLOW

PARAMS = SamplingParams(max_tokens=6)


class Script:
    """A mailbox. Of its lines, messages come in, None ends a turn of the worker, functions are called; then Stop."""

    def __init__(self, lines: list[Any], events: list[Any]) -> None:
        self._lines, self._events = chain(lines, cycle([Stop(), None])), events

    def receive(self, timeout: float) -> tuple[int, Any] | None:
        while callable(line := next(self._lines)):
            line()
        return None if line is None else (0, line)

    def send(self, peer: int, message: Any) -> None:
        self._events.append(message)


class Weights:
    """A transfer whose version v writes 10 + v everywhere."""

    def __init__(self, engine: RemoteEngine, events: list[Any], meanwhile: Callable[[int], None]) -> None:
        self._engine, self._events, self._meanwhile = engine, events, meanwhile

    def run(self, version: int) -> None:
        self._events.append(f"sync {version}")
        self._engine.live_tensors()["w"].fill_(10.0 + version)
        self._meanwhile(version)

    def invalidate(self) -> None:
        self._events.append("invalidate")


class Scorer:
    def __init__(self) -> None:
        self._samples: list[Trajectory] = []

    def submit(self, sample: Trajectory) -> None:
        self._samples.append(sample)

    def poll(self) -> list[Trajectory]:
        found, self._samples = self._samples, []
        return found

    collect = poll

    def take_stats(self) -> list[float]:
        return []

    def score(self, samples: list[Trajectory]) -> None: ...


@pytest.fixture
def make(tmp_path) -> Iterator[Callable[[int], RemoteEngine]]:
    (tmp_path / "config.json").write_text("{}")
    made: list[RemoteEngine] = []

    def start(max_restarts: int) -> RemoteEngine:
        rollout = RolloutConfig(engine=fake_host.ENGINE, process="separate", max_restarts=max_restarts)
        made.append(RemoteEngine(tmp_path, rollout, world=World(), max_model_len=20))
        made[-1].layout({"p": ParamSpec("p", (4, 3), "float32")})
        return made[-1]

    yield start
    for engine in made:
        engine.close()


def work(engine: RemoteEngine, lines: list[Any], meanwhile: Callable[[int], None] = lambda _: None) -> list[Any]:
    """What happens when the worker meets these lines: messages sent, syncs, invalidations."""
    events: list[Any] = []
    worker = RolloutWorker(
        engine, Weights(engine, events, meanwhile), Scorer(), params=PARAMS, seed=1, max_num_seqs=4,
        mailbox=Script(lines, events), group=None, recorder=RolloutRecorder(None),
    )  # type: ignore[arg-type]  # fmt: skip
    try:
        worker.run()
    except RolloutLostError as error:
        events.append(error)
    return events


def groups(*indices: int) -> list[Any]:
    """One sample each, of six tokens, one token per step."""
    pool = SamplePool(batch=len(indices), group_size=1)
    return pool.admit(Prompt(index=i, token_ids=[SLOW, 2]) for i in indices)


def kinds(events: list[Any]) -> list[Any]:
    return [event if isinstance(event, str) else type(event) for event in events]


def test_a_sample_goes_on_after_each_death_of_its_engine(make) -> None:
    """Killed between two steps, in the middle of a sync, before the next one, and before an evaluation.

    Six tokens of one sample: two steps, a death, one step; version 1, whose sync the engine does not survive, two
    steps; a death, version 2, the last step.
    """
    engine = make(9)

    def kill(*_: Any) -> None:
        os.kill(engine.pids[0], signal.SIGKILL)

    lines = [
        Update(0), Submit(groups(7)), None, None, kill, None, None, Update(1), None, None, kill, Update(2), None,
        kill, Evaluate([Prompt(index=9, token_ids=[1, 2])], SamplingParams(max_tokens=2)),
    ]  # fmt: skip
    events = work(engine, lines, lambda version: kill() if version == 1 else None)
    assert kinds(events) == [
        Ready, "sync 0", Usage, "invalidate", Ready, "sync 1", "invalidate", Usage, "invalidate", Ready, "sync 2",
        Usage, Done, "invalidate", Evaluated, Usage,
    ]  # fmt: skip
    (done,) = [event for event in events if isinstance(event, Done)]
    assert done.samples[0].token_ids == [10, 10, 10, 11, 11, 12]
    assert done.samples[0].versions == [0, 0, 0, 1, 1, 2]
    (evaluated,) = [event for event in events if isinstance(event, Evaluated)]
    assert evaluated.samples[0].token_ids[0] == 12
    assert [event.restarts for event in events if isinstance(event, Usage)] == [0, 2, 1, 1]


def test_what_was_running_is_called_back_from_a_dead_engine(make) -> None:
    engine = make(1)
    lines = [
        Update(0), Submit(groups(1, 2)), None, None, lambda: os.kill(engine.pids[0], signal.SIGKILL), Recall(),
    ]  # fmt: skip
    (recalled,) = [event for event in work(engine, lines) if isinstance(event, Recalled)]
    assert [(sample.prompt.index, sample.token_ids) for sample in recalled.samples] == [(1, [10, 10])]


def test_one_death_too_many_is_told_before_anybody_waits_in_a_sync(make) -> None:
    engine = make(1)

    def kill() -> None:
        os.kill(engine.pids[0], signal.SIGKILL)

    events = work(engine, [Update(0), None, kill, Update(1), None, kill, Update(2)])
    assert kinds(events) == [
        Ready, "sync 0", Usage, "invalidate", Ready, "sync 1", Usage, Failed, RolloutLostError,
    ]  # fmt: skip
    assert "died 2 times, and rollout.max_restarts=1. Last: an engine process died" in events[-2].reason
    assert "was killed by SIGKILL" in events[-2].reason
