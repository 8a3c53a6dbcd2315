"""What kernels may do to loaded weights, on layers without one: learnt where elements only move, refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hybridengine.engines.rollout.vllm.processing import WeightProcessing
from hybridengine.sync.plan.spec import TensorSlice
from hybridengine.sync.plan.views import write_slices

Process = Callable[[nn.Module], None]
ROWS, COLUMNS = 6, 4


class Method:
    """A quantization method as vLLM's layers have one."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.process(layer)


class Layer(nn.Module):
    def __init__(self, process: Process, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(ROWS, dtype=dtype), requires_grad=False)
        self.quant_method = Method(process)


def processed(process: Process, dtype: torch.dtype = torch.float32) -> tuple[WeightProcessing, nn.Module]:
    """A model of one layer, "block.proj", whose weights have been through ``process``."""
    model = nn.Module()
    model.block = nn.Module()
    model.block.proj = Layer(process, dtype)
    found, layer = WeightProcessing(), model.block.proj
    found._process("block.proj", layer, layer.quant_method.process_weights_after_loading)
    return found, model


ORDER = torch.tensor([3, 4, 5, 0, 2, 1])


def in_place(layer: nn.Module) -> None:
    layer.weight.data.copy_(layer.weight.data[ORDER].clone())


def other_data(layer: nn.Module) -> None:
    layer.weight.data = layer.weight.data[ORDER]
    layer.bias.data = layer.bias.data.flip(0)


def other_parameter(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(layer.weight.data[:, [2, 3, 0, 1]].contiguous(), requires_grad=False)


def transposed(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)


def tiled(layer: nn.Module) -> None:
    """[3, 2, 2, 2]: tiles of 2 × 2, one behind the other."""
    data = layer.weight.data.view(ROWS // 2, 2, COLUMNS // 2, 2).transpose(1, 2).contiguous()
    layer.weight = nn.Parameter(data, requires_grad=False)


def padded(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(nn.functional.pad(layer.weight.data, (0, 2, 0, 1)), requires_grad=False)


LEARNT = [in_place, other_data, other_parameter, transposed, tiled, padded]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("process", LEARNT, ids=lambda process: process.__name__)
def test_where_elements_go_is_learnt(process: Process, dtype: torch.dtype) -> None:
    """A checkpoint written through the slices is what processing would have made of it."""
    processing, model = processed(process, dtype)
    weight = torch.randn(ROWS, COLUMNS).to(dtype)
    bias = torch.randn(ROWS).to(dtype)
    loaded = [
        TensorSlice("w", (0, 0), (ROWS, COLUMNS), "block.proj.weight", 0, (COLUMNS, 1)),
        TensorSlice("b", (0,), (ROWS,), "block.proj.bias", 0, (1,)),
    ]
    live = {name: parameter.data for name, parameter in model.named_parameters()}
    for tensor in live.values():
        tensor.zero_()
    slices = processing.as_stored(loaded)
    for name, full in (("w", weight), ("b", bias)):
        write_slices(full, [piece for piece in slices if piece.param == name], live)
    expected = Layer(process, dtype)
    expected.weight.data, expected.bias.data = weight, bias
    process(expected)
    for name, tensor in expected.named_parameters():
        assert torch.equal(live[f"block.proj.{name}"], tensor.data), name
    moved = {"block.proj.weight"} | ({"block.proj.bias"} if process is other_data else set())
    assert processing.rearranged == moved


def test_what_nothing_is_done_to_is_left_alone() -> None:
    processing, model = processed(lambda layer: None)
    piece = TensorSlice("w", (0, 0), (ROWS, COLUMNS), "block.proj.weight", 0, (COLUMNS, 1))
    assert processing.rearranged == frozenset() and processing.as_stored([piece]) == (piece,)
    with processing.as_loaded(model) as loaded:
        assert loaded == {}


def test_the_loader_sees_the_tensors_that_it_knows() -> None:
    """Shape, class and attributes of the loaded parameter, without memory; afterwards the stored one is back."""
    processing, model = processed(transposed)
    stored = model.block.proj.weight
    assert stored.shape == (COLUMNS, ROWS)
    with processing.as_loaded(model) as loaded:
        assert model.block.proj.weight.shape == (ROWS, COLUMNS) and model.block.proj.weight.is_meta
        assert loaded["block.proj.weight"].shape == (ROWS, COLUMNS)
        assert dict(model.named_parameters()).keys() == {"block.proj.weight", "block.proj.bias"}
    assert model.block.proj.weight is stored


def scaled(factor: float) -> Process:
    def process(layer: nn.Module) -> None:
        layer.weight.data.mul_(factor)

    return process


def summed(layer: nn.Module) -> None:
    layer.weight.data = layer.weight.data + layer.weight.data.flip(0)


def as_another_dtype(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(layer.weight.data.to(torch.float16), requires_grad=False)


def repeated(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(layer.weight.data.repeat(2, 1), requires_grad=False)


def padded_with_ones(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(nn.functional.pad(layer.weight.data, (0, 0, 0, 1), value=1.0), requires_grad=False)


def derived(layer: nn.Module) -> None:
    layer.row_sums = layer.weight.data.sum(1)


def thrown_away(layer: nn.Module) -> None:
    del layer.weight


SHIFTS = itertools.cycle(range(1, ROWS))


def as_it_likes(layer: nn.Module) -> None:
    layer.weight.data = layer.weight.data.roll(next(SHIFTS), 0)


REFUSED = {
    "doubled": (scaled(2.0), "weight is not only rearranged: its kernel computes with it"),
    "halved": (scaled(0.5), "weight is"),
    "negated": (scaled(-1.0), "weight is not only rearranged"),
    "summed": (summed, "weight is"),
    "dtype": (as_another_dtype, "weight is stored as torch.float16, not as torch.float32"),
    "padded-with-ones": (padded_with_ones, "weight is"),
    "derived": (derived, "row_sums is a tensor that its kernel derives from loaded weights"),
    "thrown-away": (thrown_away, "weight is there only before or only after its kernel's processing"),
    "from-call-to-call": (as_it_likes, "weight is rearranged differently from call to call"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_more_than_moved_is_refused_by_name(case: str) -> None:
    process, told = REFUSED[case]
    with pytest.raises(ValueError) as caught:
        processed(process)
    assert str(caught.value).startswith(f"rollout.engine=vllm: block.proj.{told}"), caught.value
    assert "use another kernel (rollout.engine_kwargs), an unquantized model, or rollout.engine=transformers" in str(
        caught.value
    )


def test_elements_that_are_stored_twice_are_written_twice() -> None:
    processing, model = processed(repeated)
    loaded = TensorSlice("w", (0, 0), (ROWS, COLUMNS), "block.proj.weight", 0, (COLUMNS, 1))
    weight = torch.randn(ROWS, COLUMNS)
    write_slices(weight, processing.as_stored([loaded]), {"block.proj.weight": model.block.proj.weight.data})
    assert torch.equal(model.block.proj.weight.data, weight.repeat(2, 1))


def test_a_layer_that_can_not_be_copied_is_refused_only_if_it_moves_something() -> None:
    class Uncopyable:
        def __deepcopy__(self, memo: object) -> None:
            raise TypeError("a communicator")

    for process, refused in ((lambda layer: None, False), (in_place, True)):
        layer = Layer(process)
        layer.group = Uncopyable()
        found = WeightProcessing()
        if refused:
            with pytest.raises(ValueError, match=r"proj.weight is rearranged, and a copy .* can't be made .a commun"):
                found._process("proj", layer, process)
        else:
            found._process("proj", layer, process)
