"""A rollout engine under test, beside the weights to give it and the same models in plain transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridengine.config import RolloutConfig
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.base import StaleWeightsError
from hybridengine.engines.rollout.generate import generate
from hybridengine.engines.rollout.traits import engine_class
from hybridengine.sync.plan.spec import ParamSpec
from hybridengine.types import Prompt, SamplingParams, Trajectory
from tests.tiny import make_tiny

#: End tokens: two in the generation config, one that only the tokenizer has.
GENERATION_EOS, TOKENIZER_EOS = (2, 3), 4
STOP = {*GENERATION_EOS, TOKENIZER_EOS}
MAX_MODEL_LEN = 96
#: Index of a prompt that fills whole blocks of the KV cache, so that a forgotten prefix cache shows.
LONG = 20
#: Largest difference of a log-probability from plain transformers, float32.
TOLERANCE = 1e-5


def prompts(*indices: int) -> list[Prompt]:
    """Prompts of different lengths; some share a beginning."""
    return [Prompt(index=i, token_ids=[5 + (3 * j + i // 3) % 40 for j in range(4 + 3 * i)]) for i in indices]


@dataclass
class Subject:
    """The engine under test beside two sets of weights and the same models in plain transformers.

    Attributes:
        resumes_exactly: a sample that was interrupted goes on with the random numbers that it would have had.
    """

    engine: Any
    world: World
    weights: list[dict[str, Tensor]]
    models: list[Any]
    layout: Any
    resumes_exactly: bool = True
    version: int = -1

    def sync(self, which: int, leave_out: str | None = None) -> None:
        """A whole update, one parameter at a time."""
        self.engine.begin_update()
        for name, full in self.weights[which].items():
            if name != leave_out:
                self.engine.load_weight(name, full)
        self.engine.finish_update(self.version + 1)
        self.version += 1

    def write(self, which: int, leave_out: str | None = None) -> None:
        """A whole update written into the engine's own tensors, as a transfer does."""
        self.engine.begin_update()
        live = self.engine.live_tensors()
        for piece in self.layout:
            if piece.tensor != leave_out:
                tensor = live[piece.tensor]
                box = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
                target = tensor.as_strided(piece.sizes, piece.strides, tensor.storage_offset() + piece.start)
                target.copy_(self.weights[which][piece.param][box])
        self.engine.finish_update(self.version + 1)
        self.version += 1

    def generate(self, which: list[Prompt], seed: int = 7, step: int = 3, **params: Any) -> list[Trajectory]:
        return generate(self.engine, which, SamplingParams(**{"max_tokens": 12, **params}), seed=seed, step=step)

    @torch.no_grad()
    def logits(self, trajectory: Trajectory, which: int) -> Tensor:
        """[R, V]: what plain transformers predicts at each response token."""
        start = len(trajectory.prompt.token_ids)
        ids = torch.tensor([trajectory.prompt.token_ids + trajectory.token_ids])
        return self.models[which](ids).logits[0, start - 1 : -1].float()

    def largest_difference(self, found: list[Trajectory], which: int, params: SamplingParams) -> float:
        """Largest difference of the engine's log-probabilities from plain transformers'."""
        worst = 0.0
        for trajectory in found:
            expected = distribution(self.logits(trajectory, which), params)
            chosen = expected.gather(-1, torch.tensor(trajectory.token_ids).unsqueeze(-1)).squeeze(-1)
            worst = max(worst, (chosen - torch.tensor(trajectory.logprobs)).abs().max().item())
        return worst

    def check_serves(self, which: int) -> None:
        """The engine answers, with these weights and this version."""
        found = self.generate(prompts(0, 1, 2, LONG), n=2)
        assert self.engine.weights_version == self.version
        assert {v for t in found for v in t.versions} == {self.version}
        difference = self.largest_difference(found, which, SamplingParams())
        assert difference <= TOLERANCE, difference

    def check_stale(self) -> None:
        with pytest.raises(StaleWeightsError):
            self.generate(prompts(0))


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """Log-probabilities after temperature, min-p, top-k and top-p, spelled out token by token."""
    if params.temperature == 0:
        return logits.log_softmax(-1)
    logits = logits / params.temperature
    kept = torch.full_like(logits, float("-inf"))
    for row, values in enumerate(logits):
        order = values.argsort(descending=True).tolist()
        likely = values.softmax(-1) >= params.min_p * values.softmax(-1).max()
        order = [token for token in order if likely[token]]
        if params.top_k:
            order = order[: params.top_k]
        mass, probability = 0.0, torch.softmax(values[order], -1).tolist()
        for token, p in zip(order, probability, strict=True):
            if mass < params.top_p:
                kept[row, token] = values[token]
            mass += p
    return kept.log_softmax(-1)


def make_models(directory: Path, arch: str, overrides: dict[str, Any]) -> list[str]:
    """Three random models of one shape: two sets of weights to sync, and the ones on disk that must never answer."""
    paths = []
    for name, seed in (("first", 1), ("second", 2), ("disk", 3)):
        path = make_tiny(directory / name, arch, seed=seed, std=0.1, **overrides)
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(GENERATION_EOS)}))
        paths.append(str(path))
    return paths


def start(world: World, engine: str, tp: int, paths: list[str], options: dict[str, Any]) -> Subject:
    """An engine that has started on the last of the models.

    Args:
        engine: "vllm" or "vllm-separate", and so on.
        options: further keys of the ``rollout`` section.
    """
    from transformers import AutoModelForCausalLM

    weights = [load_file(f"{path}/model.safetensors") for path in paths[:2]]
    params = {name: ParamSpec(name, tuple(tensor.shape), "float32") for name, tensor in weights[0].items()}
    name, _, process = engine.partition("-")
    rollout = RolloutConfig(
        engine=name, process=process or "auto", tp=tp, kv_cache_gib=0.0625, max_num_seqs=64, **options
    )
    subject = engine_class(rollout)(
        paths[2], rollout, world=world, max_model_len=MAX_MODEL_LEN, eos_token_ids=[TOKENIZER_EOS]
    )
    return Subject(
        engine=subject,
        world=world,
        weights=weights,
        models=[AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in paths[:2]],
        layout=subject.layout(params),
        resumes_exactly=rollout.sampler != "engine",
    )
