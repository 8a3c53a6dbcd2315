"""A Host without a model, for the channel and the proxy: one weight, and tokens that tell what was asked.

It enforces what real hosts take for granted: no update and no sleep while samples run, finish only after begin, no
generation before an update or with a tag asleep. A prompt that starts with ``DIE`` kills the process in mid-generation;
one that starts with ``SLOW`` is answered one token per step, as many as are allowed.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from typing import Any

import torch

from hybridengine.engines.rollout.remote.messages import Output, Start
from hybridengine.engines.rollout.remote.shared_weights import WeightExporter
from hybridengine.engines.rollout.traits import EngineTraits
from hybridengine.sync.plan.spec import TensorSlice

DIE, RAISE, SLOW = 66, 77, 88


TRAITS = EngineTraits(name="fake", own_processes="tests.unit.engines.rollout.remote.fake_host:FakeHost")
ENGINE = "tests.unit.engines.rollout.remote.fake_host:TRAITS"


class FakeHost:
    def __init__(self, start: Start) -> None:
        if start.seed == 13:
            raise ValueError("seed 13 is refused")
        if start.seed == 14:
            print("about to fall over", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        self.weight = torch.nn.Parameter(torch.zeros(4, 3, device=start.platform))
        self.exporter = WeightExporter({"w": self.weight})
        self.updating, self.version, self.awake, self.running = False, -1, {"weights", "kv_cache"}, {}

    def children(self) -> list[int]:
        return []

    def describe(self) -> dict[str, int]:
        return {"kv_cache": 100}

    def shared_weights(self) -> list[Any]:
        return [self.exporter.handle]

    def layout(self, params: Any) -> list[tuple[TensorSlice, ...]]:
        return [(TensorSlice("p", (0, 0), (4, 3), "w", 0, (3, 1)),)]

    def _answer(self, request: Any) -> Output:
        if request.token_ids[0] == DIE:
            print("dying of", request.name, file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if request.token_ids[0] == RAISE:
            raise RuntimeError(f"can't answer {request.name}")
        tokens = [int(self.weight[0, 0]), request.seed % 1000][: request.max_tokens]
        return Output(request.name, tokens, [-1.0] * len(tokens), "stop" if request.max_tokens > 1 else "length")

    def advance(self, job: Any) -> list[Output]:
        assert self.version >= 0 and not self.updating and self.awake == {"weights", "kv_cache"}
        for request in job.requests if job is not None else ():
            self.running[request.name] = request
        name, request = next(iter(self.running.items()))
        if request.token_ids[0] == SLOW and request.max_tokens > 1:
            self.running[name] = replace(request, max_tokens=request.max_tokens - 1)
            return [Output(name, [int(self.weight[0, 0])], [-1.0], None)]
        del self.running[name]
        return [self._answer(request)]

    def abort(self, names: list[str]) -> list[Output]:
        for name in names:  # the one whose answer failed is gone already
            self.running.pop(name, None)
        return []

    def begin_update(self) -> None:
        assert not self.running and "weights" in self.awake
        self.updating = True

    def finish_update(self, version: int) -> None:
        assert self.updating
        self.exporter.check()
        self.updating, self.version = False, version

    def sleep(self, tags: list[str]) -> None:
        assert not self.running and set(tags) <= self.awake
        self.awake -= set(tags)
        if "weights" in tags:
            self.version = -1
            self.exporter.free()

    def wake(self, tags: list[str]) -> None:
        assert not self.awake & set(tags)
        self.awake |= set(tags)

    def checksums(self) -> list[dict[str, int]]:
        return [{"w": int(self.weight.data.view(torch.uint8).sum(dtype=torch.int64))}]

    def close(self) -> None: ...
