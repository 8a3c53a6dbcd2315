"""Generation in small steps, for schedules that refill slots, stop early or swap weights in the middle.

A RolloutStream takes samples one by one, hands back each as it finishes, and can be interrupted: what was sampled so
far stays in the trajectory, which can be submitted again, here or elsewhere, and continues where it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hybridengine.engines.rollout.seeds import sample_seed
from hybridengine.types import Prompt, SamplingParams, Trajectory


class RolloutStream(Protocol):
    """Samples in flight on one replica. Tensor-parallel ranks make the same calls in the same order."""

    @property
    def slots(self) -> int:
        """Samples that are decoded together at most; more of them wait inside the engine."""
        ...

    @property
    def running(self) -> int:
        """Samples submitted and not finished yet."""
        ...

    def submit(self, trajectory: Trajectory, *, step: int) -> None:
        """Continue ``trajectory``, empty or partial; new tokens, log-probabilities and versions are appended to it.

        The random numbers are those of (seed, step, prompt, sample, position): where and how often a sample was
        interrupted changes nothing, as long as the weights are the same. (With vLLM's own sampler on a CPU,
        ``rollout.sampler=engine``, a sample that was interrupted goes on with other random numbers.)
        """
        ...

    def step(self) -> list[Trajectory]:
        """One token for (some of) the running samples; those that are finished now."""
        ...

    def interrupt(self) -> list[Trajectory]:
        """Stop; the unfinished samples, with what they have so far, in order of submission."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to generate: prompt (and what there is of the response already), tokens at most, its seed."""

    name: str
    token_ids: list[int]
    max_tokens: int
    seed: int


def request_for(
    trajectory: Trajectory, params: SamplingParams, *, name: str, seed: int, step: int, max_model_len: int
) -> Request:
    """The request that continues ``trajectory``; ``seed`` and ``step`` as in RolloutStream.

    Raises:
        ValueError: no token is left to generate.
    """
    return Request(
        name,
        [*trajectory.prompt.token_ids, *trajectory.token_ids],
        tokens_left(trajectory, params, max_model_len),
        sample_seed(seed, step, trajectory.prompt.index, trajectory.sample_index),
    )


def tokens_left(trajectory: Trajectory, params: SamplingParams, max_model_len: int) -> int:
    """Response tokens that a sample may still take: of 8 allowed, 5 done leave 3.

    Raises:
        ValueError: it may take no more.
    """
    allowed = min(params.max_tokens, max_model_len - len(trajectory.prompt.token_ids))
    left = allowed - len(trajectory.token_ids)
    if left <= 0:
        raise ValueError(
            f"prompt {trajectory.prompt.index}, sample {trajectory.sample_index} has {len(trajectory.token_ids)} of "
            f"{allowed} response tokens already"
        )
    return left


def empty_trajectory(prompt: Prompt, sample_index: int) -> Trajectory:
    """A sample of which nothing is generated yet."""
    return Trajectory(prompt=prompt, sample_index=sample_index, token_ids=[], logprobs=[], versions=[], truncated=False)
