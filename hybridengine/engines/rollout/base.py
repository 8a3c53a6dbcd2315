"""What the trainer asks of a rollout engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from hybridengine.engines.rollout.streaming import RolloutStream
from hybridengine.sync.plan.spec import ParamSpec, TensorSlice
from hybridengine.types import Prompt, SamplingParams, Trajectory


class StaleWeightsError(RuntimeError):
    """Generation was asked of an engine whose weights are not a complete, verified policy version."""


class RolloutEngine(Protocol):
    """One model in its inference layout, on the ranks of one tensor-parallel group.

    Life of a weight update: ``begin_update()`` (unservable from here) → a WeightHandoff writes the
    weights → ``finish_update(version)`` (caches reset, servable again). If the handoff fails, finish is
    never called: the version number stays the old one and ``generate`` raises StaleWeightsError.
    """

    weights_version: int  # -1 until the first sync
    replica: int  # index of this rank's tensor-parallel group
    num_replicas: int

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        seed: int,
        step: int,
        on_finished: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """n samples per prompt, ordered by (prompt, sample). Same answer on every rank of the replica.

        The sample's seed is a function of (seed, step, prompt.index, sample index) only, so the result
        does not depend on which replica serves it. ``on_finished`` is called as each one completes.

        Raises:
            StaleWeightsError: no complete weights.
            ValueError: a prompt leaves no room in the context for a single token, by name.
        """
        ...

    def stream(self, params: SamplingParams, *, seed: int) -> RolloutStream:
        """Generation in steps, one sample at a time in and out; see RolloutStream."""
        ...

    def begin_update(self) -> None: ...

    def load_weight(self, name: str, full: torch.Tensor) -> None:
        """`gather` handoff: deliver one canonical parameter in full (inside begin/finish)."""
        ...

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """This engine's name -> this rank's tensor that the model runs on; written inside begin/finish."""
        ...

    def layout(self, params: Mapping[str, ParamSpec]) -> tuple[TensorSlice, ...]:
        """Which boxes of the canonical parameters this rank's ``live_tensors`` hold."""
        ...

    def finish_update(self, version: int) -> None: ...

    def nbytes(self, tag: str) -> int:
        """Bytes of device memory that ``tag`` holds on this rank when it is awake."""
        ...

    def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None: ...

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None: ...

    def close(self) -> None: ...


#: What can sleep separately.
TAGS = ("weights", "kv_cache")


def check_tags(tags: Sequence[str]) -> None:
    """Raise ValueError for a tag that no engine has."""
    unknown = [tag for tag in tags if tag not in TAGS]
    if unknown:
        raise ValueError(f"unknown memory tag {unknown[0]!r}; must be one of {', '.join(TAGS)}")


def check_fits(prompts: Sequence[Prompt], max_model_len: int) -> None:
    """Raise ValueError for a prompt that leaves no room in the context for a single token."""
    for prompt in prompts:
        if len(prompt.token_ids) >= max_model_len:
            raise ValueError(
                f"prompt {prompt.index} has {len(prompt.token_ids)} tokens and leaves no room in a context of "
                f"{max_model_len}; lower data.max_prompt_tokens or raise rollout.max_model_len"
            )


def generation_eos(model_path: Path) -> list[int]:
    """All end-of-sequence ids that a model directory names, in generation_config.json or config.json."""
    for name in ("generation_config.json", "config.json"):
        file = model_path / name
        if file.is_file():
            eos = json.loads(file.read_text()).get("eos_token_id")
            if eos is not None:
                return [eos] if isinstance(eos, int) else [int(token) for token in eos]
    return []
