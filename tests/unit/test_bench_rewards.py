"""What the benchmarks of rewards take, and what they work out of their measurements."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import bench_rewards, bench_sandbox
from benchmarks.bench_rewards import prompts, summary
from benchmarks.hostile_programs import KINDS


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (bench_rewards, ["--rounds", "0"], "--rounds 0: must be 1 or more"),
        (bench_rewards, ["--shortest", "50", "--longest", "40"], "--longest 40: must be at least --shortest 50"),
        (bench_rewards, ["--seconds", "nan"], "--seconds nan: must be greater than 0"),
        (bench_sandbox, ["--hostile", "0"], "--hostile 0: must be greater than 0"),
        (bench_sandbox, ["--seconds", "-1"], "--seconds -1.0: must be greater than 0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_flags_that_are_refused(
    module: object, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        module.parse(arguments)  # type: ignore[attr-defined]
    assert message in capsys.readouterr().err


def test_response_lengths_are_spread_evenly() -> None:
    """Five responses from 20 to 60 tokens in a context of 68: prompts of 48, 38, 28, 18, 8."""
    arguments = argparse.Namespace(shortest=20, longest=60, samples=5)
    assert [len(prompt.token_ids) for prompt in prompts(arguments, 0)] == [48, 38, 28, 18, 8]


def test_slowdown_is_the_median_of_ratios_of_the_same_round() -> None:
    """The machine halves its speed in round 2: ratios 0.9, 0.9, 0.8, and not the ratio of medians."""

    def round_(rate: float) -> dict[str, float]:
        names = ("generate_seconds", "hidden_fraction", "busy_seconds", "wait_seconds", "queue_seconds")
        return {"tokens_per_second": rate, **dict.fromkeys(names, 1.0)}

    found = {
        "none": [round_(100.0), round_(50.0), round_(100.0)],
        "isolated": [round_(90.0), round_(45.0), round_(80.0)],
        "threads": [round_(50.0), round_(25.0), round_(60.0)],
    }
    assert summary(found)["decode_slowdown_isolated"] == pytest.approx(0.1)
    assert summary(found)["decode_slowdown_threads"] == pytest.approx(0.5)


def test_the_table_has_every_kind_that_was_asked_for() -> None:
    wanted = (
        "fork_bomb flood_stdout grandchild_holds_stdout sleep memory_bytes file_flood symlink tcp udp proc_parent "
        "kill_parent exit_0 patched_print always_equal sys_exit replaced_stdin frames raise_with_nothing_expected"
    ).split()
    assert set(wanted) <= set(KINDS) and len(KINDS) >= 100
