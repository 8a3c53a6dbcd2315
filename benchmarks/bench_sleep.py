"""Memory that comes and goes: seconds, bytes freed, the peak of a step and what all of it costs a step.

    make bench-sleep                                                     # SmolLM2-135M's shape, random weights
    .venv/bin/python -m benchmarks.bench_sleep --model dense --rounds 3 --steps 2
    .venv/bin/python -m benchmarks.bench_sleep --directory /mnt/nvme     # CPU: where offloaded bytes wait

One rank with the FSDP engine and vLLM (the transformers engine where vLLM is not installed), on a GPU if there is
one. What is measured:

- each transition, against plain copies of the same bytes in the same run: on a GPU one cudaMemcpyAsync from or to
  page-locked memory; on a CPU the same calls on a file of the same directory, from and into memory that never left,
  and a memcpy. Waking and sleeping of the rollout engine copy nothing at level 2: their ratio is to copying what
  they hold.
- what leaves the device (or the process's PSS), as a share of what the owner says it holds
- whole steps (sync, rollout, forward and backward, optimizer) with everything moving and with nothing moving, in
  turn; each phase's peak with and without the moves before it

Ratios are medians over rounds of two times of the same round. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.bench_reshard import MODELS
from benchmarks.sleep_arms import FileCopy, MemoryCopy, PinnedCopy, Subject
from hybridengine.distributed.world import World, init_process_group
from hybridengine.memory.residency import GRADS, KV_CACHE, OPTIMIZER, ROLLOUT_WEIGHTS, TRAINER_PARAMS, State
from hybridengine.memory.tracker import GIB, PhaseMemory
from hybridengine.platform.stores import unusable
from hybridengine.report.summary import commit, versions

COPIED, REBUILT = (OPTIMIZER, GRADS, TRAINER_PARAMS), (ROLLOUT_WEIGHTS, KV_CACHE)
#: Owners smaller than this say nothing about the share that is freed: the process's own noise is as large.
SMALLEST_BYTES = 4 << 20


def main() -> int:
    arguments = parse()
    console = Console(stderr=True, highlight=False, width=140)
    world = World.from_env()
    init_process_group(world, timeout_seconds=120)
    if not world.platform.separate_memory:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    with tempfile.TemporaryDirectory(prefix="bench-sleep-") as scratch:
        path = make_model(arguments.model, Path(scratch))
        subject = Subject(
            world, path, arguments.directory, prompts=arguments.prompts, samples=arguments.samples,
            prompt_tokens=arguments.prompt_tokens, response_tokens=arguments.response_tokens,
            kv_cache_gib=arguments.kv_cache_gib, dtype=arguments.dtype,
        )  # fmt: skip
        console.print(f"{arguments.model}, {subject.engine}, {world.device}: engines are up")
        steps = measure_steps(subject, arguments.steps, console)
        transitions = {owner: measure_copied(subject, owner, arguments.rounds) for owner in COPIED}
        transitions |= {owner: measure_rebuilt(subject, owner, arguments.rounds) for owner in REBUILT}
        console.print(table(transitions))
        console.print(f"TRL's colocated mode: {trl_reason(world)}")
        result = summary(steps, transitions, world)
        subject.close()
    print(json.dumps({"benchmark": "sleep", **rounded(result), **conditions(arguments, subject)}))
    return 0


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="shape of the model; its weights are random")
    parser.add_argument("--rounds", type=int, default=7, help="times each transition is measured")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each kind, after one of each to warm up")
    parser.add_argument(
        "--directory", type=Path, default=Path(tempfile.gettempdir()), help="CPU: where offloaded bytes wait, on a disk"
    )
    parser.add_argument("--prompts", type=int, default=16, help="of a step")
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=48, help="of every prompt")
    parser.add_argument("--response-tokens", type=int, default=24, help="of every response")
    parser.add_argument("--kv-cache-gib", type=float, default=0.5, help="CPU: of the rollout engine")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of compute and rollout")
    arguments = parser.parse_args(given)
    for name in ("rounds", "steps", "prompts", "samples", "prompt_tokens", "response_tokens"):
        if (value := getattr(arguments, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: must be 1 or more")
    if not arguments.kv_cache_gib > 0:
        parser.error(f"--kv-cache-gib {arguments.kv_cache_gib}: must be greater than 0")
    if not torch.cuda.is_available() and (problem := unusable(arguments.directory)):
        parser.error(f"--directory {arguments.directory}: {problem}")
    return arguments


def make_model(name: str, scratch: Path) -> Path:
    from transformers import AutoModelForCausalLM

    config = MODELS[name]()
    config.eos_token_id = None  # every response has its full length
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(scratch / "model")
    return scratch / "model"


# -- transitions ---------------------------------------------------------------------------------------------


def measure_copied(subject: Subject, owner: str, rounds: int) -> dict[str, Any]:
    """An owner whose bytes are kept. The plain copies take turns with it."""
    residency = subject.residency
    residency.rest = dict(subject.away)
    for other in residency.movers:
        residency.move(other, State.DEVICE)
    if owner == GRADS:
        subject.make_gradients()
    nbytes, sizes = residency.movers[owner].nbytes(), subject.piece_sizes(owner)
    subject.used()  # GPU: no leftover segment in which the owner and the copies' buffers would lie side by side
    residency.move(owner, State.HOST)  # takes host memory, once
    subject.used()
    residency.move(owner, State.DEVICE)
    copies: dict[str, Any] = (
        {"link": PinnedCopy(nbytes, subject.world.device)}
        if subject.on_gpu
        else {"link": FileCopy(sizes, subject.directory), "memcpy": MemoryCopy(nbytes)}
    )
    seconds: dict[str, list[float]] = {}
    freed = []
    for turn in range(rounds):

        def offload_and_back() -> None:
            awake = subject.used()
            out = subject.timed(lambda: residency.move(owner, State.HOST))
            freed.append((awake - subject.used()) / nbytes)
            note(seconds, "offload", out)
            note(seconds, "onload", subject.timed(lambda: residency.move(owner, State.DEVICE)))

        def plain() -> None:
            for name, copy in copies.items():
                note(seconds, f"{name} out", subject.timed(copy.out))
                note(seconds, f"{name} back", subject.timed(copy.back))

        for run in (offload_and_back, plain) if turn % 2 else (plain, offload_and_back):
            run()
    for copy in copies.values():
        copy.close()
    if owner == GRADS:
        subject.train.optimizer.zero_grad()
        for shard in subject.train.policy.shards.values():
            shard.grad = None
    ratios = {
        name: {
            "offload": ratio(seconds["offload"], seconds[f"{name} out"]),
            "onload": ratio(seconds["onload"], seconds[f"{name} back"]),
        }
        for name in copies
    }
    return {"nbytes": nbytes, "pieces": len(sizes), "freed": statistics.median(freed), "seconds": seconds,
            "over": ratios, "names": ("offload", "onload")}  # fmt: skip


def measure_rebuilt(subject: Subject, owner: str, rounds: int) -> dict[str, Any]:
    """An owner that is dropped and comes back empty; compared with copying what it holds."""
    residency, nbytes = subject.residency, subject.residency.movers[owner].nbytes()
    seconds: dict[str, list[float]] = {}
    freed = []
    if not nbytes:
        return {"nbytes": 0, "pieces": 0, "freed": None, "seconds": {}, "over": {}, "names": ("sleep", "wake")}
    copy: Any = PinnedCopy(nbytes, subject.world.device) if subject.on_gpu else MemoryCopy(nbytes)
    for _ in range(rounds):
        for other in REBUILT:
            residency.move(other, State.DEVICE)
        subject.fill_rollout()
        awake = subject.used()
        note(seconds, "sleep", subject.timed(lambda: residency.move(owner, State.DROPPED)))
        freed.append((awake - subject.used()) / nbytes)
        note(seconds, "wake", subject.timed(lambda: residency.move(owner, State.DEVICE)))
        note(seconds, "copy", subject.timed(copy.out))
    copy.close()
    over = {name: ratio(seconds[name], seconds["copy"]) for name in ("sleep", "wake")}
    return {"nbytes": nbytes, "pieces": 1, "freed": statistics.median(freed), "seconds": seconds,
            "over": {"link" if subject.on_gpu else "memcpy": over}, "names": ("sleep", "wake")}  # fmt: skip


# -- steps ---------------------------------------------------------------------------------------------------


def measure_steps(subject: Subject, steps: int, console: Console) -> dict[str, Any]:
    """Steps that move everything and steps that move nothing, in turn."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    memory: dict[bool, list[PhaseMemory]] = {}
    for turn in range(steps + 1):
        for moving in (True, False) if turn % 2 else (False, True):
            taken, memory[moving] = subject.step(moving=moving)
            if turn:
                seconds[moving].append(taken)
            console.print(f"step {turn}, {'moving' if moving else 'staying'}: {taken:.2f} s", style="dim")
    # What a phase needs: its peak once room has been made, less whatever stays though it is not needed.
    peaks = {run.name: run.peak for run in memory[True]}
    outer = {name: peak for name, peak in peaks.items() if "/" not in name}
    needed = {name: peaks.get(f"{name}/body", peak) for name, peak in outer.items()}
    return {
        "seconds_moving": statistics.median(seconds[True]),
        "seconds_staying": statistics.median(seconds[False]),
        "step_time_ratio": ratio(seconds[True], seconds[False]),
        "peak_over_phase_max": max(outer.values()) / max(needed.values()),
        "peak_gib": max(outer.values()) / GIB,
        "peak_staying_gib": max(run.peak for run in memory[False]) / GIB,
        "phase_peaks_gib": {name: peak / GIB for name, peak in outer.items()},
        "phase_needs_gib": {name: peak / GIB for name, peak in needed.items()},
    }


# -- reporting -----------------------------------------------------------------------------------------------


def summary(steps: dict[str, Any], transitions: dict[str, dict[str, Any]], world: World) -> dict[str, Any]:
    copied = {owner: t for owner, t in transitions.items() if owner in COPIED}
    freed = {owner: t["freed"] for owner, t in transitions.items() if t["nbytes"] >= SMALLEST_BYTES}

    def slowest(kind: str) -> float:
        return max(r for t in copied.values() for r in t["over"][kind].values())

    found: dict[str, Any] = {
        "freed_fraction": min(freed.values()),
        "time_over_memcpy": slowest("link" if world.platform.separate_memory else "memcpy"),
        "time_over_link": slowest("link"),
        **steps,
        "freed": freed,
        "over_plain_copy": {owner: t["over"] for owner, t in transitions.items()},
        "gigabytes_per_second": {
            owner: {
                name: t["nbytes"] / statistics.median(values) / 1e9 for name, values in t["seconds"].items() if values
            }
            for owner, t in transitions.items()
        },
        "bytes": {owner: t["nbytes"] for owner, t in transitions.items()},
    }
    return found


def table(transitions: dict[str, dict[str, Any]]) -> Table:
    out = Table(title="transitions: medians; ratios to plain copies of the same bytes in the same round")
    for head in ("owner", "MB", "pieces", "freed", "", "seconds", "GB/s", "/ same link", "/ memcpy"):
        out.add_column(head, justify="left" if head in ("owner", "") else "right", no_wrap=True)
    for owner, t in transitions.items():
        for name in t["names"] if t["nbytes"] else ():
            median = statistics.median(t["seconds"][name])
            over = {kind: f"{ratios[name]:.2f}" for kind, ratios in t["over"].items()}
            out.add_row(
                owner, f"{t['nbytes'] / 1e6:.1f}", str(t["pieces"]), f"{t['freed']:.1%}", name, f"{median:.4f}",
                f"{t['nbytes'] / median / 1e9:.2f}", over.get("link", ""), over.get("memcpy", ""),
            )  # fmt: skip
    return out


def trl_reason(world: World) -> str:
    """Why it is not measured here."""
    if not world.platform.separate_memory:
        return "skipped: its sleep is vLLM's own, and vLLM's CPU worker ignores it (nothing would be freed)"
    return "skipped: no arm for it on a GPU yet"


def note(seconds: dict[str, list[float]], name: str, value: float) -> None:
    seconds.setdefault(name, []).append(value)


def ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def conditions(arguments: argparse.Namespace, subject: Subject) -> dict[str, Any]:
    return {
        "model": arguments.model,
        "engine": subject.engine,
        "device": torch.cuda.get_device_name(subject.world.device) if subject.on_gpu else "cpu",
        "dtype": arguments.dtype,
        "sequences": arguments.prompts * arguments.samples,
        "trl": trl_reason(subject.world),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        **commit(),
        "versions": versions() | {"cuda": torch.version.cuda},
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
