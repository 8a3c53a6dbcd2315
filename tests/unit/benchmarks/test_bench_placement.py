"""bench_placement: the long-tailed model, and the arithmetic of its own figures; its runs are not tested here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import bench_placement, placement_broadcast, placement_workload
from hybridengine.config.compose import build
from hybridengine.data.prompts import load_prompts
from hybridengine.rewards.load import load_function
from tests.unit.compare.recorded import measured

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


def test_workload_composes(tmp_path: Path) -> None:
    options = bench_placement.parse(["--out", str(tmp_path), "--prompts", "8"])
    config = build(bench_placement.workload(options))
    assert (config.data.prompts_per_step, config.rollout.max_tokens) == (8, 384)
    from transformers import AutoTokenizer

    data = load_prompts(config.data, AutoTokenizer.from_pretrained(config.model.tokenizer), config.seed)
    assert len(data.train) == 4000 and len(data.train[0].token_ids) == placement_workload.PROMPT_WORDS


# -- figures -------------------------------------------------------------------------------------------------


def test_arms_of_the_benchmark() -> None:
    assert bench_placement.parse(["--quick"]).arms == [
        "colocated-sync", "colocated-partial", "disaggregated-1+1-sync", "disaggregated-1+1-async",
    ]  # fmt: skip
    names = bench_placement.parse([]).arms
    assert len(names) == 8 and {"colocated-sync-static", "disaggregated-1+1-async_in_order"} <= set(names)
    with pytest.raises(SystemExit):
        bench_placement.parse(["--arms", "colocated-async"])


def test_ratios_of_rollout_throughput(tmp_path: Path) -> None:
    names = ("colocated-sync", "colocated-partial", "disaggregated-1+1-sync", "disaggregated-1+1-async")
    rounds = {name: measured(tmp_path, name) for name in names}
    rounds["colocated-partial"][0].rollout_tokens_per_second *= 1.5
    found = bench_placement.comparisons(rounds, {})
    assert found["partial_speedup"] == pytest.approx(1.5)
    simulated = found["partial_speedup_simulated"]
    assert list(simulated) == [2, 4, 8] and min(simulated.values()) > 0
    assert found["stealing_speedup"] is None and found["stealing_speedup_simulated"] is None  # no static arm
    static = replace(rounds["colocated-sync"][0], rollout_tokens_per_second=1.0)
    crowded = {"colocated-sync": rounds["colocated-sync"], "colocated-sync-static": [static]}
    stolen = bench_placement.comparisons(rounds, crowded)
    assert stolen["stealing_speedup"] == rounds["colocated-sync"][0].rollout_tokens_per_second
    assert stolen["stealing_speedup_uncrowded"] is None


@pytest.mark.parametrize(("train", "rollout", "tp"), [(1, 1, 1), (2, 2, 2), (3, 2, 1)])
def test_broadcast_case_moves_what_the_rollout_ranks_lack(train: int, rollout: int, tp: int) -> None:
    case = placement_broadcast.Case(model="dense", train=train, rollout=rollout, tp=tp, dtype="bfloat16")
    plan = case.plan()
    assert plan.world_size == train + rollout
    for rank in range(train + rollout):
        assert plan.received_bytes(rank) == plan.minimum_bytes(rank)
        assert (plan.received_bytes(rank) > 0) == (rank >= train)
