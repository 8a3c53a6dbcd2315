"""Random numbers of one sample: functions of (base seed, step, prompt index, sample index) and nothing else.

Tensor-parallel peers agree on them, two samples practically never share one, and neither the batch a sample
is decoded in nor the replica that decodes it matters.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray


def sample_seed(base: int, step: int, prompt: int, sample: int) -> int:
    """A well-mixed seed in [0, 2**63)."""
    digest = hashlib.blake2b(struct.pack("<4q", base, step, prompt, sample), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def position_seeds(seeds: NDArray[np.uint64], positions: NDArray[np.integer]) -> NDArray[np.int64]:
    """A fresh seed in [0, 2**63) for the token at each position of each sample, for all rows at once.

    Output number ``position`` of the SplitMix64 generator that starts at the sample's seed (Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).

    Args:
        seeds: [B], from :func:`sample_seed`.
        positions: [B], index of the token to draw.
    """
    state = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)
