"""Which transfer runs, and what is refused before anything is built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridengine.distributed.world import World
from hybridengine.sync.transfer import registry
from hybridengine.sync.transfer.base import TransferSettings
from hybridengine.sync.transfer.registry import TRANSFERS, choose, make_transfer

PLAN: Any = SimpleNamespace(explain=lambda: "the plan's own words")
GPU = torch.device("cuda", 0)

#: test id -> (nodes of the ranks, settings beside the world's device, on a GPU, method, part of the reason)
CHOICES: dict[str, tuple[list[int], dict[str, bool], bool, str, str]] = {
    "cpu": ([0, 0], {}, False, "pull", "all ranks are on one node"),
    "cpu-alone": ([0], {}, False, "pull", "one node"),
    "cpu-offloaded": ([0, 0], {"weights_leave": True}, False, "pull", "one node"),
    "cpu-pools": ([0, 0, 0], {"apart": True}, False, "pull", "one node"),
    "cpu-two-nodes": ([0, 0, 1, 1], {}, False, "collective", "on 2 nodes"),
    "cpu-pools-on-two-nodes": ([0, 1], {"apart": True}, False, "broadcast", "on 2 nodes"),
    "gpu": ([0, 0], {}, True, "collective", "slow where dtypes differ"),
    "gpu-alone": ([0], {"weights_leave": True}, True, "collective", "slow where dtypes differ"),
    "gpu-offloaded": ([0, 0], {"weights_leave": True}, True, "collective", "memory.offload_weights=true"),
    "gpu-pools": ([0, 0], {"apart": True}, True, "broadcast", "slow where dtypes differ"),
    "gpu-three-nodes": ([0, 1, 2], {"weights_leave": True}, True, "collective", "on 3 nodes"),
}


def settings(on_gpu: bool = False, **kwargs: bool) -> TransferSettings:
    return TransferSettings(world=World(device=GPU if on_gpu else torch.device("cpu")), **kwargs)


@pytest.mark.parametrize("case", CHOICES)
def test_auto_chooses(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    nodes, options, on_gpu, method, reason = CHOICES[case]
    monkeypatch.setattr(registry, "node_of", lambda group: nodes)
    chosen, why = choose(settings(on_gpu, **options))
    assert chosen == method and reason in why


def test_auto_builds_what_it_chose_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "node_of", lambda group: [0, 1])
    monkeypatch.setitem(
        TRANSFERS, "collective", lambda *args: SimpleNamespace(built_with=args, bytes_aliased=2 * 10**9)
    )
    options, lines = settings(), list[str]()
    made: Any = make_transfer("auto", "train", "rollout", PLAN, options, log_rank0=lines.append)  # type: ignore
    assert made.built_with == ("train", "rollout", PLAN, options)
    assert lines == [
        "weight sync: collective (auto: the ranks are on 2 nodes)\nthe plan's own words",
        "  aliased: 2.000 GB of a rank's rollout weights are the trainer's own memory",
    ]


def test_a_rank_without_an_engine_takes_part_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSFERS, "broadcast", lambda *args: SimpleNamespace(built_with=args, bytes_aliased=0))
    made: Any = make_transfer("broadcast", None, None, PLAN, settings())
    train, rollout, *_ = made.built_with
    assert train.local_tensors() == rollout.live_tensors() == {} and list(train.full_parameters()) == []


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(ValueError, match="sync.method='teleport'; it must be auto or one of pull, collective"):
        make_transfer("teleport", None, None, PLAN, settings())
