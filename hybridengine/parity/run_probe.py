"""The parity check of a run: once, after the first sync, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridengine.config import Config
from hybridengine.distributed.world import World
from hybridengine.engines.train.base import TrainEngine
from hybridengine.memory.phases import Phases
from hybridengine.memory.residency import SCORE
from hybridengine.parity.check import check_parity, settle
from hybridengine.parity.probes import choose_probes
from hybridengine.schedule.base import RolloutSource

#: Prompts of the data that probes are filled with.
TEXTS = 64


@dataclass(kw_only=True)
class RunProbe:
    """Everything the check needs beside the engines.

    Attributes:
        hf_config: of the decoder.
        max_model_len: context of the run, tokens.
        texts: token ids of real prompts.
        replicas: of the rollout engine; each is asked every probe.
        log, warn: print for the user on rank 0; to run.log only, and on the console as well.
    """

    config: Config
    world: World
    path: Path
    hf_config: Any
    max_model_len: int
    texts: Sequence[Sequence[int]]
    replicas: int
    log: Callable[[str], None]
    warn: Callable[[str], None]

    def run(self, train: TrainEngine, rollouts: RolloutSource, phases: Phases) -> None:
        """Collective over the training ranks. Raises ParityError, on all of them, where ``parity.probe=refuse``."""
        with phases("parity"):
            parity = check_parity(
                self.config,
                self.world,
                path=self.path,
                hf_config=self.hf_config,
                max_model_len=self.max_model_len,
                train=train,
                prompts=choose_probes(
                    self.hf_config,
                    self.max_model_len,
                    vocabulary=int(self.hf_config.vocab_size),
                    texts=self.texts[:TEXTS],
                    copies=self.replicas,
                ),
                generate=rollouts.evaluate,
                before_scoring=lambda: phases.prepare(SCORE),
                parameters=sum(spec.numel for spec in train.shard_map().params.values()),
            )
            settle(parity, self.config, self.hf_config, log=self.log, warn=self.warn)
