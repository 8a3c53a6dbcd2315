"""The whole program with megatron as its training engine: vLLM, memory phases, resumption, equal curves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import SMALL, curve, records, run
from tests.tiny import make_tiny

NUMBERS = ("loss", "grad_norm", "reward", "completions/mean_length", "lr")
REFERENCE = ["rollout=transformers", "rollout.tp=1"]


@pytest.mark.engine
def test_quickstart_goes_on_with_the_other_engine(small_model: Path, tmp_path: Path) -> None:
    """TP2 beside vLLM TP2, memory leaving between phases, a frozen reference; then FSDP2 from its checkpoint."""
    (tmp_path / "disk").mkdir()
    job = [
        *SMALL, f"model.path={small_model}", f"output_dir={tmp_path}", "algorithm.kl_coef=0.01",
        f"memory.offload_dir={tmp_path / 'disk'}",
    ]  # fmt: skip
    done = run([*job, "train=megatron", "train.tp=2", "steps=2", "checkpoint.export=true"], ranks=2)
    for text in ("megatron TP 2 over 2", "weight sync: pull", "grads", str(tmp_path / "model")):
        assert text in done.stdout, text
    assert done.stdout.count("transformer_engine=auto: megatron's local layers, because Transformer Engine needs") == 1
    assert len([*(tmp_path / "model").glob("model-*-of-00002.safetensors")]) == 2  # each rank writes its own
    run([*job, *REFERENCE, "steps=3"], ranks=2)
    steps = [r for r in records(tmp_path) if r["step"] > 0]
    assert [r["policy_version"] for r in steps] == [1, 2, 3]
    assert all(r["sampling/logp_difference/max"] <= 1e-5 and r["grad_norm"] > 0 for r in steps)


LAYOUTS = {
    "fsdp1": (1, ["train=fsdp"]),
    "fsdp2": (2, ["train=fsdp"]),
    "tp2": (2, ["train=megatron", "train.tp=2"]),
    "pp2": (2, ["train=megatron", "train.pp=2"]),
    "tp2-pp2": (4, ["train=megatron", "train.tp=2", "train.pp=2", "train.sequence_parallel=true"]),
}


@pytest.mark.slow
def test_ten_steps_are_the_same_curve_in_every_layout(small_model: Path, tmp_path: Path) -> None:
    curves = {}
    for name, (ranks, overrides) in LAYOUTS.items():
        out = tmp_path / name
        job = [*SMALL, *REFERENCE, f"model.path={small_model}", "steps=10", f"output_dir={out}", *overrides]
        run(job, ranks=ranks, timeout=600)
        curves[name] = curve(out, *NUMBERS)
    assert len(curves["fsdp1"]) == 10
    for name, found in curves.items():
        for mine, reference in zip(found, curves["fsdp1"], strict=True):
            assert mine == pytest.approx(reference, abs=1e-4), name


@pytest.mark.slow
def test_ten_steps_of_experts_are_the_same_curve_on_two_expert_ranks(small_model: Path, tmp_path: Path) -> None:
    import shutil

    path = make_tiny(
        tmp_path / "moe", "qwen3_moe", vocab_size=16, hidden_size=64, head_dim=32, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True,
    )  # fmt: skip
    for file in small_model.glob("*token*"):
        shutil.copy(file, path)
    curves = []
    for ranks, ep in ((1, 1), (2, 1), (2, 2)):
        out = tmp_path / f"{ranks}-{ep}"
        job = [*SMALL, "rollout.tp=1", f"model.path={path}", "steps=10", f"output_dir={out}", "train=megatron"]
        run([*job, f"train.ep={ep}"], ranks=ranks, timeout=600)
        curves.append(curve(out, *NUMBERS))
    for found in curves[1:]:
        for mine, reference in zip(found, curves[0], strict=True):
            assert mine == pytest.approx(reference, abs=1e-4)
