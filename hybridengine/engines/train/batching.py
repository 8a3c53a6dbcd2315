"""From samples to micro-batches: balance over ranks, pack under a token budget, agree on their number."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from hybridengine.distributed.errors import raise_together
from hybridengine.engines.train.base import MicroBatch
from hybridengine.types import Sample

_OPTIONAL = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "returns")

#: Stands in for a sequence on a rank that has none left while its peers still run micro-batches.
_EMPTY = Sample(
    prompt_ids=[0],
    response_ids=[0],
    loss_mask=[False],
    advantages=[0.0],
    rollout_logprobs=[0.0],
    old_logprobs=[0.0],
    ref_logprobs=[0.0],
    values=[0.0],
    returns=[0.0],
)


def partition(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Sample indices per rank, token totals balanced (longest first onto the least loaded). Deterministic."""
    loads = [(0, 0, rank) for rank in range(num_ranks)]
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, count, rank = heapq.heappop(loads)
        parts[rank].append(index)
        heapq.heappush(loads, (load + lengths[index], count + 1, rank))
    return [sorted(part) for part in parts]


def mini_batches(num_samples: int, group_size: int, num_batches: int, *, seed: int) -> list[list[int]]:
    """Cut a rollout into the batches of its optimizer steps; a prompt's samples stay together.

    The groups are shuffled by ``seed`` alone, so all ranks agree; one batch keeps the given order.

    Raises:
        ValueError: incomplete groups, or groups that can't be divided evenly.
    """
    num_groups = num_samples // group_size
    if num_samples % group_size:
        raise ValueError(f"{num_samples} samples are no whole number of groups of {group_size}")
    if num_groups % num_batches:
        raise ValueError(
            f"algorithm.mini_batches={num_batches}: {num_groups} prompts do not divide into that many batches"
        )
    groups = list(range(num_groups))
    if num_batches > 1:
        random.Random(seed).shuffle(groups)
    size = num_groups // num_batches
    return [
        [g * group_size + k for g in groups[i * size : (i + 1) * size] for k in range(group_size)]
        for i in range(num_batches)
    ]


def micro_batch_bins(lengths: Sequence[int], budget: int, *, packing: bool = True) -> list[list[int]]:
    """First-fit-decreasing bins of sample indices, none above ``budget`` tokens.

    Without packing a bin costs its rows times its longest row. [7]·8 under 8 -> 8 bins. Packed bins are evened
    out where that keeps the cap: nine samples of 10 under 80 make 50 + 40 rather than 80 + 10, which needs less
    memory and keeps ranks, which wait for each other in every micro-batch, in step.

    Raises:
        ValueError: one sample alone is above the budget, by index and length.
    """
    bins: list[list[int]] = []
    loads: list[int] = []
    widths: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > budget:
            raise ValueError(
                f"sample {index} has {length} tokens, more than train.max_tokens_per_micro_batch={budget}; "
                f"raise it to at least {length}"
            )
        for i, load in enumerate(loads):
            grown = load + (length if packing else widths[i])
            if grown <= budget:
                bins[i].append(index)
                loads[i] = grown
                break
        else:
            bins.append([index])
            loads.append(length)
            widths.append(length)
    if packing:
        even = partition(lengths, len(bins))
        if all(0 < sum(lengths[i] for i in part) <= budget for part in even):
            return sorted(even, key=lambda part: (-sum(lengths[i] for i in part), part))
    return [sorted(part) for part in bins]


def split_to(bins: list[list[int]], count: int) -> list[list[int]]:
    """The same samples in exactly ``count`` ≥ len(bins) bins: the fullest are halved, then empty ones added."""
    heap = [(-len(part), i, part) for i, part in enumerate(bins)]
    heapq.heapify(heap)
    serial = len(bins)
    while len(heap) < count and heap and -heap[0][0] > 1:
        _, i, part = heapq.heappop(heap)
        half = len(part) // 2
        heapq.heappush(heap, (-half, i, part[:half]))
        heapq.heappush(heap, (half - len(part), serial, part[half:]))
        serial += 1
    found = [part for _, _, part in sorted(heap, key=lambda item: item[1])]
    return found + [[] for _ in range(count - len(found))]


def agreed_micro_batches(
    samples: Sequence[Sample],
    *,
    budget: int,
    packing: bool,
    pad_id: int,
    device: torch.device,
    multiple: int = 1,
) -> list[MicroBatch]:
    """Collective over all ranks: this rank's samples as micro-batches, equally many on every rank.

    One all-reduce agrees on their number and on whether any rank failed.

    Args:
        budget: tokens of one micro-batch at most.
        multiple: their number becomes a multiple of it.

    Raises:
        ValueError: an empty prompt or response, a sample above the budget; PeerError on the other ranks.
    """
    bins: list[list[int]] = []
    error: Exception | None = None
    try:
        _refuse_empty(samples)
        bins = micro_batch_bins([sample.length for sample in samples], budget, packing=packing)
    except ValueError as caught:
        error = caught
    status = torch.tensor([max(len(bins), 1), int(error is not None)])
    dist.all_reduce(status, op=dist.ReduceOp.MAX)
    if status[1]:
        raise_together(error, "cutting the batch into micro-batches")
    count = -(-int(status[0]) // multiple) * multiple
    return [
        build_micro_batch(samples, part, pad_id=pad_id, packing=packing, device=device)
        for part in split_to(bins, count)
    ]


def scatter_logprobs(
    logprobs: torch.Tensor, micro: MicroBatch, samples: Sequence[Sample], out: list[list[float]]
) -> None:
    """Write each sequence's log-probabilities into its sample's list in ``out``."""
    ids = micro.sample_ids.tolist()
    lengths = [len(samples[i].response_ids) if i >= 0 else 0 for i in ids]
    values = logprobs.tolist()
    start = 0
    for i, length in zip(ids, lengths, strict=True):
        if i >= 0:
            out[i] = values[start : start + length]
        start += length


def _refuse_empty(samples: Sequence[Sample]) -> None:
    for index, sample in enumerate(samples):
        if not sample.prompt_ids or not sample.response_ids:
            raise ValueError(f"sample {index} has an empty {'response' if sample.prompt_ids else 'prompt'}")


def response_mask(lengths: Sequence[int], width: int) -> torch.Tensor:
    """bool [B, width]: the first ``lengths[b]`` of each row. Lengths decide, never token ids: pad may equal EOS."""
    return torch.arange(width).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)


def build_micro_batch(
    samples: Sequence[Sample],
    indices: Sequence[int],
    *,
    pad_id: int,
    packing: bool,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Tensors of one forward pass over ``samples[i] for i in indices``; no indices: one masked-out dummy.

    Raises:
        ValueError: a sample with an empty prompt or response, or with a field that has not one value per
            response token, by index; a field that only some of the samples have.
    """
    chosen = [samples[i] for i in indices] or [_EMPTY]
    for i, sample in zip(indices, chosen, strict=False):
        if not sample.prompt_ids or not sample.response_ids:
            part = "prompt" if not sample.prompt_ids else "response"
            raise ValueError(f"sample {i} has an empty {part}")
        for name in ("loss_mask", "advantages", *_OPTIONAL):
            values = getattr(sample, name)
            if values is not None and len(values) != len(sample.response_ids):
                raise ValueError(f"sample {i}: {len(values)} {name} for {len(sample.response_ids)} response tokens")
    rows = [sample.prompt_ids + sample.response_ids for sample in chosen]
    lengths = [len(row) for row in rows]
    width = max(lengths)
    if packing:
        starts = list(accumulate(lengths[:-1], initial=0))
        input_ids = torch.tensor([[token for row in rows for token in row]])
        position_ids = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
        attention_mask = None
    else:
        starts = [b * width for b in range(len(rows))]
        input_ids = torch.tensor([row + [pad_id] * (width - len(row)) for row in rows])
        position_ids = torch.arange(width).repeat(len(rows), 1)
        attention_mask = response_mask(lengths, width)
    spans = [(start + len(s.prompt_ids) - 1, len(s.response_ids)) for start, s in zip(starts, chosen, strict=True)]
    optional = {name: _per_token(chosen, name) for name in _OPTIONAL}
    micro = MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        sequence_lengths=torch.tensor(lengths, dtype=torch.int32),
        attention_mask=attention_mask,
        target_index=torch.cat([torch.arange(first, first + count) for first, count in spans]),
        targets=torch.tensor([token for s in chosen for token in s.response_ids]),
        sequence_ids=torch.repeat_interleave(torch.tensor([count for _, count in spans])),
        loss_mask=torch.tensor([keep for s in chosen for keep in s.loss_mask]),
        advantages=torch.tensor([a for s in chosen for a in s.advantages], dtype=torch.float32),
        sample_ids=torch.tensor(list(indices) or [-1]),
        **optional,
    )
    return _to(micro, torch.device(device))


def _per_token(samples: Sequence[Sample], name: str) -> torch.Tensor | None:
    values = [getattr(sample, name) for sample in samples]
    missing = sum(value is None for value in values)
    if missing == len(values):
        return None
    if missing:
        raise ValueError(f"{missing} of {len(values)} samples of a micro-batch have no {name}")
    return torch.tensor([x for value in values for x in value], dtype=torch.float32)


def _to(micro: MicroBatch, device: torch.device) -> MicroBatch:
    for name in MicroBatch.__slots__:
        value = getattr(micro, name)
        if isinstance(value, torch.Tensor):
            setattr(micro, name, value.to(device, non_blocking=True))
    return micro
