"""What the phases cost: seconds, as functions of how much there is to do."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of one replica, and of one training rank.

    Attributes:
        decode: (running samples, seconds of one engine step), increasing; straight lines between the points, the first
            one's seconds below it, the last line's slope beyond (constant with a single point).
        context: seconds that a token of context adds to each engine step (reading the KV cache).
        prefill: seconds that a token entering the engine adds to the step it enters in: prompts, and whatever resumed
            samples have already.
        train: seconds per token of a batch on one training rank; n ranks take 1/n of it.
        step: seconds of a training step whatever its tokens: optimizer, advantages, exchange, logging.
        rollout: colocated: seconds of a rollout whatever its samples: waking engines, exchanging samples.
        sync: seconds of a weight update, during which both sides stand still.
        latency: disaggregated: seconds from the end of a sample to the trainer that waits for it: scoring, messages.

    Raises:
        ValueError: a negative cost, or points that are not in increasing order.
    """

    decode: tuple[tuple[float, float], ...]
    context: float = 0.0
    prefill: float = 0.0
    train: float = 0.0
    step: float = 0.0
    rollout: float = 0.0
    sync: float = 0.0
    latency: float = 0.0

    def __post_init__(self) -> None:
        numbers = [n for n, _ in self.decode]
        if not numbers or numbers != sorted(set(numbers)) or min(seconds for _, seconds in self.decode) <= 0:
            raise ValueError(f"decode={self.decode}: needs points (running samples, seconds > 0) in increasing order")
        for name in ("context", "prefill", "train", "step", "rollout", "sync", "latency"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}: a cost must be 0 or more seconds")

    def engine_step(self, running: int) -> float:
        """Seconds of one engine step with so many samples, context and prefill aside.

        >>> Costs(decode=((1, 1.0), (5, 3.0))).engine_step(3)
        2.0
        """
        points = self.decode
        if running <= points[0][0] or len(points) == 1:
            return points[0][1]
        at = min(bisect_left(points, (running, -math.inf)), len(points) - 1)
        (n0, s0), (n1, s1) = points[at - 1], points[at]
        return s0 + (s1 - s0) * (running - n0) / (n1 - n0)

    def stretch(self, steps: int, running: int, context: int) -> float:
        """Seconds of consecutive engine steps in which the same samples run.

        Args:
            context: tokens of all of them in the first of these steps; each step adds ``running``.
        """
        tokens = steps * context + running * steps * (steps - 1) // 2
        return steps * self.engine_step(running) + self.context * tokens
