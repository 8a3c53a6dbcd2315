"""The phase sequence. One step reads top to bottom; the order of the lines is the order of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybridengine.algorithms.functional import LossCounts
from hybridengine.algorithms.registry import Algorithm
from hybridengine.checkpoint import Checkpointer
from hybridengine.config import Config
from hybridengine.distributed.exchange import all_gather_lists
from hybridengine.distributed.world import World
from hybridengine.engines.train.base import TrainEngine
from hybridengine.engines.train.batching import mini_batches, partition
from hybridengine.interrupt import Interrupt
from hybridengine.memory.residency import OPTIMIZE, OPTIMIZER, SCORE, SCORE_REFERENCE, TRAIN
from hybridengine.metrics import MetricLogger
from hybridengine.mismatch import Mismatch
from hybridengine.phases import Phases
from hybridengine.sampling import validation_params
from hybridengine.saving import SavePolicy
from hybridengine.schedule.base import RolloutLostError, RolloutSource
from hybridengine.types import Prompt, Sample, Trajectory


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
    total_steps: int
    step: int = 0
    saved_step: int = -1

    def __post_init__(self) -> None:
        self.saving = SavePolicy(self.config.checkpoint, self.checkpointer.directory)

    def run(self) -> None:
        """Train to ``total_steps``, or to an interruption; either way the last state is saved.

        Raises:
            RolloutLostError: the rollout pool of a disaggregated job is gone; the last state is saved then too.
        """
        self._resume()
        try:
            self._loop()
        except RolloutLostError:
            self._save()
            raise
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
                self._save()
            if self._due(self.config.validate_every) or self.step == self.total_steps:
                metrics |= self._validate()
            if self.saving.improved(metrics):
                self._save_best(metrics)
            times = self.phases.timer.end_step(tokens=metrics["perf/tokens"])
            with self.phases("logging"):
                self.logger.log(self.step, metrics | times)

    def train_step(self) -> dict[str, float]:
        """One rollout and the optimizer steps on it."""
        trajectories, counted = self.rollouts.next()
        self.logger.rollout(self.step + 1, trajectories)
        with self.phases("advantages"):
            samples, metrics = self._samples(trajectories)
        mismatch = Mismatch(self.train.version)
        if self._needs_old_logprobs():
            with self.phases("old_logprobs", SCORE):
                self._score_old(samples, mismatch)
        metrics |= self._update(samples, mismatch)
        metrics["perf/tokens"] = float(sum(t.length for t in trajectories))
        metrics["policy_version"] = float(self.train.version)
        return metrics | counted | self.rollouts.metrics() | self.phases.tracker.metrics()

    # -- phases ------------------------------------------------------------------------------------

    def _samples(self, trajectories: list[Trajectory]) -> tuple[list[Sample], dict[str, float]]:
        references = None
        if self.algorithm.needs_reference:
            with self.phases("reference", SCORE_REFERENCE):
                plain = self.algorithm.plain_samples(trajectories)
                references = self._logprobs(plain, reference=True)
        return self.algorithm.samples(trajectories, references)

    def _score_old(self, samples: list[Sample], mismatch: Mismatch) -> None:
        """Log-probabilities under the policy that generated, before its first update of this rollout."""
        for sample, logprobs in zip(samples, self._logprobs(samples), strict=True):
            sample.old_logprobs = logprobs
        mismatch.add(samples[self.world.rank :: self.world.size])

    def _logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> list[list[float]]:
        share = partition([s.length for s in samples], self.train.num_replicas)[self.train.replica]
        found = self.train.logprobs([samples[i] for i in share], reference=reference)
        return all_gather_lists(dict(zip(share, found, strict=True)), len(samples))

    def _update(self, samples: list[Sample], mismatch: Mismatch) -> dict[str, float]:
        """``epochs × mini_batches`` optimizer steps."""
        sums: list[dict[str, float]] = []
        last: dict[str, float] = {}
        algorithm = self.config.algorithm
        for epoch in range(algorithm.epochs):
            order_seed = self.config.seed + 1000003 * self.step + epoch
            for batch in mini_batches(
                len(samples), self.config.rollout.samples_per_prompt, algorithm.mini_batches, seed=order_seed
            ):
                with self.phases("batching"):
                    chosen = [samples[i] for i in batch]
                    loss_fn = self.algorithm.loss_fn(LossCounts.of(chosen))
                    share = partition([s.length for s in chosen], self.train.num_replicas)[self.train.replica]
                    mine = [chosen[i] for i in share]
                on_policy = not self._needs_old_logprobs()
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
            return self.algorithm.metrics(sums) | mismatch.reduce() | last

    # -- around the step ---------------------------------------------------------------------------

    def _needs_old_logprobs(self) -> bool:
        """A single optimizer step per rollout is on-policy: its own forward pass gives the denominator."""
        algorithm = self.config.algorithm
        if algorithm.old_logprobs == "auto":
            return algorithm.epochs * algorithm.mini_batches > 1
        return algorithm.old_logprobs == "recompute"

    def _validate(self) -> dict[str, float]:
        if not self.validation or self.config.validate_every == 0:
            return {}
        with self.phases("validation"):
            trajectories = self.rollouts.evaluate(self.validation, validation_params(self.config))
        rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
        correct = torch.tensor([next(iter(t.rewards.values())) >= 1 - 1e-6 for t in trajectories]).double()
        metrics = {
            "validation/reward": rewards.mean().item(),
            "validation/accuracy": correct.mean().item(),
            "validation/samples": float(len(trajectories)),
            "validation/mean_length": sum(len(t.token_ids) for t in trajectories) / len(trajectories),
        }
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

    def _save(self) -> None:
        if self.saved_step == self.step:
            return
        with self.phases("checkpoint", OPTIMIZE):
            self.checkpointer.save(self.step, self.train, {"rollouts": self.rollouts.state_dict(), "step": self.step})
        self.saved_step = self.step
        self.saving.saved()

    def _save_best(self, metrics: dict[str, float]) -> None:
        self._save()
        path, metric = self.checkpointer.path(self.step), self.config.checkpoint.best
        assert metric is not None and self.saving.metric is not None
        self.checkpointer.mark_best(path, self.step, metric, metrics[self.saving.metric])

    def _resume(self) -> None:
        extra: dict[str, Any] | None = self.checkpointer.load(self.train, self.config.checkpoint.resume)
        if extra is not None:
            self.step = int(extra["step"])
            self.rollouts.load_state_dict(extra["rollouts"])
            self.saved_step = self.step
        self.logger.resume(self.step)
        if extra is not None and self.world.is_main:
            left = self.total_steps - self.step
            what = f"{left} steps to go" if left > 0 else "nothing left to do"
            self.logger.message(
                f"resumed at step {self.step}, policy version {self.train.version}: {what} "
                "(checkpoint.resume=never starts over)"
            )
