"""What the trainer asks of a rollout engine."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from hybridengine.engines.rollout.streaming import RolloutStream
from hybridengine.memory.kv_plan import BlockCache
from hybridengine.sync.plan.spec import ParamSpec, TensorSlice
from hybridengine.types import Prompt, SamplingParams


class StaleWeightsError(RuntimeError):
    """Generation was asked of an engine whose weights are not a complete, verified policy version."""


class EngineLostError(RuntimeError):
    """An engine process died. Its memory and whatever it was doing are gone; a restart and a sync bring it back."""


class RestartsExhaustedError(EngineLostError):
    """An engine process died more often than ``rollout.max_restarts`` allows."""


class EngineProcessControl(Protocol):
    """Of an engine in processes of its own: whether they live, and starting them again."""

    @property
    def is_leader(self) -> bool:
        """Whether this rank talks to the processes, for its tensor-parallel group."""
        ...

    def restart(self) -> None:
        """After a loss anywhere in the job: start dead processes again; every replica waits for a sync.

        Raises:
            RestartsExhaustedError: the processes died once more than ``rollout.max_restarts`` allows.
        """
        ...

    def revive(self, version: int) -> None:
        """Between two syncs: start dead processes again, on the weights of policy ``version`` that they ran on.

        Raises:
            EngineLostError: those weights are gone.
        """
        ...


class RolloutEngine(Protocol):
    """One model in its inference layout, on the ranks of one tensor-parallel group.

    Life of a weight update: ``begin_update()`` (unservable from here) → a transfer writes the weights →
    ``finish_update(version)`` (caches reset, servable again). If the transfer fails, finish is never called: the
    version number stays the old one and samples are refused with StaleWeightsError.

    Attributes:
        max_model_len: longest prompt plus response, tokens.
        replica: index of this rank's tensor-parallel group, of ``num_replicas``.
        kv_blocks: a KV cache of which parts can be withheld; None where it keeps its size.
        processes: control over the engine's own processes; None where it runs in the trainer's.
    """

    max_model_len: int
    replica: int
    num_replicas: int
    kv_blocks: BlockCache | None
    processes: EngineProcessControl | None

    @property
    def weights_version(self) -> int:
        """Last complete policy version; -1 until the first sync."""
        ...

    # -- generation --------------------------------------------------------------------------------

    def check_servable(self) -> None:
        """Raise StaleWeightsError unless the engine is awake with complete weights."""
        ...

    def stream(self, params: SamplingParams, *, seed: int, interruptible: bool = True) -> RolloutStream:
        """Generation in steps, see RolloutStream.

        Args:
            interruptible: an interruption must keep what was sampled so far; without it an engine may report a
                sample's tokens when it is finished only.
        """
        ...

    # -- weights -----------------------------------------------------------------------------------

    def layout(self, params: Mapping[str, ParamSpec]) -> tuple[TensorSlice, ...]:
        """Which boxes of the canonical parameters this rank's ``live_tensors`` hold."""
        ...

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """This engine's name -> this rank's tensor that the model runs on; written inside begin/finish."""
        ...

    def alias_tensor(self, name: str, tensor: torch.Tensor) -> bool:
        """Run parameter ``name`` on the trainer's ``tensor`` where that is possible; returns whether it does."""
        ...

    def begin_update(self) -> None:
        """Unservable from here until :meth:`finish_update`. Raises RuntimeError while the weights sleep."""
        ...

    def load_weight(self, name: str, full: torch.Tensor) -> None:
        """`gather` transfer: deliver one canonical parameter in full (inside begin/finish).

        Raises:
            ValueError: the model has no such parameter, or of another shape.
        """
        ...

    def finish_update(self, version: int) -> None:
        """Servable at ``version``, with caches of older weights gone.

        Raises:
            RuntimeError: a parameter got no data, by name.
        """
        ...

    # -- memory ------------------------------------------------------------------------------------

    @property
    def awake(self) -> frozenset[str]:
        """Tags whose memory is there now."""
        ...

    def nbytes(self, tag: str) -> int:
        """Bytes of device memory that ``tag`` holds on this rank when it is awake."""
        ...

    def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Free what ``tags`` name, as far as ``rollout.sleep_level`` goes. Raises RuntimeError while samples run."""
        ...

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take the memory back; waking what is awake does nothing.

        Raises:
            torch.OutOfMemoryError: there is not as much; nothing has been taken then.
        """
        ...

    def close(self) -> None: ...


#: What can sleep separately.
TAGS = ("weights", "kv_cache")


def check_tags(tags: Sequence[str]) -> None:
    """Raise ValueError for a tag that no engine has."""
    unknown = [tag for tag in tags if tag not in TAGS]
    if unknown:
        raise ValueError(f"unknown memory tag {unknown[0]!r}; must be one of {', '.join(TAGS)}")


def check_awake(awake: frozenset[str]) -> None:
    """Raise StaleWeightsError unless everything is awake."""
    if awake != set(TAGS):
        raise StaleWeightsError(f"the rollout engine is asleep (awake: {sorted(awake) or 'nothing'})")


def check_weights_awake(awake: Collection[str]) -> None:
    """Raise RuntimeError unless the weights' memory is there to be written."""
    if "weights" not in awake:
        raise RuntimeError("the rollout engine's weights are asleep; wake them before an update")


def check_idle(running: int | bool) -> None:
    """Raise RuntimeError while samples are being generated."""
    if running:
        raise RuntimeError("the rollout engine can't sleep while requests are running")


def check_fits(prompts: Sequence[Prompt], max_model_len: int) -> None:
    """Raise ValueError for a prompt that leaves no room in the context for a single token."""
    for prompt in prompts:
        if len(prompt.token_ids) >= max_model_len:
            raise ValueError(
                f"prompt {prompt.index} has {len(prompt.token_ids)} tokens and leaves no room in a context of "
                f"{max_model_len}; lower data.max_prompt_tokens or raise rollout.max_model_len"
            )


def stop_tokens(model_path: Path, further: Sequence[int]) -> list[int]:
    """All end-of-sequence ids that a model directory names, in generation_config.json or config.json, and others."""
    found = set(further)
    for name in ("generation_config.json", "config.json"):
        file = model_path / name
        if file.is_file():
            eos = json.loads(file.read_text()).get("eos_token_id")
            if eos is not None:
                found |= {eos} if isinstance(eos, int) else {int(token) for token in eos}
                break
    return sorted(found)
