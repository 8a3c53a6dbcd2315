"""Models besides the policy: the critic, which is trained, and a reward model, which is not."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridengine.algorithms.critic import Critic
from hybridengine.algorithms.registry import algorithm_class
from hybridengine.config import Config
from hybridengine.distributed.world import World
from hybridengine.engines.train.base import TrainEngine
from hybridengine.memory.residency import CRITIC, REWARD_MODEL, TRAINER_PARAMS
from hybridengine.placement.memory import WholeEngine
from hybridengine.placement.parts import TRAIN_ENGINES, EngineOptions
from hybridengine.platform.base import Mover
from hybridengine.plugins import load_object
from hybridengine.rewards.decode import Decoder
from hybridengine.rewards.model import RewardModel


@dataclass(slots=True, kw_only=True)
class Beside:
    """On the training ranks; None where the run has none."""

    critic: Critic | None = None
    reward_model: RewardModel | None = None

    def movers(self, config: Config) -> dict[str, Mover]:
        """By owner, see memory/residency.py."""
        found: dict[str, Mover] = {}
        if self.critic is not None:
            found[CRITIC] = WholeEngine(self.critic.engine.movers(config.memory.offload_dir, keep_in_place=False))
        if self.reward_model is not None:
            frozen = self.reward_model.engine.movers(config.memory.offload_dir, keep_in_place=False)
            found[REWARD_MODEL] = frozen[TRAINER_PARAMS]
        return found


def build_beside(config: Config, world: World, options: EngineOptions, tokenizer: Any) -> Beside:
    """Collective over the training ranks, after the policy's engine: a critic in Megatron shares its process groups.

    ``tokenizer``: the policy's.
    """
    found = Beside()
    if algorithm_class(config.algorithm).needs_critic:
        found.critic = Critic(start_critic(config, world, options), config.critic)
    if config.reward.model.path is not None:
        decoder = Decoder(copy.deepcopy(tokenizer), skip_special_tokens=config.reward.skip_special_tokens)
        found.reward_model = RewardModel(start_reward_model(config, world), config.reward.model, decoder)
    return found


def start_reward_model(config: Config, world: World) -> TrainEngine:
    """FSDP over all training ranks, whatever trains the policy.

    Raises:
        ValueError: no classifier of one label at ``reward.model.path``.
    """
    from hybridengine.engines.train.fsdp.engine import FSDPEngine

    assert config.reward.model.path is not None
    return FSDPEngine(
        config.reward.model.path,
        replace(config.train, engine="fsdp", moe_balancing="none"),
        world=world,
        total_steps=1,
        trust_remote_code=config.model.trust_remote_code,
        head="reward",
    )


def start_critic(config: Config, world: World, options: EngineOptions) -> TrainEngine:
    """A training engine of a value model, with the ``train`` section less what ``critic`` replaces.

    Raises:
        ValueError: no model of one label at ``critic.path``, or one with too small a vocabulary.
    """
    section, path = config.critic, critic_path(config, options.model_path)
    sizes = [json.loads((place / "config.json").read_text()).get("vocab_size") for place in (options.model_path, path)]
    if None not in sizes and sizes[1] < sizes[0]:
        raise ValueError(
            f"critic.path={path}: has {sizes[1]} tokens and the policy {sizes[0]}; a critic reads the policy's tokens"
        )
    name = section.engine or config.train.engine
    train = replace(config.train, engine=name, lr=section.lr, max_grad_norm=section.max_grad_norm)
    engine: TrainEngine = load_object(TRAIN_ENGINES[name], "critic.engine")(
        path,
        train,
        world=world,
        total_steps=options.critic_steps,
        trust_remote_code=config.model.trust_remote_code,
        head="value",
    )
    return engine


def critic_path(config: Config, model_path: Path) -> Path:
    """Where the critic's checkpoint is; ``model_path``: the policy's."""
    return model_path if config.critic.path in (None, "embedded", config.model.path) else Path(config.critic.path)
