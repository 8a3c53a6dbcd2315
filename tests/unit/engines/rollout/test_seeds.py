"""Seeds of samples and positions: functions of their arguments alone, and no two alike."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from hybridengine.engines.rollout.seeds import position_seeds, sample_seed

SAMPLE_SEEDS = [1613466296301450527, 4469167747655726124]


def test_stays_what_it_is() -> None:
    """Computed once: a change would make resumed runs differ from the uninterrupted ones."""
    assert [sample_seed(1, 0, 0, 0), sample_seed(-3, 7, 2**40, 15)] == SAMPLE_SEEDS


def test_another_process_agrees() -> None:
    """Nothing like Python's randomised hash takes part."""
    code = "from hybridengine.engines.rollout.seeds import sample_seed as s; print([s(1, 2, 3, k) for k in range(4)])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(told) == [sample_seed(1, 2, 3, k) for k in range(4)]


def test_no_two_samples_share_a_seed_and_all_are_in_range() -> None:
    """Neighbouring arguments included: (step 1, prompt 0) is not (step 0, prompt 1)."""
    seeds = [sample_seed(*key) for key in itertools.product((0, 1, 2), range(6), (0, 1, 63, 64, 10**6), range(16))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_bits_are_balanced() -> None:
    """Each of the 63 bits is set in half of 4,000 seeds, within five standard deviations."""
    seeds = np.array([sample_seed(1, 0, prompt, 0) for prompt in range(4000)], dtype=np.uint64)
    share = [((seeds >> np.uint64(bit)) & np.uint64(1)).mean() for bit in range(63)]
    assert np.abs(np.array(share) - 0.5).max() < 5 * 0.5 / 4000**0.5


@pytest.mark.parametrize("seed", [0, 1234567, 2**63 - 1], ids=lambda seed: f"seed-{seed}")
def test_positions_follow_splitmix64(seed: int) -> None:
    """Against the generator written out in Python integers; the top bit is dropped."""
    expected, state, mask = [], seed, 2**64 - 1
    for _ in range(5):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        expected.append((z ^ (z >> 31)) >> 1)
    found = position_seeds(np.full(5, seed, dtype=np.uint64), np.arange(5, dtype=np.int32))
    assert found.dtype == np.int64 and found.tolist() == expected


def test_a_row_does_not_depend_on_the_others() -> None:
    seeds = np.array([5, 6, 7], dtype=np.uint64)
    positions = np.array([3, 9, 0])
    together = position_seeds(seeds, positions).tolist()
    alone = [position_seeds(seeds[i : i + 1], positions[i : i + 1]).item() for i in range(3)]
    assert together == alone and len(set(together)) == 3
