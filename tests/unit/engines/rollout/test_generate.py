"""Answering a list of prompts over a made-up stream: slots, order, and errors that come too early."""

from __future__ import annotations

from typing import Any

import pytest

from hybridengine.engines.rollout.base import EngineLostError, StaleWeightsError
from hybridengine.engines.rollout.generate import generate
from hybridengine.types import Prompt, SamplingParams, Trajectory


class Engine:
    """Also its own stream: sample k of a prompt takes k + 1 steps; the step numbered ``fails`` raises ``error``."""

    max_model_len = 10

    def __init__(self, slots: int = 3, fails: int = -1, error: Exception | None = None) -> None:
        self.slots, self.fails, self.error = slots, fails, error
        self.samples: list[Trajectory] = []
        self.log: list[Any] = []
        self.steps, self.most, self.stale = 0, 0, False

    def check_servable(self) -> None:
        if self.stale:
            raise StaleWeightsError("no weights yet")

    def stream(self, params: SamplingParams, *, seed: int, interruptible: bool = True) -> Engine:
        self.log.append(("stream", params, seed, interruptible))
        return self

    @property
    def running(self) -> int:
        return len(self.samples)

    def submit(self, sample: Trajectory, *, step: int) -> None:
        self.log.append(("submit", sample.prompt.index, sample.sample_index, step))
        self.samples.append(sample)

    def step(self) -> list[Trajectory]:
        if self.steps == self.fails and self.error is not None:
            raise self.error
        self.steps, self.most = self.steps + 1, max(self.most, self.running)
        for sample in self.samples:
            sample.token_ids.append(5)
        done = [sample for sample in self.samples if len(sample.token_ids) > sample.sample_index]
        self.samples = [sample for sample in self.samples if sample not in done]
        return done[::-1]

    def interrupt(self) -> list[Trajectory]:
        self.log.append("interrupt")
        stopped, self.samples = self.samples, []
        return stopped


PROMPTS = [Prompt(index=i, token_ids=[1] * (2 + i)) for i in (4, 0, 2)]
PARAMS = SamplingParams(n=2, max_tokens=4)


def ask(engine: Engine, prompts: list[Prompt] = PROMPTS, **options: Any) -> list[Trajectory]:
    return generate(engine, prompts, PARAMS, seed=3, step=9, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("slots", [1, 2, 3, 100])
def test_samples_go_in_as_they_fit_and_come_out_in_the_order_of_the_prompts(slots: int) -> None:
    engine, seen = Engine(slots), list[Trajectory]()
    found = ask(engine, on_finished=seen.append)
    order = [(4, 0), (4, 1), (0, 0), (0, 1), (2, 0), (2, 1)]
    assert [(t.prompt.index, t.sample_index) for t in found] == order
    assert engine.log == [("stream", PARAMS, 3, False), *(("submit", *who, 9) for who in order)]
    assert engine.most == min(slots, 6)
    assert sorted(map(id, seen)) == sorted(map(id, found)) and engine.running == 0


def test_nothing_asked_nothing_done() -> None:
    engine = Engine()
    assert ask(engine, []) == [] and engine.steps == 0


def test_stale_weights_and_long_prompts_are_refused_before_anything_is_submitted() -> None:
    engine = Engine()
    with pytest.raises(ValueError, match="prompt 7 has 10 tokens and leaves no room in a context of 10"):
        ask(engine, [*PROMPTS, Prompt(index=7, token_ids=[1] * 10)])
    engine.stale = True
    with pytest.raises(StaleWeightsError):
        ask(engine)
    assert engine.log == []


def test_an_error_in_the_callback_waits_for_the_end_of_generation() -> None:
    """Tensor-parallel peers go on stepping; this rank must, too. After the first error nobody is called."""
    engine, seen = Engine(), list[tuple[int, int]]()

    def fail(sample: Trajectory) -> None:
        seen.append((sample.prompt.index, sample.sample_index))
        if len(seen) == 2:
            raise KeyError("scoring failed")

    undisturbed = Engine()
    ask(undisturbed)
    with pytest.raises(KeyError, match="scoring failed"):
        ask(engine, on_finished=fail)
    assert len(seen) == 2 and (engine.log, engine.steps) == (undisturbed.log, undisturbed.steps)


@pytest.mark.parametrize("error", [EngineLostError("the engine died"), KeyboardInterrupt()], ids=["lost", "interrupt"])
def test_what_ends_a_step_takes_the_samples_out_of_the_engine(error: Any) -> None:
    engine = Engine(fails=1, error=error)
    with pytest.raises(type(error)):
        ask(engine)
    assert engine.log[-1] == "interrupt" and engine.running == 0
