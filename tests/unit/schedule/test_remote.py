"""RemoteRollouts and a made-up rollout pool: what each schedule says to it, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridengine.config import Config, DataConfig, PlacementConfig, RolloutConfig, ScheduleConfig
from hybridengine.data.loader import PromptLoader
from hybridengine.distributed.world import World
from hybridengine.memory.phases import Phases
from hybridengine.memory.residency import Residency
from hybridengine.schedule.base import RolloutLostError
from hybridengine.schedule.messages import Failed, Usage
from hybridengine.schedule.remote import RemoteRollouts
from hybridengine.sync.weight_sync import WeightSync
from hybridengine.tracing import PhaseTimer
from hybridengine.types import Prompt, SamplingParams
from tests.unit.schedule.fakes import Replica, Transfer


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Pool:
    """A training rank's RemoteRollouts; ``log`` has what the pool was told, ``train`` its policy version."""

    def __init__(self, tmp_path: Path, schedule: str, **options: Any) -> None:
        config = Config(
            output_dir=str(tmp_path), data=DataConfig(prompts_per_step=2), rollout=RolloutConfig(samples_per_prompt=1),
            placement=PlacementConfig(name="disaggregated"), schedule=ScheduleConfig(name=schedule, **options),
        )  # fmt: skip
        self.log: list[str] = []
        self.train: Any = SimpleNamespace(version=0)
        self.replica = Replica(self.log)
        transfer: Any = Transfer(self.log)
        mailbox: Any = self.replica
        self.source = RemoteRollouts(
            config, World(), train=self.train, weight_sync=WeightSync(transfer), mailbox=mailbox,
            loader=PromptLoader([Prompt(index=i, token_ids=[1]) for i in range(50)], prompts_per_step=2, shuffle=False,
                                seed=1),
            phases=Phases.over(Residency({}), PhaseTimer(), torch.device("cpu")),
        )  # fmt: skip

    def step(self) -> list[int]:
        """One training step; the prompts that it trained on."""
        self.source.start_step()
        for attempt in self.source.attempts():
            with attempt:
                self.source.enter_rollout_mode()
                self.source.generate()
        batch = self.source.rewards()
        assert batch is not None
        self.train.version += 1
        self.log.append("train")
        self.metrics = batch[1]
        return [sample.prompt.index for sample in batch[0]]

    def told(self) -> list[str]:
        """Since it was last asked."""
        found = self.log.copy()
        self.log.clear()
        return found


def test_sync_takes_turns(tmp_path: Path) -> None:
    pool = Pool(tmp_path, "sync")
    assert [pool.step(), pool.step()] == [[0, 1], [2, 3]]
    assert pool.told() == [
        "update 0", "sync 0", "submit [0, 1]", "done [0]", "done [1]", "train",
        "update 1", "sync 1", "submit [2, 3]", "done [2]", "done [3]", "train",
    ]  # fmt: skip


def test_partial_calls_back_what_a_batch_does_not_need(tmp_path: Path) -> None:
    """Twice the batch is started: with two groups done, the others come back with a token each and go on first."""
    pool = Pool(tmp_path, "partial", over_provision=2.0)
    assert [pool.step(), pool.step()] == [[0, 1], [2, 3]]
    assert pool.told() == [
        "update 0", "sync 0", "submit [0, 1, 2, 3]", "done [0]", "done [1]", "recall", "train",
        "update 1", "sync 1", "submit [2, 3]", "submit [4, 5]", "done [2]", "done [3]", "recall", "train",
    ]  # fmt: skip
    assert pool.metrics["rollout/recycled_samples"] == 2.0


def test_one_step_off_trains_on_one_batch_while_the_next_is_generated(tmp_path: Path) -> None:
    pool = Pool(tmp_path, "one_step_off")
    assert [pool.step(), pool.step(), pool.step()] == [[0, 1], [2, 3], [4, 5]]
    assert pool.told() == [
        "update 0", "sync 0", "submit [0, 1]", "done [0]", "done [1]", "submit [2, 3]", "train",
        "done [2]", "done [3]", "update 1", "sync 1", "submit [4, 5]", "train",
        "done [4]", "done [5]", "update 2", "sync 2", "submit [6, 7]", "train",
    ]  # fmt: skip
    assert pool.metrics["staleness/max"] == 1.0


def test_async_changes_the_weights_under_whatever_is_running(tmp_path: Path) -> None:
    """Staleness 1: two batches may be under way, and nothing is waited for before an update."""
    pool = Pool(tmp_path, "async", staleness=1)
    assert [pool.step(), pool.step()] == [[0, 1], [2, 3]]
    assert pool.told() == [
        "update 0", "sync 0", "submit [0, 1, 2, 3]", "done [0]", "done [1]", "train",
        "update 1", "sync 1", "submit [4, 5]", "done [2]", "done [3]", "train",
    ]  # fmt: skip


def test_a_version_is_synced_once(tmp_path: Path) -> None:
    pool = Pool(tmp_path, "sync")
    params = SamplingParams()
    found = pool.source.evaluate([Prompt(index=i, token_ids=[1]) for i in (7, 3, 5)], params)
    assert [sample.prompt.index for sample in found] == [7, 3, 5]
    pool.step()
    assert pool.told() == [
        "update 0", "sync 0", "evaluate 3", "submit [0, 1]", "done [0]", "done [1]", "train",
    ]  # fmt: skip
    assert pool.source.metrics()["sync/count"] == 1.0


def test_a_validation_between_two_steps_waits_for_the_batch_that_is_under_way(tmp_path: Path) -> None:
    """One step off: a batch is of one version."""
    pool = Pool(tmp_path, "one_step_off")
    pool.step()
    pool.told()
    pool.source.evaluate([Prompt(index=99, token_ids=[1])], SamplingParams())
    assert pool.told() == ["done [2]", "done [3]", "update 1", "sync 1", "evaluate 1"]


def test_a_checkpoint_calls_back_what_is_running_and_a_resumed_run_goes_on_with_it(tmp_path: Path) -> None:
    pool = Pool(tmp_path, "async", staleness=1)
    pool.step()
    state = pool.source.state_dict()
    assert pool.told()[-1] == "recall"
    resumed = Pool(tmp_path, "async", staleness=1)
    resumed.train.version = 1
    resumed.source.load_state_dict(state)
    assert resumed.step() == pool.step() == [2, 3]
    assert resumed.told() == pool.told() == [
        "update 1", "sync 1", "submit [2, 3]", "submit [4, 5]", "done [2]", "done [3]", "train",
    ]  # fmt: skip


def test_a_replica_that_failed_ends_the_run(tmp_path: Path) -> None:
    pool = Pool(tmp_path, "sync")
    pool.replica.answers.append(Failed("OSError: no disk"))
    with pytest.raises(RolloutLostError, match="rank 1 of the job, in the rollout pool, failed: OSError: no disk"):
        pool.step()
    assert pool.told() == ["update 0"], "nobody enters a sync that a replica can't take part in"
    assert set(pool.source.state_dict()) == {"loader", "pool"} and pool.told() == []


def test_a_silent_pool_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(tmp_path, "sync")
    pool.source.config.distributed.timeout_seconds = 0.05
    monkeypatch.setattr(pool.replica, "receive", lambda timeout: None)
    with pytest.raises(RolloutLostError, match=r"has sent nothing for 0\.05 s \(distributed.timeout_seconds\)"):
        pool.step()


def test_what_the_replicas_did_is_in_the_metrics(tmp_path: Path) -> None:
    pool = Pool(tmp_path, "sync")
    pool.replica.answers.append(Usage(busy_seconds=3.0, idle_seconds=1.0, tokens=40, restarts=1))
    pool.step()
    metrics = pool.source.metrics()
    assert (metrics["rollout/idle_fraction"], metrics["rollout/tokens"], metrics["rollout/restarts"]) == (0.25, 40, 1)


def test_the_end_is_told(tmp_path: Path) -> None:
    pool = Pool(tmp_path, "sync")
    pool.source.close()
    assert pool.told() == ["stop", "close"]
