"""The simulator beside the measured arms: how far off it is on them, and what it says of arms that were not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hybridengine.compare.arms import IN_ORDER, Arm, arms_of
from hybridengine.compare.measured import Measured
from hybridengine.simulate.calibrate import Run
from hybridengine.simulate.lengths import Scaled
from hybridengine.simulate.scenario import Scenario
from hybridengine.simulate.schedules import simulate

#: Simulated steps of an arm: as many as have about so many samples, within bounds; a fifth of them is left out.
SAMPLES, LEAST_STEPS, MOST_STEPS = 4000, 10, 30
#: Arms shown of each question, the best ones.
SHOWN = 3

Rounds = Mapping[str, Sequence[Measured]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorError:
    """Relative error of the simulated step time of one arm, medians over rounds.

    Attributes:
        own: with the costs of the very run: whether the simulator knows who waits for whom.
        from_sync: with the costs of the ``sync`` arm of the same placement and size; None where that is the arm itself,
            or was not run.
    """

    own: float
    from_sync: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """An arm that was not run.

    Attributes:
        question: what is different from the comparison.
        arm: its name.
        ratio: its tokens/s over those of the simulated winner of the measured arms, under the same question.
    """

    question: str
    arm: str
    seconds_per_step: float
    tokens_per_second: float
    ratio: float
    response_length: float


def errors(arms: Mapping[str, Arm], rounds: Rounds) -> dict[str, SimulatorError]:
    """Of every arm."""
    found = {}
    for name, runs in rounds.items():
        base = rounds.get(arms[name].with_schedule("sync").name) if arms[name].stealing else None
        forecast = None
        if base and arms[name].schedule != "sync":
            forecast = median(
                relative_error(run, base[min(i, len(base) - 1)].run) for i, run in enumerate(one.run for one in runs)
            )
        found[name] = SimulatorError(own=median(relative_error(one.run, one.run) for one in runs), from_sync=forecast)
    return found


def relative_error(run: Run, costs: Run) -> float:
    """Of the step time of ``run``, simulated with the costs of another run."""
    return simulate(run.scenario, costs.costs).step_seconds / run.seconds_per_step - 1


def forecasts(arms: Mapping[str, Arm], rounds: Rounds, *, winner: str) -> list[Forecast]:
    """What was not run, by question: splits of the same ranks, and every split under twice the ranks, answers twice as
    long, twice the prompts.

    Costs are those of the ``sync`` arm with the same placement and tensor parallelism; of its placement, where there is
    none; of any, where there is none either.
    """
    found: list[Forecast] = []
    ranks = arms[winner].ranks
    for question, changes in questions(rounds[winner][0].run.scenario):
        more = ranks * int(changes.pop("ranks_factor", 1))  # type: ignore[call-overload]
        known = set() if changes or more != ranks else set(rounds)
        best = _scale(arms[winner], more)
        reference = _simulated(best, arms, rounds, changes)
        sizes = {(bool(arm.rollout_ranks), arm.tp) for arm in arms.values()}
        others = [
            arm
            for arm in arms_of(more, tps=sorted({tp for _, tp in sizes}))
            if arm.name not in known and (bool(arm.rollout_ranks), arm.tp) in sizes and _in_question(arm, more)
        ]
        outcomes = [
            Forecast(
                question=question, arm=arm.name, seconds_per_step=outcome[0], tokens_per_second=outcome[1],
                ratio=outcome[1] / reference[1], response_length=outcome[2],
            )
            for arm in others
            if (outcome := _simulated(arm, arms, rounds, changes))
        ]  # fmt: skip
        found += sorted(outcomes, key=lambda forecast: -forecast.tokens_per_second)[:SHOWN]
    return found


def questions(scenario: Scenario) -> Iterator[tuple[str, dict[str, object]]]:
    """Title, and what it changes in a scenario."""
    yield "the same job, arms that were not run", {}
    yield f"twice the ranks ({2 * scenario.ranks})", {"ranks_factor": 2}
    yield "answers twice as long", {"lengths": Scaled(scenario.lengths, 2.0)}
    yield f"twice the prompts per step ({2 * scenario.prompts})", {"prompts": 2 * scenario.prompts}


def _in_question(arm: Arm, ranks: int) -> bool:
    """Splits into quarters alone, where there are many ranks."""
    return ranks <= 4 or not arm.rollout_ranks or (4 * arm.rollout_ranks) % ranks == 0


def _scale(arm: Arm, ranks: int) -> Arm:
    """The same arm on another number of ranks."""
    return Arm(
        ranks=ranks, rollout_ranks=arm.rollout_ranks * ranks // arm.ranks, schedule=arm.schedule, tp=arm.tp,
        stealing=arm.stealing,
    )  # fmt: skip


def _simulated(
    arm: Arm, arms: Mapping[str, Arm], rounds: Rounds, changes: Mapping[str, object]
) -> tuple[float, float, float]:
    """Seconds per step, tokens per second, response length."""
    run = _costs_for(arm, arms, rounds)
    scenario = scenario_of(arm, run.scenario).with_(**changes)
    outcome = simulate(scenario, run.costs)
    return outcome.step_seconds, outcome.tokens_per_second, outcome.response_length


def scenario_of(arm: Arm, like: Scenario) -> Scenario:
    """The arm with another run's prompts, samples, slots and lengths."""
    in_order = arm.schedule == IN_ORDER
    steps = min(MOST_STEPS, max(LEAST_STEPS, SAMPLES // (like.prompts * like.samples)))
    return like.with_(
        ranks=arm.ranks, rollout_ranks=arm.rollout_ranks, tp=arm.tp, schedule="async" if in_order else arm.schedule,
        in_order=in_order, stealing=arm.stealing, steps=steps, warmup=steps // 5,
    )  # fmt: skip


def _costs_for(arm: Arm, arms: Mapping[str, Arm], rounds: Rounds) -> Run:
    """The measured run whose costs suit the arm best."""

    def distance(name: str) -> tuple[bool, bool, bool]:
        other = arms[name]
        return bool(other.rollout_ranks) != bool(arm.rollout_ranks), other.tp != arm.tp, other.schedule != "sync"

    nearest = min(rounds, key=distance)
    return rounds[nearest][-1].run
