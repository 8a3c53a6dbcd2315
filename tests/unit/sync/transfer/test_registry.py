"""Which transfer runs, and what is refused before anything is built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hybridengine.distributed.world import World
from hybridengine.sync.transfer import registry
from hybridengine.sync.transfer.base import TransferSettings
from hybridengine.sync.transfer.registry import TRANSFERS, choose, make_transfer

PLAN: Any = SimpleNamespace(explain=lambda: "the plan's own words")

HIDDEN = "rank 1: the GPU of rank 0 is hidden from it (CUDA_VISIBLE_DEVICES)"

#: test id -> (nodes of the ranks, settings, why ranks can't map each other's memory, method, part of the reason)
CHOICES: dict[str, tuple[list[int], dict[str, bool], str, str, str]] = {
    "one-node": ([0, 0], {}, "", "pull", "all ranks are on one node"),
    "alone": ([0], {}, "", "pull", "one node"),
    "offloaded": ([0, 0], {"weights_leave": True}, "", "pull", "one node"),
    "pools": ([0, 0, 0], {"disaggregated": True}, "", "pull", "one node"),
    "two-nodes": ([0, 0, 1, 1], {}, "", "collective", "on 2 nodes"),
    "pools-on-two-nodes": ([0, 1], {"disaggregated": True}, "", "broadcast", "on 2 nodes"),
    "hidden-gpus": ([0, 0], {}, HIDDEN, "collective", "can't map each other's memory: rank 1: the GPU of rank 0"),
    "pools-with-hidden-gpus": ([0, 0], {"disaggregated": True}, HIDDEN, "broadcast", "CUDA_VISIBLE_DEVICES"),
}


def settings(**kwargs: bool) -> TransferSettings:
    return TransferSettings(world=World(), **kwargs)


@pytest.mark.parametrize("case", CHOICES)
def test_auto_chooses(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    nodes, options, obstacle, method, reason = CHOICES[case]
    monkeypatch.setattr(registry, "node_of", lambda group: nodes)
    monkeypatch.setattr(registry, "why_not_mapped", lambda device, group: obstacle)
    chosen, why = choose(settings(**options))
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
