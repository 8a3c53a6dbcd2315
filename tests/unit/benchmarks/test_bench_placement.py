"""bench_placement: arms, the long-tailed model, and the arithmetic of its figures; its runs are not tested here."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import bench_placement, placement_broadcast, placement_workload
from benchmarks.placement_arms import SKIP, Arm, Measured, arms_of, idle_shares, measure, read_trace, rollout_rate
from benchmarks.placement_gantt import draw
from hybridengine.config.compose import build
from hybridengine.data.prompts import load_prompts
from hybridengine.rewards.load import load_function
from hybridengine.tracing import Span, write_chrome_trace
from tests.unit.simulate.test_calibrate import write_run


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_arm_is_a_configuration(ranks: int) -> None:
    names = arms_of(ranks)
    assert len(set(names)) == len(names)
    for name in names:
        config = build(["+experiment=quickstart", *Arm(name).overrides(ranks)])
        assert name.split("-")[0] == config.placement.name
        assert config.schedule.name in name
        assert config.rollout.work_stealing == (not name.endswith("-static"))
        if config.placement.name == "disaggregated":
            assert f"-{ranks - config.placement.rollout_ranks}+{config.placement.rollout_ranks}-" in name


@pytest.mark.parametrize(
    "name",
    ["colocated-async", "disaggregated-2+1-sync", "disaggregated-0+2-sync", "colocated", "sync", "colocated-sync-x"],
)
def test_no_such_arm(name: str) -> None:
    with pytest.raises(ValueError, match="there are colocated-sync, .*disaggregated-1\\+1-async"):
        Arm(name).overrides(2)


# -- the long-tailed model -----------------------------------------------------------------------------------


def test_answers_end_as_often_as_the_last_word_says(tmp_path: Path) -> None:
    """Given any context that ends in a word of a class: its words alike, the end 1 in EXPECTED, others hardly ever."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    placement_workload.make_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    path = placement_workload.write_prompts(tmp_path / "train.jsonl", size=100)
    prompts = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
    encoded = torch.tensor(tokenizer(prompts)["input_ids"])
    assert encoded.shape == (100, placement_workload.PROMPT_WORDS)
    with torch.no_grad():
        probabilities = model(encoded).logits[:, -1].softmax(-1)
    for row, prompt in zip(probabilities, prompts, strict=True):
        number = placement_workload.CLASSES.index(prompt.split()[-1][0])
        same = row[2 + 8 * number : 2 + 8 * (number + 1)]
        assert float(row[1]) == pytest.approx(1 / placement_workload.EXPECTED[number], rel=0.25)
        assert float(same.sum() + row[1]) > 0.995
        assert float(same.max() / same.min()) < 1.5


def test_prompts_are_unlike_and_classes_have_their_share(tmp_path: Path) -> None:
    path = placement_workload.write_prompts(tmp_path / "train.jsonl", size=300)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == 300
    found = [sum(row["answer"] == letter for row in rows) for letter in placement_workload.CLASSES]
    assert found == [3 * share for share in placement_workload.SHARE]


def test_reward_counts_low_words() -> None:
    reward = load_function(f"{placement_workload.__file__}:low_words")
    assert reward("", "a0 a7 a3 a4", None) == 0.5
    assert reward("", "", None) == 0.5


def test_workload_composes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench_placement", "--out", str(tmp_path), "--prompts", "8", "--steps", "9"])
    options = bench_placement.parse()
    config = build(bench_placement.workload(options))
    assert (config.steps, config.data.prompts_per_step, config.rollout.max_tokens) == (9, 8, 384)
    from transformers import AutoTokenizer

    data = load_prompts(config.data, AutoTokenizer.from_pretrained(config.model.tokenizer), config.seed)
    assert len(data.train) == 4000 and len(data.train[0].token_ids) == placement_workload.PROMPT_WORDS


# -- figures -------------------------------------------------------------------------------------------------


def measured(directory: Path, name: str, *, steps: int = 6) -> Measured:
    """write_run's, with a trace in which each step generates for 1 s of 2 s."""
    rollout_ranks = int(name.startswith("disaggregated"))
    write_run(directory, steps=steps, rollout_ranks=rollout_ranks, schedule=name.split("-")[-1])
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"reward": line["step"] / 10, "staleness/dropped_groups": 0.0}
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    spans = [Span("rollout", 2.0 * n, 2 * n + 1.0, n + 1) for n in range(steps)]
    spans += [Span("optimizer", 2 * n + 1.5, 2 * n + 2.0, n + 1) for n in range(steps)]
    replicas = [[(2.0 * n, 2 * n + 1.0) for n in range(steps)]]
    write_chrome_trace(directory / "trace.json", spans, replicas=replicas)
    return measure(Arm(name), directory, memory_gib=1.5, load_average=0.0)


def test_measure_reads_a_run(tmp_path: Path) -> None:
    found = measured(tmp_path / "run", "colocated-sync")
    assert found.run.skipped == SKIP
    assert found.idle == {"all": 0.0}  # one replica: nobody to wait for
    assert found.rewards[-1][1] == 0.6 and len(found.rewards) == 6 - SKIP
    assert found.resync_fraction == pytest.approx(0.2 / (found.run.seconds_per_step + 7.0))
    assert list(found.seconds_per_phase)[0] == "validation"
    assert abs(bench_placement.simulator_error([found])) < 1e-6
    spans, replicas, first = read_trace(tmp_path / "run")
    assert (len(spans), len(replicas[0]), first) == (12, 6, 2.0 * SKIP)


def test_rollout_rate_is_over_the_slowest_replica() -> None:
    """Two rollouts of two replicas: 30 and 10 tokens in 2 s, then 20 and 20 in 3 s."""

    def window(busy: list[list[float]], running: int, count: int) -> dict[str, object]:
        return {"busy": busy, "decode": {running: [count, 0, 0, 0, 0]}, "prefill": {}}

    first = [window([[0.0, 2.0]], 10, 3), window([[10.0, 12.0]], 20, 1)]
    second = [window([[0.5, 1.0]], 5, 2), window([[9.0, 9.5], [9.6, 11.0]], 4, 5)]
    assert rollout_rate([first, second]) == pytest.approx((30 + 10 + 20 + 20) / (2 + 3))


def test_idle_shares(tmp_path: Path) -> None:
    """Two colocated replicas, the second ready 1 s before the first in each of two rollouts, 10 s in all: 1 s each."""
    run = measured(tmp_path / "run", "colocated-sync").run
    ends = [{"busy": [[0.0, 3.0]]}, {"busy": [[5.0, 8.0]]}], [{"busy": [[0.0, 2.0]]}, {"busy": [[5.0, 7.0]]}]
    shares = idle_shares(run, list(ends), [], {}, since=0.0, wall=10.0, sync=0.0)
    assert shares == {"all": pytest.approx(0.1)}


def test_reward_after_equal_time(tmp_path: Path) -> None:
    base = measured(tmp_path / "run", "colocated-sync")
    fast = replace(base, rewards=[(1.0, 0.1), (2.0, 0.2), (3.0, 0.3), (4.0, 0.4)])
    slow = replace(base, rewards=[(3.0, 0.5), (6.0, 0.6)])
    assert bench_placement.equal_time({"a": [fast], "b": [slow]}) == 4.0
    assert bench_placement.reward_until(fast, 4.0) == pytest.approx(0.3)
    assert bench_placement.reward_until(slow, 4.0) == 0.5
    assert math.isnan(bench_placement.reward_until(slow, 1.0))


def test_report_of_several_arms(tmp_path: Path) -> None:
    names = ("colocated-sync", "colocated-partial", "disaggregated-1+1-sync", "disaggregated-1+1-async")
    rounds = {name: [measured(tmp_path / name, name)] for name in names}
    rounds["colocated-partial"][0].rollout_tokens_per_second *= 1.5
    found = bench_placement.comparisons(rounds, {})
    assert found["partial_speedup"] == pytest.approx(1.5)
    assert found["stealing_speedup"] is None  # no static arm
    assert (
        list(found["partial_speedup_simulated"]) == [2, 4, 8] and min(found["partial_speedup_simulated"].values()) > 0
    )
    assert found["stealing_speedup_simulated"] is None
    static = replace(rounds["colocated-sync"][0], rollout_tokens_per_second=1.0)
    crowded = {"colocated-sync": rounds["colocated-sync"], "colocated-sync-static": [static]}
    stolen = bench_placement.comparisons(rounds, crowded)
    assert stolen["stealing_speedup"] == rounds["colocated-sync"][0].rollout_tokens_per_second
    assert stolen["stealing_speedup_uncrowded"] is None
    arms = [bench_placement.summary(name, found, rounds) for name, found in rounds.items()]
    for arm in arms:
        assert {"name", "tokens_per_second", "seconds_per_phase", "idle_fraction", "resync_fraction"} <= arm.keys()
        assert (arm["simulator_error_from_sync"] is None) == arm["name"].endswith("-sync")
    json.dumps(bench_placement.rounded(arms))
    arms[3]["tokens_per_second"] = 10 * arms[0]["tokens_per_second"]
    sentence = bench_placement.verdict(arms)
    assert sentence.startswith("disaggregated-1+1-async is fastest")
    assert "schedule alone, in the winner's placement" in sentence
    assert "Not the same work" not in sentence
    arms[1]["response_length"] *= 0.5
    assert "differ by more than 25% in colocated-partial" in bench_placement.verdict(arms)
    bench_placement.table(arms), bench_placement.phase_table(arms)
    draw(tmp_path / "gantt.png", [found[0] for found in rounds.values()])
    assert (tmp_path / "gantt.png").stat().st_size > 10_000


@pytest.mark.parametrize(("train", "rollout", "tp"), [(1, 1, 1), (2, 2, 2), (3, 2, 1)])
def test_broadcast_case_moves_what_the_rollout_ranks_lack(train: int, rollout: int, tp: int) -> None:
    case = placement_broadcast.Case(model="dense", train=train, rollout=rollout, tp=tp, dtype="bfloat16")
    plan = case.plan()
    assert plan.world_size == train + rollout
    for rank in range(train + rollout):
        assert plan.received_bytes(rank) == plan.minimum_bytes(rank)
        assert (plan.received_bytes(rank) > 0) == (rank >= train)
