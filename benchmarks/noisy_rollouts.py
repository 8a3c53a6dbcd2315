"""A training run whose rollouts come from weights that are slightly wrong; validation and training see the right ones.

    python -m benchmarks.noisy_rollouts --noise 0.01 +experiment=quickstart rollout=transformers rollout.tp=1 ...

Each weight that generates is multiplied by 1 + noise · ε, ε a standard normal number that stays the same for the whole
run: what a rollout engine with another precision does to weights that hardly change. Everything after ``--noise`` is as
for hybridengine.train.
"""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hybridengine.schedule.colocated import ColocatedRollouts
from hybridengine.train import main as train


@contextmanager
def disturbed(tensors: dict[str, torch.Tensor], noise: float) -> Iterator[None]:
    """The tensors with noise inside, and as they were afterwards, to the bit."""
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        tensor.mul_(1 + noise * torch.randn(tensor.shape, generator=generator))
    try:
        yield
    finally:
        for name, tensor in tensors.items():
            tensor.copy_(kept[name])


def disturb_rollouts(noise: float) -> None:
    """From here on, what colocated schedules generate for training comes from weights with noise."""
    original = ColocatedRollouts._generate

    @functools.wraps(original)
    def generate(self: Any, engine: Any, groups: Sequence[Any]) -> Any:
        with torch.inference_mode(), disturbed(engine.live_tensors(), noise):
            return original(self, engine, groups)

    ColocatedRollouts._generate = generate  # type: ignore[method-assign]


def main() -> int:
    arguments = sys.argv[1:]
    if len(arguments) < 2 or arguments[0] != "--noise":
        sys.exit("usage: python -m benchmarks.noisy_rollouts --noise SHARE key=value ...")
    disturb_rollouts(float(arguments[1]))
    return train(arguments[2:])


if __name__ == "__main__":
    sys.exit(main())
