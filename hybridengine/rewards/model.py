"""A learned reward: a frozen sequence classifier on the training ranks, sharded and time-shared like the policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridengine.config import RewardModelConfig
from hybridengine.engines.train.base import TrainEngine
from hybridengine.engines.train.shares import gathered
from hybridengine.rewards.decode import Decoder
from hybridengine.types import Sample, Trajectory

#: Its name among a trajectory's rewards.
MODEL = "model"


class RewardModel:
    """Reads prompt and response as text, by its own tokenizer and template: its vocabulary need not be the policy's.

    Args:
        engine: of a model with ``head="reward"``; never trained.
        config: ``reward.model``.
        decoder: of the policy's tokens.

    Raises:
        ValueError: no template, and no chat template with its tokenizer either; no tokenizer at its path.
    """

    def __init__(self, engine: TrainEngine, config: RewardModelConfig, decoder: Decoder) -> None:
        self.engine, self.config, self._decoder = engine, config, decoder
        self._tokenizer = load_tokenizer(config)

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Collective: add its score, times its weight, to the reward of trajectories that every rank has."""
        # One more token, of any kind: the state before it is the one after the last token of the text.
        samples = [
            Sample(prompt_ids=self.token_ids(t), response_ids=[0], loss_mask=[False], advantages=[0.0])
            for t in trajectories
        ]
        for trajectory, (score,) in zip(trajectories, gathered(samples, self.engine, self.engine.values), strict=True):
            trajectory.rewards[MODEL] = score
            trajectory.reward = (trajectory.reward or 0.0) + self.config.weight * score

    def token_ids(self, trajectory: Trajectory) -> list[int]:
        """What the model reads."""
        prompt, response = trajectory.prompt, self._decoder.decode(trajectory.token_ids).plain
        if self.config.template is not None:
            # Not str.format: prompt and response may have braces.
            head, _, rest = self.config.template.partition("{prompt}")
            middle, _, tail = rest.partition("{response}")
            return list(self._tokenizer(head + prompt.text + middle + response + tail)["input_ids"])
        asked = prompt.messages or [{"role": "user", "content": prompt.text}]
        text = self._tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": response}], tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def load_tokenizer(config: RewardModelConfig) -> Any:
    """Raises ValueError: there is none, or nothing says how prompt and response become its text."""
    from transformers import AutoTokenizer

    assert config.path is not None
    if not any(Path(config.path).glob("tokenizer*")):  # transformers would make an empty one
        raise ValueError(f"reward.model.path={config.path}: no tokenizer in it")
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path)
    except (OSError, ValueError) as error:
        raise ValueError(f"reward.model.path={config.path}: its tokenizer can't be loaded ({error})") from None
    if config.template is None and not tokenizer.chat_template:
        raise ValueError(
            f"reward.model.path={config.path}: its tokenizer has no chat template; set reward.model.template to a text "
            "with {prompt} and {response}"
        )
    return tokenizer


def model_problem(config: RewardModelConfig) -> str | None:
    """What is wrong with ``reward.model``, before anything starts."""
    if config.path is None:
        return None
    if not (Path(config.path) / "config.json").is_file():
        return f"reward.model.path={config.path}: no config.json in it; give a Hugging Face model directory"
    template = config.template
    if template is not None and not 0 <= template.find("{prompt}") < template.find("{response}"):
        return f"reward.model.template={template}: must have {{prompt}}, and after it {{response}}"
    try:
        load_tokenizer(config)
    except ValueError as error:
        return str(error)
    return None
