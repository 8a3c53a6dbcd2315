"""RemoteRollouts: batches from the rollout pool, on the ranks of the training pool.

The pool's first rank (the controller) admits groups, sends them to the replica with the least to do, and collects what
comes back while the others wait for the batch. Per schedule:

    sync          update weights, admit a batch, wait for it
    partial       update weights, admit more than a batch, stop the replicas as soon as a batch is complete
    one_step_off  wait until nothing is running, update weights, admit the next batch, hand out the one just completed:
                  it is trained while the next is generated
    async         update weights in the middle of whatever is running, admit up to the staleness bound, wait for a batch
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist

from hybridengine.config import Config
from hybridengine.data.loader import PromptLoader
from hybridengine.distributed.errors import PeerError, raise_together
from hybridengine.distributed.mailbox import Mailbox, PeerGoneError
from hybridengine.distributed.world import World
from hybridengine.engines.train.base import TrainEngine
from hybridengine.memory.phases import Phases
from hybridengine.rewards.load import reward_names
from hybridengine.rewards.stats import ScoringStats
from hybridengine.schedule.base import RolloutLostError
from hybridengine.schedule.messages import (
    Done,
    Evaluate,
    Evaluated,
    Failed,
    Ready,
    Recall,
    Recalled,
    Stop,
    Submit,
    Update,
    Usage,
)
from hybridengine.schedule.pool import Group, make_pool
from hybridengine.sync.weight_sync import WeightSync
from hybridengine.types import Prompt, SamplingParams, Trajectory

#: How long a replica may take to hear that the run is over.
STOP_SECONDS = 5.0


class RemoteRollouts:
    """See RolloutSource.

    Args:
        mailbox: to the replicas' first ranks; None except on the controller.
        weight_sync: spans both pools: collective over the job.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        *,
        train: TrainEngine,
        weight_sync: WeightSync,
        loader: PromptLoader,
        phases: Phases,
        mailbox: Mailbox | None,
    ) -> None:
        self.config, self.world, self.train, self.phases = config, world, train, phases
        self.loader, self.mailbox, self.weight_sync = loader, mailbox, weight_sync
        self.transfer = weight_sync.transfer.method
        self.pool = make_pool(config)
        self.schedule = config.schedule.name
        self._version = -1  # of the rollout pool's weights
        self._batch: tuple[list[Trajectory], dict[str, float]] | None = None
        self._lost = False
        self._replicas = mailbox.peers if mailbox is not None else ()
        self._running: dict[int, dict[int, int]] = {peer: {} for peer in self._replicas}  # peer -> group -> samples
        self._resubmit = False
        self._usage = dict.fromkeys(("busy", "idle", "tokens", "restarts"), 0.0)
        self._scoring: list[list[float]] = []  # what it cost, by replica and window since the last step's record
        self._scoring_stats = ScoringStats(reward_names(config.reward))

    # -- the trainer's side ------------------------------------------------------------------------

    def start_step(self) -> None:
        self.pool.mark_trained()

    def attempts(self) -> Iterator[AbstractContextManager[None]]:
        """One: the rollout pool restarts its engines itself."""
        yield nullcontext()

    def enter_rollout_mode(self) -> None:
        """Bring the rollout pool to the trainer's version; once per version.

        Raises:
            RolloutLostError: on every training rank: a replica can't take part, or was lost while it did.
        """
        if self._version == self.train.version:
            return
        if self.schedule == "one_step_off":  # a batch is of one version, also when a validation comes before it
            with self.phases("drain"):
                self._together(self._drain)
        with self.phases("sync"):
            self._together(self._announce)
            error: Exception | None = None
            try:
                self.weight_sync.run(self.train.version)
            except RuntimeError as caught:  # WeightSyncError, PeerError, PeerLostError
                error = caught
            self._raise_lost(error)
            self._version = self.train.version

    def generate(self) -> None:
        """Raises RolloutLostError on every training rank when the rollout pool is gone or silent."""
        with self.phases("rollout"):
            self._batch = self._together(self._wait_for_batch)

    def rewards(self) -> tuple[list[Trajectory], dict[str, float]] | None:
        return self._batch

    def evaluate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Trajectory]:
        self.enter_rollout_mode()
        with self.phases("rollout"):
            return self._together(lambda: self._evaluate(list(prompts), params))

    def state_dict(self) -> dict[str, Any]:
        """Collective. What is running is called back, so that its tokens are saved; it goes on in the next step.

        Raises:
            RolloutLostError: on every training rank; asked again, it gives the state without what is running.
        """
        if not self._lost:
            self._together(self._recall)
        if self.mailbox is None:
            return {}
        return {"loader": self.loader.state_dict(), "pool": self.pool.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.mailbox is not None:
            self.loader.load_state_dict(state["loader"])
            self.pool.load_state_dict(state["pool"])
            self._resubmit = True

    def metrics(self) -> dict[str, float]:
        total = self._usage["busy"] + self._usage["idle"]
        found = self.weight_sync.metrics() | {"rollout/restarts": self._usage["restarts"]}
        if self._scoring:
            found |= self._scoring_stats.metrics(self._scoring)
            self._scoring = []
        if total:
            found |= {"rollout/idle_fraction": self._usage["idle"] / total, "rollout/tokens": self._usage["tokens"]}
        return found

    def close(self) -> None:
        if self.mailbox is not None:
            for peer in self._replicas:
                try:
                    self.mailbox.send(peer, Stop(), timeout=STOP_SECONDS)
                except PeerGoneError:
                    pass
            self.mailbox.close()
        self.weight_sync.close()

    # -- the controller's side ---------------------------------------------------------------------

    def _announce(self) -> None:
        """Every replica has stopped, and its engine takes weights: restarting a dead one comes before this."""
        self._send_all(Update(self.train.version))
        for _ in self._replicas:
            self._receive(Ready)

    def _wait_for_batch(self) -> tuple[list[Trajectory], dict[str, float]]:
        """The batch; whatever may be generated while it is trained has been submitted by then."""
        self._admit()
        while (batch := self.pool.take()) is None:
            self._admit()  # groups dropped for their age leave room
            self._receive()
        if self.schedule == "partial":
            self._recall()
        elif self.schedule in ("one_step_off", "async"):
            self._admit()
        return batch

    def _admit(self) -> None:
        """Resubmit recalled samples and submit new groups, as far as the schedule allows."""
        count = self.pool.capacity(one_batch=self.schedule == "one_step_off")
        if self._resubmit:
            self._submit(self.pool.open)
            self._resubmit = False
        if count > 0:
            self._submit(self.pool.admit(self.loader.take(count)))

    def _submit(self, groups: Sequence[Group]) -> None:
        assert self.mailbox is not None
        shares: dict[int, list[Group]] = {peer: [] for peer in self._replicas}
        for group in groups:
            peer = min(self._replicas, key=lambda peer: sum(self._running[peer].values()))
            self._running[peer][group.index] = len(group.unfinished())
            shares[peer].append(group)
        for peer, share in shares.items():
            if share:
                self.mailbox.send(peer, Submit(share))

    def _drain(self) -> None:
        """Until nothing is running. Groups without a signal are replaced here, under the weights of their batch."""
        while any(self._running.values()):
            self._receive()
            if self.pool.replacement is not None:
                self._admit()

    def _recall(self) -> None:
        """Everything that is running comes back into the pool and is submitted again with the next admission."""
        self._send_all(Recall())
        for _ in self._replicas:
            for sample in self._receive(Recalled).samples:
                self.pool.update(sample, finished=False)
        self._running = {peer: {} for peer in self._replicas}
        self._resubmit = True

    def _evaluate(self, prompts: list[Prompt], params: SamplingParams) -> list[Trajectory]:
        assert self.mailbox is not None
        for i, peer in enumerate(self._replicas):
            self.mailbox.send(peer, Evaluate(prompts[i :: len(self._replicas)], params))
        found = [sample for _ in self._replicas for sample in self._receive(Evaluated).samples]
        position = {prompt.index: i for i, prompt in enumerate(prompts)}
        return sorted(found, key=lambda sample: (position[sample.prompt.index], sample.sample_index))

    def _receive(self, expected: type | None = None) -> Any:
        """Handle messages up to and including one of type ``expected`` (any one when None).

        Raises:
            RolloutLostError: a replica failed, is gone, or none sent anything for distributed.timeout_seconds.
        """
        assert self.mailbox is not None
        begin = time.monotonic()
        while True:
            received = self.mailbox.receive(timeout=1.0)
            if received is None:
                if time.monotonic() - begin > self.config.distributed.timeout_seconds:
                    raise RolloutLostError(
                        f"the rollout pool has sent nothing for {self.config.distributed.timeout_seconds:g} s "
                        "(distributed.timeout_seconds)"
                    )
                continue
            peer, message = received
            if isinstance(message, Failed):
                raise RolloutLostError(f"rank {peer} of the job, in the rollout pool, failed: {message.reason}")
            if isinstance(message, Done):
                for sample in message.samples:
                    self._finished(peer, sample)
            elif isinstance(message, Usage):
                self._usage["busy"] += message.busy_seconds
                self._usage["idle"] += message.idle_seconds
                self._usage["tokens"] += message.tokens
                self._usage["restarts"] += message.restarts
                if message.scoring:
                    self._scoring.append(message.scoring)
            if expected is None or isinstance(message, expected):
                return message

    def _finished(self, peer: int, sample: Trajectory) -> None:
        self.pool.update(sample, finished=True)
        running = self._running[peer]
        running[sample.prompt.index] -= 1
        if not running[sample.prompt.index]:
            del running[sample.prompt.index]

    def _send_all(self, message: Any) -> None:
        if self.mailbox is not None:
            for peer in self._replicas:
                self.mailbox.send(peer, message)

    # -- agreement ---------------------------------------------------------------------------------

    def _together(self, work: Any) -> Any:
        """Run ``work`` on the controller and hand its result, or its failure, to all training ranks."""
        error: Exception | None = None
        box: list[Any] = [None]
        if self.mailbox is not None:
            try:
                box[0] = work()
            except (PeerGoneError, RolloutLostError) as caught:
                error = caught
        self._raise_lost(error)
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def _raise_lost(self, error: Exception | None) -> None:
        """RolloutLostError on all training ranks where one has an ``error``."""
        try:
            raise_together(error, "waiting for the rollout pool")
        except RuntimeError as lost:
            if lost is not error and not isinstance(lost, PeerError):
                raise  # the training ranks couldn't even agree
            self._lost = True
            raise RolloutLostError(str(lost)) from lost
