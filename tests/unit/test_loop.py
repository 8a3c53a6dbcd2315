"""The loop on recording fakes: the order of a step, what is saved when, and how runs end and go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridengine.algorithms.critic import Critic
from hybridengine.algorithms.grpo import GRPO
from hybridengine.algorithms.ppo import PPO
from hybridengine.config import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    CriticConfig,
    DataConfig,
    MonitorConfig,
    PlacementConfig,
    RolloutConfig,
    ScheduleConfig,
)
from hybridengine.data.loader import PromptLoader
from hybridengine.distributed.world import World
from hybridengine.loop import Trainer
from hybridengine.memory.phases import Phases
from hybridengine.memory.residency import Residency
from hybridengine.monitors import Monitor
from hybridengine.schedule.base import RolloutLostError, RolloutSource
from hybridengine.schedule.colocated import ColocatedRollouts
from hybridengine.schedule.recovery import Attempt
from hybridengine.schedule.remote import RemoteRollouts
from hybridengine.sync.weight_sync import WeightSync
from hybridengine.tracing import PhaseTimer
from hybridengine.types import Prompt, Sample, SamplingParams, Trajectory
from tests.unit.schedule.fakes import Replica, Scorer, Sharding, Transfer, draw, score

PROMPTS = [Prompt(index=i, token_ids=[1] * (1 + i), text=f"p{i}") for i in range(10)]


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Train:
    """A TrainEngine that only counts versions."""

    replica, num_replicas = 0, 1

    def __init__(self, log: list[str]) -> None:
        self.log, self.version, self.batches = log, 0, list[list[list[int]]]()

    def logprobs(self, samples: list[Sample], *, reference: bool = False) -> list[list[float]]:
        self.log.append("reference" if reference else "old logprobs")
        return [[-1.5] * len(sample.response_ids) for sample in samples]

    def forward_backward(self, samples: list[Sample], loss_fn: Any, *, collect_logprobs: bool, **_: Any) -> Any:
        self.log.append(f"forward_backward {len(samples)}")
        assert all(sample.advantages for sample in samples)
        self.batches.append([sample.prompt_ids for sample in samples])
        found = [[-1.25] * len(sample.response_ids) for sample in samples] if collect_logprobs else None
        return {"loss": 0.5, "tokens": 4.0}, found

    def optimizer_step(self) -> dict[str, float]:
        self.version += 1
        self.log.append(f"optimizer_step -> {self.version}")
        return {"grad_norm": 1.0}


class Rollouts:
    """A RolloutSource that writes down its calls. The next batches are full after ``short`` attempts that are not."""

    transfer = "none"

    def __init__(self, log: list[str], config: Config, *, short: int = 0, deaths: int = 0) -> None:
        self.log, self.config, self.short, self.deaths = log, config, short, deaths
        self.error: Exception | None = None
        self.position = 0

    def start_step(self) -> None:
        self.log.append("start_step")

    def attempts(self) -> Iterator[AbstractContextManager[None]]:
        while self.deaths:
            attempt = Attempt(keeps=True)
            yield attempt
            self.log.append(f"restart after {attempt.error}")
            self.deaths -= 1
        yield nullcontext()

    def enter_rollout_mode(self) -> None:
        self.log.append("rollout mode")

    def generate(self) -> None:
        self.log.append("generate")
        if self.error is not None:
            raise self.error
        if self.deaths:
            raise OSError("a death")

    def rewards(self) -> tuple[list[Trajectory], dict[str, float]] | None:
        if self.short:
            self.short -= 1
            self.log.append("not enough")
            return None
        self.log.append("rewards")
        size, n = self.config.data.prompts_per_step, self.config.rollout.samples_per_prompt
        chosen = [PROMPTS[(self.position + i) % len(PROMPTS)] for i in range(size)]
        self.position += size
        return [answer(prompt, k) for prompt in chosen for k in range(n)], {"rollout/counted": 7.0}

    def evaluate(self, prompts: list[Prompt], params: SamplingParams) -> list[Trajectory]:
        self.log.append(f"evaluate {len(prompts)} × {params.n}")
        return [answer(prompt, 0) for prompt in prompts]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def metrics(self) -> dict[str, float]:
        return {"sync/count": 3.0}

    def close(self) -> None: ...


def answer(prompt: Prompt, sample_index: int) -> Trajectory:
    made = Trajectory(prompt=prompt, sample_index=sample_index, token_ids=[], logprobs=[], versions=[], truncated=False)
    draw(made, 2, 0)
    score(made)
    return made


class Recording(GRPO):
    """Says when advantages are computed."""

    log: list[str]

    def samples(self, trajectories: Any, ref_logprobs: Any = None, **given: Any) -> Any:
        greedy = given["greedy_rewards"]
        self.log.append("advantages" if greedy is None else f"advantages against {greedy}")
        return super().samples(trajectories, ref_logprobs, **given)


class Case:
    """A trainer over fakes, and everything that they wrote down."""

    def __init__(
        self,
        config: Config,
        *,
        steps: int = 1,
        saved: dict[str, Any] | None = None,
        interrupted_at: int = -1,
        validation: int = 0,
        rollouts: RolloutSource | None = None,
        log: list[str] | None = None,
        train: Train | None = None,
        **options: Any,
    ) -> None:
        self.log = log = [] if log is None else log
        self.train = train or Train(log)
        self.records: list[tuple[int, dict[str, float]]] = []
        self.said: list[str] = []
        self.kept: list[tuple[int, int]] = []
        self.source: Any = rollouts or Rollouts(log, config, **options)
        algorithm = Recording(config.algorithm, config.rollout)
        algorithm.log = log
        asked = iter(range(1000))
        fakes: dict[str, Any] = {
            "train": self.train,
            "checkpointer": SimpleNamespace(
                load=lambda engine, resume: saved, save=self._save, directory=Path("unused"),
            ),
            "logger": SimpleNamespace(
                log=lambda step, metrics: self.records.append((step, metrics)),
                validation=lambda step, metrics, samples: log.append(f"validated {step}"),
                rollout=lambda step, trajectories: self.kept.append((step, len(trajectories))),
                resume=lambda step, unlogged: self.said.append(f"from {step}"),
                message=self.said.append,
                history=[],
            ),
            "interrupt": SimpleNamespace(agreed=lambda: next(asked) == interrupted_at, stop=self.said.append),
            "monitor": Monitor(MonitorConfig(defaults=False), log=self.said.append),
        }  # fmt: skip
        self.trainer = Trainer(
            config=config, world=World(), rollouts=self.source, algorithm=algorithm, validation=PROMPTS[:validation],
            phases=phases(), total_steps=steps, **fakes,
        )  # fmt: skip

    def _save(self, step: int, engine: Train, extra: dict[str, Any]) -> None:
        assert getattr(engine, "policy", engine) is self.train and extra["step"] == step
        self.log.append(f"save {step}")
        self.extra = extra

    def run(self) -> list[str]:
        self.trainer.run()
        return self.log


def phases() -> Phases:
    return Phases.over(Residency({}), PhaseTimer(), torch.device("cpu"))


def config(**sections: Any) -> Config:
    given = {
        "data": DataConfig(train="unused", prompts_per_step=2),
        "rollout": RolloutConfig(samples_per_prompt=2),
        "validate_every": 0,
    }
    return Config(**(given | sections))


# -- one step ----------------------------------------------------------------------------------------------------------


def test_a_step_in_order() -> None:
    assert Case(config()).run() == [
        "start_step", "rollout mode", "generate", "rewards", "advantages", "forward_backward 4", "optimizer_step -> 1",
        "save 1",
    ]  # fmt: skip


def test_scores_come_before_advantages_and_every_mini_batch_is_an_optimizer_step() -> None:
    algorithm = AlgorithmConfig(kl_coef=0.1, epochs=2, mini_batches=2)
    case = Case(config(algorithm=algorithm))
    assert case.run() == [
        "start_step", "rollout mode", "generate", "rewards", "reference", "old logprobs", "advantages",
        "forward_backward 2", "optimizer_step -> 1", "forward_backward 2", "optimizer_step -> 2",
        "forward_backward 2", "optimizer_step -> 3", "forward_backward 2", "optimizer_step -> 4",
        "save 1",
    ]  # fmt: skip
    one, two = case.train.batches[:2], case.train.batches[2:]
    assert sorted(one) == sorted(two), "each epoch trains on every prompt once"


@pytest.mark.parametrize(
    ("setting", "steps", "scored"),
    [("auto", 1, False), ("auto", 2, True), ("recompute", 1, True), ("rollout", 2, False)],
)
def test_old_logprobs_are_computed_only_where_the_update_does_not_give_them(
    setting: str, steps: int, scored: bool
) -> None:
    algorithm = AlgorithmConfig(old_logprobs=setting, mini_batches=steps)
    assert ("old logprobs" in Case(config(algorithm=algorithm)).run()) == scored


def test_the_mismatch_is_of_whatever_scored_the_rollout_first() -> None:
    """The rollout's log-probabilities are -1; the update's own forward pass says -1.25, a pass before it -1.5."""
    for mini_batches, difference in ((1, 0.25), (2, 0.5)):
        case = Case(config(algorithm=AlgorithmConfig(mini_batches=mini_batches)))
        case.run()
        ((_, metrics),) = case.records
        assert metrics["sampling/logp_difference/max"] == pytest.approx(difference)


def test_a_batch_that_is_not_full_is_generated_for_again() -> None:
    log = Case(config(), short=2).run()
    assert log[:10] == ["start_step", *(["rollout mode", "generate", "not enough"] * 2), "rollout mode", "generate",
                        "rewards"]  # fmt: skip


def test_an_attempt_that_died_is_made_again_from_the_mode_switch_on() -> None:
    log = Case(config(), deaths=2).run()
    assert log[:9] == [
        "start_step", "rollout mode", "generate", "restart after a death", "rollout mode", "generate",
        "restart after a death", "rollout mode", "generate",
    ]  # fmt: skip
    assert log[9:] == ["rewards", "advantages", "forward_backward 4", "optimizer_step -> 1", "save 1"]


def test_the_record_of_a_step() -> None:
    case = Case(config(), steps=2)
    case.run()
    assert [step for step, _ in case.records] == [1, 2]
    for version, (_, metrics) in enumerate(case.records, start=1):
        assert metrics["policy_version"] == version
        assert metrics["perf/tokens"] > 0 and metrics["loss"] == 0.5 and metrics["grad_norm"] == 1.0
        assert (metrics["rollout/counted"], metrics["sync/count"], metrics["reward"]) == (7.0, 3.0, 0.5)
        assert {"time/advantages", "time/forward_backward", "time/optimizer", "time/step"} <= metrics.keys()


def test_a_reward_model_scores_before_anything_uses_the_rewards() -> None:
    case = Case(config(validate_every=1), validation=1)

    def add(trajectories: list[Trajectory]) -> None:
        case.log.append(f"reward model {len(trajectories)}")
        for trajectory in trajectories:
            trajectory.reward = 10.0

    case.trainer.reward_model = SimpleNamespace(score=add)  # type: ignore[assignment]
    case.trainer.config.reward.fn = "exact_match"
    log = case.run()
    assert log[log.index("rewards") + 1 :][:2] == ["reward model 4", "advantages"]
    assert log[log.index("evaluate 1 × 1") + 1] == "reward model 1"
    assert case.records[0][1]["reward"] == case.records[0][1]["validation/reward"] == 10.0


class ValueModel(Train):
    """The critic's engine."""

    def values(self, samples: list[Sample]) -> list[list[float]]:
        self.log.append("values")
        return [[0.25] * len(sample.response_ids) for sample in samples]

    def forward_backward(self, samples: list[Sample], loss_fn: Any, **_: Any) -> Any:  # type: ignore[override]
        assert all(sample.returns and sample.values == [0.25] * len(sample.returns) for sample in samples)
        self.log.append(f"critic backward {len(samples)}")
        return {"loss": 1.0, "error": 8.0, "tokens": 4.0}, None

    def optimizer_step(self) -> dict[str, float]:
        self.version += 1
        self.log.append(f"critic step -> {self.version}")
        return {"grad_norm": 2.0}


class RecordingPPO(PPO):
    """Says when advantages are computed."""

    log: list[str]

    def samples(self, trajectories: Any, ref_logprobs: Any = None, **given: Any) -> Any:
        self.log.append("advantages")
        return super().samples(trajectories, ref_logprobs, **given)


def test_a_step_with_a_critic_and_its_warm_up() -> None:
    """Values, reference, advantages, the critic's two passes, then the policy, which waits for one step."""
    given = config(
        algorithm=AlgorithmConfig(name="ppo", kl_coef=0.1, kl_in="reward", kl_estimator="k1"),
        critic=CriticConfig(epochs=2, warmup_steps=1),
    )  # fmt: skip
    case = Case(given, steps=2)
    case.trainer.algorithm = algorithm = RecordingPPO(given.algorithm, given.rollout)
    algorithm.log = case.log
    case.trainer.critic = Critic(ValueModel(case.log), given.critic)  # type: ignore[arg-type]
    before = ["start_step", "rollout mode", "generate", "rewards", "values", "reference", "advantages"]
    log = case.run()
    assert log == [
        *before, "critic backward 4", "critic step -> 1", "critic backward 4", "critic step -> 2",
        *before, "critic backward 4", "critic step -> 3", "critic backward 4", "critic step -> 4",
        "forward_backward 4", "optimizer_step -> 1", "save 2",
    ]  # fmt: skip
    first, second = (metrics for _, metrics in case.records)
    assert first["policy_version"] == 0 and "grad_norm" not in first and second["policy_version"] == 1
    assert (second["critic/loss"], second["critic/error"], second["critic/grad_norm"]) == (1.0, 2.0, 2.0)


# -- what is saved and validated, and when -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "steps", "saved"),
    [(0, 3, [3]), (1, 3, [1, 2, 3]), (2, 5, [2, 4, 5]), (2, 4, [2, 4]), (10, 3, [3])],
)
def test_saved_at_its_interval_and_at_the_end_never_twice(every: int, steps: int, saved: list[int]) -> None:
    log = Case(config(checkpoint=CheckpointConfig(every=every)), steps=steps).run()
    assert [entry for entry in log if entry.startswith("save")] == [f"save {step}" for step in saved]


def test_nothing_is_saved_at_the_end_where_nobody_wants_it() -> None:
    log = Case(config(checkpoint=CheckpointConfig(every=2, at_end=False)), steps=3).run()
    assert [entry for entry in log if entry.startswith("save")] == ["save 2"]


def test_validated_before_the_first_step_at_its_interval_and_at_the_end() -> None:
    """The checkpoint of a step comes before its validation, which shares the next rollout's weights."""
    case = Case(config(validate_every=2, checkpoint=CheckpointConfig(every=2)), steps=5, validation=3)
    log = case.run()
    assert [entry for entry in log if entry.startswith(("save", "validated"))] == [
        "validated 0", "save 2", "validated 2", "save 4", "validated 4", "validated 5", "save 5",
    ]  # fmt: skip
    assert log[0] == "evaluate 3 × 1"
    assert case.extra["record"] == {}, "the last save comes after the record is logged"
    with_accuracy = [step for step, metrics in case.records if "validation/accuracy" in metrics]
    assert with_accuracy == [2, 4, 5] and case.records[1][1]["validation/accuracy"] == 1.0


def test_a_checkpoint_before_the_log_has_the_record() -> None:
    case = Case(config(checkpoint=CheckpointConfig(every=1)), steps=1)
    case.run()
    assert case.extra["record"]["loss"] == 0.5 and case.extra["record"]["policy_version"] == 1
    case = Case(config(), steps=2, saved={"rollouts": {"position": 2}, "step": 1, "record": {"loss": 0.25}})
    given: list[Any] = []
    case.trainer.logger.resume = lambda step, unlogged: given.append((step, unlogged))  # type: ignore[assignment]
    case.run()
    assert given == [(1, {"loss": 0.25})]


def test_accuracy_is_the_share_of_answers_that_are_right() -> None:
    case = Case(config(validate_every=1), validation=4)
    evaluate = case.source.evaluate

    def one_in_four(prompts: list[Prompt], params: SamplingParams) -> list[Trajectory]:
        found: list[Trajectory] = evaluate(prompts, params)
        for trajectory, reward in zip(found, (1.0, 0.0, 0.5, 1 - 1e-3), strict=True):
            trajectory.reward, trajectory.rewards = 3 * reward, {"first": reward, "second": 1.0}
        return found

    case.source.evaluate = one_in_four
    case.run()
    assert case.records[0][1]["validation/accuracy"] == 0.25
    assert case.records[0][1]["validation/reward"] == pytest.approx(3 * (1.5 + 1 - 1e-3) / 4)


def test_mini_batches_are_in_another_order_in_every_step_and_epoch() -> None:
    """The same ten prompts in five steps of two epochs of ten mini-batches: ten orders, all different."""
    algorithm = AlgorithmConfig(epochs=2, mini_batches=10)
    case = Case(config(data=DataConfig(train="unused", prompts_per_step=10), algorithm=algorithm), steps=5)
    case.run()
    lengths = [len(batch[0]) for batch in case.train.batches]
    orders = [tuple(lengths[start : start + 10]) for start in range(0, 100, 10)]
    assert all(sorted(order) == list(range(1, 11)) for order in orders) and len(set(orders)) == 10


@pytest.mark.parametrize(("every", "prompts"), [(0, 3), (2, 0)], ids=["off", "no-prompts"])
def test_not_validated(every: int, prompts: int) -> None:
    log = Case(config(validate_every=every), steps=2, validation=prompts).run()
    assert not [entry for entry in log if "evaluate" in entry or "validated" in entry]


# -- how runs end and go on --------------------------------------------------------------------------------------------


def test_an_interruption_waits_for_the_end_of_the_step_and_saves() -> None:
    case = Case(config(), steps=10, interrupted_at=3)
    log = case.run()
    assert case.trainer.step == 3 and [step for step, _ in case.records] == [1, 2, 3]
    assert log[-2:] == ["optimizer_step -> 3", "save 3"] and log.count("save 3") == 1


def test_an_interruption_right_after_a_checkpoint_saves_no_second_time() -> None:
    log = Case(config(checkpoint=CheckpointConfig(every=2)), steps=10, interrupted_at=2).run()
    assert log[-1] == "save 2" and log.count("save 2") == 1


def test_a_lost_rollout_pool_saves_the_last_complete_step_and_is_told() -> None:
    case = Case(config(), steps=10)
    case.trainer.train_step()
    case.trainer.step += 1
    case.source.error = RolloutLostError("rank 1 of the job is gone")
    with pytest.raises(RolloutLostError, match="is gone"):
        case.run()
    assert case.log[-1] == "save 1" and case.extra == {"rollouts": {"position": 2}, "step": 1, "record": {}}


def test_any_other_error_saves_nothing() -> None:
    case = Case(config(), steps=10)
    case.source.error = OSError("no disk")
    with pytest.raises(OSError, match="no disk"):
        case.run()
    assert not [entry for entry in case.log if entry.startswith("save")]


def test_a_resumed_run_goes_on_as_the_uninterrupted_one() -> None:
    """Same prompts, same mini-batches in the same order; no validation before its first step."""
    given = config(validate_every=10, algorithm=AlgorithmConfig(mini_batches=2))
    whole = Case(given, steps=5, validation=2)
    whole.run()
    first = Case(given, steps=10, interrupted_at=3, validation=2)
    first.run()
    second = Case(given, steps=5, validation=2, saved=first.extra)
    second.train.version = 6
    log = second.run()
    assert second.said == ["from 3", "resumed at step 3, policy version 6: 2 steps to go (checkpoint.resume=never "
                           "starts over)"]  # fmt: skip
    assert log[0] == "start_step" and [step for step, _ in second.records] == [4, 5]
    assert first.train.batches + second.train.batches == whole.train.batches


def test_nothing_left_to_do_saves_nothing() -> None:
    case = Case(config(), steps=3, saved={"step": 3, "rollouts": {"position": 6}})
    assert case.run() == []
    assert case.said[-1].startswith("resumed at step 3, policy version 0: nothing left to do")


# -- every schedule in both placements ---------------------------------------------------------------------------------

SCHEDULES = {
    "colocated": ("sync", "partial"),
    "disaggregated": ("sync", "partial", "one_step_off", "async"),
}


class Called:
    """A RolloutSource whose calls by the loop are written down."""

    def __init__(self, source: Any, log: list[str]) -> None:
        self._source, self._log = source, log

    def __getattr__(self, name: str) -> Any:
        if name in ("start_step", "enter_rollout_mode", "generate", "rewards"):
            self._log.append(name.replace("enter_rollout_mode", "rollout mode"))
        return getattr(self._source, name)


def source_of(placement: str, given: Config, train: Train, log: list[str]) -> Any:
    """The real RolloutSource of a placement, over fakes."""
    loader = PromptLoader(PROMPTS, prompts_per_step=given.data.prompts_per_step, shuffle=False, seed=1)
    here: Any = {"config": given, "world": World(), "loader": loader, "phases": phases()}
    if placement == "colocated":
        # The second sample of every other prompt takes long, so that partial has something to interrupt.
        sharding: Any = Sharding(train, log, lambda prompt, sample: 2 + 4 * (sample and prompt % 2))
        return ColocatedRollouts(sharding=sharding, scorer=Scorer(log), **here)  # type: ignore[arg-type]
    sync: Any = WeightSync(Transfer(log))  # type: ignore[arg-type]
    return RemoteRollouts(train=train, weight_sync=sync, mailbox=Replica(log), **here)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("placement", "schedule"), [(placement, name) for placement, names in SCHEDULES.items() for name in names]
)
def test_every_schedule_keeps_the_order_of_a_step(tmp_path: Path, placement: str, schedule: str) -> None:
    given = config(
        output_dir=str(tmp_path), schedule=ScheduleConfig(name=schedule, staleness=2, over_provision=2.0),
        placement=PlacementConfig(name=placement), algorithm=AlgorithmConfig(kl_coef=0.1, mini_batches=2),
    )  # fmt: skip
    log: list[str] = []
    train = Train(log)
    source: Any = Called(source_of(placement, given, train, inner := list[str]()), log)
    case = Case(given, steps=3, rollouts=source, log=log, train=train)
    case.run()
    expected: list[str] = []
    for version in (0, 2, 4):
        expected += ["start_step", "rollout mode", "generate", "rewards", "reference", "old logprobs", "advantages"]
        for step in (1, 2):
            expected += ["forward_backward 2", f"optimizer_step -> {version + step}"]
    assert log == [*expected, "save 3"]
    syncs = [entry for entry in inner if entry.startswith(("rollout mode", "sync"))]
    assert [int(entry.split()[-1]) for entry in syncs] == [0, 2, 4], "once per version that is generated with"
