"""RolloutStream on an engine in processes of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridengine.engines.rollout.remote.messages import Output, fill
from hybridengine.engines.rollout.streaming import Request, request_for
from hybridengine.types import SamplingParams, Trajectory

if TYPE_CHECKING:
    from hybridengine.engines.rollout.remote.engine import RemoteEngine


class RemoteStream:
    """See RolloutStream. Samples go out with the next step, so that a step is one message however many there are."""

    def __init__(self, engine: RemoteEngine, params: SamplingParams, *, seed: int) -> None:
        self._engine, self._params, self._seed = engine, params, seed
        self._samples: dict[str, Trajectory] = {}
        self._waiting: list[Request] = []
        self._submitted = 0
        self.slots = engine.config.max_num_seqs

    @property
    def running(self) -> int:
        return len(self._samples)

    def submit(self, trajectory: Trajectory, *, step: int) -> None:
        """See RolloutStream. Raises StaleWeightsError, or ValueError for a sample without room for a token."""
        self._engine.check_servable()
        request = request_for(
            trajectory,
            self._params,
            name=f"s{self._submitted}.",  # none begins with another: SGLang aborts by prefix
            seed=self._seed,
            step=step,
            max_model_len=self._engine.max_model_len,
        )
        self._submitted += 1
        self._waiting.append(request)
        self._samples[request.name] = trajectory

    def step(self) -> list[Trajectory]:
        """See RolloutStream. Raises EngineLostError."""
        waiting, self._waiting = self._waiting, []
        if not self._samples:
            return []
        finished = []
        for output in self._engine.advance(waiting, self._params):
            self._append(output)
            if output.reason is not None:
                finished.append(self._samples.pop(output.name))
        return finished

    def interrupt(self) -> list[Trajectory]:
        stopped = list(self._samples.values())
        unsent = {request.name for request in self._waiting}
        for output in self._engine.abort([name for name in self._samples if name not in unsent]):
            self._append(output)
        self._samples.clear()
        self._waiting = []
        return stopped

    def _append(self, output: Output) -> None:
        fill(self._samples[output.name], output, self._engine.weights_version)
