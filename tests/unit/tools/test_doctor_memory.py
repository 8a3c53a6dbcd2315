"""doctor memory: the bill of machines that aren't here; one line for every flag, key and file that can't be."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hybridengine.tools.bill_table import QWEN2_5
from hybridengine.tools.doctor_memory import machine_of, memory_report

NODE = ("--gpus", "8", "--gpu-gib", "80", "--host-gib", "1000")
CPU = ("--gpus", "0", "--host-gib", "64")


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5["Qwen2.5-7B"]))
    return tmp_path


def report(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    code = memory_report(arguments, Console(file=out, width=200))
    return code, " ".join(out.getvalue().split())


def test_memory_of_a_machine_that_is_not_here(qwen: Path) -> None:
    node = (*NODE, "--config", str(qwen / "config.json"))
    code, text = report("+experiment=qwen2_5_7b", *node)
    assert code == 0 and "fits" in text and "7.62 B parameters" in text and "forward_backward" in text
    code, text = report("+experiment=qwen2_5_7b", "train.activation_checkpointing=false", *node)
    assert code == 1 and "forward_backward needs" in text
    assert "with these it would: train.activation_checkpointing=true" in text


def test_memory_of_a_cpu_machine(qwen: Path) -> None:
    code, text = report(f"model.path={qwen}", "--gpus", "0", "--ranks", "2", "--host-gib", "24", "data.train=x")
    assert code == 1 and "on 2 CPU ranks with 24 GiB" in text and "no combination of keys was found that fits" in text
    assert "rollout.kv_cache_gib=0.03 " in text  # one sequence of 768 tokens and a block, at TP 2 in bfloat16


def test_the_bill_of_megatron(qwen: Path) -> None:
    """A layout that fits, and a degree that does not divide, which is refused with its key."""
    job = [
        f"model.path={qwen}", "data.train=x", "train=megatron", "train.dtype=bfloat16", "rollout.dtype=bfloat16",
        "train.activation_checkpointing=true", "--gpus", "4", "--gpu-gib", "80", "--host-gib", "500",
    ]  # fmt: skip
    code, text = report(*job, "train.tp=2", "train.pp=2")
    assert code == 0 and "fits" in text and "megatron: TP 2 × PP 2; optimizer in host memory" in text
    code, text = report(*job, "train.tp=3")
    assert code == 2 and "train.tp=3 train.pp=1: one model takes 3 ranks, which must divide the 4" in text


def test_what_is_short_of_host_memory_may_stay_on_the_device(qwen: Path) -> None:
    """Offloaded, 8 ranks put 101 GiB into the host's memory; of two keys that move less there, one does."""
    small = (*NODE[:-1], "64", "--config", str(qwen))
    code, text = report("+experiment=qwen2_5_7b", *small)
    assert code == 1 and text.endswith("with these it would: memory.offload_optimizer=false")
    code, text = report("+experiment=qwen2_5_7b", *NODE[:-1], "8", "--config", str(qwen))
    assert code == 1 and "was found that fits: use more host memory or a smaller model" in text


@pytest.mark.parametrize(
    ("overrides", "machine", "message"),
    [
        (["train.max_tokens_per_micro_batch=-5"], NODE, "train.max_tokens_per_micro_batch=-5: must be greater than 0"),
        (["rollout.tp=0"], NODE, "rollout.tp=0: must be greater than 0"),
        (["rollout.tp=7"], NODE, "rollout.tp=7: must divide the world size 8"),
        (["rollout.tp=16"], NODE, "rollout.tp=16: must divide the world size 8"),
        (["rollout.tp=8"], NODE, "rollout.tp=8: must divide the model's 28 attention heads"),
        (["rollout.tp=2"], ("--gpus", "3", *NODE[2:]), "rollout.tp=2: must divide the world size 3"),
        (["rollout.sleep_level=5"], NODE, "rollout.sleep_level=5: must be one of 0 | 1 | 2"),
        (["sync.method=foo"], NODE, "sync.method=foo: must be one of auto | pull"),
        (["rollout=sglang"], NODE, "rollout.sleep_level=2: weights that another process maps over CUDA IPC"),
        (["placement=disaggregated"], NODE, "placement.name=disaggregated: the bill is of ranks that train and"),
        (["train=megatron", "train.transformer_engine=true"], CPU, "Transformer Engine needs a CUDA GPU; use auto"),
        (["train.lrr=1"], NODE, "unknown key 'train.lrr'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_the_program_refuses_is_not_billed(
    qwen: Path, overrides: list[str], machine: tuple[str, ...], message: str
) -> None:
    code, text = report(*overrides, *machine, "--config", str(qwen))
    assert code == 2 and message in text and "fits" not in text


def test_what_this_machine_lacks_is_no_reason_on_another(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDENGINE_SGLANG_PYTHON", "/nowhere")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    keys = ["rollout=sglang", "rollout.sleep_level=0", "rollout.tp=2", "rollout.gpu_memory_utilization=0.3"]
    code, text = report("+experiment=qwen2_5_7b", *keys, *NODE, "--config", str(qwen))
    assert code in (0, 1) and "GiB per rank" in text
    code, _ = report("memory.offload_dir=/not/here", "--gpus", "0", "--host-gib", "900", "--config", str(qwen))
    assert code == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"hidden_size": None}, "hidden_size=None: must be a whole number above 0"),
        ({"hidden_size": "big"}, "hidden_size='big': must be a whole number above 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True: must be a whole number above 0"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: must be a whole number above 0"),
        ({"max_position_embeddings": "4k"}, "max_position_embeddings='4k': must be a whole number above 0"),
        ({"hidden_size": 5}, "hidden_size=5: less than num_attention_heads=28"),
        ({"architectures": "Qwen2ForCausalLM"}, "architectures='Qwen2ForCausalLM': must be a list with one of Llama"),
        ({"architectures": ["Mixtral"]}, "architectures=['Mixtral']: must be a list with one of Llama"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "num_experts is missing; it must be a whole number above 0"),
        ([1, 2], "a list where a model's config.json has an object of keys"),
        ("[1, ", "not JSON (Expecting value: line 1 column 5 (char 4)); give a model's config.json"),
    ],
    ids=lambda value: json.dumps(value) if not isinstance(value, str) else "",
)
def test_a_config_json_that_is_none(qwen: Path, content: Any, message: str) -> None:
    if isinstance(content, dict):
        content = QWEN2_5["Qwen2.5-7B"] | content
    file = qwen / "config.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    code, text = report(*NODE, "--config", str(file))
    assert code == 2 and f"hybridengine doctor: {file}: {message}" in text


def test_a_missing_size_and_a_missing_file(qwen: Path) -> None:
    model = {key: value for key, value in QWEN2_5["Qwen2.5-7B"].items() if key != "hidden_size"}
    (qwen / "config.json").write_text(json.dumps(model))
    code, text = report(*NODE, "--config", str(qwen))
    assert code == 2 and "config.json: hidden_size is missing; it must be a whole number above 0" in text
    code, text = report(*NODE, "model.path=/nowhere")
    assert code == 2 and "/nowhere: no config.json there" in text


def flags(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**({"gpus": None, "gpu_gib": None, "host_gib": None, "ranks": None} | given))


@pytest.mark.parametrize(
    ("given", "here", "message"),
    [
        ({"gpus": -1}, 0, "--gpus -1: must be 1 or more, or 0 for a CPU machine"),
        ({"gpus": 8, "gpu_gib": 0.0}, 0, "--gpu-gib 0: must be a number of GiB above 0"),
        ({"gpus": 8, "gpu_gib": float("nan")}, 0, "--gpu-gib nan: must be a number of GiB above 0"),
        ({"host_gib": -5.0}, 0, "--host-gib -5: must be a number of GiB above 0"),
        ({"ranks": 0}, 0, "--ranks 0: must be 1 or more"),
        ({"ranks": 4}, 8, "--ranks 4: 8 GPUs have a rank each; leave it out, or give --gpus 0"),
        ({"gpu_gib": 80.0}, 0, "--gpu-gib 80: this machine has no GPU; leave it out, or give the number"),
        ({"gpus": 0, "gpu_gib": 80.0}, 8, "--gpu-gib 80: --gpus 0 is a CPU machine; leave it out"),
        ({"gpus": 8}, 0, "--gpu-gib: this machine has no GPU to take it from"),
        ({"gpus": 8, "gpu_gib": 80.0}, 0, "--host-gib: the GPUs are not those of this machine"),
        ({"gpus": 8, "gpu_gib": 141.0}, 8, "--host-gib: the GPUs are not those of this machine"),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_flags_that_describe_no_machine(given: dict[str, Any], here: int, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        machine_of(flags(**given), here, 79.2 if here else 0.0)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("given", "here", "ranks", "device"),
    [({}, 0, 1, 0.0), ({"ranks": 2}, 0, 2, 0.0), ({}, 8, 8, 79.2), ({"gpus": 8, "gpu_gib": 80.0}, 8, 8, 80.0)],
    ids=["cpu", "two-ranks", "gpus", "gpus-in-round-numbers"],
)
def test_the_memory_of_this_machine_is_taken_for_this_machine(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], here: int, ranks: int, device: float
) -> None:
    monkeypatch.setattr("hybridengine.tools.doctor_memory.host_gib", lambda: 123.0)
    machine = machine_of(flags(**given), here, 79.2 if here else 0.0)
    assert (machine.ranks, machine.device_gib, machine.host_gib) == (ranks, device, 123.0)
