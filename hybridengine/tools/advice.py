"""Which keys would make a run fit: found by trying them on the bill, cheapest in speed first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hybridengine.config import Config
from hybridengine.engines.rollout.traits import traits_of
from hybridengine.sync.plan.naming import decoder_of
from hybridengine.sync.plan.naming.vllm import tensor_parallel_fits
from hybridengine.tools.bill import Bill, make_bill
from hybridengine.tools.bill_megatron import layout_for
from hybridengine.tools.machine import Machine, Offload
from hybridengine.tools.sizes import hf_config
from hybridengine.validate.contradictions import contradictions

Changes = dict[str, Any]


def advise(model: Mapping[str, Any], config: Config, machine: Machine, offload: Offload) -> tuple[Changes, Bill]:
    """Changes that make it fit, and the bill with them.

    Each round takes the change that saves most of what is missing; in the end those that turn out not to be
    needed are taken back. Where host memory does not suffice, the same is tried from every way to offload less: one
    step that way only moves what is missing to the device. The bill still has problems when nothing helps.
    """
    found = []
    for start in _starts(make_bill(model, config, machine, offload), machine, offload):
        found.append(_from(start, model, config, machine, offload))
        if found[-1][1].fits:
            return found[-1]
    return min(found, key=lambda advice: advice[1].shortfall)


def _starts(bill: Bill, machine: Machine, offload: Offload) -> list[Changes]:
    moved = [key for key in ("offload_weights", "offload_optimizer") if getattr(offload, key)]
    if not machine.has_gpus or bill.host <= bill.host_limit:
        return [{}]
    sets = [keys for count in range(len(moved) + 1) for keys in itertools.combinations(moved, count)]
    return [{f"memory.{key}": False for key in keys} for keys in sets]


def _from(
    start: Changes, model: Mapping[str, Any], config: Config, machine: Machine, offload: Offload
) -> tuple[Changes, Bill]:
    changes = dict(start)
    bill = make_bill(model, *apply(config, offload, changes, machine))
    while not bill.fits:
        found = [*_tried(model, config, machine, offload, changes, bill)]
        best = min(found, key=lambda option: option[2].shortfall, default=None)
        if best is None or best[2].shortfall >= bill.shortfall:
            return changes, bill
        changes[best[0]], bill = best[1], best[2]
    for key in list(changes):
        fewer = {name: value for name, value in changes.items() if name != key}
        without = make_bill(model, *apply(config, offload, fewer, machine))
        if without.fits:
            changes, bill = fewer, without
    return changes, bill


def apply(config: Config, offload: Offload, changes: Changes, machine: Machine) -> tuple[Config, Machine, Offload]:
    """The arguments of :func:`make_bill` with values at ``section.key`` paths replaced."""
    sections: dict[str, Any] = {}
    for path, value in changes.items():
        section, key = path.split(".")
        if section == "memory":
            offload = replace(offload, **{key: value})
        sections[section] = replace(sections.get(section, getattr(config, section)), **{key: value})
    return replace(config, **sections), machine, offload


def _tried(
    model: Mapping[str, Any], config: Config, machine: Machine, offload: Offload, changes: Changes, bill: Bill
) -> Iterator[tuple[str, Any, Bill]]:
    """Changes that the program would accept. What was changed to begin with is not changed back."""
    now, _, now_offload = apply(config, offload, changes, machine)
    for key, value in _options(model, now, machine, now_offload, bill):
        if key.startswith("memory.") and key in changes:
            continue
        changed, _, moved = apply(config, offload, changes | {key: value}, machine)
        if not contradictions(changed, machine.world):
            yield key, value, make_bill(model, changed, machine, moved)


def _options(
    model: Mapping[str, Any], config: Config, machine: Machine, offload: Offload, bill: Bill
) -> Iterator[tuple[str, Any]]:
    """Single changes, cheapest first: among equals the earliest wins."""
    train, rollout = config.train, config.rollout
    if machine.has_gpus:  # on a CPU machine offloading needs a directory, which is the user's to name
        if not offload.offload_optimizer:
            yield "memory.offload_optimizer", True
        if not offload.offload_weights:
            yield "memory.offload_weights", True
    if rollout.sleep_level < 2:
        yield "rollout.sleep_level", 2
    megatron = train.engine == "megatron"
    if megatron and train.tp > 1 and not train.sequence_parallel:
        yield "train.sequence_parallel", True
    if not megatron and train.reshard_after_forward is not True:
        yield "train.reshard_after_forward", True
    if not train.activation_checkpointing:
        yield "train.activation_checkpointing", True
    for chunk in (512, 256, 128):
        if chunk < train.logprob_chunk_tokens:
            yield "train.logprob_chunk_tokens", chunk
    longest, tokens = config.data.max_prompt_tokens + rollout.max_tokens, train.max_tokens_per_micro_batch
    while tokens // 2 >= longest:
        tokens //= 2
        yield "train.max_tokens_per_micro_batch", tokens
    if machine.has_gpus:
        shares = sorted((n / 20 for n in range(2, 20)), key=lambda share: abs(share - rollout.gpu_memory_utilization))
        yield from (("rollout.gpu_memory_utilization", share) for share in shares)
    elif traits_of(rollout.engine).tensor_parallel:
        half = max(bill.kv_floor, math.floor(50 * rollout.kv_cache_gib) / 100)
        if half < rollout.kv_cache_gib or rollout.kv_cache_gib < bill.kv_floor:
            yield "rollout.kv_cache_gib", half
    for tp in (2, 4, 8, 16):
        fits = machine.ranks % tp == 0 and tensor_parallel_fits(hf_config(model), tp)
        if tp > rollout.tp and fits and traits_of(rollout.engine).tensor_parallel:
            yield "rollout.tp", tp
    if megatron:
        yield from _cuts(model, config, machine)
    for section, dtype in (("rollout", rollout.dtype), ("train", train.dtype)):
        if dtype == "float32":
            yield f"{section}.dtype", "bfloat16"


def _cuts(model: Mapping[str, Any], config: Config, machine: Machine) -> Iterator[tuple[str, Any]]:
    """Degrees of train=megatron above the present ones, as far as they fit the model and the ranks."""
    d, train = decoder_of(hf_config(model)), config.train
    degrees: list[tuple[str, int]] = [(key, size) for key in ("tp", "pp", "ep") for size in (2, 4, 8, 16)]
    for key, size in degrees:
        # Experts that are cut need sequence parallelism, which needs cuts: one change alone does not do.
        if size <= getattr(train, key) or key == "tp" and d.experts is not None and not train.sequence_parallel:
            continue
        changed: dict[str, Any] = {key: size}
        try:
            layout_for(d, replace(config, train=replace(train, **changed)), machine.ranks)
        except ValueError:
            continue
        yield f"train.{key}", size
