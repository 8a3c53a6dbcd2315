"""The part of models beside the policy in the bill: a critic, on the device for its own phases, and a reward model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridengine.config import Config
from hybridengine.memory.residency import CRITIC, GRADS, TRAINER_PARAMS
from hybridengine.sync.plan.naming import as_causal, decoder_of
from hybridengine.tools.sizes import LOGITS, hf_config, shard_numel

if TYPE_CHECKING:
    from hybridengine.tools.bill import Training


class CriticBill:
    """Bytes on the fullest rank.

    Args:
        engine: of a model without an output projection; the head, H numbers, is not counted.
        leaves: weights and optimizer go to host memory while the policy has the device.

    Attributes:
        start: when it is built.
        resting: on the device during the policy's phases.
        waiting: in host memory then.
    """

    def __init__(self, engine: Training, *, leaves: bool) -> None:
        self.engine = engine
        state = engine.weights + engine.optimizer
        self.start = engine.weights + engine.resting_gradients
        self.resting = 0 if leaves else state + engine.resting_gradients
        self.waiting = state if leaves else 0

    def training(self) -> dict[str, int]:
        """By owner, in the larger of its backward pass, with the optimizer there as well, and its optimizer step."""
        moments = [dict(self.engine.forward_backward()), dict(self.engine.optimizer_step())]
        for owners in moments:
            owners[CRITIC] = owners.pop(TRAINER_PARAMS, 0) + owners.pop(GRADS, 0) + self.engine.optimizer
            owners.pop(LOGITS, None)  # one number per token
        return max(moments, key=lambda owners: sum(owners.values()))


def critic_model(config: Config, model: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of ``critic.path``; ``model``, the policy's, where that is null."""
    path = config.critic.path
    if path in (None, "embedded", config.model.path):
        return model
    found: dict[str, Any] = json.loads((Path(path) / "config.json").read_text())
    return found


def reward_model_bytes(config: Config, ranks: int) -> int:
    """Float32 shards of ``reward.model.path`` on the fullest rank; 0 without one. Its scoring keeps no activations, so
    that its phase is never the largest."""
    if config.reward.model.path is None:
        return 0
    found = json.loads((Path(config.reward.model.path) / "config.json").read_text())
    return 4 * shard_numel(replace(decoder_of(as_causal(hf_config(found))), tied=True), ranks)
