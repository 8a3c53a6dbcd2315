"""Holds the answers of a data set against the verifiers that will use them, before a run starts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hybridengine.rewards import signatures
from hybridengine.rewards.base import RewardFunction
from hybridengine.rewards.builtin import BUILTIN
from hybridengine.rewards.load import CHECK
from hybridengine.rewards.service.pool import STARTUP_SECONDS, ForkServerHandle, Worker
from hybridengine.rewards.service.worker import Request
from hybridengine.rewards.signatures import Call
from hybridengine.types import Prompt

#: Rows per request.
CHUNK = 256


def check_answers(
    rewards: Sequence[RewardFunction], prompts: Sequence[Prompt], server: ForkServerHandle, *, workers: int
) -> None:
    """Raises ValueError when a built-in function can't use the answer of a row; names the row and what is wrong."""
    for reward in rewards:
        builtin = BUILTIN.get(reward.fn)
        if builtin is None or builtin.check is None:
            continue
        calls = [Call(prompt=p.text, response="", answer=p.answer, metadata=p.metadata) for p in prompts]
        usable = _usable(reward, calls, server, workers=workers)
        bad = [i for i, value in enumerate(usable) if not value]
        if bad:
            prompt = prompts[bad[0]]
            raise ValueError(
                f"reward {reward.name}: {len(bad)} of {len(prompts)} rows have an answer that it can't use; the first "
                f"is row {prompt.index} ({prompt.text!r:.80}): {_reason(reward, calls[bad[0]], server)}"
            )


def _usable(reward: RewardFunction, calls: list[Call], server: ForkServerHandle, *, workers: int) -> list[bool]:
    check = BUILTIN[reward.fn].check
    assert check is not None
    kwargs = {name: value for name, value in reward.kwargs.items() if name in signatures.parameters(check)}
    if not reward.isolated:
        return [bool(value.score) for value in signatures.call(check, signatures.BATCH, calls, kwargs)]
    chunks = [calls[i : i + CHUNK] for i in range(0, len(calls), CHUNK)]
    idle = [Worker(server) for _ in range(min(workers, len(chunks)))]

    def ask(chunk: list[Call]) -> list[bool]:
        worker = idle.pop()
        try:
            request = Request(reward.fn + CHECK, signatures.BATCH, kwargs, chunk)
            reply = worker.ask(request, STARTUP_SECONDS)
        finally:
            idle.append(worker)
        if "error" in reply:
            raise ValueError(f"reward {reward.name}: {reply['error']['message']}")
        return [bool(score) for score, _ in reply["values"]]

    try:
        with ThreadPoolExecutor(max(1, len(idle))) as threads:
            return [value for values in threads.map(ask, chunks) for value in values]
    finally:
        for worker in idle:
            worker.kill()


def _reason(reward: RewardFunction, call: Call, server: ForkServerHandle) -> str:
    """What the function itself says about a row that it can't use."""
    if not reward.isolated:
        try:
            reward.score([call])
        except ValueError as error:
            return str(error)
        return "unusable"
    worker = Worker(server)
    try:
        reply = worker.ask(Request(reward.fn, reward.form, reward.kwargs, [call]), STARTUP_SECONDS)
    finally:
        worker.kill()
    return str(reply.get("error", {}).get("message", "unusable")).removeprefix("ValueError: ")
