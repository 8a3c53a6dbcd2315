"""RolloutEngine ``vllm``: the real vLLM inside the training processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridengine.config import RolloutConfig
from hybridengine.distributed.layout import RolloutLayout
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.base import (
    EngineProcessControl,
    check_awake,
    check_idle,
    check_tags,
    check_weights_awake,
    stop_tokens,
)
from hybridengine.engines.rollout.remote.shared_weights import WeightExporter
from hybridengine.engines.rollout.vllm.capacity import kv_cache_errors_explained
from hybridengine.engines.rollout.vllm.device import VLLMDevice, device_for
from hybridengine.engines.rollout.vllm.patches import (
    keep_process_group,
    no_message_queue,
    preserve_process_settings,
    quiet_start,
    register_architecture,
    register_head_bias,
    widen,
)
from hybridengine.engines.rollout.vllm.processing import WeightProcessing
from hybridengine.engines.rollout.vllm.requests import Requests, VLLMStream
from hybridengine.engines.rollout.weight_state import WeightState
from hybridengine.memory.kv_plan import BlockCache
from hybridengine.models.buffers import persistent_buffers
from hybridengine.models.facts import context_length, text_config
from hybridengine.sync.plan.spec import ParamSpec, TensorSlice
from hybridengine.sync.plan.views import write_slices
from hybridengine.types import SamplingParams


def public_buffers(model: Any) -> dict[str, Tensor]:
    """Persistent buffers without vLLM's own (scales of a quantized cache), whose names begin with an underscore."""
    return {n: b for n, b in persistent_buffers(model).items() if not n.rpartition(".")[2].startswith("_")}


def extended_context(model_path: Path, max_model_len: int, trust_remote_code: bool) -> int | None:
    """max_position_embeddings to tell vLLM, which takes a config.json at its word where scaled rotary embeddings reach
    further than that; None where the context is within it."""
    from transformers import AutoConfig

    config = text_config(AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code))
    limit, reached = getattr(config, "max_position_embeddings", None), context_length(config)
    return reached if limit and reached and limit < max_model_len <= reached else None


class VLLMEngine:
    """One vLLM engine per tensor-parallel group, all its ranks in our processes. See RolloutEngine.

    Weights on disk are never read: the engine starts with placeholders and is unservable until the first sync.

    Args:
        model_path: Hugging Face directory (config and generation config are read).
        rollout: the ``rollout`` section of the configuration.
        max_model_len: longest prompt plus response, tokens.
        eos_token_ids: end tokens besides those of the generation config.
        exports_weights: another process will map the weights: they must be in memory that can be exported.

    Raises:
        ValueError: the tensor-parallel size does not divide the world; the KV cache has no room; vLLM stores a weight
            in a way that can't be written into.
    """

    processes: EngineProcessControl | None = None

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
        exports_weights: bool = False,
    ) -> None:
        layout = RolloutLayout(world.size, rollout.tp)
        self.config, self.world, self.max_model_len = rollout, world, max_model_len
        self.replica, self.num_replicas = layout.replica_of(world.rank), layout.num_replicas
        self._padding: set[str] = set()
        self._canonical: set[str] = set()
        self._buffers: set[str] = set()  # those that the loader fills
        self._rearranged: dict[str, list[TensorSlice]] = {}  # parameter -> where it is, if not as loaded
        self._processing = WeightProcessing()
        self._device: VLLMDevice = device_for(rollout, world, exports_weights=exports_weights)
        with preserve_process_settings(world), quiet_start(), no_message_queue():
            self.llm = self._build(Path(model_path), seed, trust_remote_code)
        engine = self.llm.llm_engine
        self._runner = engine.model_executor.driver_worker.worker.model_runner
        self.model: Any = self._runner.model
        register_head_bias(self.llm, self.model, Path(model_path))
        if rollout.dtype == "float32":
            widen(self.model)
        self._state = WeightState()
        self._awake = {"weights", "kv_cache"}
        sampler = self._device.attach(self.llm, self._runner, self.live_tensors())
        vocabulary = self._runner.model_config.get_vocab_size()  # beyond it nothing is sampled, and vLLM refuses it
        stop = [token for token in stop_tokens(Path(model_path), eos_token_ids) if token < vocabulary]
        self.requests = Requests(engine, sampler, stop=stop, stepping=self._device.stepping)

    def _build(self, model_path: Path, seed: int, trust_remote_code: bool) -> Any:
        from vllm import LLM

        register_architecture(model_path)
        rollout = self.config
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
        if (limit := extended_context(model_path, self.max_model_len, trust_remote_code)) is not None:
            options["hf_overrides"] = {"max_position_embeddings": limit}
        options |= self._device.options() | rollout.engine_kwargs
        with (
            kv_cache_errors_explained(self._device.cache_size, self.max_model_len),
            keep_process_group(),  # what fails here fails on all ranks together, and they have to agree on that
            self._device.building(),
            self._processing.watching(),
        ):
            return LLM(**options)

    # -- generation --------------------------------------------------------------------------------

    def stream(self, params: SamplingParams, *, seed: int, interruptible: bool = True) -> VLLMStream:
        """Generation in steps, see RolloutStream."""
        return VLLMStream(self, params, seed=seed, interruptible=interruptible)

    def check_servable(self) -> None:
        """Raise StaleWeightsError unless the engine is awake with complete weights."""
        self._state.check_servable()
        check_awake(self.awake)

    # -- weights -----------------------------------------------------------------------------------

    @property
    def weights_version(self) -> int:
        """Last complete policy version; -1 when there is none."""
        return self._state.version

    def live_tensors(self) -> dict[str, Tensor]:
        """vLLM parameter name -> this rank's tensor that the model runs on, to be written in place.

        Tensors that are padding from end to end (a small vocabulary over many ranks) are left out.
        """
        named = self.model.named_parameters()
        live = {name: parameter.data for name, parameter in named if name not in self._padding}
        return live | {name: b for name, b in public_buffers(self.model).items() if name in self._buffers}

    def layout(self, params: Mapping[str, ParamSpec]) -> tuple[TensorSlice, ...]:
        """Which boxes of the canonical parameters this rank's tensors hold, learnt from vLLM's own loader."""
        from hybridengine.sync.plan.bake import bake_vllm

        self._padding.clear()
        self._buffers.clear()
        live, buffers = self.live_tensors(), public_buffers(self.model)
        with self._processing.as_loaded(self.model) as loaded:
            slices = bake_vllm(self.model, params, live | loaded, optional=buffers)
        slices = self._processing.as_stored(slices)
        reached = {piece.tensor for piece in slices}
        self._padding, self._buffers = set(live) - reached, set(buffers) & reached
        self._canonical = set(params)
        self._rearranged = {}
        for piece in slices:
            if piece.tensor in self._processing.rearranged:
                self._rearranged.setdefault(piece.param, []).append(piece)
        return slices

    def alias_tensor(self, name: str, tensor: Tensor) -> bool:
        """Run parameter ``name`` on the trainer's ``tensor`` if the two are alike; returns whether it does."""
        if name in self._buffers:
            return False
        return self._device.aliases.alias(name, self.model.get_parameter(name), tensor)

    def export_weights(self) -> WeightExporter:
        """Move the weights into memory that another process can map; once, before the first sync."""
        exporter = WeightExporter(dict(self.model.named_parameters()) | public_buffers(self.model))
        self._device.weights_exported(exporter)
        return exporter

    def begin_update(self) -> None:
        """Unservable from here until :meth:`finish_update`.

        Raises:
            RuntimeError: the weights are asleep.
        """
        check_weights_awake(self._awake)
        self._state.begin(self._device.aliases.without(self.live_tensors()))

    def load_weight(self, name: str, full: Tensor) -> None:
        """Deliver one canonical parameter in full.

        Raises:
            ValueError: the model has no such parameter.
        """
        self._state.mark_delivered(name)
        if name in self._rearranged:
            return write_slices(full, self._rearranged[name], self.live_tensors())
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
        self._state.check_complete(self._canonical, self._device.aliases.without(self.live_tensors()))
        self._device.weights_written()
        self.requests.drop_caches()
        self._state.finish(version)

    # -- memory ------------------------------------------------------------------------------------

    @property
    def kv_blocks(self) -> BlockCache | None:
        """What can be withheld of the KV cache; None on a GPU, where it is mapped as a whole."""
        return self._device.kv_blocks

    @property
    def awake(self) -> frozenset[str]:
        return frozenset(self._awake)

    def nbytes(self, tag: str) -> int:
        """Bytes of ``tag`` on this rank when awake, aliases left out; on a CPU usable blocks, and no packed weights."""
        check_tags([tag])
        return self._device.nbytes(tag)

    def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Free what ``tags`` name, as far as ``rollout.sleep_level`` and the device go.

        At level 2 the weights are dropped and the engine is unservable until the next sync; at level 1 a GPU's wait in
        host memory, once there are any. On a GPU the KV cache goes with the weights: vLLM has no other way.

        Raises:
            RuntimeError: requests are running.
        """
        check_tags(tags)
        check_idle(self.requests.running)
        level = self.config.sleep_level
        going = self._awake.intersection(tags) & self._device.can_sleep(level)
        if not going:
            return
        self.requests.drop_caches()
        keep = level == 1 and self._state.version >= 0
        gone = self._device.sleep(going, keep_weights=keep)
        if "weights" in gone and not keep:
            self._state.lose()
        self._awake -= gone

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take the memory back; waking what is awake does nothing.

        Raises:
            torch.OutOfMemoryError: there is not as much; nothing has been taken then.
        """
        check_tags(tags)
        coming = set(tags) - self._awake
        if coming:
            self._device.wake(coming)
            self._awake |= coming

    def close(self) -> None:
        """Shut the engine down; the process group stays."""
        self._state.lose()
        with keep_process_group():
            self.llm.llm_engine.engine_core.shutdown()
