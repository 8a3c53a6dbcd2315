"""Learning curves of every algorithm on the embedded task, and of GRPO beside TRL's.

    make bench-algorithms                                                  # everything, about 50 minutes on two cores
    .venv/bin/python -m benchmarks.bench_algorithms --quick                # one seed, few steps: does everything run?
    .venv/bin/python -m benchmarks.bench_algorithms --only grpo gspo --seeds 1 2

The job is the quickstart's (64 prompts × 8 samples, 40 steps, greedy accuracy on 256 held-out prompts), with the
transformers engine on one process of all cores. Four families of arms:

    one update per rollout    every algorithm in conf/algorithm; three of them also with 512 prompts × 1 sample
    four updates per rollout  where the ratio leaves 1, so that surrogates differ
    noise                     rollouts from weights with noise, uncorrected and corrected (noisy_rollouts.py)
    TRL                       GRPO through TRL 1.16 (peers/trl_learn.py), on more seeds; needs scripts/install_peers.sh

Every arm runs in a process of its own; results are kept under --cache and used again with --reuse. The last line is one
JSON object: per algorithm ``accuracy_after`` of its seeds, and ``trl_difference``, GRPO's mean less TRL's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any

from rich.console import Console
from rich.table import Table

from hybridengine.config.compose import config_groups
from hybridengine.report.summary import commit

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".venv-peers" / "bin" / "python"
SEEDS, TRL_SEEDS = (1, 2, 3), (1, 2, 3, 4, 5, 6)
#: Mean training reward is taken over so many last steps.
LAST = 5

JOB = [
    "+experiment=quickstart", "rollout=transformers", "rollout.tp=1", "rollout.max_num_seqs=512", "validate_every=10",
    "checkpoint.export=false", "checkpoint.resume=never", "logging=quiet", "logging.plot=false",
    "logging.tensorboard=false",
]  # fmt: skip
SINGLE = ["rollout.samples_per_prompt=1", "data.prompts_per_step=512"]
FOUR = ["algorithm.mini_batches=4"]


@dataclass(frozen=True)
class Arm:
    """One line of the table. ``noise``: of the rollout weights; None: through hybridengine.train as it is."""

    name: str
    overrides: tuple[str, ...] = ()
    noise: float | None = None
    trl: bool = False


def arms() -> list[Arm]:
    names = config_groups()["algorithm"]
    found = [Arm(name, (f"algorithm={name}",)) for name in ["grpo", *(n for n in names if n != "grpo")]]
    found += [Arm(f"{name}, one sample", (f"algorithm={name}", *SINGLE)) for name in ("reinforce_pp", "remax", "ppo")]
    found += [
        Arm(f"{name}, four updates", (f"algorithm={name}", *FOUR)) for name in ("grpo", "dapo", "gspo", "cispo", "sapo")
    ]
    found.append(Arm("gspo clipped at .2, four updates", ("algorithm=gspo", *FOUR, *WIDE)))
    found += [Arm(f"noise {share:g}, {preset}", (f"algorithm.correction={preset}",), noise=share)
              for share in (0.01, 0.3) for preset in ("none", "tis", "icepop")]  # fmt: skip
    return [*found, Arm("TRL grpo", trl=True)]


WIDE = ("algorithm.clip_low=0.2", "algorithm.clip_high=0.2")


def main() -> int:
    arguments = parse()
    log = Console(stderr=True, highlight=False)
    chosen = [arm for arm in arms() if arguments.only is None or arm.name in arguments.only]
    if any(arm.trl for arm in chosen) and not PEERS.exists():
        log.print("[yellow].venv-peers is missing (scripts/install_peers.sh): no arm through TRL[/]")
        chosen = [arm for arm in chosen if not arm.trl]
    begin = time.time()
    results: dict[str, dict[int, dict[str, Any]]] = {arm.name: {} for arm in chosen}
    for seed in sorted({*arguments.seeds, *arguments.trl_seeds}):
        for arm in chosen:
            against_trl = arm.trl or (arm.name == "grpo" and any(other.trl for other in chosen))
            if seed not in (arguments.trl_seeds if against_trl else arguments.seeds):
                continue
            found = results[arm.name][seed] = run(arm, seed, arguments)
            log.print(
                f"seed {seed}  {arm.name:34} accuracy {found['accuracy'][-1][1]:.3f}  reward "
                f"{fmean(found['reward'][-LAST:]):.3f}  {found['seconds']:.0f} s",
                soft_wrap=True,
            )
    Console(width=130).print(table(results))
    if arguments.plot:
        write_plot(arguments.plot, results)
    print(json.dumps(report(results, arguments.seeds) | conditions(arguments, time.time() - begin)))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="arms by name", choices=[arm.name for arm in arms()], metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--trl-seeds", nargs="+", type=int, default=list(TRL_SEEDS), help="of GRPO and of TRL")
    parser.add_argument("--steps", type=int, help="default: the quickstart's 40")
    parser.add_argument("--quick", action="store_true", help="one seed, 4 steps")
    parser.add_argument("--reuse", action="store_true", help="results that are under --cache are not made again")
    parser.add_argument("--cache", type=Path, default=ROOT / "outputs" / "bench_algorithms")
    parser.add_argument("--plot", type=Path, help="picture to write")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds allowed to one run")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.trl_seeds, arguments.steps = [1], [1], arguments.steps or 4
    return arguments


def run(arm: Arm, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one arm and read its curve.

    Raises:
        SystemExit: it failed or took too long; the end of its log is shown.
    """
    place = arguments.cache / f"{arm.name.replace(', ', '-').replace(' ', '-')}-{seed}"
    result = place / "result.json"
    if arguments.reuse and result.is_file():
        return dict(json.loads(result.read_text()))
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    steps = [] if arguments.steps is None else [f"steps={arguments.steps}"]
    if arm.trl:
        command = [str(PEERS), "-W", "ignore", "-m", "benchmarks.peers.trl_learn", "--seed", str(seed), "--out"]
        command += [str(place / "trl.json"), *(["--steps", str(arguments.steps)] if arguments.steps else [])]
    else:
        module = (
            ["hybridengine.train"] if arm.noise is None else ["benchmarks.noisy_rollouts", "--noise", f"{arm.noise}"]
        )
        overrides = [*JOB, f"seed={seed}", f"output_dir={place / 'run'}", *steps, *arm.overrides]
        command = [sys.executable, "-W", "ignore", "-m", *module, *overrides]
    begin = time.perf_counter()
    with (place / "log.txt").open("w") as stream:
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, timeout=arguments.timeout,
                env=os.environ | {"OMP_NUM_THREADS": str(os.cpu_count() or 1)},
            )  # fmt: skip
            status: int | str = done.returncode
        except subprocess.TimeoutExpired:
            status = f"no end after {arguments.timeout:.0f} s"
    if status != 0:
        tail = "\n".join((place / "log.txt").read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(f"{tail}\nbench_algorithms: {arm.name}, seed {seed} failed ({status})")
    found = read_trl(place / "trl.json") if arm.trl else read_run(place / "run")
    found["seconds"] = time.perf_counter() - begin
    result.write_text(json.dumps(found))
    return found


def read_run(directory: Path) -> dict[str, Any]:
    """Accuracy by step, training reward, and what a step cost."""
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["step"] > 0]
    prompts = json.loads((directory / "config.json").read_text())["data"]["prompts_per_step"]
    return {
        "accuracy": [(r["step"], r["validation/accuracy"]) for r in records if "validation/accuracy" in r],
        "reward": [r["reward"] for r in steps],
        "seconds_per_step": fmean(r["time/step"] - r.get("time/validation", 0.0) for r in steps[1:]),
        "generated": 1 + fmean(r.get("dynamic_sampling/replaced_groups", 0.0) for r in steps) / prompts,
        "clipped": fmean(r.get("clip_ratio/low", 0.0) + r.get("clip_ratio/high", 0.0) for r in steps),
        "mean_exp_abs": fmean(r.get("sampling/mean_exp_abs", math.nan) for r in steps),
        "explained_variance": [r["critic/explained_variance"] for r in steps if "critic/explained_variance" in r],
    }


def read_trl(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    return found | {"seconds_per_step": math.nan, "generated": 1.0, "clipped": 0.0, "mean_exp_abs": math.nan}


# -- what came out -----------------------------------------------------------------------------------------------------


def accuracies(runs: Mapping[int, Mapping[str, Any]]) -> list[float]:
    return [found["accuracy"][-1][1] for _, found in sorted(runs.items())]


def report(results: Mapping[str, Mapping[int, Mapping[str, Any]]], seeds: Sequence[int]) -> dict[str, Any]:
    """Per arm the accuracy of ``seeds``; against TRL, all seeds that both have."""
    found: dict[str, Any] = {
        name: {
            "accuracy_after": [round(value, 4) for value in accuracies({s: r for s, r in runs.items() if s in seeds})],
            "reward_last": [round(fmean(r["reward"][-LAST:]), 4) for _, r in sorted(runs.items())],
            "seconds_per_step": round(fmean(r["seconds_per_step"] for r in runs.values()), 3),
            **explained(runs),
        }
        for name, runs in results.items()
        if runs and name != "TRL grpo"
    }
    ours, theirs = results.get("grpo"), results.get("TRL grpo")
    found["trl_difference"] = found["trl_difference_standard_error"] = None
    if ours and theirs:
        a, b = accuracies(ours), accuracies(theirs)
        found["trl_accuracy_after"] = [round(value, 4) for value in b]
        found["trl_difference"] = round(fmean(a) - fmean(b), 5)
        if min(len(a), len(b)) > 1:
            found["trl_difference_standard_error"] = round(math.sqrt(variance(a) / len(a) + variance(b) / len(b)), 5)
    return found


def explained(runs: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Of an algorithm with a critic: the best explained variance up to step 20, by seed."""
    curves = [found.get("explained_variance") for _, found in sorted(runs.items())]
    return {"explained_variance_by_20": [round(max(curve[:20]), 3) for curve in curves if curve]} if any(curves) else {}


def table(results: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> Table:
    found = Table(title="embedded task; held-out greedy accuracy after the last step", title_justify="left")
    for head in ("arm", "accuracy, by seed", "mean ± sd", "reward, last steps", "s/step", "generated", "clipped"):
        found.add_column(head, justify="left" if head == "arm" else "right")
    for name, runs in results.items():
        if not runs:
            continue
        values = accuracies(runs)
        spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
        rewards = fmean(fmean(r["reward"][-LAST:]) for r in runs.values())
        seconds, generated, clipped = (
            fmean(r[key] for r in runs.values()) for key in ("seconds_per_step", "generated", "clipped")
        )
        found.add_row(
            name, " ".join(f"{value:.3f}" for value in values), f"{fmean(values):.3f}{spread}", f"{rewards:.3f}",
            "–" if math.isnan(seconds) else f"{seconds:.2f}", f"{generated:.2f}×", f"{clipped:.1%}",
        )  # fmt: skip
    return found


def write_plot(path: Path, results: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> None:
    """Four panels: one update, four updates, noise, TRL; lines are means over seeds, bands their range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from hybridengine.report.plot import COLORS, STYLE

    def band(
        axis: Any, name: str, color: str, *, key: str = "reward", label: str | None = None, style: str = "-"
    ) -> None:
        runs = results.get(name)
        if not runs:
            return
        curves = [smooth(found[key]) if key == "reward" else [y for _, y in found[key]] for found in runs.values()]
        first = next(iter(runs.values()))
        x = range(1, len(curves[0]) + 1) if key == "reward" else [step for step, _ in first[key]]
        axis.plot(x, [fmean(values) for values in zip(*curves, strict=True)], style, color=color, label=label)
        low, high = ([pick(values) for values in zip(*curves, strict=True)] for pick in (min, max))
        axis.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), sharex=True)
        panels = {
            "one update per rollout": [
                n for n in results if ("," not in n or n.endswith("one sample")) and n != "TRL grpo"
            ],
            "four updates per rollout": [n for n in results if n.endswith("four updates")],
            "rollout weights with noise": ["grpo", *(n for n in results if n.startswith("noise"))],
        }
        for axis, (title, names) in zip(axes.flat, panels.items(), strict=False):
            key = "accuracy" if "noise" in title else "reward"  # the reward of rollouts with noise is their own
            for index, name in enumerate(names):
                style = "--" if "dapo" in name else ":" if "0.01" in name else "-"
                short = name.removesuffix(", four updates")
                band(axis, name, COLORS[index % len(COLORS)], label=short, key=key, style=style)
            axis.set_title(title)
            axis.set_ylabel("training reward" if key == "reward" else "held-out greedy accuracy")
            axis.legend(ncols=2, loc="lower right")
        last = axes.flat[3]
        for name, color in (("grpo", COLORS[0]), ("TRL grpo", COLORS[5])):
            band(last, name, color, label=f"{name}: reward")
            band(last, name, color, key="accuracy", label=f"{name}: held-out greedy accuracy", style="--")
        last.set_title("GRPO and TRL's")
        last.legend(loc="lower right")
        for axis in axes[1]:
            axis.set_xlabel("step")
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def smooth(values: Sequence[float], window: int = 3) -> list[float]:
    """Means over the last ``window`` values."""
    return [fmean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]


def conditions(arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Where and how the figures were taken."""
    found: dict[str, Any] = dict(commit())
    found["versions"] = {name: version(name) for name in ("torch", "transformers")}
    found["hardware"] = {"cores": os.cpu_count()}
    found |= {"seeds": arguments.seeds, "trl_seeds": arguments.trl_seeds, "steps": arguments.steps or 40}
    return found | {"seconds": round(seconds), "date": time.strftime("%Y-%m-%d")}


if __name__ == "__main__":
    sys.exit(main())
