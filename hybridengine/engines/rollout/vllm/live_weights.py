"""Live weights at full speed on vLLM's CPU build.

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

The last is chosen: the plain weight stays in checkpoint layout, so that a transfer copies long runs of memory
or aliases them, and packing costs what it saves in about 25 decode steps of 32 rows. Whole decode steps are
1.32 (32 rows) and 1.25 (64 rows) times as fast as with ``linear``. The second copy goes while the weights sleep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hybridengine.engines.rollout.vllm.patches import intercept_packing


class LiveWeights:
    """Linear layers and experts whose plain weights stay in place, packed again by :meth:`repack`."""

    def __init__(self) -> None:
        self._linears: list[Any] = []
        self._experts: list[_LiveExperts] = []
        self._dispatch: Callable[..., None] = _no_weights
        self._pack_experts: Callable[[Any, nn.Module], None] = _no_weights

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While the engine is built: note every layer that vLLM would pack, and pack nothing yet."""

        def note_linear(layer: Any, remove_weight: bool) -> None:
            layer.cpu_linear = _no_weights
            self._linears.append(layer)

        with intercept_packing(note_linear, self._note_experts) as (self._dispatch, self._pack_experts):
            yield

    def _note_experts(self, experts: Any, layer: nn.Module) -> None:
        self._experts.append(_LiveExperts(experts, layer, self._pack_experts))

    def only(self, layers: Iterable[nn.Module]) -> None:
        """Drop all other layers: copies that were made to observe vLLM's processing."""
        kept = {id(layer) for layer in layers}
        self._linears = [layer for layer in self._linears if id(layer) in kept]
        self._experts = [experts for experts in self._experts if id(experts.layer) in kept]

    def drop(self) -> None:
        """Forget the packed copies (the plain weights are the caller's)."""
        for layer in self._linears:
            layer.cpu_linear = _no_weights
        for experts in self._experts:
            experts.drop()

    def repack(self) -> None:
        """Pack every layer from its plain weight; one at a time, the old copy going before the new one comes."""
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
        self._experts, self.layer, self._pack = experts, layer, pack
        self._packed: tuple[Tensor, Tensor] | None = None
        self._apply = experts.apply
        experts.apply = self._apply_packed

    def drop(self) -> None:
        self._packed = None

    def repack(self) -> None:
        self.drop()
        shadow: Any = nn.Module()
        for name in ("w13_weight", "w2_weight", "w13_bias", "w2_bias"):
            plain = getattr(self.layer, name, None)
            if plain is not None:
                setattr(shadow, name, nn.Parameter(plain.data, requires_grad=False))
        self._pack(self._experts, shadow)
        w13, w2 = shadow.w13_weight.data, shadow.w2_weight.data
        if hasattr(shadow, "w13_bias") and w13.shape != self.layer.w13_weight.shape:
            raise ValueError(
                f"experts with a bias need an intermediate size per rank that the CPU kernel takes unpadded; "
                f"{self.layer.w2_weight.shape[-1]} is padded to {w2.shape[-1]}"
            )
        self._packed = (w13, w2)

    def _apply_packed(self, *args: Any, w1: Tensor, w2: Tensor, **kwargs: Any) -> Any:
        if self._packed is None:
            _no_weights()
        assert self._packed is not None
        return self._apply(*args, w1=self._packed[0], w2=self._packed[1], **kwargs)


def _with_bias(gemm: Callable[..., Tensor], bias: Tensor) -> Callable[..., Tensor]:
    return lambda x, weight, given: gemm(x, weight, None if given is None else bias)


def _no_weights(*_: Any) -> Any:
    raise RuntimeError("the rollout engine's weights are asleep or were never synced")
