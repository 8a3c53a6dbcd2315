"""Moves of a sync on a GPU: everything is enqueued at once, and streams follow other ranks' streams by words.

A step of a lane waits for its gates, runs and says so, each on the stream itself (``platform/cuda/stream_memory.py``),
so no kernel is held up by a host thread and no multiprocessor spins. The host only looks on: it sees who is late or
lost by the same words, and where a sync fails it opens all gates, so that what was enqueued runs out.

Order. Steps are enqueued by number, of equal numbers those that fill this rank's ring first. A step waits for words
that come before it in this order on whatever rank writes them: a chunk's readers wait for its filling, its filling for
the readers of an earlier chunk. So ranks never wait in a circle, even where a device serves all of a process's streams
one after the other (CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron asks for).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from hybridengine.native_cuda import DeviceTable
from hybridengine.platform.base import Sums
from hybridengine.platform.cuda.stream_memory import HostWords
from hybridengine.sync.transfer.control import PAGE_BYTES, ControlPage, Waiter, Word
from hybridengine.sync.transfer.lanes import GENERATION_SHIFT, Gate, Lane
from hybridengine.sync.transfer.region import MappedRegion
from hybridengine.sync.transfer.tables import BoxTable

#: Opens every gate of its generation, and none of the next.
_OPEN = (1 << GENERATION_SHIFT) - 1
#: Streams whose gates are all open and that have not run out by then are not waited for.
_RUN_OUT_SECONDS = 30.0


class _Steps:
    """A lane on a stream of its own."""

    def __init__(self, lane: Lane, device: torch.device) -> None:
        self.table = DeviceTable(lane.table.boxes, lane.bounds, device)
        self.stream = torch.cuda.Stream(device)
        self.gates, self.signal = lane.gates, lane.signal
        # Chunks of which this rank needs nothing are neither waited for nor acknowledged.
        self.numbers = [k for k in range(len(lane.gates)) if lane.bounds[k] < lane.bounds[k + 1]]


class DeviceMoves:
    """One rank's part in a sync. Arguments as of HostMoves."""

    def __init__(
        self,
        own: BoxTable,
        pulls: Mapping[int, BoxTable],
        lanes: Sequence[Lane],
        waiter: Waiter,
        pages: Mapping[int, ControlPage],
        shards: Mapping[int, MappedRegion],
        *,
        rank: int,
        device: torch.device,
    ) -> None:
        self._waiter, self._device, self._page = waiter, device, pages.get(rank)
        self._seen = {page.address: HostWords(page, page.address, PAGE_BYTES) for page in pages.values()}
        self._own = DeviceTable(own.boxes, (0, len(own.boxes)), device)
        self._pull_stream = torch.cuda.Stream(device)
        self._pulls = {
            peer: (DeviceTable(table.boxes, (0, len(table.boxes)), device), pages[peer].word("ready"))
            for peer, table in pulls.items()
            if len(table.boxes)
        }
        self._lanes = [_Steps(lane, device) for lane in lanes]
        self._peers = sorted(set(pages) - {rank})
        self._gates = [Gate({peer: ready}, 0) for peer, (_, ready) in self._pulls.items()]
        self._gates += [lane.gates[k] for lane in self._lanes for k in lane.numbers]

    def run(self, generation: int, version: int, sums: Sums) -> None:
        """Bring what this rank needs to its engine, and what others need to where they read it; ``sums``: of what was
        moved. All of it is done on return.

        Raises:
            StaleGenerationError, PeerLostError: see Waiter.
        """
        assert sums is None or isinstance(sums, torch.Tensor)
        base = generation << GENERATION_SHIFT
        for table in (self._own, *(table for table, _ in self._pulls.values()), *(lane.table for lane in self._lanes)):
            table.upload()  # may wait for the device: before anything there waits for other ranks
        here = torch.cuda.current_stream(self._device)
        streams = [self._pull_stream, *(lane.stream for lane in self._lanes)]
        try:
            if self._page is not None:
                self._page.publish(generation, version)
                self._write(here, self._page.word("ready"), base)
            for stream in streams:
                stream.wait_stream(here)
            self._own.run(0, sums)
            with torch.cuda.stream(self._pull_stream):
                for table, ready in self._pulls.values():
                    self._wait(self._pull_stream, ready, base)
                    table.run(0, sums)
            for number in range(max((lane.numbers[-1] + 1 for lane in self._lanes if lane.numbers), default=0)):
                for lane in self._lanes:
                    if number in lane.numbers:
                        self._enqueue(lane, number, base, sums)
            self._look_on(generation, version, base)
        except BaseException:
            self._let_run_out(base, [*streams, here])
            raise
        for stream in streams:
            here.wait_stream(stream)
        here.synchronize()

    def _enqueue(self, lane: _Steps, number: int, base: int, sums: torch.Tensor | None) -> None:
        gate = lane.gates[number]
        with torch.cuda.stream(lane.stream):
            for word in gate.words.values():
                self._wait(lane.stream, word, base + gate.steps)
            lane.table.run(number, sums)
            self._write(lane.stream, lane.signal, base + number + 1)

    def _look_on(self, generation: int, version: int, base: int) -> None:
        """Return once every word has come that this rank's streams wait for."""
        for peer in self._peers:
            self._waiter.published(peer, generation, version)
        for peer in self._peers:
            gates = [gate for gate in self._gates if peer in gate.words]

            def open_to(gates: list[Gate] = gates, peer: int = peer) -> bool:
                return not any(peer in gate.closed(base) for gate in gates)

            self._waiter.until(open_to, ranks=[peer], generation=generation, what="stage or read a chunk of weights")

    def _let_run_out(self, base: int, streams: Sequence[torch.cuda.Stream]) -> None:
        """Open all gates until nothing enqueued is left. Whatever is copied by then, the sync has failed everywhere."""
        deadline = time.monotonic() + _RUN_OUT_SECONDS
        while not all(stream.query() for stream in streams) and time.monotonic() < deadline:
            # Again and again: a rank that is still at it writes smaller values over these.
            for gate in self._gates:
                for word in gate.words.values():
                    if word.get() < base + _OPEN:
                        word.set(base + _OPEN)
            time.sleep(1e-3)

    def _wait(self, stream: torch.cuda.Stream, word: Word, value: int) -> None:
        self._seen[word.page.address].wait_at_least(stream, word.address, value)

    def _write(self, stream: torch.cuda.Stream, word: Word, value: int) -> None:
        self._seen[word.page.address].write(stream, word.address, value)

    def rest(self) -> None:
        """All ranks have read what they need: nothing to do for memory that stays."""

    def close(self) -> None:
        """Stop showing control pages to the device. What was enqueued is done."""
        for words in self._seen.values():
            words.close()
        self._seen.clear()
