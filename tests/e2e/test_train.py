"""The whole program: vLLM under torchrun, resumption, world sizes, signals, refusals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridengine.models.safetensors_source import SafetensorsSource
from tests.e2e.rounding import KEPT, check_mismatch
from tests.e2e.runs import ROOT, SMALL, command, curve, environment, records, run
from tests.tiny import make_tiny

NUMBERS = ("loss", "grad_norm", "reward", "completions/mean_length", "lr")
REFERENCE = ["rollout=transformers", "rollout.tp=1"]


@pytest.mark.engine
def test_quickstart_with_vllm_over_two_ranks(small_model: Path, tmp_path: Path) -> None:
    """FSDP2 over two ranks and vLLM TP=2 in the same processes: parity, files, an exported model that loads."""
    done = run(
        [
            *SMALL, f"model.path={small_model}", f"output_dir={tmp_path}", "steps=3", "validate_every=2",
            "checkpoint.export=true", "logging.plot=true", "logging.report=true", *KEPT,
        ],
        ranks=2,
    )  # fmt: skip
    summary = json.loads((tmp_path / "summary.json").read_text())
    expected = (
        "steps seconds_total seconds_engine_start accuracy_before accuracy_after max_logp_difference "
        "unaccounted_fraction tokens_per_second world_size commit versions"
    )
    assert set(expected.split()) <= set(summary)
    assert summary["steps"] == 3 and summary["world_size"] == 2
    check_mismatch(tmp_path, small_model)
    assert summary["versions"]["vllm"]
    steps = [r for r in records(tmp_path) if r["step"] > 0]
    assert [r["policy_version"] for r in steps] == [1, 2, 3]
    assert summary["max_logp_difference"] == max(r["sampling/logp_difference/max"] for r in steps)
    assert all(r["grad_norm"] > 0 for r in steps)
    for name in (
        "report.png",
        "report.html",
        "trace.json",
        "metrics.jsonl",
        "checkpoints",
        "model/model.safetensors.index.json",
    ):
        assert (tmp_path / name).exists(), name
    for text in ("step 3/3", "reward", "mismatch", "weight sync: pull", "engine start", str(tmp_path / "model")):
        assert text in done.stdout, text
    assert "Traceback" not in done.stderr

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    answer = model.generate(**tokenizer("37+58=", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert re.fullmatch(r"37\+58=\d+", tokenizer.decode(answer[0], skip_special_tokens=True).replace(" ", ""))


@pytest.mark.engine
def test_experts_through_fsdp_and_vllm(small_model: Path, tmp_path: Path) -> None:
    """Mixtral over two ranks, TP 2: stacked experts there, fused w13 here, separate ones in the exported checkpoint.
    A balancing loss changes no routing: the engines agree as they do without."""
    model = make_tiny(
        tmp_path / "mixtral", "mixtral", num_local_experts=4, hidden_size=128, intermediate_size=64, std=0.05
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((small_model / name).read_bytes())
    out = tmp_path / "out"
    job = [*SMALL, "model=local", f"model.path={model}", f"output_dir={out}", "steps=2", "checkpoint.export=true"]
    run([*job, "train.moe_balancing=aux_loss"], ranks=2)
    steps = [r for r in records(out) if r["step"] > 0]
    assert all(r["sampling/logp_difference/max"] <= 1e-5 and r["grad_norm"] > 0 for r in steps)
    assert all(r["moe/load_balancing_loss"] >= 1 and 1 <= r["moe/max_expert_load"] <= 2 for r in steps)
    before, after = load_file(model / "model.safetensors"), SafetensorsSource(out / "model")
    assert sorted(before) == sorted(after.names())
    assert any(not torch.equal(before[name], after[name]) for name in before if ".experts." in name)


@pytest.mark.engine
def test_the_heads_of_smollm2_over_three_ranks(small_model: Path, tmp_path: Path) -> None:
    """9 heads and 3 KV heads: FSDP2 over three ranks, uneven rows and all, and vLLM TP=3."""
    model = make_tiny(
        tmp_path / "llama", "llama", hidden_size=576, intermediate_size=1536, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=192, tie_word_embeddings=True, std=0.02,
    )  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((small_model / name).read_bytes())
    out = tmp_path / "out"
    job = [*SMALL, "model=local", f"model.path={model}", f"output_dir={out}", "steps=3", "rollout.tp=3"]
    done = run([*job, "data.prompts_per_step=6", "train.max_tokens_per_micro_batch=512"], ranks=3)
    steps = [r for r in records(out) if r["step"] > 0]
    assert [r["policy_version"] for r in steps] == [1, 2, 3]
    assert all(0 < r["sampling/logp_difference/max"] <= 1e-5 and r["grad_norm"] > 0 for r in steps)
    assert "weight sync: pull" in done.stdout


def test_resume_is_bit_identical_also_in_mid_epoch_and_over_its_end(small_model: Path, tmp_path: Path) -> None:
    """40 prompts are 5 steps an epoch: 7 steps in one go, or 3 + 3 + 1 (in mid-epoch, then past its end)."""
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(8)]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    job = [
        *SMALL, *REFERENCE, f"model.path={small_model}", f"data.train={data}", "data.validation_size=0",
        "algorithm.epochs=2", "algorithm.mini_batches=2", "train.lr_schedule=cosine", "train.warmup_steps=2",
        "algorithm.kl_coef=0.05",
    ]  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run([*job, "steps=7", f"output_dir={whole}"])
    stop_at = "checkpoint.every=3"
    first = subprocess.Popen(
        command([*job, "steps=7", stop_at, f"output_dir={parts}"]), env=environment(), cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    _kill_after(first, r"step +4/7", signal.SIGKILL)
    assert (parts / "checkpoints" / "latest").exists() or any((parts / "checkpoints").iterdir())
    run([*job, "steps=7", stop_at, f"output_dir={parts}"])
    assert curve(parts, *NUMBERS) == curve(whole, *NUMBERS)
    assert [r["step"] for r in records(parts)] == list(range(1, 8))


def test_sigterm_saves_and_exits_0_and_the_run_goes_on_at_another_world_size(small_model: Path, tmp_path: Path) -> None:
    job = [*SMALL, *REFERENCE, f"model.path={small_model}", f"output_dir={tmp_path}"]
    process = subprocess.Popen(
        command([*job, "steps=500"]), env=environment(), cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    output = _kill_after(process, r"step +2/500", signal.SIGTERM)
    assert process.returncode == 0, output
    assert "SIGTERM: finishing this step" in output
    reached = int(records(tmp_path)[-1]["step"])
    run([*job, f"steps={reached + 1}"], ranks=2)
    assert [r["step"] for r in records(tmp_path)] == list(range(1, reached + 2))


CUTS = {
    "two-ranks": (2, []),
    "four-ranks": (4, []),
    "small-micro-batches": (1, ["train.max_tokens_per_micro_batch=24"]),
    "padded": (1, ["train.packing=false", "train.max_tokens_per_micro_batch=60"]),
    "two-ranks-gather": (2, ["sync.method=gather"]),
    "two-ranks-collective": (2, ["sync.method=collective"]),
}


@pytest.fixture(scope="module")
def one_rank_curve(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, ...]]:
    directory = tmp_path_factory.mktemp("one-rank")
    run([*SMALL, *REFERENCE, f"model.path={small_model}", "steps=3", f"output_dir={directory}"])
    return curve(directory, *NUMBERS)


@pytest.mark.parametrize(("ranks", "overrides"), CUTS.values(), ids=CUTS.keys())
def test_the_curve_does_not_depend_on_how_the_batch_is_cut(
    small_model: Path, one_rank_curve: list[tuple[float, ...]], tmp_path: Path, ranks: int, overrides: list[str]
) -> None:
    run([*SMALL, *REFERENCE, f"model.path={small_model}", "steps=3", f"output_dir={tmp_path}", *overrides], ranks=ranks)
    found = curve(tmp_path, *NUMBERS)
    assert len(found) == len(one_rank_curve) == 3
    for mine, reference in zip(found, one_rank_curve, strict=True):
        assert mine == pytest.approx(reference, abs=1e-5)


OWN_ENGINE = """
from hybridengine.engines.rollout.traits import EngineTraits
from hybridengine.engines.rollout.transformers.engine import TransformersEngine


class Mine(TransformersEngine):
    def finish_update(self, version):
        super().finish_update(version)
        print(f"my engine serves version {version}", flush=True)


TRAITS = EngineTraits(name="mine", same_process=f"{__file__}:Mine", tensor_parallel=False, kv_cache_grows=True)
"""


def test_an_engine_of_the_users_own_is_named_by_its_file(
    small_model: Path, one_rank_curve: list[tuple[float, ...]], tmp_path: Path
) -> None:
    file = tmp_path / "my_engine.py"
    file.write_text(OWN_ENGINE)
    job = [*SMALL, "rollout.tp=1", f"rollout.engine={file}:TRAITS", f"model.path={small_model}", "steps=3"]
    done = run([*job, f"output_dir={tmp_path / 'out'}"])
    assert [done.stdout.count(f"my engine serves version {version}") for version in range(4)] == [1, 1, 1, 0]
    assert curve(tmp_path / "out", *NUMBERS) == one_rank_curve


def test_a_failing_reward_stops_every_rank_with_its_name(small_model: Path, tmp_path: Path) -> None:
    reward = tmp_path / "bad.py"
    reward.write_text("def score(prompt, response, answer, **kwargs):\n    raise RuntimeError('verifier went away')\n")
    started = time.monotonic()
    done = subprocess.run(
        command(
            [*SMALL, *REFERENCE, f"model.path={small_model}", "steps=1", f"output_dir={tmp_path}",
             f"reward.fn={reward}:score"],
            ranks=2,
        ),
        capture_output=True, text=True, timeout=200, env=environment(), cwd=ROOT,
    )  # fmt: skip
    assert done.returncode != 0
    assert "verifier went away" in done.stderr and "score" in done.stderr
    assert time.monotonic() - started < 150


@pytest.mark.parametrize(
    ("override", "message"),
    [("data.train=/nowhere.jsonl", "/nowhere.jsonl"), ("reward.fn=/nowhere.py:score", "/nowhere.py")],
    ids=["data", "reward"],
)
def test_wrong_files_are_refused_once_before_anything_starts(
    small_model: Path, tmp_path: Path, override: str, message: str
) -> None:
    overrides = [*SMALL, *REFERENCE, f"model.path={small_model}", f"output_dir={tmp_path}", override]
    done = subprocess.run(
        command(overrides, ranks=2), capture_output=True, text=True, timeout=120, env=environment(), cwd=ROOT
    )
    assert done.returncode != 0
    assert done.stderr.count("hybridengine: ") == 1  # torchrun prints it, as the root cause
    assert message in done.stderr.partition("Root Cause")[2]
    assert "[rank0]: Traceback" not in done.stderr and "[rank1]: Traceback" not in done.stderr


def _kill_after(process: subprocess.Popen[str], pattern: str, number: int) -> str:
    """Send a signal once the process has printed a line with ``pattern``; returns all of its output."""
    output = ""
    assert process.stdout is not None
    for line in process.stdout:
        output += line
        if re.search(pattern, line):
            os.kill(process.pid, number)
            break
    rest, _ = process.communicate(timeout=120)
    return output + (rest or "")
