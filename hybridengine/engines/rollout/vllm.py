"""RolloutEngine ``vllm``: the real vLLM inside the training processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridengine.config import RolloutConfig
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.base import StaleWeightsError, check_fits, check_tags, generation_eos
from hybridengine.engines.rollout.seeds import sample_seed
from hybridengine.engines.rollout.sleeper import Sleeper
from hybridengine.engines.rollout.vllm_cpu import LiveWeights, private_shared_memory
from hybridengine.reshard.spec import ParamSpec, TensorSlice
from hybridengine.types import Prompt, SamplingParams, Trajectory

#: Set while the engine is built, unless the user set them; vLLM reads them at import or construction.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, beside the trainer
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads are ours to place
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class VLLMEngine:
    """One vLLM engine per tensor-parallel group, all its ranks in our processes. See RolloutEngine.

    Weights on disk are never read: the engine starts with placeholders and is unservable until the first
    sync. All ranks of a group must call :meth:`generate` with the same prompts.

    Args:
        model_path: Hugging Face directory (config and generation config are read).
        rollout: the ``rollout`` section of the configuration.
        max_model_len: longest prompt plus response, tokens.
        eos_token_ids: end tokens besides those of the generation config.
        sleep_level: what :meth:`sleep` does; see ``rollout.sleep_level``.
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
        self.config, self.world, self.max_model_len = rollout, world, max_model_len
        self.replica, self.num_replicas = world.rank // rollout.tp, world.size // rollout.tp
        self.weights_version = -1
        self._servable = False
        self._padding: set[str] = set()
        self._stop = sorted({*eos_token_ids, *generation_eos(Path(model_path))})
        self._live_weights = LiveWeights()
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        set_num_threads = torch.set_num_threads  # vLLM's CPU worker replaces it for the whole process
        try:
            self.llm = self._build(str(model_path), rollout, seed, trust_remote_code)
        finally:
            torch.set_num_threads = set_num_threads
        self._runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self.model: nn.Module = self._runner.model
        if not world.is_cuda:
            self._weights = Sleeper(self.live_tensors().values())
            self._kv_cache = Sleeper(_tensors(self._runner.kv_caches))
        self._awake = {"weights", "kv_cache"}
        self._loaded: set[str] = set()

    def _build(self, model_path: str, rollout: RolloutConfig, seed: int, trust_remote_code: bool) -> Any:
        from vllm import LLM

        options: dict[str, Any] = {
            "model": model_path,
            "tensor_parallel_size": rollout.tp,
            "distributed_executor_backend": "external_launcher",
            "load_format": "dummy",
            "skip_tokenizer_init": True,
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
        else:
            options |= {"enforce_eager": True, "kv_cache_memory_bytes": int(rollout.kv_cache_gib * 2**30)}
        options |= rollout.engine_kwargs
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
        """n samples per prompt; see RolloutEngine.generate."""
        if not self._servable or "kv_cache" not in self._awake:
            raise StaleWeightsError(
                f"the rollout engine holds no complete policy version (last: {self.weights_version}, "
                f"awake: {sorted(self._awake) or 'nothing'}); sync before generating"
            )
        check_fits(prompts, self.max_model_len)
        engine = self.llm.llm_engine
        found: dict[str, Trajectory] = {}
        requests = {f"{p}-{k}": (prompt, k) for p, prompt in enumerate(prompts) for k in range(params.n)}
        for name, (prompt, k) in requests.items():
            engine.add_request(
                name,
                {"prompt_token_ids": prompt.token_ids},
                self._vllm_params(params, prompt, sample_seed(seed, step, prompt.index, k)),
            )
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        prompt, k = requests[output.request_id]
                        found[output.request_id] = trajectory = self._trajectory(output, prompt, k)
                        if on_finished is not None:
                            on_finished(trajectory)
        except BaseException:
            engine.abort_request([name for name in requests if name not in found])
            raise
        return [found[name] for name in requests]

    def _vllm_params(self, params: SamplingParams, prompt: Prompt, seed: int) -> Any:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        greedy = params.temperature == 0
        return VLLMSamplingParams(
            temperature=params.temperature,
            top_p=1.0 if greedy else params.top_p,
            top_k=0 if greedy else params.top_k,
            max_tokens=min(params.max_tokens, self.max_model_len - len(prompt.token_ids)),
            seed=None if greedy else seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            stop_token_ids=self._stop,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _trajectory(self, output: Any, prompt: Prompt, sample: int) -> Trajectory:
        completion = output.outputs[0]
        token_ids = list(completion.token_ids)
        flat = completion.logprobs
        return Trajectory(
            prompt=prompt,
            sample_index=sample,
            token_ids=token_ids,
            logprobs=[flat.logprobs[start] for start in flat.start_indices],
            versions=[self.weights_version] * len(token_ids),
            truncated=completion.finish_reason == "length",
        )

    # -- weights -----------------------------------------------------------------------------------

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
        return slices

    def begin_update(self) -> None:
        """Unservable from here until :meth:`finish_update`."""
        self._servable = False
        self._loaded.clear()

    def load_weight(self, name: str, full: Tensor) -> None:
        """Deliver one canonical parameter in full.

        Raises:
            ValueError: the model has no such parameter.
        """
        reached = self.model.load_weights([(name, full)])
        if not reached:
            raise ValueError(f"parameter {name!r} reached nothing in the vLLM model {type(self.model).__name__}")
        self._loaded |= reached

    def finish_update(self, version: int) -> None:
        """Servable again, with caches of older weights gone.

        Raises:
            RuntimeError: weights were delivered one by one and some are missing, by name.
        """
        if self._loaded:
            missing = [name for name, _ in self.model.named_parameters() if name not in self._loaded]
            missing = [name for name in missing if not self._is_tied_head(name)]
            if missing:
                raise RuntimeError(f"{len(missing)} parameters got no data in this sync, first: {missing[0]}")
        self._live_weights.repack()
        if not self.llm.llm_engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset: requests are still running")
        self.weights_version = version
        self._servable = True

    def _is_tied_head(self, name: str) -> bool:
        return name.endswith("lm_head.weight") and bool(
            getattr(self._runner.model_config.hf_config, "tie_word_embeddings", False)
        )

    # -- memory ------------------------------------------------------------------------------------

    def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Free what ``tags`` name; without weights the engine is unservable until the next sync.

        Raises:
            RuntimeError: requests are running.
        """
        check_tags(tags)
        if self.llm.llm_engine.has_unfinished_requests():
            raise RuntimeError("the rollout engine can't sleep while requests are running")
        level = self.config.sleep_level
        going = self._awake.intersection(tags) if level else set()
        if not going:
            return
        self.llm.llm_engine.reset_prefix_cache()
        if self.world.is_cuda:
            self.llm.sleep(level=level)
            going = {"weights", "kv_cache"}
        else:
            if "kv_cache" in going:
                self._kv_cache.sleep()
            if "weights" in going and level == 2:
                self._live_weights.drop()
                self._weights.sleep()
            elif "weights" in going:
                going = going - {"weights"}  # host memory is where they are
        if "weights" in going and level == 2:
            self._servable = False
            self.weights_version = -1
        self._awake -= going

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take the memory back; waking what is awake does nothing."""
        check_tags(tags)
        coming = set(tags) - self._awake
        if not coming:
            return
        if self.world.is_cuda:
            self.llm.wake_up(tags=sorted(coming))
        else:
            if "weights" in coming:
                self._weights.wake()
            if "kv_cache" in coming:
                self._kv_cache.wake()
        self._awake |= coming

    def close(self) -> None:
        """Let go of the engine; the process group stays."""
        self._servable = False
        self.llm.llm_engine.engine_core.shutdown()


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []
