"""Samples in flight inside a vLLM engine: submitting them, and reading the output of each engine step."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hybridengine.engines.rollout.seeds import position_seeds
from hybridengine.engines.rollout.streaming import Request, request_for
from hybridengine.engines.rollout.vllm.sampler import SeededSampler
from hybridengine.types import SamplingParams, Trajectory

if TYPE_CHECKING:
    from hybridengine.engines.rollout.vllm.engine import VLLMEngine


class NewTokens(NamedTuple):
    """New tokens of one request with their log-probabilities; ``reason``: "stop" or "length" when it is finished."""

    name: str
    token_ids: list[int]
    logprobs: list[float]
    reason: str | None


class Requests:
    """Adds requests to a vLLM engine and reads its outputs, with vLLM's own sampler or ours.

    Args:
        engine: vLLM's LLMEngine.
        sampler: ours, where it stands in for vLLM's; it keeps what it has drawn until it is asked.
        stop: token ids that end a sample.
        stepping: context of every engine step.
    """

    def __init__(
        self,
        engine: Any,
        sampler: SeededSampler | None,
        *,
        stop: Sequence[int],
        stepping: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._engine, self._sampler, self._stop, self._stepping = engine, sampler, list(stop), stepping
        self._internal_names: dict[str, str] = {}  # request -> vLLM's name for it
        # vLLM's older model runner starts a generator per request at its seed; the newer one hashes seed and position.
        self._counts_draws = sampler is None and not engine.vllm_config.use_v2_model_runner
        self._wanted = functools.lru_cache(maxsize=1024)(self._make_params)

    @property
    def running(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def add(self, request: Request, params: SamplingParams, *, interruptible: bool) -> None:
        """Queue one sample. ``interruptible``: its tokens can be had before it is finished.

        Raises:
            ValueError: vLLM refuses the request, by what it says and with the keys that the request was made from.
        """
        seed = request.seed
        if self._counts_draws:  # a sample that goes on must not meet the noise of its first tokens again
            seed = int(position_seeds(np.array([seed], np.uint64), np.array([len(request.token_ids)]))[0])
        # Named as the tokens that they are: vLLM then spares itself the search for what kind of prompt it was given.
        prompt = {"type": "token", "prompt_token_ids": request.token_ids}
        with refusals(params, tokens=len(request.token_ids), max_tokens=request.max_tokens):
            wanted = self._wanted(params, request.max_tokens, interruptible)
            if self._sampler is None and params.temperature > 0:
                wanted = copy.copy(wanted)
                wanted.seed = seed
            internal = self._engine.add_request(request.name, prompt, wanted)
        self._internal_names[request.name] = internal
        if self._sampler is not None:
            self._sampler.add(internal, seed)

    def _make_params(self, params: SamplingParams, max_tokens: int, interruptible: bool) -> Any:
        """vLLM's own form, without a seed. Making and checking one takes a good part of a submission's time."""
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        greedy, ours = params.temperature == 0, self._sampler is not None
        return VLLMSamplingParams(
            temperature=params.temperature,
            top_p=1.0 if greedy else params.top_p,
            top_k=0 if greedy else params.top_k,
            min_p=0.0 if greedy else params.min_p,
            stop=list(params.stop),
            max_tokens=max_tokens,
            logprobs=None if ours else 0,
            flat_logprobs=True,
            skip_clone=True,  # vLLM copies it shallowly, and adds the same end tokens every time
            detokenize=bool(params.stop),
            stop_token_ids=self._stop,
            # Our own sampler keeps what it has drawn; vLLM's is asked for every token as it comes.
            output_kind=RequestOutputKind.DELTA if interruptible and not ours else RequestOutputKind.FINAL_ONLY,
        )

    def step(self) -> list[NewTokens]:
        """One engine step; what it reports."""
        with self._stepping():
            outputs = self._engine.step()
        return list(self._read(outputs))

    def abort(self, names: Sequence[str]) -> dict[str, tuple[list[int], list[float]]]:
        """End requests early; tokens and log-probabilities that no step has reported."""
        self._engine.abort_request(list(names))
        left = {name: self._drawn(name) for name in names if name in self._internal_names}
        for name in left:
            del self._internal_names[name]
        return left

    def drop_caches(self) -> None:
        """Drop every cache that was computed with the present weights.

        Raises:
            RuntimeError: requests are running.
        """
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset: requests are still running")

    def _read(self, outputs: Sequence[Any]) -> Iterator[NewTokens]:
        for output in outputs:
            completion, name = output.outputs[0], output.request_id
            if self._sampler is None:
                flat = completion.logprobs
                tokens, logprobs = list(completion.token_ids), [flat.logprobs[start] for start in flat.start_indices]
            elif output.finished:
                tokens, logprobs = self._drawn(name)
                assert tokens == list(completion.token_ids), (name, tokens, completion.token_ids)
            else:
                continue
            assert len(logprobs) == len(tokens), (len(logprobs), len(tokens))
            if output.finished:
                del self._internal_names[name]
            yield NewTokens(name, tokens, logprobs, completion.finish_reason if output.finished else None)

    def _drawn(self, name: str) -> tuple[list[int], list[float]]:
        """Take from our own sampler what it has drawn for a request; it drops the request."""
        return ([], []) if self._sampler is None else self._sampler.take(self._internal_names[name])


@contextmanager
def refusals(params: SamplingParams, *, tokens: int, max_tokens: int) -> Iterator[None]:
    """vLLM's refusals of what is requested inside as ValueError: its own class for them is none since version 0.32.

    Args:
        tokens, max_tokens: length of the request's prompt, and of what may follow it.
    """
    from vllm.exceptions import VLLMClientError

    try:
        yield
    except VLLMClientError as error:
        asked = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k, "min_p": params.min_p}
        keys = ", ".join(f"{name}={value}" for name, value in (asked | {"stop": list(params.stop)}).items())
        raise ValueError(
            f"vLLM refuses a sample: {error}; it was asked for up to {max_tokens} tokens after {tokens}, with {keys} "
            "(keys of rollout, or of rollout.validation)"
        ) from error


class VLLMStream:
    """See RolloutStream. One at a time per engine; the engine must be servable when a sample is submitted."""

    def __init__(self, engine: VLLMEngine, params: SamplingParams, *, seed: int, interruptible: bool) -> None:
        self._engine, self._params, self._seed, self._interruptible = engine, params, seed, interruptible
        self.slots = engine.config.max_num_seqs
        self._samples: dict[str, Trajectory] = {}
        self._submitted = 0

    @property
    def running(self) -> int:
        return len(self._samples)

    def submit(self, trajectory: Trajectory, *, step: int) -> None:
        """See RolloutStream. Raises StaleWeightsError, or ValueError for a sample without room for a token."""
        engine = self._engine
        engine.check_servable()
        request = request_for(
            trajectory, self._params, name=f"s{self._submitted}", seed=self._seed, step=step,
            max_model_len=engine.max_model_len,
        )  # fmt: skip
        self._submitted += 1
        engine.requests.add(request, self._params, interruptible=self._interruptible)
        self._samples[request.name] = trajectory

    def step(self) -> list[Trajectory]:
        finished = []
        for name, tokens, logprobs, reason in self._engine.requests.step():
            trajectory = self._samples[name]
            self._append(trajectory, tokens, logprobs)
            if reason is not None:
                trajectory.truncated = reason == "length"
                finished.append(trajectory)
                del self._samples[name]
        return finished

    def interrupt(self) -> list[Trajectory]:
        stopped = list(self._samples.values())
        for name, (tokens, logprobs) in self._engine.requests.abort(list(self._samples)).items():
            self._append(self._samples[name], tokens, logprobs)
        self._samples.clear()
        return stopped

    def _append(self, trajectory: Trajectory, tokens: list[int], logprobs: list[float]) -> None:
        trajectory.token_ids += tokens
        trajectory.logprobs += logprobs
        trajectory.versions += [self._engine.weights_version] * len(tokens)
