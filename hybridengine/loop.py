"""The phase sequence. One step reads top to bottom; the order of the lines is the order of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hybridengine.algorithms.base import Algorithm
from hybridengine.algorithms.critic import Critic
from hybridengine.algorithms.losses import LossCounts
from hybridengine.checkpoint.beside import WithCritic
from hybridengine.checkpoint.checkpointer import Checkpointable, Checkpointer
from hybridengine.checkpoint.policy import SavePolicy
from hybridengine.config import Config
from hybridengine.distributed.world import World
from hybridengine.engines.train.base import TrainEngine
from hybridengine.engines.train.batching import mini_batches
from hybridengine.engines.train.shares import gathered, share_of
from hybridengine.interrupt import Interrupt
from hybridengine.memory.phases import Phases
from hybridengine.memory.residency import (
    OPTIMIZE,
    OPTIMIZER,
    SCORE,
    SCORE_REFERENCE,
    SCORE_REWARD,
    SCORE_VALUES,
    TRAIN,
    TRAIN_CRITIC,
)
from hybridengine.mismatch import Mismatch
from hybridengine.monitors import STOPPED, Monitor
from hybridengine.parity.run_probe import RunProbe
from hybridengine.report.metrics import MetricLogger
from hybridengine.rewards.model import RewardModel
from hybridengine.sampling import validation_params
from hybridengine.schedule.base import RolloutLostError, RolloutSource
from hybridengine.types import Prompt, Sample, SamplingParams, Trajectory


@dataclass(slots=True)
class Scores:
    """What the models say of a rollout, per sample and response token.

    Attributes:
        values: of the state before each token, by the critic.
        reference: of the frozen reference model; None where the algorithm needs none.
        old: of the policy before its first update on this rollout; None where that update's own forward pass gives it.
    """

    values: list[list[float]] | None = None
    reference: list[list[float]] | None = None
    old: list[list[float]] | None = None


@dataclass(kw_only=True)
class Trainer:
    """Everything one run needs, already built; :meth:`run` is the loop."""

    config: Config
    world: World
    train: TrainEngine
    rollouts: RolloutSource
    algorithm: Algorithm
    validation: Sequence[Prompt]
    checkpointer: Checkpointer
    logger: MetricLogger
    phases: Phases
    interrupt: Interrupt
    monitor: Monitor
    total_steps: int
    critic: Critic | None = None
    reward_model: RewardModel | None = None
    step: int = 0
    saved_step: int = -1
    probe: RunProbe | None = None

    def __post_init__(self) -> None:
        self.saving = SavePolicy(self.config.checkpoint, self.checkpointer.directory)

    def run(self) -> None:
        """Train to ``total_steps``, or to an interruption; either way the last state is saved (``checkpoint.at_end``).

        Raises:
            RolloutLostError: the rollout pool of a disaggregated job is gone; the last state is saved then too.
            ParityError: rollout engine and trainer disagree about the same tokens, before anything is trained.
        """
        self._resume()
        if self.probe is not None and self.step < self.total_steps:
            self.probe.run(self.train, self.rollouts, self.phases)
        try:
            self._loop()
        except RolloutLostError:
            self._save()
            raise
        if self.config.checkpoint.at_end:
            self._save()

    def _loop(self) -> None:
        if self.step == 0:
            self._validate()
        while self.step < self.total_steps and not self._interrupted():
            self.phases.timer.start_step(self.step + 1)
            metrics = self.train_step()
            self.step += 1
            # The checkpoint needs what is on the device now; a validation after it shares the next rollout's sync.
            if self.saving.due(self.step):
                self._save(metrics)
            if self._due(self.config.validate_every) or self.step == self.total_steps:
                metrics |= self._validate()
            if self.saving.improved(metrics):
                self._save_best(metrics)
            times = self.phases.timer.end_step(tokens=metrics["perf/tokens"])
            with self.phases("logging"):
                metrics |= self.monitor.check(self.step, metrics)
                self.logger.log(self.step, metrics | times)
            if self.monitor.stopped:
                self.interrupt.stop(STOPPED)

    def train_step(self) -> dict[str, float]:
        """One rollout and the optimizer steps on it; the order of the lines is the order of memory."""
        rollouts, batch = self.rollouts, None
        rollouts.start_step()
        while batch is None:  # again where a batch is not full yet
            for attempt in rollouts.attempts():  # again where an engine died
                with attempt:
                    rollouts.enter_rollout_mode()  # weights synced, training memory gone, KV cache awake
                    rollouts.generate()
            batch = rollouts.rewards()
        trajectories, counted = batch
        self._add_model_rewards(trajectories)
        with self.phases("monitor"):
            counted |= self.monitor.look(self.step + 1, trajectories)
        self.logger.rollout(self.step + 1, trajectories)
        greedy = self._greedy_rewards(trajectories) if self.algorithm.needs_greedy else None
        mismatch = Mismatch(self.train.version)
        scores = self._scores(trajectories, mismatch)
        with self.phases("advantages"):
            samples, metrics = self.algorithm.samples(
                trajectories, scores.reference, old_logprobs=scores.old, greedy_rewards=greedy, values=scores.values
            )
        if self.critic is not None:
            metrics |= self._update_critic(self.critic, samples)
        if self.critic is None or not self.critic.in_warmup(self.step):
            metrics |= self._update(samples, mismatch)
        metrics["perf/tokens"] = float(sum(t.length for t in trajectories))
        metrics["policy_version"] = float(self.train.version)
        return metrics | counted | rollouts.metrics() | self.phases.tracker.metrics()

    # -- phases ------------------------------------------------------------------------------------

    def _greedy_rewards(self, trajectories: list[Trajectory]) -> list[float]:
        """One greedy sample per prompt, of the version that the rollout ended with: nothing has been trained since, so
        the engine's weights stay as they are."""
        prompts = [t.prompt for t in trajectories[:: self.config.rollout.samples_per_prompt]]
        params = SamplingParams(n=1, max_tokens=self.config.rollout.max_tokens, temperature=0.0)
        with self.phases("greedy"):
            greedy = self.rollouts.evaluate(prompts, params)
        self._add_model_rewards(greedy)
        return [float(t.reward or 0.0) for t in greedy]

    def _add_model_rewards(self, trajectories: list[Trajectory]) -> None:
        if self.reward_model is not None:
            with self.phases("reward_model", SCORE_REWARD):
                self.reward_model.score(trajectories)

    def _scores(self, trajectories: list[Trajectory], mismatch: Mismatch) -> Scores:
        """The critic's values; log-probabilities by the reference, by the policy before its first update on them."""
        scores = Scores()
        plain = self.algorithm.plain_samples(trajectories)
        if self.critic is not None:
            with self.phases("values", SCORE_VALUES):
                scores.values = gathered(plain, self.critic.engine, self.critic.engine.values)
        if self.algorithm.needs_reference:
            with self.phases("reference", SCORE_REFERENCE):
                scores.reference = self._logprobs(plain, reference=True)
        if self.algorithm.needs_old_logprobs:
            with self.phases("old_logprobs", SCORE):
                scores.old = self._logprobs(plain)
                share = slice(self.world.rank, None, self.world.size)
                mismatch.add(plain[share], scores.old[share])
        return scores

    def _logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> list[list[float]]:
        return gathered(samples, self.train, partial(self.train.logprobs, reference=reference))

    def _batches(self, samples: list[Sample], epochs: int) -> Iterator[list[Sample]]:
        """Those of the ``epochs × mini_batches`` optimizer steps on a rollout."""
        algorithm = self.config.algorithm
        for epoch in range(epochs):
            order_seed = self.config.seed + 1000003 * self.step + epoch
            for batch in mini_batches(
                len(samples), self.config.rollout.samples_per_prompt, algorithm.mini_batches, seed=order_seed
            ):
                yield [samples[i] for i in batch]

    def _update_critic(self, critic: Critic, samples: list[Sample]) -> dict[str, float]:
        """``critic.epochs × mini_batches`` optimizer steps."""
        sums: list[dict[str, float]] = []
        last: dict[str, float] = {}
        for chosen in self._batches(samples, critic.config.epochs):
            counts = LossCounts.of(chosen)
            if counts.tokens:
                with self.phases("critic", TRAIN_CRITIC):
                    found, _ = critic.engine.forward_backward(share_of(chosen, critic.engine), critic.loss_fn(counts))
                    last = critic.engine.optimizer_step()
                sums.append(found)
        return critic.metrics(sums, last)

    def _update(self, samples: list[Sample], mismatch: Mismatch) -> dict[str, float]:
        """``epochs × mini_batches`` optimizer steps, less those of which no token is trained on."""
        sums: list[dict[str, float]] = []
        last: dict[str, float] = {}
        skipped = 0
        for chosen in self._batches(samples, self.config.algorithm.epochs):
            with self.phases("batching"):
                counts = LossCounts.of(chosen)
                if not counts.tokens:  # momentum and weight decay would move the weights all the same
                    skipped += 1
                    continue
                loss_fn = self.algorithm.loss_fn(counts)
                mine = share_of(chosen, self.train)
            on_policy = not self.algorithm.needs_old_logprobs
            with self.phases("forward_backward", TRAIN):
                found, logprobs = self.train.forward_backward(
                    mine, loss_fn, collect_logprobs=on_policy, before_last_backward=self._fetch_optimizer
                )
            with self.phases("optimizer", OPTIMIZE):
                last = self.train.optimizer_step()
            sums.append(found)
            if logprobs is not None:
                with self.phases("mismatch"):
                    mismatch.add(mine, logprobs)
        with self.phases("metrics"):
            found = self.algorithm.metrics(sums) | mismatch.reduce() | last
        return found | {"skipped_updates": float(skipped)}

    # -- around the step ---------------------------------------------------------------------------

    def _validate(self) -> dict[str, float]:
        if not self.validation or self.config.validate_every == 0:
            return {}
        with self.phases("validation"):
            trajectories = self.rollouts.evaluate(self.validation, validation_params(self.config))
        self._add_model_rewards(trajectories)
        rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
        metrics = {
            "validation/reward": rewards.mean().item(),
            "validation/samples": float(len(trajectories)),
            "validation/mean_length": sum(len(t.token_ids) for t in trajectories) / len(trajectories),
        }
        if (
            self.reward_model is None or self.config.reward.fn or self.config.reward.terms
        ):  # a score is not right or wrong
            correct = [next(iter(t.rewards.values())) >= 1 - 1e-6 for t in trajectories]
            metrics["validation/accuracy"] = sum(correct) / len(correct)
        self.logger.validation(self.step, metrics, trajectories)
        return metrics

    def _interrupted(self) -> bool:
        with self.phases("interrupt"):
            return self.interrupt.agreed()

    def _fetch_optimizer(self) -> None:
        """Its memory comes back while the last backward pass of an optimizer step runs."""
        self.phases.prefetch(OPTIMIZER, during="forward_backward")

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _save(self, record: dict[str, float] | None = None) -> None:
        """``record``: of the step, where it is not logged yet; a kill before that must leave no hole in the curve."""
        if self.saved_step == self.step:
            return
        with self.phases("checkpoint", OPTIMIZE):
            extra = {"rollouts": self.rollouts.state_dict(), "step": self.step, "record": dict(record or {})}
            self.checkpointer.save(self.step, self._saved(), extra)
        self.saved_step = self.step
        self.saving.saved()

    def _saved(self) -> Checkpointable:
        if self.critic is None:
            return self.train
        return WithCritic(self.train, self.critic.engine, before_critic=partial(self.phases.prepare, TRAIN_CRITIC))

    def _save_best(self, metrics: dict[str, float]) -> None:
        self._save(metrics)
        path, metric = self.checkpointer.path(self.step), self.config.checkpoint.best
        assert metric is not None and self.saving.metric is not None
        self.checkpointer.mark_best(path, self.step, metric, metrics[self.saving.metric])

    def _resume(self) -> None:
        extra: dict[str, Any] | None = self.checkpointer.load(self._saved(), self.config.checkpoint.resume)
        if extra is not None:
            self.step = int(extra["step"])
            self.rollouts.load_state_dict(extra["rollouts"])
            self.saved_step = self.step
        self.logger.resume(self.step, unlogged=extra.get("record") if extra is not None else None)
        self.monitor.resume(self.logger.history)
        if extra is not None and self.world.is_main:
            left = self.total_steps - self.step
            what = f"{left} steps to go" if left > 0 else "nothing left to do"
            self.logger.message(
                f"resumed at step {self.step}, policy version {self.train.version}: {what} "
                "(checkpoint.resume=never starts over)"
            )
