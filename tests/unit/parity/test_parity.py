"""Which sequences are probed, what counts as a difference, and what is done about it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridengine.config import Config, DataConfig, ModelConfig, ParityConfig, RolloutConfig
from hybridengine.distributed.world import World
from hybridengine.parity.check import PLAIN_BUDGET, ParityError, check_parity, settle
from hybridengine.parity.probes import RESPONSE_TOKENS, choose_probes, probe_lengths
from hybridengine.parity.report import BFLOAT16_MEAN, FLOAT32, FLOAT32_ON_GPU, Difference, Parity, Tolerance
from hybridengine.parity.report import likely_cause as cause_of
from hybridengine.types import Prompt, Sample, SamplingParams, Trajectory
from tests.tiny import make_tiny


def config_of(**parity: Any) -> Config:
    return Config(
        model=ModelConfig(path="model"), data=DataConfig(train="unused"), rollout=RolloutConfig(temperature=0.7),
        parity=ParityConfig(**parity),
    )  # fmt: skip


def hf(**keys: Any) -> Any:
    return SimpleNamespace(model_type="llama", vocab_size=96, **keys)


# -- probes ----------------------------------------------------------------------------------------


def test_lengths_around_window_and_original_context() -> None:
    """Half of the 8 response tokens before the boundary, half behind it."""
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 48}
    found = probe_lengths(hf(sliding_window=32, rope_parameters=rope), 96)
    assert found == {
        "shortest": 1, "longest": 88, "window-32": 28, "beyond-window-32": 68, "rope-48": 44, "beyond-rope-48": 52,
    }  # fmt: skip


def test_lengths_fit_the_context_and_come_once() -> None:
    assert probe_lengths(hf(sliding_window=4096), 96) == {"shortest": 1, "longest": 88}
    assert probe_lengths(hf(), RESPONSE_TOKENS + 1) == {"shortest": 1}
    assert all(length + RESPONSE_TOKENS <= 64 for length in probe_lengths(hf(sliding_window=8), 64).values())


def test_prompts_are_of_the_data_and_one_per_replica() -> None:
    probes = choose_probes(hf(), 20, vocabulary=96, texts=[[5, 6, 7], [8, 200]], copies=2)
    assert [p.text for p in probes] == ["shortest", "shortest", "longest", "longest"]
    assert probes[2].token_ids == probes[3].token_ids == [6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 8, 5]
    assert [p.index for p in probes] == [-1, -2, -3, -4]
    random = choose_probes(hf(), 20, vocabulary=7)
    assert all(0 <= token < 7 for p in random for token in p.token_ids)


# -- differences -----------------------------------------------------------------------------------


def test_what_is_no_number_is_infinitely_far() -> None:
    found = Difference.between("p", [-1.0, float("nan")], [-1.0, -2.0])
    assert found.largest == float("inf") and not found.within(Tolerance(1e9, of_mean=False))


@pytest.mark.parametrize(
    ("dtypes", "on_gpu", "given", "expected"),
    [
        (("float32", "float32"), False, None, Tolerance(FLOAT32, False)),
        (("float32", "float32"), True, None, Tolerance(FLOAT32_ON_GPU, False)),
        (("bfloat16", "bfloat16"), True, None, Tolerance(BFLOAT16_MEAN, True)),
        (("float32", "bfloat16"), False, None, Tolerance(BFLOAT16_MEAN, True)),
        (("float32", "float32"), False, 0.5, Tolerance(0.5, False)),
    ],
    ids=["float32", "gpu", "bfloat16", "mixed", "given"],
)
def test_tolerance(dtypes: tuple[str, str], on_gpu: bool, given: float | None, expected: Tolerance) -> None:
    config = config_of(tolerance=given)
    config.train.dtype, config.rollout.dtype = dtypes
    assert Tolerance.of(config, on_gpu=on_gpu) == expected


NAMES = ["shortest", "longest", "window-32", "beyond-window-32"]


def parity_of(**wrong: set[str]) -> Parity:
    """``wrong``: side -> probes on which it differs by 1."""
    parity = Parity(Tolerance(1e-3, of_mean=False))
    for side, probes in wrong.items():
        values = [[-1.0, -2.0 - (name in probes)] for name in NAMES]
        parity.add(side, NAMES, [[-1.0, -2.0]] * len(NAMES), values)
    return parity


@pytest.mark.parametrize(
    ("wrong", "keys", "told"),
    [
        ({"packed": {"longest"}, "padded": set(), "transformers": set()}, {}, "does not keep packed sequences apart"),
        ({"packed": set(), "padded": set(), "transformers": set(NAMES)}, {}, "both leave out something"),
        (
            {"packed": {"beyond-window-32"}, "padded": {"beyond-window-32"}},
            {"sliding_window": 32},
            r"beyond the sliding window \(32\)",
        ),
        ({"packed": {"longest"}, "padded": {"longest"}}, {"rope_parameters": {"rope_type": "dynamic"}}, "type dynamic"),
        ({"packed": set(NAMES), "padded": set(NAMES)}, {"num_experts": 4}, "routing of experts"),
        ({"packed": set(NAMES), "padded": set(NAMES)}, {"final_logit_softcapping": 30.0}, "soft-capped logits"),
        ({"packed": set(NAMES), "padded": set(NAMES)}, {}, "a weight or buffer does not reach"),
    ],
    ids=["packing", "own-head", "window", "rope", "experts", "caps", "anything"],
)
def test_the_likely_cause(wrong: dict[str, set[str]], keys: dict[str, Any], told: str) -> None:
    import re

    assert re.search(told, cause_of(parity_of(**wrong), hf(**keys)))


def test_what_is_done_about_a_difference() -> None:
    said: list[str] = []
    logged: list[str] = []
    wrong, right = parity_of(packed={"longest"}, padded={"longest"}), parity_of(packed=set(), padded=set())
    with pytest.raises(ParityError, match="parity.probe=refuse: rollout engine and trainer disagree by more than"):
        settle(wrong, config_of(), hf(), log=logged.append, warn=said.append)
    settle(wrong, config_of(probe="warn"), hf(), log=logged.append, warn=said.append)
    assert len(said) == 1 and said[0].startswith("WARNING") and "likely cause" in said[0] and not logged
    settle(right, config_of(), hf(), log=logged.append, warn=said.append)
    assert len(said) == 1 and len(logged) == 2 and "mean |Δlogprob| 0" in logged[0]


# -- the check, with plain transformers as every side ----------------------------------------------


class Fake:
    """A trainer that scores as it is told; records how it was asked."""

    version, replica, num_replicas, packings = 0, 0, 1, (True, False)

    def __init__(self, model: Any, shift: dict[bool, float]) -> None:
        self.model, self.shift, self.asked = model, shift, []  # type: ignore[var-annotated]

    def logprobs(self, samples: list[Sample], *, packing: bool) -> list[list[float]]:
        self.asked.append(packing)
        return [[x + self.shift.get(packing, 0.0) for x in scores(self.model, s)] for s in samples]


@torch.no_grad()
def scores(model: Any, sample: Sample) -> list[float]:
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    rows = (model(ids).logits[0, len(sample.prompt_ids) - 1 : -1] / 0.7).log_softmax(-1)
    return rows.gather(-1, torch.tensor(sample.response_ids)[:, None]).squeeze(-1).tolist()


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("shift", "wrong"), [({}, set()), ({True: 0.01}, {"packed"}), ({False: 0.01}, {"padded"})],
    ids=["right", "packed-wrong", "padded-wrong"],
)  # fmt: skip
def test_every_side_scores_what_the_engine_sampled(tmp_path: Path, alone: Any, shift: Any, wrong: set[str]) -> None:
    from transformers import AutoModelForCausalLM

    path = make_tiny(tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    order: list[str] = []

    def generate(prompts: list[Prompt], params: SamplingParams) -> list[Trajectory]:
        order.append("generate")
        assert params == SamplingParams(n=1, max_tokens=RESPONSE_TOKENS, temperature=0.7)
        found = []
        for p in prompts:
            sample = Sample(prompt_ids=p.token_ids, response_ids=[3, 9, 40], loss_mask=[True] * 3, advantages=[0.0] * 3)
            found.append(Trajectory(prompt=p, sample_index=0, token_ids=[3, 9, 40], logprobs=scores(model, sample),
                                    versions=[0] * 3, truncated=True))  # fmt: skip
        return found

    trainer: Any = Fake(model, shift)
    options: dict[str, Any] = {
        "path": path, "hf_config": model.config, "max_model_len": 64, "train": trainer, "generate": generate,
        "prompts": choose_probes(model.config, 64, vocabulary=96), "before_scoring": lambda: order.append("memory"),
    }  # fmt: skip
    parity = check_parity(config_of(), World(), parameters=1000, **options)
    assert order == ["generate", "memory"] and trainer.asked == [True, False]
    assert set(parity.against) == {"packed", "padded", "transformers"} and set(parity.wrong) == wrong
    assert parity.largest == pytest.approx(0.01 if wrong else 0.0, abs=1e-5)
    too_large = check_parity(config_of(), World(), parameters=int(PLAIN_BUDGET), **options)
    assert "transformers" not in too_large.against and "would take long" in too_large.notes[0]
    trainer.version = 3
    later = check_parity(config_of(transformers="true"), World(), parameters=1000, **options)
    assert "transformers" not in later.against and "policy version 3" in later.notes[0]
