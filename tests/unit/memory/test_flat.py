"""One storage for many tensors: values, objects and views stay what they are."""

from __future__ import annotations

import pytest
import torch

from hybridengine.config import TrainConfig
from hybridengine.engines.train.optim import ShardedAdamW
from hybridengine.memory.flat import ALIGNMENT, pack, zeros_like

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU")]),
]


def storages(tensors: list[torch.Tensor]) -> set[int]:
    return {t.untyped_storage()._cdata for t in tensors if t.numel()}


def test_zeros_are_separate_and_of_one_storage() -> None:
    like = [torch.ones(3, 5), torch.ones(7, dtype=torch.bfloat16), torch.ones(0, 4), torch.ones(2, 3).t()]
    found = zeros_like(like)
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in like]
    assert len(storages(found)) == 1 and all(t.is_contiguous() for t in found)
    for i, tensor in enumerate(found):
        assert not tensor.any()
        tensor.fill_(i + 1)
    assert all(bool((t == i + 1).all()) for i, t in enumerate(found))
    assert found[1].data_ptr() % ALIGNMENT == found[0].data_ptr() % ALIGNMENT


@pytest.mark.parametrize("device", DEVICES)
def test_packing_keeps_objects_values_and_views(device: str) -> None:
    base = torch.arange(100.0, device=device)
    parameter = torch.nn.Parameter(torch.arange(6.0, device=device).view(2, 3))
    bytes_, empty = torch.arange(5, dtype=torch.uint8, device=device), torch.empty(0, device=device)
    tensors = [base[10:30].view(4, 5).t(), base[20:40], parameter, bytes_, empty]
    before = [(id(t), t.detach().clone(), t.stride()) for t in tensors]
    assert pack(tensors)
    for tensor, (name, values, stride) in zip(tensors, before, strict=True):
        assert id(tensor) == name and torch.equal(tensor, values) and tensor.stride() == stride
    assert len(storages(tensors)) == 1
    tensors[1][0] = -1.0
    assert tensors[0].t()[2, 0] == -1.0, "two views of one tensor are still views of one tensor"
    assert base[20] == -1.0, "and their base moved along"
    assert parameter.requires_grad and parameter.is_leaf
    assert not pack(tensors)


def test_a_forgotten_view_is_found() -> None:
    one, other = torch.arange(10.0), torch.arange(4.0)
    forgotten = one.detach()
    with pytest.raises(RuntimeError, match="1 other tensor"):
        pack([one, other])
    assert forgotten[3] == 3.0


def test_memory_that_others_map_stays() -> None:
    shared = torch.frombuffer(bytearray(64), dtype=torch.float32)
    address = shared.data_ptr()
    assert not pack([shared, torch.ones(3)])
    assert shared.data_ptr() == address


def test_moments_are_one_block_and_adam_takes_the_same_steps() -> None:
    shards = {"a": torch.randn(40, 9), "b": torch.randn(31), "none": torch.empty(0, 9)}
    plain = [torch.nn.Parameter(shards[name].clone()) for name in ("a", "b")]
    ours = ShardedAdamW(shards, [], TrainConfig(lr=0.1))
    theirs = torch.optim.AdamW(plain, lr=0.1, weight_decay=0.0, fused=True)
    for step in range(3):
        for parameter, twin in zip((ours.params["a"], ours.params["b"]), plain, strict=True):
            twin.grad = torch.randn(twin.shape, generator=torch.Generator().manual_seed(step))
            parameter.grad = twin.grad.clone()
        ours.step(0.1)
        theirs.step()
        assert torch.equal(shards["a"], plain[0]) and torch.equal(shards["b"], plain[1])
    moments = [tensor for tensors in ours.moments().values() for tensor in tensors.values()]
    assert len(storages(moments)) == 1
