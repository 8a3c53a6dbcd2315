"""What the megatron engine works out without processes: places, boxes, refusals, a cut vocabulary."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridengine.config import TrainConfig
from hybridengine.config.compose import ConfigError, build
from hybridengine.distributed.world import World
from hybridengine.engines.train import logprob
from hybridengine.engines.train.base import MicroBatch
from hybridengine.engines.train.batching import build_micro_batch
from hybridengine.engines.train.logprob import VocabShard, chunked_logprobs
from hybridengine.engines.train.megatron.batches import pad_micro_batches
from hybridengine.engines.train.megatron.checkpoint import blocks_of, flat_boxes
from hybridengine.engines.train.megatron.degrees import layout_of
from hybridengine.engines.train.megatron.topology import Topology
from hybridengine.sync.plan.naming.megatron import MegatronLayout, megatron_shard_map
from hybridengine.types import Sample
from hybridengine.validate.contradictions import validate
from tests.tiny import make_tiny

BASE = ["data.train=d.jsonl", "reward.fn=exact_match", "train=megatron"]


# -- boxes ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_flat_boxes_are_the_flat_range_in_order(rows: int, columns: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, rows * columns - 1))
    stop = data.draw(st.integers(start + 1, rows * columns))
    whole = torch.arange(rows * columns).view(rows, columns)
    boxes = list(flat_boxes(start, stop, (rows, columns)))
    parts = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].reshape(-1) for box in boxes]
    assert torch.cat(parts).tolist() == list(range(start, stop))
    assert len(boxes) <= 3


@pytest.mark.parametrize("layout", [MegatronLayout(tp=2, dp=2), MegatronLayout(tp=4), MegatronLayout(pp=2, dp=2)])
def test_blocks_of_all_ranks_are_the_checkpoint(layout: MegatronLayout) -> None:
    """Each rank keeps half of every local tensor, at an odd place; the blocks of all hold every element's own value."""
    config = SimpleNamespace(
        architectures=["LlamaForCausalLM"], num_hidden_layers=2, hidden_size=6, num_attention_heads=4,
        num_key_value_heads=1, head_dim=2, intermediate_size=8, vocab_size=37, tie_word_embeddings=False,
    )  # fmt: skip
    layout = MegatronLayout(tp=layout.tp, pp=layout.pp, dp=layout.dp, vocab_divisor=8)
    shard_map = megatron_shard_map(config, layout)
    shapes = {name: spec.shape for name, spec in shard_map.params.items()}
    values = {name: torch.arange(spec.numel, dtype=torch.float32).view(spec.shape) for name, spec in
              shard_map.params.items()}  # fmt: skip
    rebuilt = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    for rank in range(layout.world_size):
        by_tensor: dict[str, list[Any]] = {}
        for item in shard_map.ranks[rank]:
            by_tensor.setdefault(item.tensor, []).append(item)
        for items in by_tensor.values():
            tail = items[0].sizes[1:]
            local = torch.full((max(i.start // (tail[0] if tail else 1) + i.sizes[0] for i in items), *tail), -1.0)
            for item in items:
                box = tuple(slice(o, o + n) for o, n in zip(item.offsets, item.sizes, strict=True))
                local.as_strided(item.sizes, item.strides, item.start).copy_(values[item.param][box])
            middle = max(1, local.numel() // 2 - 1)
            halves = [(0, middle), (middle, local.numel())]
            for start, stop in [halves[rank // layout.tp % 2]] if layout.dp > 1 else halves:
                flat = local.view(-1)[start:stop]
                for block in blocks_of(items, local.shape, start, flat, "model", shapes):
                    box = tuple(slice(o, o + n) for o, n in zip(block.offsets, block.tensor.shape, strict=True))
                    rebuilt[block.key.removeprefix("model.")][box] = block.tensor
    for name, value in values.items():
        assert torch.equal(rebuilt[name], value), name


# -- places ---------------------------------------------------------------------------------------------------------


def test_chunks_of_a_virtual_pipeline_take_turns() -> None:
    """Eight layers, two stages of two chunks: stage 0 has layers 0, 1 and 4, 5."""
    decoder: Any = SimpleNamespace(num_layers=8)
    layout = layout_of(TrainConfig(tp=2, pp=2, vpp=2), decoder, 8)
    assert layout.stages == (0, 0, 1, 1, 0, 0, 1, 1) and layout.dp == 2
    places = [Topology(layout, 2, rank) for rank in range(8)]
    assert [p.tp_rank for p in places] == [0, 1] * 4
    assert [p.replica for p in places] == [0, 0, 1, 1] * 2
    assert [p.stage for p in places] == [0] * 4 + [1] * 4
    assert [p.is_leader for p in places] == [False] * 4 + [True, False] * 2
    assert [list(places[4].layers(chunk, 8)) for chunk in range(2)] == [[2, 3], [6, 7]]


@pytest.mark.parametrize(("tp", "divisor"), [(1, 64), (2, 32), (3, 64), (8, 8)])
def test_the_vocabulary_is_padded_as_vllm_pads_it(tp: int, divisor: int) -> None:
    decoder: Any = SimpleNamespace(num_layers=1)
    layout = layout_of(TrainConfig(tp=tp), decoder, tp)
    assert layout.vocab_divisor == divisor
    if 64 % tp == 0:
        assert layout.padded_vocab(97) == 128


def test_widened_batches_keep_the_tokens_and_their_positions() -> None:
    samples = [
        Sample(prompt_ids=[5, 6], response_ids=list(range(7, 7 + n)), loss_mask=[True] * n, advantages=[1.0] * n)
        for n in (3, 1)
    ]
    packed = [build_micro_batch(samples, part, pad_id=0, packing=True) for part in ([0, 1], [1])]
    first, second = pad_micro_batches(packed, multiple=5, alike=False, pad_id=2)
    assert first.input_ids.tolist() == [[5, 6, 7, 8, 9, 5, 6, 7, 2, 2]]
    assert first.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    assert first.layout is not None and first.layout.cu_seqlens.tolist() == [0, 5, 8, 10]
    assert second.input_ids.shape == (1, 5)
    assert [b.input_ids.shape[1] for b in pad_micro_batches(packed, multiple=1, alike=True, pad_id=2)] == [8, 8]
    rows: MicroBatch = build_micro_batch(samples, [0, 1], pad_id=0, packing=False)
    (padded,) = pad_micro_batches([rows], multiple=4, alike=False, pad_id=2)
    assert padded.input_ids.shape == (2, 8) and padded.layout is None


# -- a cut vocabulary -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [64, 3], ids=["one-chunk", "chunks"])
def test_a_cut_vocabulary_gives_the_whole_ones_numbers(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Three parts, the last without a row, computed in threads that meet in each all-reduce."""
    from threading import Barrier, Thread

    cuts, barrier, shared = [0, 5, 11, 11], Barrier(3), {}

    def all_reduce(tensor: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM, group: Any = None) -> None:
        shared[group] = tensor.clone()
        barrier.wait()
        parts = torch.stack([shared[rank] for rank in range(3)])
        barrier.wait()
        tensor.copy_(parts.amax(0) if op == torch.distributed.ReduceOp.MAX else parts.sum(0))
        barrier.wait()

    monkeypatch.setattr(logprob.dist, "all_reduce", all_reduce)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(7, 4, generator=generator), torch.randn(11, 4, generator=generator)
    targets = torch.tensor([0, 4, 5, 10, 3, 7, 2])
    options: dict[str, Any] = {"temperature": 0.7, "chunk_tokens": chunk, "with_entropy": True}

    def gradients(w: torch.Tensor, shard: VocabShard | None) -> tuple[torch.Tensor, ...]:
        h, w = hidden.clone().requires_grad_(), w.clone().requires_grad_()
        scores, entropy = chunked_logprobs(h, w, targets, shard=shard, **options)
        assert entropy is not None
        # In this thread: backward's own threads would wait for each other in the barrier.
        with torch.autograd.set_multithreading_enabled(False):
            (scores.sin().sum() + entropy.square().sum()).backward()
        return scores.detach(), entropy.detach(), h.grad, w.grad  # type: ignore[return-value]

    found: list[Any] = [None] * 3

    def run(rank: int) -> None:
        found[rank] = gradients(weight[cuts[rank] : cuts[rank + 1]], VocabShard(rank, cuts[rank]))  # type: ignore[arg-type]

    threads = [Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    scores, entropy, d_hidden, d_weight = gradients(weight, None)
    for part in found:
        torch.testing.assert_close(part[0], scores)
        torch.testing.assert_close(part[1], entropy)
    torch.testing.assert_close(sum(part[2] for part in found), d_hidden)
    torch.testing.assert_close(torch.cat([part[3] for part in found]), d_weight)


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("model"), "qwen2", max_position_embeddings=4096, head_dim=32))


@pytest.mark.parametrize(
    ("overrides", "ranks", "message"),
    [
        (["train.tp=3"], 4, "train.tp=3 train.pp=1: one model takes 3 ranks, which must divide the 4"),
        (["train.ep=4", "train.tp=2"], 4, "train.ep=4: must divide the 2 replica"),
        (["train.vpp=2"], 4, "train.vpp=2: chunks of pipeline stages need train.pp of 2 or more"),
        (["train.pp=2", "train.vpp=2", "train.packing=false"], 2, "train.packing must be true"),
        (["train.sequence_parallel=true"], 2, "train.sequence_parallel=true: needs train.tp of 2 or more"),
        (["train.shard_order=rank"], 2, "train.shard_order=rank: has no effect with train.engine=megatron"),
        (["train.reshard_after_forward=true"], 2, "train.reshard_after_forward=True: has no effect with"),
        (["train.tp=0"], 2, "train.tp=0: must be greater than 0"),
        (["train.pp=4"], 4, "train.pp=4: the model's 2 layers must divide by 4; possible: [1, 2]"),
        (["train.ep=2"], 2, "ep=2 for Qwen2ForCausalLM, which has no experts"),
        (["train.tp=8"], 8, "4 attention heads are not divisible by tp=8"),
        (["train.moe_balancing=aux_loss"], 2, "aux_loss: Qwen2ForCausalLM has no experts to balance; use none"),
        (["train.moe_balancing=aux_loss", "train=fsdp"], 2, "Qwen2ForCausalLM has no experts to balance; use none"),
        (["train=fsdp", "train.tp=2"], 2, "train.tp=2: has no effect with train.engine=fsdp; use train=megatron"),
    ],
)
def test_refused_before_anything_starts(model: str, overrides: list[str], ranks: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(build([f"model.path={model}", *BASE, *overrides]), World(size=ranks))
    assert message in str(caught.value)


def test_a_checkpoint_with_other_tensors_is_refused_before_anything_starts(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = make_tiny(tmp_path / "model", "qwen2", head_dim=32, max_position_embeddings=4096)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing, first: model\.layers\.1\.mlp\.up_proj\.weight"):
        validate(build([f"model.path={path}", *BASE]), World(size=2))


def test_what_fits_is_accepted(model: str) -> None:
    validate(build([f"model.path={model}", *BASE, "train.tp=2", "train.pp=2"]), World(size=4))
