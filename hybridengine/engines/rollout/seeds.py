"""The seed of one sample: a function of (base seed, step, prompt index, sample index) and nothing else."""

from __future__ import annotations

import hashlib
import struct


def sample_seed(base: int, step: int, prompt: int, sample: int) -> int:
    """A well-mixed seed in [0, 2**63).

    Tensor-parallel peers agree on it, two samples practically never share one, and neither the batch a
    sample is decoded in nor the replica that decodes it matters.
    """
    digest = hashlib.blake2b(struct.pack("<4q", base, step, prompt, sample), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
