"""Samples dealt out over a model's replicas, and what they say gathered again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybridengine.distributed.exchange import all_gather_lists
from hybridengine.engines.train.base import TrainEngine
from hybridengine.engines.train.batching import partition
from hybridengine.types import Sample


def share_of(samples: Sequence[Sample], engine: TrainEngine) -> list[Sample]:
    """Those of this rank's replica."""
    return [samples[i] for i in partition([s.length for s in samples], engine.num_replicas)[engine.replica]]


def gathered(
    samples: Sequence[Sample], engine: TrainEngine, score: Callable[[list[Sample]], list[list[float]]]
) -> list[list[float]]:
    """Collective: each replica scores its share; every rank has all of it, per sample and response token."""
    share = partition([s.length for s in samples], engine.num_replicas)[engine.replica]
    found = score([samples[i] for i in share])
    return all_gather_lists(dict(zip(share, found, strict=True)), len(samples))
