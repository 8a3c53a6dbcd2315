"""RolloutStream on the in-process vLLM engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridengine.engines.rollout.seeds import sample_seed
from hybridengine.engines.rollout.streaming import tokens_left
from hybridengine.types import SamplingParams, Trajectory

if TYPE_CHECKING:
    from hybridengine.engines.rollout.vllm.engine import VLLMEngine


class VLLMStream:
    """See RolloutStream. One at a time per engine; the engine must be servable when a sample is submitted."""

    def __init__(self, engine: VLLMEngine, params: SamplingParams, *, seed: int) -> None:
        self._engine, self._params, self._seed = engine, params, seed
        self._samples: dict[str, Trajectory] = {}
        self._submitted = 0

    @property
    def running(self) -> int:
        return len(self._samples)

    def submit(self, trajectory: Trajectory, *, step: int) -> None:
        """See RolloutStream. Raises StaleWeightsError, or ValueError for a sample without room for a token."""
        engine = self._engine
        engine.check_servable()
        left = tokens_left(trajectory, self._params, engine.max_model_len)
        name = f"s{self._submitted}"
        self._submitted += 1
        seed = sample_seed(self._seed, step, trajectory.prompt.index, trajectory.sample_index)
        prefix = [*trajectory.prompt.token_ids, *trajectory.token_ids]
        engine.add_request(name, prefix, self._params, max_tokens=left, seed=seed, streaming=True)
        self._samples[name] = trajectory

    def step(self) -> list[Trajectory]:
        finished = []
        for name, tokens, logprobs, reason in self._engine.step():
            trajectory = self._samples[name]
            self._append(trajectory, tokens, logprobs)
            if reason is not None:
                trajectory.truncated = reason == "length"
                finished.append(trajectory)
                del self._samples[name]
        return finished

    def interrupt(self) -> list[Trajectory]:
        stopped = list(self._samples.values())
        for name, (tokens, logprobs) in self._engine.abort(list(self._samples)).items():
            self._append(self._samples[name], tokens, logprobs)
        self._samples.clear()
        return stopped

    def _append(self, trajectory: Trajectory, tokens: list[int], logprobs: list[float]) -> None:
        trajectory.token_ids += tokens
        trajectory.logprobs += logprobs
        trajectory.versions += [self._engine.weights_version] * len(tokens)
