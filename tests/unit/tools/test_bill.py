"""The memory bill against hand-worked numbers, the layout tables, and the committed tables; advice; out of memory."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridengine.config import AlgorithmConfig, Config, RewardConfig, RewardModelConfig
from hybridengine.config.compose import build
from hybridengine.memory.residency import GRADS, KV_CACHE, OPTIMIZER, ROLLOUT_WEIGHTS, TRAINER_PARAMS
from hybridengine.placement.oom import OutOfMemoryError, explain, explained, keys_for
from hybridengine.sync.plan.naming import decoder_of, vllm_slices
from hybridengine.tools import bill_fsdp, sizes
from hybridengine.tools.advice import advise, apply
from hybridengine.tools.bill import GIB, make_bill
from hybridengine.tools.bill_critic import CriticBill
from hybridengine.tools.bill_table import MACHINES, QWEN2_5, markdown, table_config
from hybridengine.tools.machine import Machine, Offload
from tests import ROOT

TINY: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 100, "hidden_size": 8, "intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


@functools.cache
def config(*overrides: str) -> Config:
    return build(["model.path=.", "data.train=.", *overrides])


def test_hand_worked() -> None:
    """Two ranks, TP 2, bfloat16, one micro-batch of 2048 tokens of a model small enough to count by hand.

    Parameters: embedding and head 2 × 100·8, final norm 8; per layer q 8·8+8, k and v 2 × (4·8+4), o 8·8,
    gate, up and down 3 × 16·8, norms 2 × 8 = 608. Together 1608 + 2·608 = 2824; every first dimension is even,
    so a rank holds 1412. Adam twice that, each 4 bytes.

    Rollout rank of 2: vocabulary padded to 128, 2 × 128·8/2; norm 8; per layer q 36, k and v whole (one KV head)
    72, o 32, MLP 192, norms 16 = 348. Together 1032 + 696 = 1728 elements of 2 bytes.

    One layer keeps per token: norms 2·(4·8 + 2·8 + 2·8) = 128, attention 2·(8+4+4+8) + 4·2 = 56, MLP
    4·2·16 = 128: 312. Two layers, then final norm and hidden states (4+6)·8 = 80: 704 · 2048 in all.

    Logits 1024·100·8; the head's gradient in float32 and bfloat16 100·8·6. All weights stay gathered, in bfloat16,
    and their gradients in float32: 2824 · 6; shards of gradients come only after that.
    """
    c = config("train.dtype=bfloat16", "rollout.dtype=bfloat16", "rollout.tp=2")
    c = apply(c, Offload(), {"train.max_tokens_per_micro_batch": 2048}, Machine(ranks=2, device_gib=80, host_gib=64))[0]
    found = make_bill(TINY, c, Machine(ranks=2, device_gib=80, host_gib=64), Offload(offload_optimizer=False)).phases
    train = found["forward_backward"]
    step = found["optimizer"]
    assert train[TRAINER_PARAMS] == step[GRADS] == 4 * 1412 and train[OPTIMIZER] == 8 * 1412
    assert GRADS not in train and step[sizes.GATHERED] == 2824 * 2
    assert train[sizes.GATHERED] == 2824 * (2 + 4)
    assert train[sizes.ACTIVATIONS] == 704 * 2048
    assert train[sizes.LOGITS] == 1024 * 100 * 8 + 100 * 8 * 6
    assert found["sync"][ROLLOUT_WEIGHTS] == found["rollout"][ROLLOUT_WEIGHTS] == 2 * 1728
    assert TRAINER_PARAMS in found["sync"] and TRAINER_PARAMS not in found["rollout"]
    assert GRADS not in found["sync"] and found["rollout"][OPTIMIZER] == 8 * 1412
    share = int(0.6 * 80 * GIB)  # vLLM's: weights, prefill and cache add up to it
    assert found["rollout"][KV_CACHE] + 2 * 1728 + found["rollout"][sizes.ACTIVATIONS] == share
    assert sizes.kv_bytes_per_token(decoder_of(sizes.hf_config(TINY)), tp=2, dtype="bfloat16") == 2 * 2 * 4 * 2


@pytest.mark.parametrize(("name", "billions"), [*zip(QWEN2_5, (1.54, 7.62, 32.76, 72.71), strict=True)])
def test_published_parameter_counts(name: str, billions: float) -> None:
    assert sizes.full_numel(decoder_of(sizes.hf_config(QWEN2_5[name]))) / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_rollout_weights_are_those_of_the_layout_table(tp: int) -> None:
    model = sizes.hf_config(QWEN2_5["Qwen2.5-72B"] | {"num_hidden_layers": 2})
    table = sum(piece.numel for piece in vllm_slices(model, tp=tp, rank=0))
    assert sizes.rollout_numel(decoder_of(model), tp) == table


@pytest.mark.parametrize("machine", MACHINES)
def test_committed_tables_are_current(machine: str) -> None:
    """``python -m hybridengine.tools.bill_table docs/results`` writes them."""
    committed = ROOT / "docs" / "results" / f"memory-bill-{machine}.md"
    assert committed.read_text() == markdown(machine)


def test_a_critic_has_a_phase_of_its_own() -> None:
    """The model of ``test_hand_worked`` with a critic of 2824 - 100·8 = 2024 parameters, 1012 per rank, each 4 bytes
    and Adam twice that. It is there as a whole in its own phase, in the larger of two moments: weights gathered in
    bfloat16 with gradients in float32 and activations, or, in its step, gradients' shards. Otherwise it is in host
    memory, or, not offloaded, in every phase; when it is built it has no optimizer yet."""
    c = config("train.dtype=bfloat16", "rollout.dtype=bfloat16", "rollout.tp=2", "algorithm=ppo")
    machine = Machine(ranks=2, device_gib=80, host_gib=64)
    c = apply(c, Offload(), {"train.max_tokens_per_micro_batch": 2048}, machine)[0]
    moves, stays = (make_bill(TINY, c, machine, Offload(offload_weights=leaves)) for leaves in (True, False))
    own = moves.phases["critic"]
    assert own["critic"] == (4 + 8) * 1012 and own[sizes.GATHERED] == 2024 * (2 + 4)
    assert own[sizes.ACTIVATIONS] == 704 * 2048 and TRAINER_PARAMS not in own and sizes.LOGITS not in own
    for phase, owners in moves.phases.items():
        assert owners.get("critic", 0) == (12 * 1012 if phase == "critic" else 0)
    headless = replace(decoder_of(sizes.hf_config(TINY)), tied=True)
    assert CriticBill(bill_fsdp.FSDPTraining(headless, c, ranks=2), leaves=True).start == 4 * 1012
    assert all(stays.phases[phase]["critic"] == 12 * 1012 for phase in ("forward_backward", "sync", "rollout"))
    without = make_bill(TINY, config("rollout.tp=2"), machine, Offload())
    assert "critic" not in without.phases
    assert moves.host - make_bill(TINY, replace(c, algorithm=AlgorithmConfig()), machine, Offload()).host == (
        2 * 12 * 1012
    )


@pytest.mark.parametrize("offloaded", [True, False])
def test_a_reward_model_waits_on_the_host_or_stays(tmp_path: Path, offloaded: bool) -> None:
    """2024 parameters without an output projection, as the critic above; 4 · 1012 bytes on each of two ranks."""
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"architectures": ["Qwen2ForSequenceClassification"]}))
    plain, machine = config("rollout.tp=2"), Machine(ranks=2, device_gib=80, host_gib=64)
    judged = replace(plain, reward=RewardConfig(model=RewardModelConfig(path=str(tmp_path))))
    offload = Offload(offload_weights=offloaded)
    before, after = (make_bill(TINY, c, machine, offload) for c in (plain, judged))
    assert after.host - before.host == (2 * 4 * 1012 if offloaded else 0)
    assert after.phases["rollout"].get("reward_model", 0) == (0 if offloaded else 4 * 1012)


def test_offloading_takes_the_optimizer_out_of_every_phase_but_its_own() -> None:
    c, machine = table_config("Qwen2.5-32B"), MACHINES["8x80"]
    c = apply(c, Offload(), {"algorithm.mini_batches": 1}, machine)[0]
    phases = make_bill(QWEN2_5["Qwen2.5-32B"], c, machine, Offload()).phases
    assert [phase for phase, owners in phases.items() if OPTIMIZER in owners] == ["optimizer"]


#: rollout.* of 7B on 80 GiB -> GiB of owners at the start, and whether that is possible.
STARTS = {
    # 0.85 · 80 is the share of weights, prefill and cache; the trainer comes when they are gone
    "asleep": ({"sleep_level": 2}, {"kv_cache": 60.1, "graphs": 1.0}, True),
    # Awake, it stays where the trainer is to be: 68 + 1 + 1.5 and 1/8 of 28.4 GiB of weights, more than the rollout has
    "awake": ({"sleep_level": 0}, {"kv_cache": 60.1, "trainer_params": 3.5}, True),
    "awake-and-larger": ({"sleep_level": 0, "gpu_memory_utilization": 0.95}, {"trainer_params": 3.5}, False),
    # In a process of its own, its weights stay whatever the level: they are mapped by the trainer
    "elsewhere": ({"sleep_level": 1, "process": "separate"}, {"rollout_weights": 7.1}, True),
}


@pytest.mark.parametrize("case", STARTS)
def test_the_engine_starts_alone_and_the_trainer_beside_what_stays(case: str) -> None:
    keys, expected, fits = STARTS[case]
    changes = {"rollout.gpu_memory_utilization": 0.85, **{f"rollout.{key}": value for key, value in keys.items()}}
    model, machine = QWEN2_5["Qwen2.5-7B"], MACHINES["8x80"]
    bill = make_bill(model, *apply(table_config("Qwen2.5-7B"), Offload(), changes, machine))
    start = {owner: size / GIB for owner, size in bill.phases["start"].items()}
    assert {owner: start[owner] for owner in expected} == pytest.approx(expected, abs=0.1)
    assert any(problem.startswith("start needs") for problem in bill.problems) != fits


MEASURED = {
    # checkpointing, kept gathered, tokens of a micro-batch: GiB in forward_backward, in the optimizer step
    "unit-by-unit": (False, False, 1024, 1.372, 0.688),
    "checkpointing": (True, False, 1024, 1.193, 0.733),
    "kept-gathered": (False, True, 1024, 1.348, 0.875),
    "kept-gathered-checkpointing": (True, True, 2048, 1.089, 0.879),
}


@pytest.mark.parametrize(("checkpointing", "kept", "tokens", "backward", "step"), MEASURED.values(), ids=MEASURED)
def test_agrees_with_measured_peaks(checkpointing: bool, kept: bool, tokens: int, backward: float, step: float) -> None:
    """The fsdp engine on one CPU rank, float32, two micro-batches, measured with MemoryTracker above an idle process,
    with freed memory going back to the system at once (MALLOC_MMAP_THRESHOLD_=65536)."""
    model = TINY | {
        "vocab_size": 16000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 10,
        "num_attention_heads": 8, "num_key_value_heads": 4,
    }  # fmt: skip
    machine = Machine(ranks=1, device_gib=0, host_gib=24)
    nothing = Offload(offload_optimizer=False, offload_weights=False)
    changes = {
        "train.max_tokens_per_micro_batch": tokens, "train.reshard_after_forward": not kept,
        "train.activation_checkpointing": checkpointing, "train.logprob_chunk_tokens": 256,
        "data.max_prompt_tokens": 128, "rollout.max_tokens": 128,
    }  # fmt: skip
    phases = make_bill(model, *apply(config(), nothing, changes, machine)).phases
    for phase, measured in (("forward_backward", backward), ("optimizer", step)):
        predicted = sum(size for owner, size in phases[phase].items() if owner != sizes.CONTEXT) / GIB
        assert 0.9 <= predicted / measured <= 1.1


def test_advice_makes_it_fit_and_asks_for_nothing_needless() -> None:
    model, machine = QWEN2_5["Qwen2.5-7B"], Machine(ranks=8, device_gib=80, host_gib=1000)
    c = apply(table_config("Qwen2.5-7B"), Offload(), {"train.activation_checkpointing": False}, machine)[0]
    nothing = Offload(offload_optimizer=False, offload_weights=False)
    assert any("forward_backward needs" in problem for problem in make_bill(model, c, machine, nothing).problems)
    changes, changed = advise(model, c, machine, nothing)
    assert changed.fits and changes == {"train.activation_checkpointing": True}


def test_advice_offloads_less_where_host_memory_is_short() -> None:
    """16 GiB of processes fit into 20; the optimizer and weights of 7 B parameters do not beside them. On the device
    they leave too little for activations, so no single step lessens what is missing."""
    model, machine = QWEN2_5["Qwen2.5-7B"], Machine(ranks=8, device_gib=80, host_gib=20)
    c = apply(table_config("Qwen2.5-7B"), Offload(), {"train.activation_checkpointing": False}, machine)[0]
    changes, changed = advise(model, c, machine, Offload())
    assert changed.fits and changes == {
        "memory.offload_weights": False, "memory.offload_optimizer": False, "train.activation_checkpointing": True
    }  # fmt: skip


def test_advice_is_what_the_program_accepts() -> None:
    """Weights lent to the trainer can't leave the GPU: sleeping deeper would save most."""
    model, machine = QWEN2_5["Qwen2.5-32B"], Machine(ranks=8, device_gib=80, host_gib=2000)
    keys = {"rollout.engine": "sglang", "rollout.sleep_level": 0, "rollout.gpu_memory_utilization": 0.8}
    c = apply(table_config("Qwen2.5-32B"), Offload(), keys, machine)[0]
    assert not make_bill(model, c, machine, Offload()).fits
    changes, _ = advise(model, c, machine, Offload())
    assert changes and "rollout.sleep_level" not in changes


def test_a_cpu_s_cache_holds_one_sequence() -> None:
    """768 tokens in blocks of 128, and a block that no sequence gets: 896 · 2·28·4·128·4 bytes are 0.0957 GiB."""
    model, machine = QWEN2_5["Qwen2.5-7B"], Machine(ranks=1, device_gib=0, host_gib=900)
    small = apply(config(), Offload(), {"rollout.kv_cache_gib": 0.05}, machine)[0]
    bill = make_bill(model, small, machine, Offload(offload_optimizer=False, offload_weights=False))
    told = "KV cache: rollout.kv_cache_gib=0.05, one sequence of 768 tokens needs 0.10"
    assert bill.kv_floor == 0.1 and bill.problems == [told]
    changes, changed = advise(model, small, machine, Offload(offload_optimizer=False, offload_weights=False))
    assert changed.fits and changes == {"rollout.kv_cache_gib": 0.1}


def test_a_share_too_small_for_one_sequence_is_a_problem_with_its_key() -> None:
    c, machine = table_config("Qwen2.5-72B"), MACHINES["8x141"]
    c = apply(c, Offload(), {"rollout.gpu_memory_utilization": 0.1}, machine)[0]
    problems = make_bill(QWEN2_5["Qwen2.5-72B"], c, machine, Offload()).problems
    assert any("rollout.gpu_memory_utilization=0.1 leaves 0.0 GiB" in problem for problem in problems)


def test_constants_are_the_engine_s_own() -> None:
    from hybridengine.engines.train.fsdp import sharded

    assert (bill_fsdp.KEEP_GATHERED_BYTES, sizes.UNIT_BYTES) == (sharded.KEEP_GATHERED_BYTES, sharded.UNIT_BYTES)


def test_machines_are_checked() -> None:
    with pytest.raises(ValueError, match="at least 1 rank"):
        Machine(ranks=0, device_gib=80, host_gib=100)


# -- out of memory -------------------------------------------------------------------------------------------------


def test_the_message_names_phase_owners_and_keys() -> None:
    text = explain(
        "forward_backward",
        {"optimizer": 7 * GIB, "trainer_params": 3 * GIB, "grads": 0},
        config(),
        elsewhere={"rollout_weights": GIB},
        cause="tried to allocate 2 GiB",
    )
    assert "phase 'forward_backward' (tried to allocate 2 GiB)" in text
    assert "optimizer 7.00 GiB, trainer_params 3.00 GiB" in text and "grads" not in text
    assert "elsewhere: rollout_weights 1.00 GiB" in text
    assert (
        "train.activation_checkpointing=true, train.max_tokens_per_micro_batch=8192, train.reshard_after_forward=true"
        in text
    )


def test_keys_that_are_set_already_are_not_suggested() -> None:
    c = config("train.activation_checkpointing=true", "train.max_tokens_per_micro_batch=768")
    assert keys_for("forward_backward", c)[0] == "train.reshard_after_forward=true"
    assert keys_for("validation/rollout", c)[0] == "rollout.gpu_memory_utilization=0.45"
    megatron = config("train=megatron", "train.activation_checkpointing=true", "train.max_tokens_per_micro_batch=768")
    assert keys_for("forward_backward", megatron)[0] == "train.tp=2"
    for phase in ("rollout", "sync", "optimizer", "engine_start", "old_logprobs", "elsewhere"):
        assert len(keys_for(phase, c)) == 3


def test_out_of_memory_errors_are_explained_and_others_are_not() -> None:
    def owners() -> tuple[dict[str, int], dict[str, int]]:
        return {"kv_cache": GIB}, {}

    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("DefaultCPUAllocator: x")):
        with (
            pytest.raises(OutOfMemoryError, match="phase 'rollout'") as caught,
            explained(config(), owners, phase=lambda: "rollout"),
        ):
            raise error
        assert caught.value.__cause__ is error
    with pytest.raises(RuntimeError, match="^other$"), explained(config(), owners):
        raise RuntimeError("other")
