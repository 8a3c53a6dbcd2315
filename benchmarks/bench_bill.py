"""A few training steps of a model, each phase's peak of memory beside what `doctor memory` predicts.

    python3 -m benchmarks.bench_bill                         # Qwen2.5-1.5B's shape in bfloat16, on one GPU
    python3 -m benchmarks.bench_bill --shape tiny            # the same on a CPU, to try it

Weights are random, so rewards mean nothing; times and memory do. FSDP2 at world size 1, vLLM, everything offloaded and
deep sleep. The last line is one JSON object: GiB measured and predicted by phase, seconds by phase, tokens per second.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hybridengine.config.compose import build
from hybridengine.memory.host import host_gib
from hybridengine.report.summary import MISMATCH, commit, versions
from hybridengine.tools.bill import GIB, make_bill
from hybridengine.tools.bill_table import QWEN2_5
from hybridengine.tools.doctor_memory import gpus_here, offload_of
from hybridengine.tools.machine import Machine
from hybridengine.tools.model_file import read_model

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": QWEN2_5["Qwen2.5-1.5B"],
    "tiny": {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "intermediate_size": 256, "vocab_size": 8192}
    | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
}
#: Phases that the bill and a run's metrics both have.
PHASES = ("sync", "rollout", "forward_backward", "optimizer")


def make_model(shape: str, path: Path) -> Path:
    """Random bfloat16 weights of a shape, and the embedded model's tokenizer."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    from hybridengine.embedded import ensure_embedded

    torch.manual_seed(0)
    numbers = {name: value for name, value in SHAPES[shape].items() if name != "architectures"}
    # Without an end token every response has its full length.
    config = Qwen2Config(**numbers, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to("cpu").save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ensure_embedded() / name, path / name)
    return path


def overrides(given: argparse.Namespace, model: Path, output: Path) -> list[str]:
    """Of the run, which is also what the bill is made of."""
    memory = (
        [f"rollout.gpu_memory_utilization={given.share:g}"]
        if torch.cuda.is_available()
        else ["rollout.kv_cache_gib=0.5"]
    )
    return [
        f"model.path={model}", "data=arithmetic", "reward=exact_match", "train=fsdp_bf16", "train.lr=1e-6",
        "rollout=vllm", "rollout.tp=1", "rollout.dtype=bfloat16", f"rollout.max_tokens={given.tokens}",
        f"rollout.enforce_eager={str(not given.graphs).lower()}", f"rollout.samples_per_prompt={given.samples}",
        f"data.prompts_per_step={given.prompts}", "data.max_prompt_tokens=32", f"steps={given.steps}",
        "validate_every=0", "logging.plot=false", "logging.report=false", "logging.tensorboard=false",
        "checkpoint.export=false", f"output_dir={output}", *memory,
    ]  # fmt: skip


def predicted(job: Sequence[str], model: Path) -> dict[str, int]:
    """Bytes by phase that `doctor memory` says this machine's rank will hold."""
    config = build(list(job))
    count, size = gpus_here()
    machine = Machine(ranks=1, device_gib=size if count else 0.0, host_gib=host_gib())
    return make_bill(read_model(str(model)), config, machine, offload_of(config, machine.has_gpus)).peaks


def measured(records: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Of the steps after the first, which warms up; of its only one, if there is no other."""
    steps = [record for record in records if record["step"] > 0]
    later = steps[1:] or steps
    seconds = {name: statistics.median(record[f"time/{name}"] for record in later) for name in (*PHASES, "step")}
    return {
        "peaks_gib": {name: max(record[f"memory/{name}/peak_gib"] for record in steps) for name in PHASES},
        "seconds": seconds,
        "tokens_per_second": statistics.median(record["perf/tokens_per_second"] for record in later),
        "logp_difference": max(record[MISMATCH] for record in steps),
    }


def beside(peaks_gib: Mapping[str, float], bill: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """phase -> GiB measured, GiB billed, and how much of the bill was used."""
    return {
        name: {
            "measured_gib": round(peaks_gib[name], 3),
            "billed_gib": round(bill[name] / GIB, 3),
            "billed_over_measured": round(bill[name] / GIB / peaks_gib[name], 3),
        }
        for name in PHASES
    }


def main() -> int:
    given = parse()
    console = Console(stderr=True, highlight=False, width=120)
    with tempfile.TemporaryDirectory(prefix="bench-bill-") as scratch:
        model = make_model(given.shape, Path(scratch) / "model")
        output = Path(scratch) / "run"
        job = overrides(given, model, output)
        bill = predicted(job, model)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        subprocess.run([*launcher, "-m", "hybridengine.train", *job], check=True, stdout=sys.stderr)
        found = measured([json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()])
    phases = beside(found.pop("peaks_gib"), bill)
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    table = Table(
        "phase", "GiB measured", "GiB billed", "billed / measured", "seconds", title=f"{given.shape}, {device}"
    )
    for name, row in phases.items():
        table.add_row(name, *(f"{value:.2f}" for value in row.values()), f"{found['seconds'][name]:.3f}")
    console.print(table)
    keys = ("shape", "steps", "tokens", "samples", "prompts", "share", "graphs")
    arguments = {key: getattr(given, key) for key in keys}
    print(json.dumps({"benchmark": "bill", "device": device, "phases": phases, **found, **arguments, **commit(),
                      "versions": versions()}))  # fmt: skip
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b", help="of the model; its weights are random")
    parser.add_argument("--steps", type=int, default=4, help="of training")
    parser.add_argument("--tokens", type=int, default=256, help="of every response")
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--prompts", type=int, default=32, help="of a step")
    parser.add_argument("--share", type=float, default=0.5, help="of the GPU, for vLLM: rollout.gpu_memory_utilization")
    parser.add_argument("--graphs", action="store_true", help="vLLM compiles and captures CUDA graphs")
    given = parser.parse_args(arguments)
    for name in ("steps", "tokens", "samples", "prompts"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} {getattr(given, name)}: must be 1 or more")
    if not 0 < given.share < 1:
        parser.error(f"--share {given.share:g}: must be between 0 and 1")
    if given.shape != "tiny" and not torch.cuda.is_available():
        parser.error(f"--shape {given.shape}: needs a CUDA GPU; on a CPU --shape tiny")
    return given


if __name__ == "__main__":
    sys.exit(main())
