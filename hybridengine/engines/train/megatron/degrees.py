"""Degrees of parallelism of the ``train`` section, as a layout. No torch: the memory bill needs them too."""

from __future__ import annotations

import math

from hybridengine.config import TrainConfig
from hybridengine.sync.plan.naming.decoder import Decoder
from hybridengine.sync.plan.naming.megatron import MegatronLayout


def data_parallel_size(train: TrainConfig, world_size: int) -> int:
    """Replicas of ``train.tp * train.pp`` ranks each.

    Raises:
        ValueError: the world size is no multiple of that.
    """
    ranks = train.tp * train.pp
    if world_size % ranks:
        raise ValueError(
            f"train.tp={train.tp} train.pp={train.pp}: {ranks} ranks hold one model, which must divide the "
            f"world size {world_size}"
        )
    return world_size // ranks


def layout_of(train: TrainConfig, decoder: Decoder, world_size: int) -> MegatronLayout:
    """The layout that the ``train`` section asks for.

    The vocabulary is padded to the next multiple of 64 where tp divides 64, as vLLM pads it: rows then have the same
    place in both engines.

    Raises:
        ValueError: degrees that do not fit the world size or the number of layers.
    """
    dp = data_parallel_size(train, world_size)
    runs = train.pp * train.vpp
    if decoder.num_layers % runs:
        what = f"train.pp={train.pp}" + (f" train.vpp={train.vpp}" if train.vpp > 1 else "")
        fits = [n for n in range(1, decoder.num_layers + 1) if decoder.num_layers % n == 0]
        raise ValueError(f"{what}: the model's {decoder.num_layers} layers must divide by {runs}; possible: {fits}")
    each = decoder.num_layers // runs
    return MegatronLayout(
        tp=train.tp,
        pp=train.pp,
        dp=dp,
        ep=train.ep,
        stages=tuple(layer // each % train.pp for layer in range(decoder.num_layers)),
        vocab_divisor=64 // math.gcd(64, train.tp),
    )
