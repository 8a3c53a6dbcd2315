"""The parity check: the engine samples a few responses, and everybody scores them.

Collective over the training ranks. The engine's own log-probabilities are those it reports while it samples, which is
what a run trains on; the trainer scores the same tokens packed together and padded apart, and rank 0 scores them with
plain transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybridengine.config import Config
from hybridengine.config.schema import ConfigError
from hybridengine.distributed.errors import agree
from hybridengine.distributed.exchange import all_gather_lists
from hybridengine.distributed.world import World
from hybridengine.engines.train.base import TrainEngine
from hybridengine.engines.train.batching import partition
from hybridengine.parity.plain import plain_logprobs
from hybridengine.parity.probes import RESPONSE_TOKENS
from hybridengine.parity.report import Parity, Tolerance, likely_cause
from hybridengine.types import Prompt, Sample, SamplingParams, Trajectory

#: Parameters times tokens up to which plain transformers scores a probe on its own (``parity.transformers=auto``): some
#: seconds on a CPU core.
PLAIN_BUDGET = 4e10


class ParityError(ConfigError):
    """Rollout engine and trainer disagree about the same tokens by more than rounding."""


def check_parity(
    config: Config,
    world: World,
    *,
    path: Path,
    hf_config: Any,
    max_model_len: int,
    train: TrainEngine,
    prompts: Sequence[Prompt],
    generate: Callable[[Sequence[Prompt], SamplingParams], list[Trajectory]],
    before_scoring: Callable[[], None] = lambda: None,
    parameters: int,
) -> Parity:
    """Score the probes on every side.

    Args:
        path, hf_config: the checkpoint that the weights are of, while the trainer is at version 0.
        prompts: of :func:`hybridengine.parity.probes.choose_probes`.
        generate: the rollout engine's answers, in the order of the prompts, alike on all ranks.
        before_scoring: called between generating and scoring, for memory to change hands.
        parameters: elements of the model's weights.
    """
    # What the trainer scores is the whole distribution: the engine must not cut it either.
    params = SamplingParams(n=1, max_tokens=RESPONSE_TOKENS, temperature=config.rollout.temperature)
    trajectories = [t for t in generate(prompts, params) if t.token_ids]
    names = [t.prompt.text for t in trajectories]
    engine = [t.logprobs for t in trajectories]
    samples = [_sample(t) for t in trajectories]
    before_scoring()
    parity = Parity(Tolerance.of(config, on_gpu=world.platform.separate_memory))
    for side, packing in (("packed", True), ("padded", False)):
        if packing in train.packings:
            parity.add(side, names, engine, _trained(train, samples, packing=packing))
    if (reason := _without_plain(config, train, parameters, samples)) is not None:
        parity.notes.append(reason)
        return parity
    scores: list[Any] = [None]
    with agree("scoring with plain transformers"):
        if world.is_main:
            scores[0] = plain_logprobs(
                path,
                samples,
                temperature=config.rollout.temperature,
                dtype=config.train.dtype,
                device=world.device,
                max_model_len=max_model_len,
                trust_remote_code=config.model.trust_remote_code,
            )
    dist.broadcast_object_list(scores, src=0)
    parity.add("transformers", names, engine, scores[0])
    return parity


def settle(
    parity: Parity, config: Config, hf_config: Any, *, log: Callable[[str], None], warn: Callable[[str], None]
) -> None:
    """Say what was found, and do what ``parity.probe`` says where it is wrong.

    Raises:
        ParityError: on all ranks alike.
    """
    lines = parity.lines()
    if not parity.wrong:
        for line in lines:
            log(f"parity: {line}")
        return
    text = (
        f"rollout engine and trainer disagree by more than {parity.tolerance} about the same tokens of "
        f"{config.model.path}:\n  " + "\n  ".join(lines) + f"\n  likely cause: {likely_cause(parity, hf_config)}\n"
        "  parity.probe=warn goes on all the same; parity.tolerance sets what is allowed"
    )
    if config.parity.probe == "refuse":
        raise ParityError(f"parity.probe=refuse: {text}")
    warn(f"WARNING: {text}")


def _trained(train: TrainEngine, samples: Sequence[Sample], *, packing: bool) -> list[list[float]]:
    """Every sample's score, computed by whichever replica of the trainer it is given to."""
    share = partition([s.length for s in samples], train.num_replicas)[train.replica]
    found = train.logprobs([samples[i] for i in share], packing=packing)
    return all_gather_lists(dict(zip(share, found, strict=True)), len(samples))


def _without_plain(config: Config, train: TrainEngine, parameters: int, samples: Sequence[Sample]) -> str | None:
    """Why plain transformers has no say; None where it has."""
    if train.version:
        return f"plain transformers left out: the weights are of policy version {train.version}"
    if config.parity.transformers == "false":
        return "plain transformers left out: parity.transformers=false"
    cost = parameters * sum(s.length for s in samples)
    if config.parity.transformers == "auto" and cost > PLAIN_BUDGET:
        return (
            f"plain transformers left out: {parameters / 1e9:.2g} billion parameters would take long; "
            "parity.transformers=true or `hybridengine doctor parity` has it"
        )
    return None


def _sample(trajectory: Trajectory) -> Sample:
    count = len(trajectory.token_ids)
    return Sample(
        prompt_ids=trajectory.prompt.token_ids,
        response_ids=trajectory.token_ids,
        loss_mask=[True] * count,
        advantages=[0.0] * count,
    )
