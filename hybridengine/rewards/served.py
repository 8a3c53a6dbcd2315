"""A reward from a server: a judge behind an OpenAI-compatible API, vLLM's classify endpoint, or OpenRLHF's remote form.

kind       request                                                          score
judge      POST url/chat/completions {model, messages, temperature: 0}      the last number of the answer
classify   POST url/classify {model, input}                                 the probability of ``label``
openrlhf   POST url {query: [text], prompts: [prompt], labels: [answer]}    rewards[0]
"""

from __future__ import annotations

import asyncio
import os
import re
import weakref
from typing import Any

import httpx

KINDS = ("judge", "classify", "openrlhf")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
#: Statuses after which the same request may work: too many requests, and errors of the server's own.
AGAIN = (408, 429, 500, 502, 503, 504)


class ServedRewardError(RuntimeError):
    """The server gave no score; the message names it, and what it said."""


class Server:
    """One client of one server on one event loop, with so many requests at a time."""

    def __init__(self, concurrency: int) -> None:
        self.client = httpx.AsyncClient()
        self.slots = asyncio.Semaphore(concurrency)


_servers: weakref.WeakKeyDictionary[Any, dict[tuple[str, int], Server]] = weakref.WeakKeyDictionary()


async def served(
    prompt: str,
    response: str,
    answer: Any,
    *,
    url: str,
    kind: str = "judge",
    model: str | None = None,
    template: str = "{prompt}{response}",
    label: int = 0,
    scale: float = 1.0,
    concurrency: int = 16,
    retries: int = 3,
    retry_seconds: float = 0.5,
    request_seconds: float = 9.0,
    api_key_env: str | None = None,
) -> float:
    """What a server says of a response.

    Args:
        url: of the server's API, such as ``http://host:8000/v1``; for openrlhf the whole address.
        kind: one of KINDS.
        model: as the server calls it; needed by judge.
        template: what the server reads, with {prompt}, {response} and, for judges that compare, {answer}.
        label: classify: which class is the good one.
        scale: the score is divided by it: 10 for a judge that gives 0 to 10.
        concurrency: requests of this process at a time.
        retries: further tries after a failure to connect, a request that takes longer than ``request_seconds``, or a
            status of AGAIN; the first after ``retry_seconds``, each later one after twice the time.
        api_key_env: environment variable with the key, sent as a bearer token.

    Raises:
        ValueError: an unknown kind, a judge without a model, no such environment variable.
        ServedRewardError: no score after all tries, or at once after another status.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind}: must be one of {' | '.join(KINDS)}")
    if kind == "judge" and model is None:
        raise ValueError("model=null: a judge needs the name by which its server knows it")
    if api_key_env is not None and api_key_env not in os.environ:
        raise ValueError(f"api_key_env={api_key_env}: no such environment variable")
    headers = {"Authorization": f"Bearer {os.environ[api_key_env]}"} if api_key_env else {}
    text = template.replace("{answer}", str(answer)).replace("{prompt}", prompt).replace("{response}", response)
    address, body = request_of(url, kind, model=model, text=text, prompt=prompt, answer=answer)
    server = _server(url, concurrency)
    problem = ""
    for attempt in range(retries + 1):
        if attempt:
            await asyncio.sleep(retry_seconds * 2 ** (attempt - 1))
        async with server.slots:
            try:
                reply = await server.client.post(address, json=body, headers=headers, timeout=request_seconds)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__} {error}".strip()
                continue
        if reply.status_code == 200:
            return score_of(kind, reply, label=label, where=address) / scale
        problem = f"status {reply.status_code}: {reply.text[:200]}"
        if reply.status_code not in AGAIN:
            break
    raise ServedRewardError(f"{address}: {problem} ({attempt + 1} tries)")


def request_of(
    url: str, kind: str, *, model: str | None, text: str, prompt: str, answer: Any
) -> tuple[str, dict[str, Any]]:
    """Address and body of one request."""
    base = url.rstrip("/")
    if kind == "judge":
        messages = [{"role": "user", "content": text}]
        return f"{base}/chat/completions", {"model": model, "messages": messages, "temperature": 0}
    if kind == "classify":
        return f"{base}/classify", {"input": text} | ({"model": model} if model else {})
    return url, {"query": [text], "prompts": [prompt], "labels": [answer]}


def score_of(kind: str, reply: httpx.Response, *, label: int, where: str) -> float:
    """Raises ServedRewardError: the reply has no score where its kind has it."""
    try:
        content = reply.json()
        if kind == "judge":
            return float(NUMBER.findall(content["choices"][0]["message"]["content"])[-1])
        if kind == "classify":
            return float(content["data"][0]["probs"][label])
        return float(content["rewards"][0])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ServedRewardError(f"{where}: no score in its answer {reply.text[:200]!r}") from error


def _server(url: str, concurrency: int) -> Server:
    here = _servers.setdefault(asyncio.get_running_loop(), {})
    if (url, concurrency) not in here:
        here[url, concurrency] = Server(concurrency)
    return here[url, concurrency]
