"""The end-to-end benchmark's arithmetic, job definitions and arguments; its runs are not tested here."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import bench_step
from benchmarks.peers import ours
from benchmarks.peers.job import JOBS, SMOLLM2, TINY, our_reward, prepare, trl_reward
from benchmarks.peers.summary import Measurement, arm_summary, job_summary, overall, rounded, speedup


def measurement(*steps: float, generation: float = 0.0, start: float = 10.0) -> Measurement:
    return Measurement(
        step_seconds=list(steps),
        step_cpu_seconds=[seconds / 2 for seconds in steps],
        phase_seconds={"generation": [generation] * len(steps)},
        engine_start_seconds=start,
    )


def test_step_time_is_the_median_over_all_steps_of_all_rounds() -> None:
    """[1, 1, 9] and [2, 3]: median of 1 1 2 3 9 is 2; medians of the rounds are 1 and 2.5."""
    found = arm_summary([measurement(1, 1, 9, start=8.0), measurement(2, 3, start=12.0)], tokens_per_step=100)
    assert found["seconds_per_step"] == 2
    assert found["seconds_per_step_by_round"] == [1, 2.5]
    assert found["tokens_per_second"] == 50
    assert found["seconds_engine_start"] == 10
    assert found["timed_steps"] == 5


def test_training_is_what_generation_and_sync_leave() -> None:
    timed = Measurement(
        step_seconds=[4.0],
        step_cpu_seconds=[4.0],
        phase_seconds={"generation": [2.5], "sync": [0.5]},
        engine_start_seconds=1.0,
    )
    found = arm_summary([timed], tokens_per_step=1)
    assert (found["seconds_generation"], found["seconds_sync"], found["seconds_training"]) == (2.5, 0.5, 1.0)


def test_an_arm_without_timed_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="no timed step"):
        arm_summary([measurement()], tokens_per_step=1)


def test_speedup_is_the_peers_time_over_ours() -> None:
    peer = arm_summary([measurement(3.0), measurement(5.0)], tokens_per_step=1)  # median 4
    mine = arm_summary([measurement(1.0), measurement(3.0)], tokens_per_step=1)  # median 2
    assert speedup(peer, mine) == {"ratio": 2.0, "by_round": [3.0, 5.0 / 3.0], "cpu_ratio": 2.0}


@pytest.mark.parametrize(
    ("job", "arm", "ratio"),
    [("tiny", "ours-transformers", 3.0), ("smollm2", "ours-vllm", 6.0)],
    ids=["tiny-against-transformers", "smollm2-against-vllm"],
)
def test_trl_with_hf_generation_is_compared_with_the_right_arm(job: str, arm: str, ratio: float) -> None:
    measured = {
        "trl-hf": [measurement(6.0)],
        "trl-vllm": [measurement(8.0)],
        "trl-vllm-packed": [measurement(7.0)],
        "ours-transformers": [measurement(2.0)],
        "ours-vllm": [measurement(1.0)],
    }
    found = job_summary(job, measured, tokens_per_step=1)
    assert (found["speedup_over_trl_hf"]["arm"], found["speedup_over_trl_hf"]["ratio"]) == (arm, ratio)
    assert found["speedup_over_trl_vllm"]["ratio"] == 8.0
    assert found["speedup_over_trl_vllm_packed"]["ratio"] == 7.0


def test_a_missing_arm_leaves_its_speedup_out() -> None:
    found = job_summary("tiny", {"trl-vllm": [measurement(2.0)], "ours-vllm": [measurement(1.0)]}, tokens_per_step=1)
    assert found["speedup_over_trl_vllm"]["ratio"] == 2.0
    assert "speedup_over_trl_hf" not in found


def test_the_last_line_quotes_the_smallest_ratio_over_the_jobs() -> None:
    def job(over_vllm: float) -> dict[str, dict[str, float]]:
        return {"speedup_over_trl_vllm": {"ratio": over_vllm}}

    found = overall({"tiny": job(3.0), "smollm2": job(1.5)})
    assert found["speedup_over_trl_vllm"] == 1.5
    assert found["speedup_over_trl_hf"] is None
    assert found["tiny"]["speedup_over_trl_vllm"]["ratio"] == 3.0
    json.dumps(found)


def test_rounding_keeps_structure_and_integers() -> None:
    assert rounded({"a": [1.23456, 7], "b": {"c": 123456.0}, "d": None}) == {
        "a": [1.235, 7],
        "b": {"c": 123500.0},
        "d": None,
    }


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_every_rank_and_replica_gets_the_same_work(job: bench_step.Job) -> None:
    """Whole groups per rank, TP divides the heads, prompt and response fit the context."""
    shape = job.architecture[1]
    assert job.prompts % job.world_size == 0
    assert shape["num_attention_heads"] % job.tp == 0 and shape["num_key_value_heads"] % job.tp == 0
    assert job.prompt_tokens + job.max_tokens <= shape["max_position_embeddings"]
    assert job.sequences % job.samples == 0 and job.warmup_steps >= 1 and job.steps >= 2


def test_the_end_token_is_one_the_model_has_no_logit_for(tmp_path: Path) -> None:
    """So every response runs to max_tokens in every arm; and every prompt has the same number of tokens."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    model, data = prepare(TINY, tmp_path)
    vocab_size = AutoConfig.from_pretrained(model).vocab_size
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.eos_token_id >= vocab_size
    assert GenerationConfig.from_pretrained(model).eos_token_id == tokenizer.eos_token_id
    assert tokenizer.pad_token_id < vocab_size
    prompts = [json.loads(line)["prompt"] for line in data.read_text().splitlines()]
    assert {len(ids) for ids in tokenizer(prompts)["input_ids"]} == {TINY.prompt_tokens}
    assert all(tokenizer.decode([i]) for i in range(1, vocab_size))
    assert prepare(TINY, tmp_path) == (model, data)


def test_both_sides_compute_the_same_reward() -> None:
    texts = ["one", "two", ""]
    assert trl_reward(texts, prompts=None) == [our_reward("p", text, None, metadata={}) for text in texts]
    assert len(set(trl_reward(texts))) == 3


def records(steps: int, tokens: float = float(TINY.tokens_per_step)) -> list[dict[str, float]]:
    return [
        {"step": i, "perf/tokens": tokens, "time/step": 1.0, "time/rollout": 0.5 + i, "time/sync": 0.1,
         "time/sync/wake": 0.2, "time/optimizer": 0.2, "sampling/logp_difference/max": 1e-7 * i}
        for i in range(1, steps + 1)
    ]  # fmt: skip


SHORT = dataclasses.replace(TINY, warmup_steps=3)


def test_our_steps_are_cut_from_start_to_start() -> None:
    """Three warm-up steps, two timed, one more to close the last: starts 0 1 2 | 3 5 8."""
    found = ours.measurement(SHORT, [(t, t / 4) for t in (0.0, 1.0, 2.0, 3.0, 5.0, 8.0)], records(6), steps=2)
    assert found["step_cpu_seconds"] == [0.5, 0.75]
    assert found["step_seconds"] == [2.0, 3.0]
    assert found["phase_seconds"]["generation"] == [4.5, 5.5]
    assert found["phase_seconds"]["sync"] == pytest.approx([0.3, 0.3])
    assert found["mismatch"] == pytest.approx(6e-7)


@pytest.mark.parametrize(
    ("starts", "found", "message"),
    [
        ([(0.0, 0.0)] * 5, records(5), "6 expected"),
        ([(0.0, 0.0)] * 6, records(6, tokens=1.0), "needs exactly 2560"),
    ],
    ids=["a-step-too-few", "other-lengths"],
)
def test_a_run_that_did_other_work_is_refused(
    starts: list[tuple[float, float]], found: list[dict], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ours.measurement(SHORT, starts, found, steps=2)


@pytest.mark.parametrize("generation", ["vllm", "hf"])
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_our_overrides_compose_and_describe_the_job(
    job: bench_step.Job, generation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybridengine.config.compose import build

    monkeypatch.setattr(ours, "prepare", lambda *_: (tmp_path / "model", tmp_path / "prompts.jsonl"))
    arguments = argparse.Namespace(cache=tmp_path, generation=generation, correction=False)
    config = build(ours.overrides(job, arguments, tmp_path / "run", total_steps=7))
    assert config.data.prompts_per_step * config.rollout.samples_per_prompt == job.sequences
    assert config.rollout.engine == {"vllm": "vllm", "hf": "transformers"}[generation]
    assert config.rollout.tp == (job.tp if generation == "vllm" else 1)
    assert (config.rollout.temperature, config.algorithm.kl_coef, config.train.lr) == (1.0, 0.0, job.learning_rate)
    assert (config.steps, config.validate_every, config.rollout.max_tokens) == (7, 0, job.max_tokens)


def test_the_command_starts_the_arm_in_its_own_environment(tmp_path: Path) -> None:
    arguments = argparse.Namespace(cache=tmp_path, steps=5, correction=True)
    peer = bench_step.command("trl-vllm-packed", SMOLLM2, arguments, tmp_path / "r.json")
    mine = bench_step.command("ours-transformers", TINY, arguments, tmp_path / "r.json")
    assert ".venv-peers" in peer[0] and "benchmarks.peers.trl_grpo" in peer
    assert peer[peer.index("--weights") + 1] == "packed" and peer[-1] == "--correction"
    assert ".venv/" in mine[0] and "benchmarks.peers.ours" in mine and "--correction" not in mine
    assert mine[mine.index("--steps") + 1] == "5"
