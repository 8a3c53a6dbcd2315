"""When a run checks parity, and what becomes of a run that fails it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridengine.config import Config, DataConfig, ModelConfig
from hybridengine.distributed.world import World
from hybridengine.loop import Trainer
from hybridengine.memory.phases import Phases
from hybridengine.memory.residency import Residency
from hybridengine.parity import run_probe
from hybridengine.parity.check import ParityError
from hybridengine.parity.report import Parity, Tolerance
from hybridengine.parity.run_probe import RunProbe
from hybridengine.tracing import PhaseTimer


class Log(list[str]):
    def noting(self, text: str) -> Any:
        return lambda *args, **kwargs: self.append(text)


def trainer(log: Log, probe: Any, *, step: int = 0) -> Trainer:
    """A loop whose parts only note that they were called."""
    made = object.__new__(Trainer)
    made.probe, made.step, made.total_steps = probe, step, 4
    made.config = Config(model=ModelConfig(path="m"), data=DataConfig(train="unused"))
    made.train = made.rollouts = made.phases = None  # type: ignore[assignment]
    for name in ("_resume", "_loop", "_save"):
        setattr(made, name, log.noting(name))
    return made


def test_before_the_first_step_and_after_what_is_resumed() -> None:
    log = Log()
    trainer(log, SimpleNamespace(run=log.noting("probe"))).run()
    assert log == ["_resume", "probe", "_loop", "_save"]


@pytest.mark.parametrize(("probe", "step"), [(None, 0), (SimpleNamespace(run=None), 4)], ids=["off", "nothing-left"])
def test_not_checked(probe: Any, step: int) -> None:
    log = Log()
    trainer(log, probe, step=step).run()
    assert log == ["_resume", "_loop", "_save"]


def test_nothing_is_trained_or_saved_after_a_refusal() -> None:
    log = Log()

    def refuse(*_: Any) -> None:
        raise ParityError("they differ")

    with pytest.raises(ParityError):
        trainer(log, SimpleNamespace(run=refuse)).run()
    assert log == ["_resume"]


def test_every_replica_is_asked_with_real_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def check(config: Config, world: World, **given: Any) -> Parity:
        seen.update(given)
        return Parity(Tolerance(1e-3, of_mean=False))

    monkeypatch.setattr(run_probe, "check_parity", check)
    params = {"a": SimpleNamespace(numel=5), "b": SimpleNamespace(numel=7)}
    train: Any = SimpleNamespace(shard_map=lambda: SimpleNamespace(params=params))
    rollouts: Any = SimpleNamespace(evaluate="generate")
    RunProbe(
        config=Config(model=ModelConfig(path="m"), data=DataConfig(train="unused")),
        world=World(), path=tmp_path, hf_config=SimpleNamespace(vocab_size=50), max_model_len=20,
        texts=[[7, 8, 9]], replicas=3, log=print, warn=print,
    ).run(train, rollouts, Phases.over(Residency({}), PhaseTimer(), torch.device("cpu")))  # fmt: skip
    assert [p.text for p in seen["prompts"]] == ["shortest"] * 3 + ["longest"] * 3
    assert {token for p in seen["prompts"] for token in p.token_ids} == {7, 8, 9}
    assert seen["parameters"] == 12 and seen["generate"] == "generate" and seen["path"] == tmp_path
