"""RolloutWorker: the loop of one rank of the rollout pool."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from hybridengine.distributed.mailbox import Mailbox
from hybridengine.engines.rollout.base import EngineLostError, RolloutEngine
from hybridengine.engines.rollout.generate import generate
from hybridengine.rewards.scorer import Scorer
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
from hybridengine.schedule.recorder import RolloutRecorder
from hybridengine.sync.transfer.base import WeightTransfer
from hybridengine.sync.weight_sync import WeightSync
from hybridengine.types import SamplingParams, Trajectory

log = logging.getLogger(__name__)

#: Seconds between looks at the mailbox while there is nothing to generate.
IDLE_SECONDS = 0.05


class RolloutWorker:
    """Generates, scores and handles messages until Stop arrives.

    The first rank of a tensor-parallel group reads the messages and tells the others, so that all make the same calls
    to the engine in the same order.

    An engine in processes of its own that dies is started again here, on the weights that it had; what was running goes
    on from its last token, and the training pool learns nothing but the number of restarts.

    Args:
        mailbox: to the training pool's first rank; None on the other ranks of a tensor-parallel group.
        group: ranks of this replica; None when it has one.
        weights_group: ranks of both pools, which take part in a weight sync; None: all.
        controller: rank of the training pool's first rank in the mailbox's group.
        max_num_seqs: samples generated at once.
        recorder: watches the engine.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        transfer: WeightTransfer,
        scorer: Scorer,
        *,
        params: SamplingParams,
        seed: int,
        max_num_seqs: int,
        mailbox: Mailbox | None,
        group: dist.ProcessGroup | None,
        weights_group: dist.ProcessGroup | None = None,
        recorder: RolloutRecorder,
        controller: int = 0,
    ) -> None:
        self.engine, self.scorer = engine, scorer
        self.weight_sync = WeightSync(transfer, finish=self._finish_update, group=weights_group)
        self.params, self.seed, self.max_num_seqs = params, seed, max_num_seqs
        self.mailbox, self._group, self._controller = mailbox, group, controller
        self.recorder = recorder
        self._stream: Any = None
        self._queue: deque[tuple[Trajectory, int]] = deque()  # (sample, step of its seeds), not submitted yet
        self._running: dict[tuple[int, int], tuple[Trajectory, int]] = {}  # the same, submitted and not finished
        self._usage = Usage()

    def run(self) -> None:
        """Until Stop. An error is reported to the training pool, which decides what becomes of the run."""
        try:
            while self._handle(self._messages()):
                self._advance()
        except Exception as error:
            self._tell(Failed(f"{type(error).__name__}: {error}"))
            self._await_stop()
            if isinstance(error, RolloutLostError) and self._group is not None:
                dist.barrier(group=self._group)  # all ranks of the replica have this error; one hears the Stop
            raise

    def _await_stop(self) -> None:
        """Wait until the training pool has saved: a launcher ends all ranks as soon as one exits."""
        while self.mailbox is not None:
            received = self.mailbox.receive(timeout=1.0)
            if received is not None and isinstance(received[1], Stop):
                return

    # -- messages ----------------------------------------------------------------------------------

    def _messages(self) -> list[Any]:
        """What has come in, the same on all ranks of the replica; waits a moment when there is nothing to do."""
        found: list[Any] = []
        if self.mailbox is not None:
            busy = self._queue or (self._stream is not None and self._stream.running)
            begin = time.perf_counter()
            received = self.mailbox.receive(0.0 if busy else IDLE_SECONDS)
            while received is not None:
                found.append(received[1])
                received = self.mailbox.receive(0.0)
            if not busy:
                self._usage.idle_seconds += time.perf_counter() - begin
        if self._group is not None:
            box = [found]
            dist.broadcast_object_list(box, group=self._group, group_src=0)
            found = box[0]
        return found

    def _handle(self, messages: Sequence[Any]) -> bool:
        """Returns whether to go on."""
        handlers: dict[type, Callable[[Any], None]] = {
            Submit: self._submit, Update: self._update, Recall: self._recall, Evaluate: self._evaluate,
        }  # fmt: skip
        for message in messages:
            if isinstance(message, Stop):
                if self._stream is not None:
                    with suppress(EngineLostError):  # nobody needs it any more
                        self._stream.interrupt()
                self._tell(self._usage)
                return False
            handlers[type(message)](message)
        return True

    def _submit(self, message: Submit) -> None:
        for group in message.groups:
            self._queue.extend((sample, group.admitted_at) for sample in group.unfinished())

    def _update(self, message: Update) -> None:
        self._interrupt()
        self.recorder.flush(self.engine.weights_version)
        self._retry(self._begin_update)
        self._tell(Ready())
        self.weight_sync.run(message.version)
        self.engine.wake(("kv_cache",))
        self._usage.scoring = self.scorer.take_stats()
        self._tell(self._usage)
        self._usage = Usage()

    def _begin_update(self) -> None:
        self.engine.wake(("weights",))
        self.engine.begin_update()

    def _finish_update(self, version: int) -> None:
        try:
            self.engine.finish_update(version)
        except EngineLostError as lost:  # the weights have arrived all the same
            self._revive(lost, version)

    def _recall(self, message: Recall) -> None:
        self._interrupt()
        unfinished = [sample for sample, _ in self._queue]
        self._queue.clear()
        self.recorder.flush(self.engine.weights_version)
        self._send_scored(wait=True)
        self._tell(Recalled([sample for sample in unfinished if sample.token_ids]))

    def _evaluate(self, message: Evaluate) -> None:
        self._interrupt()
        self._send_scored(wait=True)
        found = self._retry(lambda: generate(self.engine, message.prompts, message.params, seed=self.seed, step=-1))
        if self.mailbox is not None:
            self.scorer.score(found)
        self._tell(Evaluated(found))

    # -- generating --------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Fill free slots, generate one token for each running sample, send what has been scored."""
        if self._queue and self._stream is None:
            self._stream = self.recorder.watch(self.engine.stream(self.params, seed=self.seed))
        while self._queue and self._stream.running < self.max_num_seqs:
            sample, step = self._queue.popleft()
            self._stream.submit(sample, step=step)
            self._running[sample.prompt.index, sample.sample_index] = sample, step
        if self._stream is not None and self._stream.running:
            try:
                self._step()
            except EngineLostError as lost:
                self._revive(lost, self.engine.weights_version)
        self._send_scored(wait=False)

    def _step(self) -> None:
        begin = time.perf_counter()
        finished = self._stream.step()
        self._usage.busy_seconds += time.perf_counter() - begin
        for sample in finished:
            del self._running[sample.prompt.index, sample.sample_index]
            self._usage.tokens += len(sample.token_ids)
            if self.mailbox is not None:
                self.scorer.submit(sample)

    def _interrupt(self) -> None:
        """Nothing is generated any more; what was running is first in the queue, with what it has."""
        if self._stream is not None:
            try:
                self._stream.interrupt()
            except EngineLostError as lost:
                self._revive(lost, self.engine.weights_version)
        self._requeue()

    def _requeue(self) -> None:
        self._stream = None
        self._queue.extendleft(reversed(list(self._running.values())))
        self._running.clear()

    def _send_scored(self, *, wait: bool) -> None:
        if self.mailbox is not None:
            scored = self.scorer.collect() if wait else self.scorer.poll()
            if scored:
                self._tell(Done(scored))

    def _tell(self, message: Any) -> None:
        if self.mailbox is not None:
            self.mailbox.send(self._controller, message)

    # -- engines that die --------------------------------------------------------------------------

    def _retry(self, work: Callable[[], Any]) -> Any:
        """Call ``work``, again after each death of the engine."""
        while True:
            try:
                return work()
            except EngineLostError as lost:
                self._revive(lost, self.engine.weights_version)

    def _revive(self, lost: EngineLostError, version: int) -> None:
        """Start the engine again, whose mapped weights are those of policy ``version``; what was running is queued.

        Raises:
            RolloutLostError: on every rank of the replica: it can't be.
        """
        if self.mailbox is not None:
            log.warning("replica %d: %s\nreplica %d: starting it again", self.engine.replica, lost, self.engine.replica)
        self._requeue()
        assert self.engine.processes is not None, "no other engine has processes to lose"
        try:
            self.engine.processes.revive(version)
        except EngineLostError as failed:
            raise RolloutLostError(f"{failed}. Last: {lost}") from failed
        self.weight_sync.transfer.invalidate()
        self._usage.restarts += 1
