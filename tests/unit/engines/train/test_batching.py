"""Partition, bins and micro-batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridengine.engines.train.batching import (
    agreed_micro_batches,
    build_micro_batch,
    micro_batch_bins,
    mini_batches,
    partition,
    response_mask,
    split_to,
)
from hybridengine.types import Sample
from tests.distributed.ranks import run_ranks

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


def sample(prompt: list[int], response: list[int], **values: list[float]) -> Sample:
    return Sample(
        prompt_ids=prompt, response_ids=response, loss_mask=[True] * len(response),
        advantages=[1.0] * len(response), **values,
    )  # fmt: skip


@given(LENGTHS, st.integers(1, 8))
def test_partition_has_every_sample_once_and_is_balanced(lengths: list[int], ranks: int) -> None:
    parts = partition(lengths, ranks)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(lengths, default=0)
    assert parts == partition(lengths, ranks)


@given(LENGTHS, st.booleans())
def test_bins_hold_every_sample_once_and_keep_the_cap(lengths: list[int], packing: bool) -> None:
    bins = micro_batch_bins(lengths, 60, packing=packing)
    assert sorted(i for part in bins for i in part) == list(range(len(lengths)))
    for part in bins:
        cost = sum(lengths[i] for i in part) if packing else len(part) * max(lengths[i] for i in part)
        assert cost <= 60


@pytest.mark.parametrize(("lengths", "cap", "bins"), [([7] * 8, 8, 8), ([30720] * 16, 32768, 16), ([4, 4, 8], 8, 2)])
def test_bin_counts(lengths: list[int], cap: int, bins: int) -> None:
    assert len(micro_batch_bins(lengths, cap)) == bins


def test_packed_bins_are_evened_out() -> None:
    """Nine samples of 10 under 80: 50 + 40, not 80 + 10; the fuller bin first."""
    bins = micro_batch_bins([10] * 9, 80)
    assert [len(part) for part in bins] == [5, 4]


def test_evening_out_never_exceeds_the_cap() -> None:
    """[3, 3, 2, 2, 2] under 6: longest-first balancing would give 7 + 5, first fit 6 + 6."""
    assert micro_batch_bins([3, 3, 2, 2, 2], 6) == [[0, 1], [2, 3, 4]]


@given(LENGTHS)
def test_bins_are_deterministic_and_no_more_than_first_fit_needs(lengths: list[int]) -> None:
    """Any two bins of a first fit together exceed the cap, so there are at most 2·total/cap + 1 of them."""
    bins = micro_batch_bins(lengths, 60)
    assert bins == micro_batch_bins(list(lengths), 60)
    assert len(bins) <= 2 * sum(lengths) / 60 + 1
    assert all(bins)


def test_a_sample_above_the_cap_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"sample 1 has 40000 tokens.*max_tokens_per_micro_batch=32768"):
        micro_batch_bins([5, 40000], 32768)


@given(LENGTHS, st.integers(0, 20))
def test_split_keeps_samples(lengths: list[int], more: int) -> None:
    bins = micro_batch_bins(lengths, 60)
    split = split_to(bins, len(bins) + more)
    assert len(split) == len(bins) + more
    assert sorted(i for part in split for i in part) == list(range(len(lengths)))


def _count(world, budget: int, lengths: list[list[int]], multiple: int) -> list[int]:
    samples = [sample([7] * (n - 1), [8]) for n in lengths[world.rank]]
    found = agreed_micro_batches(
        samples, budget=budget, packing=True, pad_id=0, device=torch.device("cpu"), multiple=multiple
    )
    assert sorted(i for micro in found for i in micro.sample_ids.tolist() if i >= 0) == list(range(5))
    return len(found)


@pytest.mark.parametrize(("multiple", "count"), [(1, 5), (4, 8)])
def test_ranks_agree_on_the_number_of_micro_batches(multiple: int, count: int) -> None:
    assert run_ranks(2, _count, 100, [[95] * 5, [20] * 5], multiple) == [count, count]


def test_mini_batches_keep_groups_and_agree() -> None:
    parts = mini_batches(12, 3, 2, seed=5)
    assert sorted(i for part in parts for i in part) == list(range(12))
    assert all(part[k : k + 3] == list(range(part[k], part[k] + 3)) for part in parts for k in (0, 3))
    assert parts == mini_batches(12, 3, 2, seed=5)
    assert any(parts != mini_batches(12, 3, 2, seed=s) for s in range(6, 12))
    assert mini_batches(12, 3, 1, seed=5) == [list(range(12))]
    with pytest.raises(ValueError, match="algorithm.mini_batches=3: 4 prompts do not divide"):
        mini_batches(12, 3, 3, seed=0)
    with pytest.raises(ValueError, match="no whole number of groups"):
        mini_batches(13, 3, 1, seed=0)


def test_lengths_decide_the_mask_even_when_pad_is_eos() -> None:
    """Response [5, 6, E, E, E] of true length 3."""
    assert response_mask([3], 5).tolist() == [[True, True, True, False, False]]


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_micro_batch_indices(packing: bool) -> None:
    """An end token inside the prompt is attended; each target is predicted by the token before it."""
    eos = 2
    samples = [sample([7, eos, 8], [5, 6, eos]), sample([9], [4])]
    micro = build_micro_batch(samples, [0, 1], pad_id=eos, packing=packing)
    flat = micro.input_ids.view(-1)
    assert micro.targets.tolist() == [5, 6, eos, 4]
    assert flat[micro.target_index].tolist() == [8, 5, 6, 9]
    assert micro.sequence_ids.tolist() == [0, 0, 0, 1]
    assert micro.sequence_lengths.tolist() == [6, 2]
    if packing:
        assert micro.attention_mask is None and micro.input_ids.shape == (1, 8)
        assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1]]
    else:
        assert micro.attention_mask is not None
        assert micro.attention_mask.tolist() == [[True] * 6, [True, True] + [False] * 4]


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_dummy_is_one_whole_sequence(packing: bool) -> None:
    """Something every model can run: a prompt token and a response token that is predicted from it."""
    micro = build_micro_batch([], [], pad_id=2, packing=packing)
    assert micro.input_ids.shape == (1, 2) and micro.target_index.tolist() == [0]
    assert micro.sequence_lengths.tolist() == [2]


@pytest.mark.parametrize("field", ["loss_mask", "advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs"])
def test_a_field_of_the_wrong_length_is_refused(field: str) -> None:
    bad = sample([1], [2, 3])
    setattr(bad, field, [True])
    with pytest.raises(ValueError, match=f"sample 1: 1 {field} for 2 response tokens"):
        build_micro_batch([sample([1], [2]), bad], [0, 1], pad_id=0, packing=True)


def test_a_field_that_only_some_samples_have_is_refused() -> None:
    samples = [sample([1], [2], old_logprobs=[-1.0]), sample([1], [2])]
    with pytest.raises(ValueError, match="1 of 2 samples of a micro-batch have no old_logprobs"):
        build_micro_batch(samples, [0, 1], pad_id=0, packing=True)


def test_dummy_is_masked_out() -> None:
    micro = build_micro_batch([], [], pad_id=0, packing=True)
    assert not micro.loss_mask.any() and micro.sample_ids.tolist() == [-1]


def test_optional_values_travel_or_are_none() -> None:
    micro = build_micro_batch([sample([1], [2, 3], old_logprobs=[-1.0, -2.0])], [0], pad_id=0, packing=True)
    assert micro.old_logprobs is not None and micro.old_logprobs.tolist() == [-1.0, -2.0]
    assert micro.ref_logprobs is None
    assert micro.advantages.dtype == torch.float32


@pytest.mark.parametrize(("prompt", "response", "part"), [([], [1], "prompt"), ([1], [], "response")])
def test_empty_parts_are_refused(prompt: list[int], response: list[int], part: str) -> None:
    with pytest.raises(ValueError, match=f"sample 0 has an empty {part}"):
        build_micro_batch([sample(prompt, response)], [0], pad_id=0, packing=True)


def test_the_longest_are_dealt_out_first() -> None:
    """9 | 5, 4 | 3 | 2, 1: 12 tokens each; in the given order it would be 1 + 3 + 5 = 9 and 2 + 4 + 9 = 15."""
    lengths = [1, 2, 3, 4, 5, 9]
    assert [sum(lengths[i] for i in part) for part in partition(lengths, 2)] == [12, 12]
