"""Engines in processes of their own, with a host that has no model: the channel, the proxy, shared memory, deaths."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from hybridengine.config import RolloutConfig
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.base import EngineLostError, RestartsExhaustedError, StaleWeightsError
from hybridengine.engines.rollout.generate import generate
from hybridengine.engines.rollout.remote.engine import RemoteEngine
from hybridengine.engines.rollout.remote.shared_weights import WeightExporter, WeightImporter
from hybridengine.engines.rollout.streaming import empty_trajectory
from hybridengine.platform.cpu.pages import release_pages
from hybridengine.sync.plan.spec import ParamSpec
from hybridengine.sync.transfer.base import LayoutChangedError
from hybridengine.types import Prompt, SamplingParams
from tests.unit.engines.rollout.remote import fake_host
from tests.unit.engines.rollout.remote.fake_host import DIE, RAISE

PARAMS = {"p": ParamSpec("p", (4, 3), "float32")}


@pytest.fixture
def start(tmp_path):
    """Makes engines on the fake host; ends what is left of them."""
    made: list[RemoteEngine] = []

    def make(max_restarts: int = 1, **options) -> RemoteEngine:
        (tmp_path / "config.json").write_text("{}")
        rollout = RolloutConfig(engine=fake_host.ENGINE, process="separate", max_restarts=max_restarts)
        made.append(RemoteEngine(tmp_path, rollout, world=World(), max_model_len=20, **options))
        made[-1].layout(PARAMS)
        return made[-1]

    yield make
    for one in made:
        one.close()


def sync(engine: RemoteEngine, value: float, version: int = 0) -> None:
    engine.begin_update()
    engine.load_weight("p", torch.full((4, 3), value))
    engine.finish_update(version)


def ask(engine: RemoteEngine, first: int = 1, **options):
    prompts = [Prompt(index=i, token_ids=[first if i == 1 else 1, 2]) for i in range(3)]
    return generate(engine, prompts, SamplingParams(max_tokens=4), seed=1, step=1, **options)


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_the_trainer_writes_what_the_engine_reads(start):
    engine = start()
    with pytest.raises(StaleWeightsError):
        ask(engine)
    with pytest.raises(RuntimeError, match="1 parameters got no data"):
        engine.begin_update()
        engine.finish_update(0)
    sync(engine, 5.0)
    assert engine.checksums() == {"w": 12 * sum(torch.tensor([5.0]).view(torch.uint8).tolist())}
    assert [t.token_ids[0] for t in ask(engine)] == [5, 5, 5]
    engine.live_tensors()["w"].fill_(6)  # as a transfer does
    assert ask(engine)[0].token_ids[0] == 6
    with pytest.raises(ValueError, match=r"'p' is \[4\], must be \[4, 3\]"):
        engine.begin_update()
        engine.load_weight("p", torch.zeros(4))
    with pytest.raises(ValueError, match="'q'"):
        engine.load_weight("q", torch.zeros(4))


def test_sleeping_weights_are_freed_on_both_sides(start):
    engine = start()
    sync(engine, 5.0)
    mapped = engine.live_tensors()["w"]
    engine.sleep()
    assert engine.awake == frozenset() and bool((mapped == 0).all())
    with pytest.raises(RuntimeError, match="asleep"):
        engine.begin_update()
    engine.wake()
    with pytest.raises(StaleWeightsError):
        ask(engine)
    sync(engine, 7.0)
    assert ask(engine)[0].token_ids[0] == 7


def test_an_error_of_a_call_is_the_callers_and_the_process_lives(start):
    engine = start()
    sync(engine, 5.0)
    pids = engine.pids
    with pytest.raises(RuntimeError, match=r"can't answer s1\."):
        ask(engine, RAISE)
    assert ask(engine)[0].token_ids[0] == 5 and engine.pids == pids


def test_refusing_to_start_and_dying_at_the_start_are_told_apart(start):
    with pytest.raises(ValueError, match="seed 13 is refused"):
        start(seed=13)
    with pytest.raises(EngineLostError, match=r"SIGSEGV[\s\S]*about to fall over"):
        start(seed=14)


def test_a_killed_engine_is_reported_restarted_and_given_up_in_the_end(start):
    """In mid-generation with its last log lines; between calls; restarts are counted."""
    engine = start()
    sync(engine, 5.0)
    first, seen = engine.pids, []
    begin = time.monotonic()
    with pytest.raises(EngineLostError, match=r"killed by SIGKILL[\s\S]*dying of s1\."):
        ask(engine, DIE, on_finished=seen.append)
    assert time.monotonic() - begin < 5 and len(seen) == 1 and gone(first)
    with pytest.raises(EngineLostError):
        engine.begin_update()
    engine.restart()
    assert engine.weights_version == -1 and engine.restarts == 1 and engine.pids != first
    with pytest.raises(StaleWeightsError):
        ask(engine)
    sync(engine, 8.0)
    assert ask(engine)[0].token_ids[0] == 8
    os.kill(engine.pids[0], signal.SIGKILL)
    engine.sleep()  # dead processes sleep well
    with pytest.raises(EngineLostError):
        engine.wake()
    with pytest.raises(RestartsExhaustedError, match="died 2 times, and rollout.max_restarts=1"):
        engine.restart()


def test_a_replica_that_lived_keeps_its_process_and_waits_for_a_sync(start):
    engine = start()
    sync(engine, 5.0)
    pids = engine.pids
    engine.restart()
    assert engine.pids == pids and engine.restarts == 0 and engine.weights_version == -1


def test_a_revived_engine_has_the_weights_of_the_dead_one(start):
    engine = start()
    sync(engine, 5.0, version=3)
    os.kill(engine.pids[0], signal.SIGKILL)
    with pytest.raises(EngineLostError):
        ask(engine)
    engine.revive(3)
    assert engine.weights_version == 3 and engine.restarts == 1
    assert engine.checksums() == {"w": 12 * sum(torch.tensor([5.0]).view(torch.uint8).tolist())}
    assert [t.token_ids[0] for t in ask(engine)] == [5, 5, 5]
    engine.world = World(device=torch.device("cuda", 0))
    with pytest.raises(EngineLostError, match="GPU memory"):
        engine.revive(3)


def test_samples_in_flight_forbid_sleep_and_updates(start):
    engine = start()
    sync(engine, 5.0)
    stream = engine.stream(SamplingParams(max_tokens=4), seed=1)
    samples = [empty_trajectory(Prompt(index=i, token_ids=[1, 2]), 0) for i in range(3)]
    for sample in samples:
        stream.submit(sample, step=1)
    assert stream.step() == samples[:1] and stream.running == 2
    with pytest.raises(RuntimeError, match="requests are running"):
        engine.sleep()
    assert stream.interrupt() == samples[1:] and stream.running == 0
    engine.sleep()


def test_shared_memory_is_one_memory():
    weight = torch.nn.Parameter(torch.arange(12.0).view(3, 4))
    tied = torch.nn.Parameter(weight.data.t())
    exporter = WeightExporter({"a": weight, "tied": tied})
    importer = WeightImporter(exporter.handle)
    assert exporter.handle.nbytes == 96
    assert torch.equal(importer.tensors["a"], torch.arange(12.0).view(3, 4))
    importer.tensors["a"][1, 2] = -1
    assert weight[1, 2] == -1 and tied[2, 1] == -1
    exporter.free()
    assert not weight.any() and not importer.tensors["tied"].any()
    weight.data = torch.zeros(3, 4)
    with pytest.raises(LayoutChangedError, match="tensor a is not where"):
        exporter.check()


def test_a_weight_with_another_view_is_not_shared():
    weight = torch.nn.Parameter(torch.zeros(3, 4))
    other = weight.data[1:]
    with pytest.raises(ValueError, match="still view"):
        WeightExporter({"a": weight})
    assert other.numel() == 8


def test_released_pages_go_back_and_the_tensor_stays():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    tensor = torch.ones(16 * 2**20, dtype=torch.uint8)
    before, address = resident(), tensor.data_ptr()
    release_pages(address, tensor.nbytes)
    assert before - resident() > 15 * 2**20 and tensor.data_ptr() == address
    tensor.fill_(3)
    assert int(tensor.sum(dtype=torch.int64)) == 3 * 16 * 2**20
