"""What scoring costs generation: the decode rate with a reward in worker processes, in threads, and without one.

    make bench-rewards                                      # 64 samples, a reward of 50 ms in pure Python
    .venv/bin/python -m benchmarks.bench_rewards --model smollm2 --rounds 3

One rank with a real rollout engine (vLLM; transformers where it is not installed) and random weights. Responses have
lengths spread evenly from ``--shortest`` to ``--longest`` tokens, so that they end one after the other, as in a run;
each is scored as soon as it ends. The arms take turns in every round:

- none: nobody scores
- isolated: ``reward.isolate=true``
- threads: the same function on threads of the engine's process

The decode rate is tokens over the seconds of ``generate``; waiting for scores afterwards counts for
``reward/hidden_fraction``. Slowdowns are medians over rounds of the two rates of the same round. On a CPU the engine is
given ``--engine-threads`` of the cores: a GPU leaves the cores to Python, a CPU engine on all of them does not.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.bench_reshard import MODELS
from hybridengine.config import Config, DataConfig, ModelConfig, RewardConfig, RolloutConfig
from hybridengine.distributed.world import World, init_process_group
from hybridengine.engines.rollout.generate import generate
from hybridengine.placement.parts import EngineOptions, start_rollout
from hybridengine.report.summary import commit, versions
from hybridengine.rewards.scorer import Scorer
from hybridengine.types import Prompt, SamplingParams

ARMS = ("none", "isolated", "threads")


def main() -> int:
    arguments = parse()
    console = Console(stderr=True, highlight=False, width=120)
    world = World.from_env()
    init_process_group(world, timeout_seconds=120)
    if not world.platform.separate_memory:
        torch.set_num_threads(arguments.engine_threads)
    with tempfile.TemporaryDirectory(prefix="bench-rewards-") as scratch:
        engine = make_engine(arguments, world, Path(scratch))
        scorers = {arm: make_scorer(arguments, arm) for arm in ARMS[1:]}
        found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
        for arm in ARMS:
            measure(engine, scorers.get(arm), arguments, turn=-1)
        for turn in range(arguments.rounds):
            order = ARMS[turn % 3 :] + ARMS[: turn % 3]
            for arm in order:
                found[arm].append(measure(engine, scorers.get(arm), arguments, turn=turn))
        for scorer in scorers.values():
            scorer.close()
    console.print(table(found))
    print(json.dumps({"benchmark": "rewards", **summary(found), **conditions(arguments, world)}))
    return 0


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="dense", help="shape of the model; its weights are random")
    parser.add_argument("--rounds", type=int, default=7, help="times each arm is measured")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--shortest", type=int, default=24, help="tokens of the shortest response")
    parser.add_argument("--longest", type=int, default=200, help="tokens of the longest response")
    parser.add_argument("--seconds", type=float, default=0.05, help="processor time of one call of the reward function")
    parser.add_argument("--workers", type=int, default=4, help="reward.workers")
    parser.add_argument("--engine-threads", type=int, default=1, help="CPU: threads of the engine's matrix products")
    arguments = parser.parse_args(given)
    for name in ("rounds", "samples", "shortest", "workers", "engine_threads"):
        if (value := getattr(arguments, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: must be 1 or more")
    if arguments.longest < arguments.shortest:
        parser.error(f"--longest {arguments.longest}: must be at least --shortest {arguments.shortest}")
    if not arguments.seconds > 0:
        parser.error(f"--seconds {arguments.seconds}: must be greater than 0")
    return arguments


class Numbers:
    """A tokenizer whose text of a token is its number."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))


def make_engine(arguments: argparse.Namespace, world: World, scratch: Path) -> Any:
    """The rollout engine, with its weights."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    shape = MODELS[arguments.model]()
    shape.eos_token_id = None  # responses end where the context does
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape, dtype=torch.float32).save_pretrained(scratch)
    config = Config(
        model=ModelConfig(path=str(scratch)),
        data=DataConfig(train="unused"),
        rollout=RolloutConfig(engine="vllm" if importlib.util.find_spec("vllm") else "transformers", sleep_level=0),
    )
    options = EngineOptions(model_path=scratch, max_model_len=context(arguments), eos_token_ids=[])
    engine = start_rollout(config, world, options)
    weights = load_file(scratch / "model.safetensors")
    engine.wake(("weights",))
    engine.begin_update()
    for name, full in weights.items():
        engine.load_weight(name, full)
    engine.finish_update(0)
    engine.wake(("kv_cache",))
    return engine


def context(arguments: argparse.Namespace) -> int:
    return int(arguments.longest) + 8


def prompts(arguments: argparse.Namespace, turn: int) -> list[Prompt]:
    """Prompt i leaves room for the response length that sample i is to have."""
    spread = arguments.longest - arguments.shortest
    lengths = [arguments.shortest + spread * i // max(1, arguments.samples - 1) for i in range(arguments.samples)]
    sizes = [context(arguments) - length for length in lengths]
    return [
        Prompt(index=i, token_ids=[3 + (turn * 977 + 11 * i + 7 * j) % 1000 for j in range(size)], answer="1")
        for i, size in enumerate(sizes)
    ]


def make_scorer(arguments: argparse.Namespace, arm: str) -> Scorer:
    config = RewardConfig(
        fn="benchmarks.slow_reward:spin", kwargs={"seconds": arguments.seconds}, isolate=arm == "isolated",
        workers=arguments.workers, timeout_seconds=60.0,
    )  # fmt: skip
    return Scorer(config, Numbers())


def measure(engine: Any, scorer: Scorer | None, arguments: argparse.Namespace, *, turn: int) -> dict[str, float]:
    params = SamplingParams(n=1, max_tokens=arguments.longest)
    begin = time.perf_counter()
    found = generate(
        engine,
        prompts(arguments, turn),
        params,
        seed=1,
        step=turn + 1,
        on_finished=None if scorer is None else scorer.submit,
    )
    generated = time.perf_counter()
    measured = {"tokens_per_second": sum(len(t.token_ids) for t in found) / (generated - begin)}
    measured["generate_seconds"] = generated - begin
    if scorer is not None:
        scored = scorer.collect()
        assert len(scored) == len(found) and all(t.reward == 1.0 for t in scored)
        measured["wait_seconds"] = time.perf_counter() - generated
        metrics = scorer.metrics(scorer.take_stats())
        measured |= {name.removeprefix("reward/"): value for name, value in metrics.items()}
    return measured


def summary(found: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    def slowdown(arm: str) -> float:
        rates = [
            one["tokens_per_second"] / none["tokens_per_second"]
            for one, none in zip(found[arm], found["none"], strict=True)
        ]
        return round(1 - statistics.median(rates), 4)

    def median(arm: str, name: str) -> float:
        return round(statistics.median(one[name] for one in found[arm]), 4)

    return {
        "decode_slowdown_isolated": slowdown("isolated"),
        "decode_slowdown_threads": slowdown("threads"),
        "hidden_fraction": median("isolated", "hidden_fraction"),
        "hidden_fraction_threads": median("threads", "hidden_fraction"),
        "tokens_per_second": median("none", "tokens_per_second"),
        "generate_seconds": median("none", "generate_seconds"),
        "busy_seconds_isolated": median("isolated", "busy_seconds"),
        "wait_seconds_isolated": median("isolated", "wait_seconds"),
        "queue_seconds_isolated": median("isolated", "queue_seconds"),
    }


def table(found: dict[str, list[dict[str, float]]]) -> Table:
    shown = Table(title="decode rate", title_justify="left")
    names = (
        "tokens_per_second",
        "generate_seconds",
        "wait_seconds",
        "hidden_fraction",
        "busy_seconds",
        "queue_seconds",
    )
    for column in ("arm", *names):
        shown.add_column(column)
    for arm, measured in found.items():
        cells = [[one[name] for one in measured if name in one] for name in names]
        shown.add_row(arm, *(f"{statistics.median(values):.3f}" if values else "" for values in cells))
    return shown


def conditions(arguments: argparse.Namespace, world: World) -> dict[str, Any]:
    return {
        "model": arguments.model,
        "samples": arguments.samples,
        "reward_seconds": arguments.seconds,
        "response_tokens": [arguments.shortest, arguments.longest],
        "workers": arguments.workers,
        "rounds": arguments.rounds,
        "device": str(world.device),
        "cpu_count": os.cpu_count(),
        "engine_threads": arguments.engine_threads,
        **commit(),
        "versions": versions(),
    }


if __name__ == "__main__":
    sys.exit(main())
