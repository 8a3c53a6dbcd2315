"""Weights shared over CUDA IPC: the trainer writes into GPU memory that another process's model runs on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from hybridengine.config import RolloutConfig
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.base import EngineLostError
from hybridengine.engines.rollout.remote.engine import RemoteEngine
from hybridengine.sync.plan.spec import ParamSpec
from tests.unit.engines.rollout.remote import fake_host


def test_written_here_read_there_and_again_after_a_restart(tmp_path: Path) -> None:
    """The engine's byte sums of its own model are those of what was written through the mapping."""
    (tmp_path / "config.json").write_text("{}")
    rollout = RolloutConfig(engine=fake_host.ENGINE, process="separate", sleep_level=0, max_restarts=1)
    world = World(device=torch.device("cuda", 0))
    engine = RemoteEngine(tmp_path, rollout, world=world, max_model_len=20)
    try:
        engine.layout({"p": ParamSpec("p", (4, 3), "float32")})
        for version, value in enumerate((5.0, -3.0)):
            engine.begin_update()
            engine.load_weight("p", torch.full((4, 3), value))
            engine.finish_update(version)
            assert engine.live_tensors()["w"].is_cuda
            assert engine.checksums() == {"w": 12 * sum(torch.tensor([value]).view(torch.uint8).tolist())}
            if version == 0:
                os.kill(engine.pids[0], signal.SIGKILL)
                with pytest.raises(EngineLostError):
                    engine.begin_update()
                engine.restart()
    finally:
        engine.close()
