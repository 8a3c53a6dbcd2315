"""RolloutEngine ``vllm``: the real vLLM inside the training processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridengine.config import RolloutConfig
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.base import StaleWeightsError, check_fits, check_tags, generation_eos
from hybridengine.engines.rollout.foreign import ForeignMemory
from hybridengine.engines.rollout.seeds import sample_seed
from hybridengine.engines.rollout.sleeper import Sleeper, tensors_in
from hybridengine.engines.rollout.streaming import empty_trajectory, tokens_left
from hybridengine.engines.rollout.updates import UpdateLedger
from hybridengine.engines.rollout.vllm_blocks import KVBlocks
from hybridengine.engines.rollout.vllm_capacity import check_room_to_wake, kv_cache_errors_explained
from hybridengine.engines.rollout.vllm_cpu import LiveWeights, private_shared_memory, yield_while_waiting
from hybridengine.engines.rollout.vllm_process import (
    process_group_kept,
    process_settings_kept,
    quiet_start,
    register_architecture,
)
from hybridengine.engines.rollout.vllm_sampler import SeededSampler
from hybridengine.engines.rollout.vllm_slots import answer_in_short
from hybridengine.engines.rollout.vllm_stream import VLLMStream
from hybridengine.memory.storages import storage_bytes
from hybridengine.reshard.spec import ParamSpec, TensorSlice
from hybridengine.types import Prompt, SamplingParams, Trajectory


class VLLMEngine:
    """One vLLM engine per tensor-parallel group, all its ranks in our processes. See RolloutEngine.

    Weights on disk are never read: the engine starts with placeholders and is unservable until the first
    sync. All ranks of a group must call :meth:`generate` with the same prompts.

    Args:
        model_path: Hugging Face directory (config and generation config are read).
        rollout: the ``rollout`` section of the configuration.
        max_model_len: longest prompt plus response, tokens.
        eos_token_ids: end tokens besides those of the generation config.

    Raises:
        ValueError: the tensor-parallel size does not divide the world.
    """

    def __init__(
        self,
        model_path: Path | str,
        rollout: RolloutConfig,
        *,
        world: World,
        max_model_len: int,
        seed: int = 0,
        eos_token_ids: Sequence[int] = (),
        trust_remote_code: bool = False,
    ) -> None:
        if world.size % rollout.tp:
            raise ValueError(f"rollout.tp={rollout.tp} does not divide the world size {world.size}")
        self.config, self.world, self.max_model_len = rollout, world, max_model_len
        self.replica, self.num_replicas = world.rank // rollout.tp, world.size // rollout.tp
        self._stop = sorted({*eos_token_ids, *generation_eos(Path(model_path))})
        self._padding: set[str] = set()
        self._canonical: set[str] = set()
        self._live_weights = LiveWeights()
        with process_settings_kept(world), quiet_start():
            self.llm = self._build(Path(model_path), rollout, seed, trust_remote_code)
        self._engine = self.llm.llm_engine
        self._runner = self._engine.model_executor.driver_worker.worker.model_runner
        self.model: Any = self._runner.model
        vocab_size = self._runner.model_config.get_vocab_size()  # beyond it nothing is sampled, and vLLM refuses it
        self._stop = [token for token in self._stop if token < vocab_size]
        self._sampler: SeededSampler | None = None
        self.kv_blocks: KVBlocks | None = None  # a GPU's KV cache is mapped as a whole
        self._foreign = ForeignMemory(None)
        if not world.is_cuda:
            yield_while_waiting()
            self._sampler = self._runner.sampler = SeededSampler(self._runner)
            self._weights = Sleeper(self.live_tensors().values(), large_pages=True)
            self._foreign = ForeignMemory(self._weights)
            scheduler = self._engine.engine_core.engine_core.scheduler
            self.kv_blocks = KVBlocks(tensors_in(self._runner.kv_caches), scheduler)
            answer_in_short(scheduler)
        self._nbytes = {
            "weights": storage_bytes(self.live_tensors().values()),
            "kv_cache": storage_bytes(tensors_in(self._runner.kv_caches)),
        }
        self._awake = {"weights", "kv_cache"}
        self._updates = UpdateLedger()
        self._internal_names: dict[str, str] = {}  # request -> vLLM's name for it

    def _build(self, model_path: Path, rollout: RolloutConfig, seed: int, trust_remote_code: bool) -> Any:
        from vllm import LLM

        register_architecture(model_path)
        options: dict[str, Any] = {
            "model": str(model_path),
            "tensor_parallel_size": rollout.tp,
            "distributed_executor_backend": "external_launcher",
            "load_format": "dummy",
            "skip_tokenizer_init": not rollout.stop,  # stop strings are looked for in text
            "dtype": rollout.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": rollout.max_num_seqs,
            "enable_prefix_caching": rollout.prefix_caching,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "seed": seed,
            "trust_remote_code": trust_remote_code,
        }
        if self.world.is_cuda:
            options |= {
                "enforce_eager": rollout.enforce_eager,
                "gpu_memory_utilization": rollout.gpu_memory_utilization,
                "enable_sleep_mode": rollout.sleep_level > 0,
            }
        else:  # eager with an explicit cache size: vLLM then skips its warm-up
            options |= {"enforce_eager": True, "kv_cache_memory_bytes": int(rollout.kv_cache_gib * 2**30)}
        options |= rollout.engine_kwargs
        with kv_cache_errors_explained(rollout, self.max_model_len, is_cuda=self.world.is_cuda):
            if self.world.is_cuda:
                return LLM(**options)
            with self._live_weights.recording(), private_shared_memory():
                return LLM(**options)

    # -- generation --------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        seed: int,
        step: int,
        on_finished: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """n samples per prompt; see RolloutEngine.generate.

        An error in ``on_finished`` is raised once generation is complete: tensor-parallel peers must not be
        left waiting for this rank in the middle.
        """
        self.check_servable()
        check_fits(prompts, self.max_model_len)
        found: dict[str, Trajectory] = {}
        requests: dict[str, Trajectory] = {}
        error: Exception | None = None
        try:
            for p, prompt in enumerate(prompts):
                for k in range(params.n):
                    requests[f"{p}-{k}"] = trajectory = empty_trajectory(prompt, k)
                    left = tokens_left(trajectory, params, self.max_model_len)
                    own = sample_seed(seed, step, prompt.index, k)
                    self.add_request(f"{p}-{k}", prompt.token_ids, params, max_tokens=left, seed=own)
            with self._eager():
                while self._engine.has_unfinished_requests():
                    for name, tokens, logprobs, reason in self._outputs():
                        found[name] = trajectory = requests[name]
                        trajectory.token_ids, trajectory.logprobs = tokens, logprobs
                        trajectory.versions = [self.weights_version] * len(tokens)
                        trajectory.truncated = reason == "length"
                        if on_finished is not None and error is None:
                            try:
                                on_finished(trajectory)
                            except Exception as caught:  # noqa: BLE001  re-raised below
                                error = caught
        except BaseException:
            self.abort([name for name in requests if name not in found])
            raise
        if error is not None:
            raise error
        return [found[name] for name in requests]

    def stream(self, params: SamplingParams, *, seed: int) -> VLLMStream:
        """Generation in steps, see RolloutStream."""
        return VLLMStream(self, params, seed=seed)

    def check_servable(self) -> None:
        """Raise StaleWeightsError unless the engine is awake with complete weights."""
        self._updates.check_servable()
        if self._awake != {"weights", "kv_cache"}:
            raise StaleWeightsError(f"the rollout engine is asleep (awake: {sorted(self._awake) or 'nothing'})")

    def step(self) -> list[tuple[str, list[int], list[float], str | None]]:
        """One engine step; (request, new tokens, their log-probabilities, why it finished or None)."""
        with self._eager():
            return self._outputs()

    def abort(self, names: Sequence[str]) -> dict[str, tuple[list[int], list[float]]]:
        """End requests early; tokens and log-probabilities that no step has reported."""
        self._engine.abort_request(list(names))
        left = {name: self._drawn(name) for name in names if name in self._internal_names}
        for name in left:
            del self._internal_names[name]
        return left

    def _eager(self) -> AbstractContextManager[Any]:
        """On a CPU: run what vLLM decorates with ``torch.compile`` as it is written.

        Two small functions are left of that when the model runs eagerly; compiling them takes seconds at the
        first token, and calling the compiled ones longer than running them.
        """
        eager = not self.world.is_cuda and self._runner.model_config.enforce_eager
        return torch.compiler.set_stance("force_eager") if eager else nullcontext()

    def add_request(
        self,
        name: str,
        token_ids: list[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        seed: int,
        streaming: bool = False,
    ) -> None:
        """Queue one sample. ``streaming``: its tokens can be had before it is finished."""
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        greedy = params.temperature == 0
        ours = self._sampler is not None
        internal = self._engine.add_request(
            name,
            {"prompt_token_ids": token_ids},
            VLLMSamplingParams(
                temperature=params.temperature,
                top_p=1.0 if greedy else params.top_p,
                top_k=0 if greedy else params.top_k,
                min_p=0.0 if greedy else params.min_p,
                stop=list(params.stop),
                max_tokens=max_tokens,
                seed=None if greedy or ours else seed,
                logprobs=None if ours else 0,
                flat_logprobs=True,
                skip_clone=True,  # made for this request alone
                detokenize=bool(params.stop),
                stop_token_ids=self._stop,
                # Our own sampler keeps what it has drawn; vLLM's is asked for every token as it comes.
                output_kind=RequestOutputKind.DELTA if streaming and not ours else RequestOutputKind.FINAL_ONLY,
            ),
        )
        self._internal_names[name] = internal
        if self._sampler is not None:
            self._sampler.add(internal, seed)

    def _outputs(self) -> list[tuple[str, list[int], list[float], str | None]]:
        found = []
        for output in self._engine.step():
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
            found.append((name, tokens, logprobs, completion.finish_reason if output.finished else None))
        return found

    def _drawn(self, name: str) -> tuple[list[int], list[float]]:
        """What our own sampler has drawn for a request and not handed over yet; it forgets the request."""
        return ([], []) if self._sampler is None else self._sampler.take(self._internal_names[name])

    # -- weights -----------------------------------------------------------------------------------

    @property
    def weights_version(self) -> int:
        """Last complete policy version; -1 when there is none."""
        return self._updates.version

    def live_tensors(self) -> dict[str, Tensor]:
        """vLLM parameter name -> this rank's tensor that the model runs on, to be written in place.

        Tensors that are padding from end to end (a small vocabulary over many ranks) are left out.
        """
        named = self.model.named_parameters()
        return {name: parameter.data for name, parameter in named if name not in self._padding}

    def layout(self, params: Mapping[str, ParamSpec]) -> tuple[TensorSlice, ...]:
        """Which boxes of the canonical parameters this rank's tensors hold, learnt from vLLM's own loader."""
        from hybridengine.reshard.bake import bake_vllm

        self._padding.clear()
        live = self.live_tensors()
        slices = bake_vllm(self.model, params, live)
        self._padding = set(live) - {piece.tensor for piece in slices}
        self._canonical = set(params)
        return slices

    def begin_update(self) -> None:
        """Unservable from here until :meth:`finish_update`.

        Raises:
            RuntimeError: the weights are asleep.
        """
        if "weights" not in self._awake:
            raise RuntimeError("the rollout engine's weights are asleep; wake them before an update")
        self._updates.begin(self._foreign.without(self.live_tensors()))

    def alias_tensor(self, name: str, tensor: Tensor) -> bool:
        """Run parameter ``name`` on the trainer's ``tensor``, if alike; says whether. Never on a GPU, where captured
        graphs hold the addresses of vLLM's own memory."""
        return self._foreign.alias(name, self.model.get_parameter(name), tensor)

    def load_weight(self, name: str, full: Tensor) -> None:
        """Deliver one canonical parameter in full.

        Raises:
            ValueError: the model has no such parameter.
        """
        self._updates.delivered(name)
        try:
            reached = self.model.load_weights([(name, full)])
        except (KeyError, ValueError) as error:
            raise ValueError(f"parameter {name!r}: the vLLM model does not take it ({error})") from error
        if not reached:
            raise ValueError(f"parameter {name!r} reached nothing in the vLLM model {type(self.model).__name__}")

    def finish_update(self, version: int) -> None:
        """Servable again, with caches of older weights gone.

        Raises:
            RuntimeError: a parameter got no data, by name.
        """
        self._updates.check_complete(self._canonical, self._foreign.without(self.live_tensors()))
        self._live_weights.repack()
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset: requests are still running")
        self._updates.finish(version)

    # -- memory ------------------------------------------------------------------------------------

    def nbytes(self, tag: str) -> int:
        """Bytes of ``tag`` on this rank when awake, aliases left out; on a CPU usable blocks, and no packed weights."""
        check_tags([tag])
        if self.kv_blocks is not None:
            return self.kv_blocks.nbytes if tag == "kv_cache" else self._weights.nbytes
        return self._nbytes[tag]

    def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Free what ``tags`` name, as far as ``rollout.sleep_level`` goes.

        At level 2 the weights are dropped and the engine is unservable until the next sync. On a GPU vLLM
        puts weights and KV cache to sleep together, whatever ``tags`` name.

        Raises:
            RuntimeError: requests are running.
        """
        check_tags(tags)
        if self._engine.has_unfinished_requests():
            raise RuntimeError("the rollout engine can't sleep while requests are running")
        level = self.config.sleep_level
        going = self._awake.intersection(tags) if level else set()
        if not self.world.is_cuda and level == 1:
            going.discard("weights")  # host memory is where they are
        if not going:
            return
        self._engine.reset_prefix_cache()
        if self.kv_blocks is None:
            self.llm.sleep(level=level)
            going = {"weights", "kv_cache"}
        else:
            if "kv_cache" in going:
                self.kv_blocks.sleep()
            if "weights" in going:
                self._live_weights.drop()
                self._weights.sleep()
        if "weights" in going and level == 2:
            self._updates.lose()
        self._awake -= going

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take the memory back; waking what is awake does nothing.

        Raises:
            torch.OutOfMemoryError: there is not as much; nothing has been taken then.
        """
        check_tags(tags)
        coming = set(tags) - self._awake
        if not coming:
            return
        if self.kv_blocks is None:
            check_room_to_wake({tag: self._nbytes[tag] for tag in sorted(coming)}, self.world.device)
            self.llm.wake_up(tags=sorted(coming))
        else:
            if "weights" in coming:
                self._weights.wake()
            if "kv_cache" in coming:
                self.kv_blocks.wake()
        self._awake |= coming

    def close(self) -> None:
        """Let go of the engine; the process group stays."""
        self._updates.lose()
        with process_group_kept():
            self._engine.engine_core.shutdown()
