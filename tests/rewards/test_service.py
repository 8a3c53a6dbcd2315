"""Worker processes: killed, replaced, retried, bounded; nothing survives the trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridengine.config import RewardTerm
from hybridengine.process_control import children
from hybridengine.rewards.base import RewardError
from hybridengine.rewards.scorer import Scorer
from hybridengine.rewards.service.pool import Worker, WorkerTimeoutError, new_server
from hybridengine.rewards.service.wire import BrokenWorkerError
from hybridengine.rewards.service.worker import Request
from hybridengine.rewards.signatures import SAMPLE, Call
from tests.rewards.samples import scorer, trajectory

FUNCTIONS = "tests.rewards.functions"
ROOT = Path(__file__).resolve().parents[2]


def alive(pid: int) -> bool:
    """Not gone and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Any, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def score(scoring: Scorer, *tokens: int, **metadata: Any) -> list[float | None]:
    batch = [trajectory([token], index=i, **metadata) for i, token in enumerate(tokens)]
    scoring.score(batch)
    return [t.reward for t in batch]


@pytest.fixture
def worker() -> Iterator[Worker]:
    server = new_server([], 1.0)
    made = Worker(server)
    yield made
    made.kill()
    server.close()


def ask(worker: Worker, function: str, response: str, seconds: float = 30.0, **metadata: Any) -> dict[str, Any]:
    call = Call(prompt="", response=response, metadata=metadata)
    return worker.ask(Request(f"{FUNCTIONS}:{function}", SAMPLE, {}, [call]), seconds)


# -- one worker ------------------------------------------------------------------------------------


def test_a_worker_is_another_process_which_is_kept(worker: Worker) -> None:
    first, second = (ask(worker, "process", "")["values"][0][0] for _ in range(2))
    assert first == second == worker.pid != os.getpid() and worker.starts == 1


def test_a_dead_worker_is_replaced_by_a_fork(worker: Worker) -> None:
    """Of the same fork server: nothing is imported again."""
    first = int(ask(worker, "process", "")["values"][0][0])
    with pytest.raises(BrokenWorkerError):
        ask(worker, "misbehaves", "die")
    server = worker._server.pid
    second = int(ask(worker, "process", "")["values"][0][0])
    assert second != first and worker._server.pid == server and worker.starts == 2


@pytest.mark.parametrize("what", ["hang", "spin"])
def test_a_call_beyond_its_limit_is_killed(worker: Worker, what: str) -> None:
    ask(worker, "length", "x")
    pid, begin = worker.pid, time.monotonic()
    with pytest.raises(WorkerTimeoutError, match="still running after 0.4 s"):
        ask(worker, "misbehaves", what, 0.4)
    assert time.monotonic() - begin < 4.1 and pid is not None and not alive(pid)


def test_a_result_that_is_too_large_is_no_result(worker: Worker) -> None:
    assert ask(worker, "misbehaves", "huge")["error"]["kind"] == "value"


def test_what_a_function_prints_is_not_taken_for_a_reply(worker: Worker) -> None:
    assert ask(worker, "prints", "x")["values"] == [(1.0, {})]


def test_memory_is_bounded(worker: Worker) -> None:
    assert ask(worker, "misbehaves", "memory")["error"]["kind"] == "memory"
    assert ask(worker, "length", "abc")["values"] == [(3.0, {})]


def test_a_fork_server_that_dies_is_started_again(worker: Worker) -> None:
    pid = int(ask(worker, "process", "")["values"][0][0])
    server = worker._server
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    assert wait_until(lambda: not alive(pid))  # its workers go with it
    with pytest.raises(BrokenWorkerError):
        ask(worker, "process", "")
    assert ask(worker, "length", "abc")["values"] == [(3.0, {})]


def test_children_of_a_killed_worker_are_killed(worker: Worker, tmp_path: Path) -> None:
    """Also one in a session of its own, which no signal to the group reaches."""
    mark = tmp_path / "pid"
    with pytest.raises(WorkerTimeoutError):
        ask(worker, "leaves_a_child", "hang", 3.0, mark=str(mark))
    assert wait_until(lambda: not alive(int(mark.read_text())))


@pytest.mark.parametrize(("confine", "reached"), [(False, 3.0), (True, 0.0)])
def test_a_confined_worker_neither_writes_nor_signals(
    worker: Worker, tmp_path: Path, confine: bool, reached: float
) -> None:
    from hybridengine.rewards.code.sandbox import landlock_abi

    if landlock_abi() < 6:
        pytest.skip("needs Landlock ABI 6 (Linux 6.12)")
    call = Call(prompt="", response="", metadata={"mark": str(tmp_path / "mark"), "pid": os.getpid()})
    request = Request(f"{FUNCTIONS}:reaches_out", SAMPLE, {}, [call], confine=confine)
    assert worker.ask(request, 30.0)["values"] == [(reached, {})]


@pytest.mark.parametrize(
    "reply",
    [b"", b"nonsense", b'{"values": [[1.0, {}], [1.0, {}]]}', b'{"values": [["1e999x", {}]]}', b"[" * 100_000, b"{}"],
    ids=["empty", "no-json", "too-many", "no-number", "nested", "neither"],
)
def test_a_reply_is_believed_only_in_form(reply: bytes) -> None:
    from hybridengine.rewards.service.pool import _checked

    with pytest.raises(BrokenWorkerError):
        _checked(reply, 1)


# -- through the scorer ----------------------------------------------------------------------------


def test_one_hang_in_64_costs_one_timeout_and_not_the_run() -> None:
    scoring = scorer("fine", "hang", fn=f"{FUNCTIONS}:misbehaves", isolate=True, timeout_seconds=1.0)
    score(scoring, 1)
    begin = time.monotonic()
    rewards = score(scoring, *(1 + (i == 17) for i in range(64)))
    assert rewards == [1.0] * 17 + [0.0] + [1.0] * 46
    assert time.monotonic() - begin < 10.0
    taken = scoring.metrics(scoring.take_stats())
    assert (taken["reward/timeouts/misbehaves"], taken["reward/errors/misbehaves"]) == (1, 1)
    scoring.close()


def test_on_error_raise_means_timeouts_too() -> None:
    scoring = scorer(
        "hang", fn=f"{FUNCTIONS}:misbehaves", isolate=True, timeout_seconds=0.3, on_error="raise"
    )  # fmt: skip
    with pytest.raises(RewardError, match="still running after 0.3 s"):
        score(scoring, 1)
    scoring.close()


def test_a_dead_workers_sample_is_tried_again(tmp_path: Path) -> None:
    scoring = scorer("x", fn=f"{FUNCTIONS}:dies_once", isolate=True, on_error="raise")
    assert score(scoring, 1, 1, mark=str(tmp_path / "mark")) == [1.0, 1.0]
    assert scoring.metrics(scoring.take_stats())["reward/retries"] >= 1
    scoring.close()


def test_a_sample_that_kills_two_workers_scores_zero() -> None:
    scoring = scorer("fine", "die", fn=f"{FUNCTIONS}:misbehaves", isolate=True)
    assert score(scoring, 1, 2, 1) == [1.0, 0.0, 1.0]
    scoring.close()


def test_too_much_memory_scores_zero() -> None:
    scoring = scorer("fine", "memory", fn=f"{FUNCTIONS}:misbehaves", isolate=True, memory_gib=1.0)
    assert score(scoring, 1, 2, 1) == [1.0, 0.0, 1.0]
    scoring.close()


def test_a_backtracking_pattern_does_not_stop_the_trainer() -> None:
    """In this process it would hold the interpreter lock, so that not even the time limit could fire."""
    scoring = scorer("a" * 40 + "b", "aa", fn="format", kwargs={"pattern": "(a+)+"}, timeout_seconds=0.5)
    begin = time.monotonic()
    assert score(scoring, 1, 2) == [0.0, 1.0]
    assert time.monotonic() - begin < 15.0
    scoring.close()


def gym(task: str, **kwargs: Any) -> dict[str, Any]:
    factory = pytest.importorskip("reasoning_gym.factory")
    entry = factory.create_dataset(task, size=1, seed=3, **kwargs)[0]
    return {"task": task, "kwargs": kwargs, "entry": entry}


def test_reasoning_gym_runs_what_the_model_wrote_where_it_can_do_nothing(tmp_path: Path) -> None:
    """puzzle24 evaluates the response. It can neither write, nor signal this process, nor change later scores."""
    row = gym("puzzle24")
    numbers = row["entry"]["metadata"]["numbers"]
    secret = tmp_path / "written"
    attack = f"[].append(__import__('os').system('touch {secret}; kill -9 {os.getpid()}'))"
    patch = "exec('import reasoning_gym.games.puzzle24 as p; p.Puzzle24Dataset.score_answer = lambda *a: 1.0')"
    responses = ("9**9**9", "9**9**9**9", attack, patch, "1+1", "__import__('time').sleep(600)")
    scoring = scorer(*responses, fn="reasoning_gym", timeout_seconds=0.7)
    begin = time.monotonic()
    rewards = score(scoring, 1, 2, 3, 4, 5, 6, 5, **row)
    assert max(r for r in rewards if r is not None) < 0.1, (rewards, numbers)
    assert not secret.exists() and time.monotonic() - begin < 60
    scoring.close()


def test_scoring_that_hangs_on_every_sample_ends_soon() -> None:
    """16 samples with a limit of 3 s each: the budget of 1 s is soon used up, and each then gets half a second."""
    scoring = scorer(
        "hang", fn=f"{FUNCTIONS}:misbehaves", isolate=True, timeout_seconds=3.0, timeout_budget_seconds=1.0, workers=4
    )  # fmt: skip
    begin = time.monotonic()
    assert score(scoring, *[1] * 16) == [0.0] * 16
    assert time.monotonic() - begin < 9.0  # 3 s for the first four, 3 rounds of 0.5 s; 12 s without a budget
    scoring.close()


def test_different_functions_share_the_workers() -> None:
    terms = {
        "math": RewardTerm(fn="math"),
        "mine": RewardTerm(fn=f"{FUNCTIONS}:process", isolate=True),
        "form": RewardTerm(fn="format", kwargs={"pattern": ".*5.*"}),
    }
    scoring = scorer(r"\boxed{5}", terms=terms, workers=1)
    batch = [trajectory([1], index=i) for i in range(4)]
    scoring.score(batch)
    pids = {t.rewards["mine"] for t in batch}
    assert len(pids) == 1 and os.getpid() not in pids
    assert all(t.rewards["math"] == t.rewards["form"] == 1.0 for t in batch)
    scoring.close()


def test_closing_leaves_no_process() -> None:
    scoring = scorer("fine", fn=f"{FUNCTIONS}:misbehaves", isolate=True)
    score(scoring, *[1] * 8)
    server = scoring._server.pid
    assert server is not None
    workers = children(server)
    assert workers
    scoring.close()
    assert not any(alive(pid) for pid in [server, *workers])


PROGRAM = """
import sys, time
from tests.rewards.samples import scorer, trajectory
scoring = scorer("spin", fn="tests.rewards.functions:misbehaves", isolate=True, timeout_seconds=600.0)
for i in range(4):
    scoring.submit(trajectory([1], index=i))
from hybridengine.process_control import children
server = scoring._server.pid
while len(children(server)) < 4:
    time.sleep(0.02)
print(server, *children(server), flush=True)
time.sleep(600)
"""


def test_no_orphan_survives_a_killed_trainer() -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert program.stdout is not None
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) == 5 and all(alive(pid) for pid in pids)
    program.kill()
    program.wait()
    assert wait_until(lambda: not any(alive(pid) for pid in pids), 5.0)


def test_importing_takes_no_time_from_the_call(tmp_path: Path) -> None:
    """A module that takes a second to import, with a limit of half a second for a call."""
    source = tmp_path / "heavy.py"
    source.write_text("import time\ntime.sleep(1)\ndef score(prompt, response, answer):\n    return 1.0\n")
    scoring = scorer("x", fn=f"{source}:score", isolate=True, timeout_seconds=0.5, on_error="raise")
    assert score(scoring, 1, 1) == [1.0, 1.0]
    scoring.close()
