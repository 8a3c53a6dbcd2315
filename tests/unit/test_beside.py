"""Models beside the policy: what is refused before they are built, and checkpoints of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridengine.checkpoint.beside import WithCritic
from hybridengine.config import Config, CriticConfig, DataConfig, ModelConfig, RewardConfig, RewardModelConfig
from hybridengine.config.compose import ConfigError
from hybridengine.distributed.world import World
from hybridengine.embedded import make_tokenizer
from hybridengine.placement.beside import critic_path, start_critic
from hybridengine.placement.parts import EngineOptions
from hybridengine.rewards.scorer import Scorer
from hybridengine.types import Prompt, Trajectory
from hybridengine.validate.contradictions import validate


class Engine:
    """Writes a file with its name."""

    version = 3

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def save(self, path: Path) -> None:
        (path / "state").write_text(self.name)
        self.log.append(f"save {self.name}")

    def load(self, path: Path) -> None:
        assert (path / "state").read_text() == self.name
        self.log.append(f"load {self.name}")


def test_a_checkpoint_has_the_critic_beside_the_policy(tmp_path: Path) -> None:
    """The critic's memory comes only after the policy has been written."""
    log: list[str] = []
    both = WithCritic(Engine("policy", log), Engine("critic", log), before_critic=lambda: log.append("room"))
    (tmp_path / "engine").mkdir()
    both.save(tmp_path / "engine")
    both.load(tmp_path / "engine")
    assert log == ["save policy", "room", "save critic", "load policy", "load critic"] and both.version == 3
    (tmp_path / "critic" / "state").unlink()
    (tmp_path / "critic").rmdir()
    with pytest.raises(ValueError, match="is of a run without a critic; checkpoint.resume=never"):
        both.load(tmp_path / "engine")


def test_a_critic_reads_the_policy_s_tokens(tmp_path: Path) -> None:
    for name, tokens in (("policy", 96), ("critic", 64)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": tokens}))
    config = Config(model=ModelConfig(path=str(tmp_path / "policy")), data=DataConfig(train="unused"))
    assert critic_path(config, tmp_path / "policy") == tmp_path / "policy"
    config.critic = CriticConfig(path=str(tmp_path / "critic"))
    options = EngineOptions(model_path=tmp_path / "policy", max_model_len=8, eos_token_ids=[])
    with pytest.raises(ValueError, match="critic: has 64 tokens and the policy 96; a critic reads the policy's tokens"):
        start_critic(config, World(), options)


def test_a_reward_model_and_dynamic_sampling_are_refused_together() -> None:
    config = Config(
        model=ModelConfig(path="unused"), data=DataConfig(train="unused"),
        reward=RewardConfig(model=RewardModelConfig(path="/nowhere")),
    )  # fmt: skip
    config.algorithm.dynamic_sampling.enable = True
    with pytest.raises(ConfigError) as caught:
        validate(config, World())
    found = str(caught.value)
    assert "reward.model.path=/nowhere: scores when a batch is complete, too late for algorithm.dynamic" in found
    assert "reward.model.path=/nowhere: no config.json in it" in found and "no reward" not in found


def test_a_reward_model_alone_leaves_the_scorer_nothing_to_do() -> None:
    """Its score is added after the rollout; until then a sample has reward 0 and counts as scored."""
    trajectory = Trajectory(
        prompt=Prompt(index=0, token_ids=[3], text="1="), sample_index=0, token_ids=[3, 1], logprobs=[-1.0] * 2,
        versions=[0] * 2, truncated=False,
    )  # fmt: skip
    scorer = Scorer(RewardConfig(model=RewardModelConfig(path="unused")), make_tokenizer())
    try:
        scorer.score([trajectory])
    finally:
        scorer.close()
    assert (trajectory.reward, trajectory.rewards) == (0.0, {})
    with pytest.raises(ValueError, match="no reward configured"):
        Scorer(RewardConfig(), make_tokenizer())
