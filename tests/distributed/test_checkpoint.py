"""Checkpoints of the real engine: exact resume, other world sizes, kill -9, damage, pruning."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hybridengine.checkpoint.checkpointer import Checkpointer
from hybridengine.config import TrainConfig
from hybridengine.distributed.world import World
from hybridengine.engines.train.fsdp.engine import FSDPEngine
from tests.distributed.engines.train.fsdp.test_engine import PolicyGradient, columns, make_samples
from tests.distributed.ranks import RankFailure, run_ranks
from tests.tiny import make_tiny

TRAIN = TrainConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, eps=1e-4, lr_schedule="cosine", warmup_steps=2)
STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", "qwen2", tie_word_embeddings=True)


def make_engine(world: World, model: Path, **kwargs: Any) -> FSDPEngine:
    return FSDPEngine(model, TRAIN, world=world, total_steps=STEPS, **kwargs)


def step(engine: FSDPEngine, world: World) -> dict[str, float]:
    """One optimizer step on samples drawn from the generators that a checkpoint has to restore."""
    samples = make_samples(8, seed=int(torch.randint(1000, ()).item()) + random.randrange(1000))
    draw = torch.tensor([len(s.response_ids) for s in samples])
    first = draw.clone()
    dist.broadcast(first, src=0)
    assert torch.equal(draw, first), "the ranks' generators differ"
    engine.forward_backward(samples[world.rank :: world.size], PolicyGradient(samples))
    return engine.optimizer_step()


def seed_all() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


def whole(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    state = {name: full.clone() for name, full in engine.full_parameters()}
    for key, tensors in engine.optimizer.moments().items():
        for name, local in tensors.items():
            state[f"{key}.{name}"] = engine.policy.like_shard(name, local).full_tensor()
    return state


def run_and_save(world: World, model: Path, directory: Path) -> dict[str, Any]:
    """Four steps, saved after the second; what the last two did, and the final state."""
    seed_all()
    engine = make_engine(world, model)
    checkpointer = Checkpointer(directory, keep=0, config={"seed": 7})
    for _ in range(2):
        step(engine, world)
    checkpointer.save(2, engine, {"loader": {"epoch": 1, "order": [3, 1, 2]}, "step": 2})
    metrics = [step(engine, world) for _ in range(2)]
    return {"metrics": metrics, "state": whole(engine), "numpy": np.random.rand(), "version": engine.version}


def resume(world: World, model: Path, directory: Path, kwargs: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(world, model, **kwargs)
    torch.manual_seed(999)
    extra = Checkpointer(directory, keep=0).load(engine)
    assert extra == {"loader": {"epoch": 1, "order": [3, 1, 2]}, "step": 2}
    assert engine.version == 2
    metrics = [step(engine, world) for _ in range(2)]
    return {"metrics": metrics, "state": whole(engine), "numpy": np.random.rand(), "version": engine.version}


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("checkpoints")
    return directory, run_ranks(2, run_and_save, model, directory)[0]


def test_resume_is_bit_identical(model: Path, uninterrupted: tuple[Path, dict[str, Any]]) -> None:
    directory, expected = uninterrupted
    found = run_ranks(2, resume, model, directory, {})[0]
    assert found["metrics"] == expected["metrics"]
    assert found["numpy"] == expected["numpy"]
    assert found["version"] == expected["version"] == 4
    assert list(found["state"]) == list(expected["state"])
    for name, value in expected["state"].items():
        assert torch.equal(found["state"][name], value), name


@pytest.mark.parametrize(
    ("world_size", "kwargs"),
    [(1, {}), (4, {}), (4, {"placements": columns, "rank_order": [2, 0, 3, 1]})],
    ids=["world1", "world4", "world4-other-layout"],
)
def test_resume_at_another_world_size(
    model: Path, uninterrupted: tuple[Path, dict[str, Any]], world_size: int, kwargs: dict[str, Any]
) -> None:
    directory, expected = uninterrupted
    found = run_ranks(world_size, resume, model, directory, kwargs)[0]
    for name, value in expected["state"].items():
        torch.testing.assert_close(found["state"][name], value, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def save_three(world: World, model: Path, directory: Path) -> list[str]:
    engine = make_engine(world, model)
    checkpointer = Checkpointer(directory, keep=2)
    (directory / "step_00000009.tmp" / "engine").mkdir(parents=True)  # a crash left this
    for number in (1, 2, 3, 3):
        checkpointer.save(number, engine, {"step": number})
    assert checkpointer.latest() == directory / "step_00000003"
    # The run starts again from step 1: that is the newest truth, though its number is lower.
    checkpointer.save(1, engine, {"step": 1})
    return sorted(os.listdir(directory))


def test_keeps_the_newest_and_cleans_up(model: Path, tmp_path: Path) -> None:
    assert run_ranks(1, save_three, model, tmp_path)[0] == ["latest", "step_00000001", "step_00000003"]
    assert (tmp_path / "latest").read_text() == "step_00000001"


def load_from(world: World, model: Path, directory: Path, which: str) -> Any:
    return Checkpointer(directory).load(make_engine(world, model), which)


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "no-metadata", "no-extra", "other-model"])
def test_damage_is_one_clear_error_on_all_ranks(
    model: Path, uninterrupted: tuple[Path, dict[str, Any]], tmp_path: Path, damage: str
) -> None:
    import shutil

    source = uninterrupted[0] / "step_00000002"
    path = tmp_path / "step_00000002"
    if damage != "missing":
        shutil.copytree(source, path)
    if damage == "truncated":
        file = next((path / "engine").glob("*.distcp"))
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif damage == "flipped":
        for file in (path / "engine").glob("*.distcp"):  # one bit in the middle of each
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 4
            file.write_bytes(content)
    elif damage == "no-metadata":
        (path / "engine" / ".metadata").unlink()
    elif damage == "no-extra":
        (path / "extra.pt").unlink()
    elif damage == "other-model":
        model = make_tiny(tmp_path / "other", "qwen2", tie_word_embeddings=True, intermediate_size=40)
    with pytest.raises(RankFailure, match=rf"(ValueError|PeerError).*{path}"):
        run_ranks(2, load_from, model, tmp_path, str(path), timeout=60)


def test_nothing_to_resume_from(model: Path, tmp_path: Path) -> None:
    assert run_ranks(2, load_from, model, tmp_path / "empty", "auto") == [None, None]


def save_until_killed(world: World, model: Path, directory: Path, fraction: float) -> None:
    """Saves in a loop; kill -9 strikes ``fraction`` of a save's duration after some complete one."""
    engine = make_engine(world, model)
    checkpointer = Checkpointer(directory, keep=1)
    checkpointer.save(1, engine, {"number": 0})
    start = time.monotonic()
    checkpointer.save(2, engine, {"number": 1})
    delay = fraction * (time.monotonic() - start)
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for number in range(2, 10000):
        (directory / "saved").write_text(str(number - 1))
        checkpointer.save(1 + number % 3, engine, {"number": number})


def load_number(world: World, model: Path, directory: Path) -> int:
    extra = Checkpointer(directory).load(make_engine(world, model), "auto")
    assert extra is not None
    return extra["number"]


@pytest.mark.parametrize("fraction", [0.1, 0.35, 0.6, 0.85, 1.1, 1.7])
def test_kill_at_any_moment_leaves_a_loadable_checkpoint(model: Path, tmp_path: Path, fraction: float) -> None:
    with pytest.raises(RankFailure, match="exited with code -9"):
        run_ranks(1, save_until_killed, model, tmp_path, fraction)
    done = int((tmp_path / "saved").read_text() or 1)
    assert run_ranks(1, load_number, model, tmp_path)[0] >= done


def test_kill_between_the_two_renames_of_a_second_save(model: Path, uninterrupted: tuple[Path, Any]) -> None:
    """The step was being replaced: its old directory is put back."""
    path = uninterrupted[0] / "step_00000002"
    path.rename(path.with_name("step_00000002.replaced"))
    assert run_ranks(1, load_from, model, uninterrupted[0], "auto")[0]["step"] == 2
    assert path.is_dir()
