"""What the configuration refuses of engines in processes of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridengine.config import RolloutConfig
from hybridengine.config.compose import build
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.remote.launch import environment
from hybridengine.engines.rollout.sglang.traits import interpreter
from hybridengine.validate.contradictions import validate

CPU = World()
CUDA = replace(CPU, device=torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("overrides", "world", "told"),
    [
        (["rollout=sglang", "rollout.process=same"], CPU, "rollout.process=same: sglang runs in processes of its own"),
        (["rollout=transformers", "rollout.process=separate"], CPU, "rollout.process=separate: transformers has no"),
        (["rollout.process=elsewhere"], CPU, "rollout.process=elsewhere: must be one of auto | same | separate"),
        (["rollout.process=separate", "rollout.max_restarts=-1"], CPU, "rollout.max_restarts=-1: must be 0 or more"),
        (["rollout.process=separate"], CUDA, "rollout.sleep_level=2: weights that another process maps"),
    ],
    ids=["sglang-same", "transformers-separate", "unknown", "negative", "cuda-sleep"],
)
def test_refused(overrides: list[str], world: World, told: str) -> None:
    config = build(["+experiment=quickstart", "rollout.tp=1", *overrides])
    with pytest.raises(ValueError) as refused:
        validate(config, world)
    assert told in str(refused.value)


@pytest.mark.parametrize("world", [CPU, CUDA], ids=["cpu", "cuda"])
def test_accepted_in_a_rollout_pool_where_nothing_sleeps(world: World) -> None:
    overrides = ["rollout.process=separate", "placement=disaggregated", "rollout.tp=1", "schedule=one_step_off"]
    validate(build(["+experiment=quickstart", *overrides]), replace(world, size=2, local_size=2))


def test_a_missing_environment_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HYBRIDENGINE_SGLANG_PYTHON", str(tmp_path / "python"))
    with pytest.raises(ValueError, match="rollout.engine=sglang: no interpreter at .*HYBRIDENGINE_SGLANG_PYTHON"):
        interpreter()
    monkeypatch.delenv("HYBRIDENGINE_SGLANG_PYTHON")
    monkeypatch.setattr("sys.prefix", str(tmp_path / ".venv"))
    with pytest.raises(ValueError, match="make install-sglang"):
        interpreter()


def test_an_engine_sees_the_devices_of_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 2 and 3 of a node whose visible devices are 4 to 7: the replica of TP 2 sees 6 and 7."""
    world = World(rank=2, size=4, local_rank=2, local_size=4, device=torch.device("cuda", 2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert environment(RolloutConfig(tp=2), world)["CUDA_VISIBLE_DEVICES"] == "6,7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert environment(RolloutConfig(tp=2), world)["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_sglang_replicas_are_bound_to_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang itself would bind every replica's ranks from core 0 on."""
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2, 3, 5})

    def binding(rank: int, tp: int) -> str | None:
        world = World(rank=rank, size=4, local_rank=rank, local_size=4)
        return environment(RolloutConfig(engine="sglang", tp=tp), world).get("SGLANG_CPU_OMP_THREADS_BIND")

    assert [binding(0, 1), binding(1, 1), binding(2, 2)] == ["2", "3", "5|2"]
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "7")
    assert binding(1, 1) is None  # the user's
