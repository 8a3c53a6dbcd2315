"""What vLLM's CPU build lacks for time-sharing: live weights at full speed, quick start, private memory.

As shipped, every linear weight is packed once into a oneDNN handler and the parameter itself is thrown
away: there is nothing to write an update into. Ways to live with that, compared in float32 on the layers of a
135M-parameter Llama on one AVX-512 core (CPU time of all matrix products of a decode step; packed = 1):

    ============================================  ====  ====  ====  ======================================
    rows in the batch                                8    32    64  price
    ============================================  ====  ====  ====  ======================================
    packed, as shipped                            1     1     1     nothing to update in place
    plain weight, ``torch.nn.functional.linear``  1.86  1.40  1.38  none
    plain weight, oneDNN without packing          1.49  1.15  1.16  none
    plain weight in transposed memory, oneDNN     1.30  1.15  1.11  every update is a strided transpose
    plain weight, packed again after the update   1     1     1     a second copy; 0.35 s per update
    ============================================  ====  ====  ====  ======================================

The last is chosen: the plain weight stays in checkpoint layout, so that a handoff copies long runs of memory
or aliases them, and packing costs what it saves in about 25 decode steps of 32 rows. Whole decode steps are
1.32 (32 rows) and 1.25 (64 rows) times as fast as with ``linear``. The second copy goes while the weights sleep.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridengine.platform.cpu.shared_collectives import SharedCollectives, supported


class LiveWeights:
    """Linear layers and experts whose plain weights stay in place, packed again by :meth:`repack`."""

    def __init__(self) -> None:
        self._linears: list[Any] = []
        self._experts: list[_LiveExperts] = []
        self._dispatch: Callable[..., None] | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While the engine is built: note every layer that vLLM would pack, and pack nothing yet."""
        from vllm.model_executor.layers import utils
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe

        Experts: Any = cpu_moe.CPUUnquantizedExperts
        dispatch, pack_experts = utils.dispatch_cpu_unquantized_gemm, Experts.process_weights_after_loading

        def note_linear(layer: Any, remove_weight: bool) -> None:
            layer.cpu_linear = _no_weights
            self._linears.append(layer)

        def note_experts(experts: Any, layer: nn.Module) -> None:
            self._experts.append(_LiveExperts(experts, layer, pack_experts))

        self._dispatch = dispatch
        utils.dispatch_cpu_unquantized_gemm = note_linear
        Experts.process_weights_after_loading = note_experts
        try:
            yield
        finally:
            utils.dispatch_cpu_unquantized_gemm = dispatch
            Experts.process_weights_after_loading = pack_experts

    def drop(self) -> None:
        """Forget the packed copies (the plain weights are the caller's)."""
        for layer in self._linears:
            layer.cpu_linear = _no_weights
        for experts in self._experts:
            experts.drop()

    def repack(self) -> None:
        """Pack every layer from its plain weight; one at a time, the old copy going before the new one comes."""
        assert self._dispatch is not None
        for layer in self._linears:
            layer.cpu_linear = _no_weights
            bias = getattr(layer, "bias", None)
            plain = None if bias is None else bias.data
            self._dispatch(layer, remove_weight=False)
            if bias is not None and plain is not None and bias.dtype != plain.dtype:
                # One kernel wants a float32 bias and replaces the parameter's data: keep the live one.
                layer.cpu_linear = _with_bias(layer.cpu_linear, bias.data)
                bias.data = plain
        for experts in self._experts:
            experts.repack()


class _LiveExperts:
    """The stacked experts (w13, w2) of one layer; the kernel reads packed copies."""

    def __init__(self, experts: Any, layer: Any, pack: Callable[[Any, nn.Module], None]) -> None:
        self._experts, self._layer, self._pack = experts, layer, pack
        self._packed: tuple[Tensor, Tensor] | None = None
        self._apply = experts.apply
        experts.apply = self._apply_packed

    def drop(self) -> None:
        self._packed = None

    def repack(self) -> None:
        self.drop()
        shadow: Any = nn.Module()
        for name in ("w13_weight", "w2_weight", "w13_bias", "w2_bias"):
            plain = getattr(self._layer, name, None)
            if plain is not None:
                setattr(shadow, name, nn.Parameter(plain.data, requires_grad=False))
        self._pack(self._experts, shadow)
        w13, w2 = shadow.w13_weight.data, shadow.w2_weight.data
        if hasattr(shadow, "w13_bias") and w13.shape != self._layer.w13_weight.shape:
            raise ValueError(
                f"experts with a bias need an intermediate size per rank that the CPU kernel takes unpadded; "
                f"{self._layer.w2_weight.shape[-1]} is padded to {w2.shape[-1]}"
            )
        self._packed = (w13, w2)

    def _apply_packed(self, *args: Any, w1: Tensor, w2: Tensor, **kwargs: Any) -> Any:
        if self._packed is None:
            _no_weights()
        assert self._packed is not None
        return self._apply(*args, w1=self._packed[0], w2=self._packed[1], **kwargs)


def _with_bias(gemm: Callable[..., Tensor], bias: Tensor) -> Callable[..., Tensor]:
    return lambda x, weight, given: gemm(x, weight, None if given is None else bias)


def _no_weights(*_: Any) -> torch.Tensor:
    raise RuntimeError("the rollout engine's weights are asleep or were never synced")


@contextmanager
def private_shared_memory() -> Iterator[None]:
    """While the engine is built: shared memory under names of this job's own, gone from /dev/shm right after.

    vLLM names its tensor-parallel segments after the launcher's address, which is the same for every job on
    a host, and a killed job leaves them behind for the next to fail on. Collective.
    """
    from vllm.distributed.device_communicators import cpu_communicator

    Shared: Any = cpu_communicator._CPUSHMDistributed

    job = [uuid.uuid4().hex[:12]]
    dist.broadcast_object_list(job, src=0)
    original, names = Shared.make_group_name, set()

    def name_of(communicator: Any) -> str:
        name = f"hybridengine-{job[0]}-{original(communicator).lstrip('/-')}"
        names.add(name)
        return name

    Shared.make_group_name = staticmethod(name_of)
    try:
        yield
    finally:
        Shared.make_group_name = staticmethod(original)
        for name in names:
            for file in Path("/dev/shm").glob(f"{name.split('[')[0]}*"):
                file.unlink(missing_ok=True)  # mapped by every rank by now; the memory lives on


def yield_while_waiting() -> None:
    """Let the built engine's tensor-parallel ranks exchange data through our collectives. Collective."""
    from vllm.distributed.parallel_state import get_tp_group

    tp = get_tp_group()
    if tp.world_size == 1 or not supported():
        return
    timeout = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout
    ours = SharedCollectives(tp.cpu_group, timeout_seconds=timeout.total_seconds())
    communicator: Any = tp.device_communicator
    for name in ("all_reduce", "all_gather_into_tensor", "gather"):
        setattr(communicator.dist_module, name, getattr(ours, name))
