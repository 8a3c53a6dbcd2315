"""Reward functions that behave well, and others; workers import them by name."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

EVENTS: list[Any] = []


def length(prompt: str, response: str, answer: Any) -> float:
    return float(len(response))


def misbehaves(prompt: str, response: str, answer: Any, *, kwargs: Any = None) -> float:
    """What it does is the response's first word."""
    what = response.split()[0]
    if what == "hang":
        time.sleep(600)
    if what == "spin":
        while True:
            pass
    if what == "die":
        os._exit(3)
    if what == "exit":
        sys.exit(0)
    if what == "raise":
        raise KeyError("six")
    if what == "memory":
        bytearray(1 << 42)
    if what == "nan":
        return float("nan")
    if what == "text":
        return "1"  # type: ignore[return-value]
    if what == "huge":
        return [1.0] * 10**7  # type: ignore[return-value]
    return 1.0


def dies_once(prompt: str, response: str, answer: Any, *, metadata: dict[str, Any]) -> float:
    """Kills its process with the first call; ``metadata["mark"]`` remembers that across processes."""
    mark = Path(metadata["mark"])
    if not mark.exists():
        mark.touch()
        os._exit(1)
    return 1.0


def leaves_a_child(prompt: str, response: str, answer: Any, *, metadata: dict[str, Any]) -> float:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path(metadata["mark"]).write_text(str(child.pid))
    if response == "hang":
        time.sleep(600)
    return 1.0


def busy(prompt: str, response: str, answer: Any, *, seconds: float = 0.05) -> float:
    """Pure Python that holds the interpreter lock."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return 1.0


def process(prompt: str, response: str, answer: Any) -> float:
    return float(os.getpid())


def prints(prompt: str, response: str, answer: Any) -> float:
    print("not a reply", flush=True)
    os.write(1, b"nor this\n")
    return 1.0


def reaches_out(prompt: str, response: str, answer: Any, *, metadata: dict[str, Any]) -> float:
    """1 if it could write a file, 2 if it could signal the process ``metadata["pid"]``, 3 if both."""
    score = 0.0
    try:
        Path(metadata["mark"]).write_text("out")
        score += 1
    except OSError:
        pass
    try:
        os.kill(metadata["pid"], 0)
        score += 2
    except OSError:
        pass
    return score


def lists(
    prompts: list[str], responses: list[str], answers: list[Any], *, metadata: list[dict[str, Any]]
) -> list[float]:
    EVENTS.append((list(responses), list(answers)))
    return [float(len(response)) for response in responses]


def too_few(prompts: list[str], responses: list[str], answers: list[Any]) -> list[float]:
    return [1.0]


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None) -> Any:
    """As one writes it for verl's reward.custom_reward_function."""
    assert data_source == "gsm8k" and extra_info == {"split": "train"}, (data_source, extra_info)
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}


def verl_batch(
    data_sources: list[str], solution_strs: list[str], ground_truths: list[str], extra_infos: list[dict[str, Any]]
) -> list[float]:
    return [float(a == b) for a, b in zip(solution_strs, ground_truths, strict=True)]


def trl(completions: list[Any], solution: list[str], **kwargs: Any) -> list[float | None]:
    """As one writes it for TRL's GRPOTrainer(reward_funcs=...); chat and plain completions."""
    EVENTS.append(sorted(kwargs))
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [None if text == "skip" else float(text == gold) for text, gold in zip(texts, solution, strict=True)]


async def judge(prompt: str, response: str, answer: Any, *, seconds: float = 0.2) -> float:
    await asyncio.sleep(600 if response == "hang" else seconds)
    if response == "raise":
        raise ConnectionError("no judge")
    return 1.0
