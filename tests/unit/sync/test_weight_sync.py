"""WeightSync's bracket on recording fakes: its order, what a failure leaves out, and how lost ranks are named."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hybridengine.distributed.errors import PeerLostError
from hybridengine.sync.transfer.base import SyncReport, WeightSyncError
from hybridengine.sync.weight_sync import WeightSync, is_broken_collective

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:40912"
REPORT = SyncReport(method="none", version=7, bytes_received=8, seconds=0.5)


class Recorder:
    """All that a sync calls, by name, in order. The step named ``fails`` raises ``error``."""

    def __init__(self, fails: str = "", error: Exception | None = None, gone: list[int] | None = None) -> None:
        self.log: list[str] = []
        self._fails, self._error = fails, error or OSError("injected")
        transfer: Any = SimpleNamespace(
            run=lambda version: self._note("transfer", version) or REPORT,
            close=lambda: self._note("close"),
            peers=SimpleNamespace(gone=lambda: gone or []),
        )
        self.sync = WeightSync(
            transfer, begin=lambda: self._note("begin"), finish=lambda version: self._note("finish", version)
        )

    def _note(self, step: str, *version: int) -> None:
        self.log.append(" ".join(map(str, (step, *version))))
        if step == self._fails:
            raise self._error


def test_begin_transfer_finish() -> None:
    case = Recorder()
    assert case.sync.report is None and case.sync.metrics() == {"sync/count": 0.0}
    case.sync.run(7)
    assert case.log == ["begin", "transfer 7", "finish 7"]
    assert case.sync.report is REPORT and case.sync.count == 1
    assert case.sync.metrics() == {"sync/count": 1.0} | REPORT.metrics()
    case.sync.close()
    assert case.log[3:] == ["close"]


@pytest.mark.parametrize(
    ("fails", "reached"),
    [("begin", ["begin"]), ("transfer", ["begin", "transfer 7"]), ("finish", ["begin", "transfer 7", "finish 7"])],
    ids=["begin", "transfer", "finish"],
)
def test_what_comes_after_a_failure_is_left_out_and_the_sync_can_be_tried_again(fails: str, reached: list[str]) -> None:
    case = Recorder(fails)
    with pytest.raises(OSError, match="injected"):
        case.sync.run(7)
    assert case.log == reached and case.sync.count == 0
    case._fails = ""
    case.sync.run(7)
    assert case.log[len(reached) :] == ["begin", "transfer 7", "finish 7"] and case.sync.count == 1


def test_the_engine_of_this_rank_is_in_the_bracket() -> None:
    log: list[str] = []
    engine: Any = SimpleNamespace(begin_update=lambda: log.append("begin"), finish_update=lambda v: log.append(f"v{v}"))
    transfer: Any = SimpleNamespace(run=lambda version: log.append("transfer"))
    WeightSync.into(engine, transfer).run(3)
    assert log == ["begin", "transfer", "v3"]


def test_a_rank_without_an_engine_only_transfers() -> None:
    log: list[int] = []
    transfer: Any = SimpleNamespace(run=log.append)
    WeightSync(transfer).run(3)
    assert log == [3]


BROKEN: dict[str, Exception] = {
    "gloo": RuntimeError(GLOO),
    "backend": dist.DistBackendError("NCCL error: remote process exited"),
    "network": dist.DistNetworkError("connection reset"),
}
GONE = {
    "one": ([2], "rank 2 died"),
    "several": ([1, 3], r"ranks \[1, 3\] have ended"),
    "none": ([], r"a rank was lost or late \(distributed\.timeout_seconds\); none of this node has ended"),
}


@pytest.mark.parametrize("step", ["begin", "transfer", "finish"])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_collective_is_a_lost_peer_wherever_it_broke(kind: str, step: str) -> None:
    case = Recorder(step, BROKEN[kind], gone=[2])
    with pytest.raises(PeerLostError, match="^weight sync to policy version 7: rank 2 died: ") as caught:
        case.sync.run(7)
    assert caught.value.__cause__ is BROKEN[kind] and case.sync.count == 0


@pytest.mark.parametrize("who", GONE)
def test_lost_ranks_are_named(who: str) -> None:
    gone, told = GONE[who]
    with pytest.raises(PeerLostError, match=f"^weight sync to policy version 7: {told}: .*Connection closed by peer"):
        Recorder("transfer", RuntimeError(GLOO), gone=gone).sync.run(7)


@pytest.mark.parametrize(
    "error",
    [
        WeightSyncError("gloo is not to blame"),
        PeerLostError("rank 1 gave up this weight sync"),
        RuntimeError("the weights are asleep"),
        ValueError("gloo"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_are_themselves(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        Recorder("transfer", error, gone=[2]).sync.run(7)
    assert caught.value is error


@pytest.mark.parametrize(
    ("make", "broken"),
    [
        (lambda: RuntimeError(GLOO), True),
        (lambda: dist.DistStoreError("wait timeout"), True),
        (lambda: RuntimeError("shape mismatch"), False),
        (lambda: WeightSyncError(GLOO), False),
    ],
    ids=["gloo", "store", "other", "ours"],
)
def test_what_counts_as_a_broken_collective(make: Callable[[], RuntimeError], broken: bool) -> None:
    assert is_broken_collective(make()) == broken
