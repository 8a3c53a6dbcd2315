"""A rollout without an engine: streams that draw made-up tokens, a scorer that knows the answer, a pool of one replica.

All of them write what happens to a list that the test gives them, in their own words.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from hybridengine.schedule import messages
from hybridengine.schedule.pool import Group
from hybridengine.sync.transfer.base import SyncReport
from hybridengine.types import Trajectory

#: (prompt, sample) -> tokens that end it.
Length = Callable[[int, int], int]


class Stream:
    """One token per step and sample."""

    slots = 100

    def __init__(self, length: Length, *, version: int = 0, log: list[str] | None = None) -> None:
        self.length, self.version, self.log = length, version, log if log is not None else []
        self.samples: list[Trajectory] = []
        self.entered: list[tuple[int, int]] = []
        self.occupied: list[int] = []

    @property
    def running(self) -> int:
        return len(self.samples)

    def submit(self, sample: Trajectory, *, step: int) -> None:
        self.samples.append(sample)
        self.entered.append((sample.prompt.index, sample.sample_index))

    def step(self) -> list[Trajectory]:
        self.occupied.append(self.running)
        for sample in self.samples:
            draw(sample, 1, self.version)
        done = [s for s in self.samples if len(s.token_ids) >= self.length(s.prompt.index, s.sample_index)]
        self.samples = [sample for sample in self.samples if sample not in done]
        return done

    def interrupt(self) -> list[Trajectory]:
        self.log.append("interrupt")
        stopped, self.samples = self.samples, []
        return stopped


def draw(sample: Trajectory, count: int, version: int) -> None:
    """``count`` more tokens of policy ``version``."""
    sample.token_ids += [5] * count
    sample.logprobs += [-1.0] * count
    sample.versions += [version] * count


def score(sample: Trajectory) -> None:
    """The first sample of each prompt is right."""
    sample.reward = float(sample.sample_index == 0)
    sample.rewards = {"right": sample.reward}


class Scorer:
    """Scores at once; says so when it is asked."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.submitted = log, list[Trajectory]()

    def spread(self, rank: int, ranks: int) -> None: ...

    def owns(self, sample: Trajectory) -> bool:
        return True

    def take_stats(self) -> list[float]:
        return []

    def metrics(self, taken: Sequence[float]) -> dict[str, float]:
        return {}

    def submit(self, sample: Trajectory) -> None:
        score(sample)
        self.submitted.append(sample)

    def collect(self) -> list[Trajectory]:
        self.log.append(f"scored {len(self.submitted)}")
        found, self.submitted = self.submitted, []
        return found

    def discard(self) -> None:
        self.log.append("discard")
        self.submitted.clear()


class Sharding:
    """The mode switch of colocated ranks, and the rollout engine in one: it holds what it was synced to."""

    replica, num_replicas, processes = 0, 1, None

    def __init__(self, train: Any, log: list[str], length: Length = lambda prompt, sample: 2) -> None:
        self.train, self.log, self.length = train, log, length
        self.rollout: Any = self
        self.weights_version, self.max_model_len = -1, 1000
        self.weight_sync: Any = SimpleNamespace(transfer=Transfer(log))

    def enter_rollout_mode(self) -> None:
        self.weights_version = self.train.version
        self.log.append(f"rollout mode {self.weights_version}")

    def check_servable(self) -> None: ...

    def stream(self, params: Any, *, seed: int, interruptible: bool = True) -> Stream:
        self.log.append("generate")
        return Stream(self.length, version=self.weights_version, log=self.log)

    def metrics(self) -> dict[str, float]:
        return {"sync/count": 1.0}

    def close(self) -> None:
        self.log.append("close")


class Transfer:
    """Moves nothing; says to which version."""

    method, peers = "none", SimpleNamespace(gone=list)

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def run(self, version: int) -> SyncReport:
        self.log.append(f"sync {version}")
        return SyncReport(method=self.method, version=version)

    def invalidate(self) -> None:
        self.log.append("invalidate")

    def close(self) -> None: ...


class Replica:
    """A mailbox to a rollout pool of one replica, which is as fast as it is asked to answer.

    It finishes one group each time somebody waits for news, those it has had longest first; a Recall finds the others
    with one token per sample.
    """

    peers = (1,)

    def __init__(self, log: list[str]) -> None:
        self.log, self.version = log, -1
        self.groups: deque[Group] = deque()
        self.answers: deque[Any] = deque()

    def send(self, peer: int, message: Any, *, timeout: float | None = None) -> None:
        match message:
            case messages.Submit(groups=groups):
                self.log.append(f"submit {indices(groups)}")
                self.groups.extend(groups)
            case messages.Update(version=version):
                self.log.append(f"update {version}")
                self.version = version
                self.answers.append(messages.Ready())
            case messages.Recall():
                self.log.append("recall")
                self.answers.append(messages.Recalled([self._begin(s) for g in self.groups for s in g.unfinished()]))
                self.groups.clear()
            case messages.Evaluate(prompts=prompts):
                self.log.append(f"evaluate {len(prompts)}")
                found = [Trajectory(prompt=p, sample_index=0, token_ids=[5], logprobs=[-1.0], versions=[self.version],
                                    truncated=False) for p in prompts]  # fmt: skip
                for sample in found:
                    score(sample)
                self.answers.append(messages.Evaluated(found))
            case _:
                self.log.append(type(message).__name__.lower())

    def receive(self, timeout: float) -> tuple[int, Any] | None:
        if self.answers:
            return 1, self.answers.popleft()
        if not self.groups:
            raise AssertionError("waiting for a replica that has nothing to do")
        group = self.groups.popleft()
        samples = group.unfinished()
        for sample in samples:
            draw(sample, 2, self.version)
            score(sample)
        self.log.append(f"done [{group.index}]")
        return 1, messages.Done(samples)

    def _begin(self, sample: Trajectory) -> Trajectory:
        draw(sample, 1, self.version)
        return sample

    def close(self) -> None:
        self.log.append("close")


def indices(groups: Sequence[Group]) -> list[int]:
    return [group.index for group in groups]
