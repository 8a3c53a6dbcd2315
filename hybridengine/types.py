"""The data that travels between the phases: prompts, sampling settings, trajectories."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class Prompt:
    """One prompt, already tokenised.

    Attributes:
        index: position in the run's global prompt sequence; with the sample index it determines the seed.
        token_ids: prompt tokens, chat template applied.
        text: the prompt as the user wrote it, for logs and rewards.
        answer: ground truth handed to the reward functions (None when the data has none).
        metadata: every other column of the data row.
        messages: the chat messages of the data row; None where its prompt is plain text.
    """

    index: int
    token_ids: list[int]
    text: str = ""
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] | None = None


@dataclass(slots=True, kw_only=True, frozen=True)
class SamplingParams:
    """How to sample. ``temperature == 0`` is greedy; ``top_p == 1``, ``top_k == 0`` and ``min_p == 0`` are off.

    ``stop``: texts that end a response, which keeps the token that completes the text.
    """

    n: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """One sampled response.

    Attributes:
        prompt: the prompt it answers.
        sample_index: which of the prompt's n samples, in [0, n).
        token_ids: response tokens, including the end-of-sequence token when one was sampled.
        logprobs: log-probability of each response token under the distribution it was sampled from.
        versions: policy version that sampled each response token.
        truncated: True when generation stopped at the token limit rather than at an end token.
        reward: the total (weighted) reward once scored.
        rewards: per reward function, unweighted.
    """

    prompt: Prompt
    sample_index: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    truncated: bool
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Prompt plus response tokens."""
        return len(self.prompt.token_ids) + len(self.token_ids)


@dataclass(slots=True, kw_only=True)
class Sample:
    """One trajectory as the trainer sees it: tokens plus everything the loss needs, per response token.

    ``advantages`` has one value per response token; ``old_logprobs``/``ref_logprobs``/``rollout_logprobs``
    likewise, or None where the algorithm does not use them. ``loss_mask`` marks the response tokens that
    are trained on (all False removes the sample from the loss but keeps it in the batch, so that every
    rank runs the same number of micro-batches). ``versions``: policy version that sampled each token.
    ``values`` and ``returns``, where there is a critic: what it said of the state before each token, and what it is
    trained towards.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    rollout_logprobs: list[float] | None = None
    versions: list[int] | None = None
    old_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    values: list[float] | None = None
    returns: list[float] | None = None

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)
