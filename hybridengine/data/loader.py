"""A deterministic, resumable, endless sequence of prompts."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Sequence
from typing import Any

from hybridengine.types import Prompt


class PromptLoader:
    """Hands out the prompts step by step, epoch after epoch.

    The run's prompt sequence is the concatenation of the epochs' orders; prompt k of it belongs to epoch
    ``k // len(prompts)`` and is handed out with ``index = k``, so a prompt has another index, and other
    sampling seeds, in each epoch. A step that reaches the end of an epoch continues in the next one. As the
    order is a pure function of (seed, epoch), the whole state is k.

    >>> prompts = [Prompt(index=i, token_ids=[i]) for i in range(3)]
    >>> loader = PromptLoader(prompts, prompts_per_step=2, shuffle=False, seed=1)
    >>> [[(p.index, p.token_ids[0]) for p in loader.next()] for _ in range(3)]
    [[(0, 0), (1, 1)], [(2, 2), (3, 0)], [(4, 1), (5, 2)]]

    Args:
        prompts: the training prompts.
        prompts_per_step: how many :meth:`next` returns.
        shuffle: a new order each epoch; False keeps the order of the data.
        seed: the run's seed.

    Raises:
        ValueError: no prompts, or none asked for.
    """

    def __init__(self, prompts: Sequence[Prompt], *, prompts_per_step: int, shuffle: bool, seed: int) -> None:
        if not prompts:
            raise ValueError("no prompts to load")
        if prompts_per_step < 1:
            raise ValueError(f"data.prompts_per_step={prompts_per_step}: must be 1 or more")
        self._prompts = list(prompts)
        self._prompts_per_step = prompts_per_step
        self._shuffle = shuffle
        self._seed = seed
        self._position = 0
        self._order: tuple[int, list[int]] = (-1, [])  # (epoch, its order)

    def next(self) -> list[Prompt]:
        """The next ``prompts_per_step`` prompts."""
        return self.take(self._prompts_per_step)

    def take(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts."""
        end = self._position + count
        step = [dataclasses.replace(self._at(k), index=k) for k in range(self._position, end)]
        self._position = end
        return step

    def num_steps(self, epochs: int) -> int:
        """Steps after which every prompt has been seen ``epochs`` times."""
        return -(-epochs * len(self._prompts) // self._prompts_per_step)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "seed": self._seed, "shuffle": self._shuffle, "data": self._digest()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken. ``prompts_per_step`` may differ.

        Raises:
            ValueError: the state belongs to another order or to other data.
        """
        own = self.state_dict()
        for name, what in (("seed", "seed"), ("shuffle", "data.shuffle"), ("data", "the training prompts")):
            if state[name] != own[name]:
                raise ValueError(
                    f"the checkpoint was written with other data order: {what} was {state[name]}, now {own[name]}; "
                    "restore it, or start afresh with checkpoint.resume=never"
                )
        self._position = int(state["position"])

    def _at(self, k: int) -> Prompt:
        epoch, offset = divmod(k, len(self._prompts))
        if self._order[0] != epoch:
            self._order = (epoch, self._epoch_order(epoch))
        return self._prompts[self._order[1][offset]]

    def _epoch_order(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for prompt in self._prompts:
            digest.update(repr((prompt.token_ids, prompt.answer)).encode())
        return digest.hexdigest()[:16]
