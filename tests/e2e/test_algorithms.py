"""Algorithms as a user runs them, on real engines: what asks something of the rollout, or of the order of a step."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.runs import ROOT, SMALL, command, curve, environment, records, run

NUMBERS = ("loss", "grad_norm", "reward", "dynamic_sampling/replaced_groups", "dynamic_sampling/flat_groups")
JOB = [*SMALL, "rollout=transformers", "rollout.tp=1", f"reward.fn={ROOT / 'tests/e2e/closeness.py'}:even"]
APART = ["placement=disaggregated", "rollout.tp=1"]


def test_dynamic_sampling_gives_the_same_batches_in_both_placements_and_when_resumed(
    small_model: Path, tmp_path: Path
) -> None:
    """Every batch is full of groups with a signal, with one sync per policy version."""
    job = [*JOB, f"model.path={small_model}", "algorithm=dapo"]
    whole, parts, pools = tmp_path / "whole", tmp_path / "parts", tmp_path / "pools"
    run([*job, "steps=4", f"output_dir={whole}"])
    run([*job, "steps=2", f"output_dir={parts}"])
    run([*job, "steps=4", f"output_dir={parts}"])
    run([*job, *APART, "steps=4", f"output_dir={pools}"], ranks=2)
    expected = curve(whole, *NUMBERS)
    assert curve(parts, *NUMBERS) == expected and curve(pools, *NUMBERS) == expected
    for place in (whole, pools):
        steps = [r for r in records(place) if r["step"] > 0]
        assert sum(r["dynamic_sampling/replaced_groups"] for r in steps) > 0
        assert all(r["dynamic_sampling/flat_groups"] == r["frac_reward_zero_std"] == 0 for r in steps)
        assert [r["sync/count"] for r in steps] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "place"),
    [("partial", []), ("partial", APART), ("one_step_off", APART), ("async", APART)],
    ids=["partial", "partial-pools", "one_step_off", "async"],
)
def test_dynamic_sampling_under_the_other_schedules(
    small_model: Path, tmp_path: Path, schedule: str, place: list[str]
) -> None:
    """Interrupted and resumed in the middle as well."""
    job = [
        *JOB,
        *place,
        f"model.path={small_model}",
        "algorithm=dapo",
        f"schedule={schedule}",
        f"output_dir={tmp_path}",
    ]
    for steps in (2, 5):
        run([*job, f"steps={steps}"], ranks=2 if place else 1)
    trained = [r for r in records(tmp_path) if r["step"] > 0]
    assert [r["step"] for r in trained] == [1, 2, 3, 4, 5]
    assert all(r["dynamic_sampling/flat_groups"] == r["frac_reward_zero_std"] == 0 for r in trained)
    assert sum(r["dynamic_sampling/replaced_groups"] for r in trained) > 0
    if (
        schedule == "one_step_off"
    ):  # replaced before the weights changed; only what the end of a run called back is mixed
        assert all(r["rollout/recycled_samples"] == 0 for r in trained if r["step"] != 3)


def test_no_signal_at_all_is_skipped_or_ends_the_run(small_model: Path, tmp_path: Path) -> None:
    """A reward that is always 0: filled batches move no weight; with on_exhausted=error the run is saved and ends."""
    reward = tmp_path / "nothing.py"
    reward.write_text("def score(prompt, response, answer):\n    return 0.0\n")
    job = [*JOB, f"model.path={small_model}", "algorithm=dapo", f"reward.fn={reward}:score", "steps=2"]
    job += ["algorithm.dynamic_sampling.max_rounds=2", "train.weight_decay=0.1"]
    run([*job, f"output_dir={tmp_path / 'fill'}"])
    steps = [r for r in records(tmp_path / "fill") if r["step"] > 0]
    assert [(r["skipped_updates"], r["policy_version"], r["sync/count"]) for r in steps] == [(1, 0, 1), (1, 0, 1)]
    assert all(r["dynamic_sampling/replaced_groups"] == r["dynamic_sampling/flat_groups"] == 8 for r in steps)
    done = subprocess.run(
        command([*job, "algorithm.dynamic_sampling.on_exhausted=error", f"output_dir={tmp_path / 'error'}"]),
        capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=120,
    )  # fmt: skip
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert "groups with equal rewards for one batch of 8" in done.stderr
    assert (tmp_path / "error" / "checkpoints" / "step_00000000").is_dir()


def test_remax_takes_its_greedy_samples_without_a_second_sync(small_model: Path, tmp_path: Path) -> None:
    job = [*JOB, f"model.path={small_model}", "algorithm=remax", "rollout.samples_per_prompt=1", "steps=3"]
    run([*job, f"output_dir={tmp_path / 'one'}"])
    run([*job, *APART, f"output_dir={tmp_path / 'two'}"], ranks=2)
    names = ("loss", "grad_norm", "reward", "reward_greedy")
    assert curve(tmp_path / "one", *names) == curve(tmp_path / "two", *names)
    steps = [r for r in records(tmp_path / "one") if r["step"] > 0]
    assert [r["sync/count"] for r in steps] == [1, 2, 3]
    assert any(r["grad_norm"] > 0 for r in steps) and all("reward_std" not in r for r in steps)


def test_an_algorithm_from_a_file_with_rejection_and_the_unbiased_kl(small_model: Path, tmp_path: Path) -> None:
    """Scores come before advantages, on two ranks; the reference is a model of its own."""
    (tmp_path / "mine.py").write_text(
        dedent("""
            from hybridengine.algorithms.base import Algorithm
            from hybridengine.algorithms.losses import Surrogate, TokenBatch, masked_sum, token_ratio


            class Plain(Algorithm):
                def surrogate(self, batch: TokenBatch) -> Surrogate:
                    ratio = token_ratio(batch)
                    return Surrogate(-batch.advantages * ratio, {"mine/ratio": masked_sum(ratio.detach(), batch.mask)})
        """)
    )
    job = [
        *JOB, f"model.path={small_model}", f"algorithm.fn={tmp_path / 'mine.py'}:Plain", "algorithm.kl_coef=0.05",
        "algorithm.kl_estimator=k3_ratio", "algorithm.correction=seq_mask_tis", "steps=2",
        "algorithm.correction.reject_bounds=[0.5,2]",
    ]  # fmt: skip
    run([*job, f"output_dir={tmp_path / 'out'}"], ranks=2)
    steps = [r for r in records(tmp_path / "out") if r["step"] > 0]
    assert all(abs(r["mine/ratio"] - 1) < 1e-4 and r["sampling/rejected_sequences"] == 0 for r in steps)
    assert all(r["kl_max"] >= r["kl"] and r["sampling/mean_exp_abs"] >= 1 for r in steps) and steps[1]["kl_max"] > 0
    assert all("time/advantages/old_logprobs" in r or "time/old_logprobs" in r for r in steps)


def test_ppo_with_four_models_learns_moves_and_resumes_exactly(small_model: Path, tmp_path: Path) -> None:
    """Policy, reference, critic and reward model on two ranks; one sample per prompt, two updates of the policy per
    rollout and four of the critic, KL in the reward. For five steps the critic learns alone; the reward hangs on the
    first token, so that there is something to tell from the second state on. The resumed run keeps on a disk what it
    does not need."""
    disk, whole, parts, judge = (tmp_path / name for name in ("disk", "whole", "parts", "judge"))
    disk.mkdir()
    shutil.copytree(small_model, judge)
    weights = load_file(judge / "model.safetensors")
    hidden = weights["model.norm.weight"].numel()
    weights["score.weight"] = torch.randn(1, hidden, generator=torch.Generator().manual_seed(0)) / hidden
    save_file(weights, judge / "model.safetensors", metadata={"format": "pt"})
    job = [
        *JOB, f"model.path={small_model}", "algorithm=ppo", f"reward.model.path={judge}", "reward.model.weight=0.05",
        'reward.model.template="{prompt}{response}"', "rollout.samples_per_prompt=1", "data.prompts_per_step=64",
        f"reward.fn={ROOT / 'tests/e2e/closeness.py'}:odd_first", "algorithm.mini_batches=2", "algorithm.kl_coef=0.02",
        "critic.lr=1e-3", "critic.epochs=2", "critic.warmup_steps=5", "steps=8",
    ]  # fmt: skip
    run([*job, f"output_dir={whole}", "checkpoint.every=6", "checkpoint.keep=0", "checkpoint.export=true"], ranks=2)
    resumed = f"checkpoint.resume={whole / 'checkpoints' / 'step_00000006'}"
    run([*job, f"output_dir={parts}", f"memory.offload_dir={disk}", resumed], ranks=2)
    names = (
        "reward",
        "rewards/model",
        "grad_norm",
        "critic/loss",
        "critic/grad_norm",
        "critic/values",
        "critic/explained_variance",
    )
    steps = [r for r in records(whole) if r["step"] > 0]
    assert curve(parts, *names) == [tuple(r[name] for name in names) for r in steps[6:]]
    assert [r["policy_version"] for r in steps] == [0] * 5 + [2, 4, 6] and "grad_norm" not in steps[4]
    assert steps[0]["critic/values"] == 0 == steps[0]["critic/explained_variance"]
    assert steps[-1]["critic/error"] < 0.6 * steps[0]["critic/error"] and steps[-1]["critic/explained_variance"] > 0.15
    last = records(parts)[-1]
    assert last["memory/owner/critic_gib"] > 0 < last["memory/owner/reward_model_gib"]
    assert last["rewards/odd_first"] + 0.05 * last["rewards/model"] == pytest.approx(last["reward"], abs=1e-6)
    from transformers import AutoModelForSequenceClassification

    critic = AutoModelForSequenceClassification.from_pretrained(whole / "critic")
    assert critic.config.num_labels == 1 and critic.score.weight.abs().max() > 0
