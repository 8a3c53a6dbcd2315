"""What vLLM's CPU build lacks for time-sharing: live weights at full speed, and sleep.

As shipped, every linear weight is packed once into a oneDNN handler and the parameter itself is thrown
away: there is nothing to write an update into. Two ways to live with that were compared: keeping the plain
weight and computing with ``torch.nn.functional.linear`` (no second copy, but every decode step pays), or
keeping the plain weight *and* the packed one, and packing again after each update. The second is chosen:
an update happens once per step, a matrix product happens for every token (docs/status.md has the figures).
Its price is a second copy of the linear weights while the engine is awake.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class LiveWeights:
    """Linear layers whose plain weights stay in place and are packed again by :meth:`repack`."""

    def __init__(self) -> None:
        self.layers: list[nn.Module] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While the engine is built: note every packed layer, and keep its plain weight."""
        from vllm.model_executor.layers import utils

        original = utils.dispatch_cpu_unquantized_gemm

        def keep(layer: nn.Module, remove_weight: bool) -> None:
            original(layer, remove_weight=False)
            self.layers.append(layer)

        self._dispatch = original
        utils.dispatch_cpu_unquantized_gemm = keep
        try:
            yield
        finally:
            utils.dispatch_cpu_unquantized_gemm = original

    def drop(self) -> None:
        """Forget the packed copies (the plain weights are the caller's)."""
        for layer in self.layers:
            layer.cpu_linear = _asleep

    def repack(self) -> None:
        """Pack every recorded layer from its plain weight, one at a time."""
        for layer in self.layers:
            layer.cpu_linear = _asleep  # the old copy goes before the new one comes
            self._dispatch(layer, remove_weight=False)


def _asleep(*_: Any) -> torch.Tensor:
    raise RuntimeError("the rollout engine's weights are asleep")


@contextmanager
def private_shared_memory() -> Iterator[None]:
    """While the engine is built: shared memory under names of this job's own, gone from /dev/shm right after.

    vLLM names its tensor-parallel segments after the launcher's address, which is the same for every job on
    a host, and a killed job leaves them behind for the next to fail on. Collective.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as Shared

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
