"""Rewards from a server, against a stub that fails, stalls and answers out of order."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hybridengine.config import RewardConfig
from hybridengine.embedded import make_tokenizer
from hybridengine.rewards.base import RewardError
from hybridengine.rewards.scorer import Scorer
from hybridengine.rewards.served import ServedRewardError, served
from hybridengine.types import Prompt, Trajectory


class Stub(ThreadingHTTPServer):
    """``plan``: by text, what its next requests get: a status, or seconds to wait; then the answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.plan: dict[str, list[Any]] = {}
        self.lock, self.busy, self.most, self.seen = threading.Lock(), 0, 0, list[tuple[str, dict[str, Any]]]()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body.get("input") or (body.get("query") or [None])[0] or body["messages"][0]["content"]
        with self.server.lock:
            self.server.busy += 1
            self.server.most = max(self.server.most, self.server.busy)
            self.server.seen.append((self.path, body))
            steps = self.server.plan.get(text, [])
            step = steps.pop(0) if steps else 200
        if isinstance(step, float):
            time.sleep(step)
            step = 200
        value = len(text)
        answer: dict[str, Any] = {"choices": [{"message": {"content": f"Of 10 points it gets {value}."}}]}
        if "input" in body:
            answer = {"data": [{"probs": [0.25, 0.75]}]}
        elif "query" in body:
            answer = {"rewards": [value / 2]}
        if step == "nonsense":
            step, answer = 200, {"choices": [{"message": {"content": "good"}}]}
        with self.server.lock:
            self.server.busy -= 1
        content = json.dumps(answer).encode()
        self.send_response(step)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ask(stub: Stub, response: str = "12", **keys: Any) -> float:
    keys = {"url": stub.url, "model": "m", "retry_seconds": 0.01, "request_seconds": 0.3} | keys
    return asyncio.run(served("1+1=", response, "2", **keys))


@pytest.mark.parametrize(
    ("keys", "path", "expected"),
    [
        ({"kind": "judge", "scale": 10}, "/chat/completions", 0.6),
        ({"kind": "classify", "label": 1}, "/classify", 0.75),
        ({"kind": "openrlhf"}, "/", 3.0),
        ({"kind": "judge", "template": "{response}:{answer}"}, "/chat/completions", 4.0),
    ],
    ids=["judge", "classify", "openrlhf", "template"],
)
def test_forms(stub: Stub, keys: dict[str, Any], path: str, expected: float) -> None:
    assert ask(stub, **keys) == pytest.approx(expected)
    ((seen, body),) = stub.seen
    assert seen == path and (keys["kind"] != "openrlhf" or (body["prompts"], body["labels"]) == (["1+1="], ["2"]))


def test_it_tries_again_after_failures_and_stalls(stub: Stub) -> None:
    stub.plan["1+1=12"] = [503, 429, 0.6]
    assert ask(stub) == 6.0 and len(stub.seen) == 4


@pytest.mark.parametrize(
    ("plan", "message", "requests"),
    [
        ([503] * 3, r"/chat/completions: status 503: .* \(3 tries\)", 3),
        ([404], r"status 404: .* \(1 tries\)", 1),
        (["nonsense"], "no score in its answer '.*good", 1),
    ],
    ids=["failing", "refused", "nonsense"],
)
def test_what_it_says_after_that(stub: Stub, plan: list[Any], message: str, requests: int) -> None:
    stub.plan["1+1=12"] = plan
    with pytest.raises(ServedRewardError, match=message):
        ask(stub, retries=2)
    assert len(stub.seen) == requests


def test_nobody_there() -> None:
    with pytest.raises(ServedRewardError, match=r"127.0.0.1:9/chat/completions: ConnectError.* \(2 tries\)"):
        asyncio.run(served("", "", "", url="http://127.0.0.1:9", model="m", retries=1, retry_seconds=0.01))


@pytest.mark.parametrize(
    ("keys", "message"),
    [({"kind": "x"}, "kind=x: must be"), ({"model": None}, "model=null"), ({"api_key_env": "NO_KEY"}, "no such env")],
)
def test_settings_that_can_t_be(stub: Stub, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(stub, **keys)


def rollout(count: int) -> list[Trajectory]:
    tokenizer = make_tokenizer()
    found = []
    for index in range(count):
        ids = tokenizer(str(10**index))["input_ids"]
        found.append(
            Trajectory(
                prompt=Prompt(index=index, token_ids=[3], text="1="), sample_index=0, token_ids=ids,
                logprobs=[-1.0] * len(ids), versions=[0] * len(ids), truncated=False,
            )
        )  # fmt: skip
    return found


def score(stub: Stub, **changes: Any) -> tuple[list[float | None], dict[str, float]]:
    kwargs = {"url": stub.url, "model": "m", "concurrency": 3, "retries": 0, "request_seconds": 1.0}
    scorer = Scorer(RewardConfig(fn="served", kwargs=kwargs, **changes), make_tokenizer())
    try:
        trajectories = rollout(8)
        scorer.score(trajectories)
        return [t.reward for t in trajectories], {}
    finally:
        scorer.close()


def test_scores_find_their_samples_however_late(stub: Stub) -> None:
    """The first answers come last; never more than three requests at a time."""
    stub.plan = {"1=1": [0.4], "1=10": [0.3], "1=100": [0.2]}
    rewards, _ = score(stub)
    assert rewards == [float(3 + index) for index in range(8)] and stub.most <= 3


def test_a_failure_ends_the_run_or_scores_zero(stub: Stub) -> None:
    stub.plan = {"1=100": [500]}
    with pytest.raises(RewardError, match="served.*status 500"):
        score(stub)
    stub.plan = {"1=100": [500]}
    rewards, _ = score(stub, on_error="zero")
    assert rewards == [3.0, 4.0, 0.0, 6.0, 7.0, 8.0, 9.0, 10.0]
