"""A reward model in the ranks against transformers, read by a tokenizer of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridengine.config import Config, DataConfig, ModelConfig, RewardConfig, RewardModelConfig, TrainConfig
from hybridengine.distributed.world import World
from hybridengine.embedded import ALPHABET, make_tokenizer
from hybridengine.placement.beside import start_reward_model
from hybridengine.rewards.decode import Decoder
from hybridengine.rewards.model import MODEL, RewardModel, model_problem
from hybridengine.types import Prompt, Trajectory
from tests.distributed.ranks import run_ranks
from tests.tiny import make_tiny

CHAT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}*{{ m['content'] }}{% else %}={{ m['content'] }}*{% endif %}"
    "{% endfor %}"
)
TEXTS = [("12+7=", "19"), ("5=", "5"), ("90-45=", "45"), ("1+1=", "3"), ("77*2=", "154")]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of one label whose vocabulary is the policy's in another order."""
    path = make_tiny(tmp_path_factory.mktemp("reward") / "model", "qwen2", vocab_size=len(ALPHABET))
    weights = load_file(path / "model.safetensors")
    del weights["lm_head.weight"]
    weights["score.weight"] = torch.randn(1, 32, generator=torch.Generator().manual_seed(3)) * 0.3
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    tokenizer = make_tokenizer()
    order = {token: (7 * i + 3) % len(ALPHABET) for i, token in enumerate(ALPHABET)}
    tokenizer.backend_tokenizer.model = type(tokenizer.backend_tokenizer.model)(order)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    return path


def config(path: Path, template: str | None, **train: object) -> Config:
    return Config(
        model=ModelConfig(path="unused"), data=DataConfig(train="unused"), train=TrainConfig(**train),  # type: ignore[arg-type]
        reward=RewardConfig(model=RewardModelConfig(path=str(path), template=template, weight=0.5)),
    )  # fmt: skip


def rollout() -> list[Trajectory]:
    """Responses with the end token; each has a reward of 1 already."""
    policy = make_tokenizer()
    found = []
    for index, (prompt, response) in enumerate(TEXTS):
        ids = policy(response)["input_ids"] + [policy.eos_token_id]
        found.append(
            Trajectory(
                prompt=Prompt(index=index, token_ids=policy(prompt)["input_ids"], text=prompt), sample_index=0,
                token_ids=ids, logprobs=[-1.0] * len(ids), versions=[0] * len(ids), truncated=False, reward=1.0,
                rewards={"right": 1.0},
            )
        )  # fmt: skip
    return found


def score(world: World, given: Config) -> list[tuple[float, float]]:
    model = RewardModel(start_reward_model(given, world), given.reward.model, Decoder(make_tokenizer()))
    trajectories = rollout()
    model.score(trajectories)
    assert all(list(t.rewards) == ["right", MODEL] for t in trajectories)
    return [(t.rewards[MODEL], t.reward or 0.0) for t in trajectories]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("template", [None, "={prompt}{response}*"], ids=["chat", "text"])
def test_equals_transformers(reward_model: Path, ranks: int, template: str | None) -> None:
    """To 1e-5; the weight, .5, is in the total, and the verifier's reward of 1 stays."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    given = config(reward_model, template, max_tokens_per_micro_batch=24)
    found = run_ranks(ranks, score, given)
    model = AutoModelForSequenceClassification.from_pretrained(reward_model, num_labels=1, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    assert tokenizer("1")["input_ids"] != make_tokenizer()("1")["input_ids"]
    for each in found:
        for (value, total), (prompt, response) in zip(each, TEXTS, strict=True):
            text = f"={prompt}{response}*" if template else f"*{prompt}={response}*"
            with torch.no_grad():
                expected = model(**tokenizer(text, return_tensors="pt")).logits.item()
            assert value == pytest.approx(expected, abs=1e-5) and abs(expected) > 1e-3
            assert total == pytest.approx(1 + 0.5 * expected, abs=1e-5)


def test_what_can_t_be_is_refused(reward_model: Path, tmp_path: Path) -> None:
    good = RewardModelConfig(path=str(reward_model))
    assert model_problem(good) is None and model_problem(RewardModelConfig()) is None
    assert "no config.json in it" in str(model_problem(replace(good, path=str(tmp_path))))
    assert "must have {prompt}, and after it {response}" in str(model_problem(replace(good, template="{response}")))
    plain = make_tiny(tmp_path / "plain", "qwen2")
    assert "no tokenizer in it" in str(model_problem(RewardModelConfig(path=str(plain))))
    make_tokenizer().save_pretrained(plain)
    assert "has no chat template; set reward.model.template" in str(model_problem(RewardModelConfig(path=str(plain))))
