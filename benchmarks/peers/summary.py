"""From the raw measurements of the arms to figures: medians, ratios and one JSON object. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

TRL_HF, TRL_VLLM, TRL_VLLM_PACKED = "trl-hf", "trl-vllm", "trl-vllm-packed"
OURS_HF, OURS_VLLM = "ours-transformers", "ours-vllm"

#: Which of our arms is compared with TRL's Hugging Face generation. On the tiny model a vLLM decode step is all
#: engine overhead, so that like is compared with like: plain transformers generation in both.
AGAINST_TRL_HF = {"tiny": OURS_HF, "smollm2": OURS_VLLM}

SPEEDUPS = {  # name in the report: the peer
    "speedup_over_trl_vllm": TRL_VLLM,
    "speedup_over_trl_vllm_packed": TRL_VLLM_PACKED,
    "speedup_over_trl_hf": TRL_HF,
}


@dataclass(kw_only=True, slots=True)
class Measurement:
    """One arm in one round, as its process wrote it.

    Attributes:
        step_seconds: wall time of each timed step.
        step_cpu_seconds: processor time of rank 0 in each of them. What else runs on the machine hardly touches it
            (busy waiting for the other rank counts), so it tells a real ratio from one that contention made.
        phase_seconds: of it ``generation`` and ``sync`` (getting new weights into the engine, sleep and wake),
            per step; the rest is training.
        engine_start_seconds: from the process's first import until the first step could begin.
        load_average: of the machine when the arm was started; above 0.5 per core something else was running.
    """

    step_seconds: list[float]
    step_cpu_seconds: list[float]
    phase_seconds: dict[str, list[float]] = field(default_factory=dict)
    engine_start_seconds: float
    load_average: float = 0.0
    mismatch: float | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, load_average: float) -> Measurement:
        return cls(
            step_seconds=list(data["step_seconds"]),
            step_cpu_seconds=list(data["step_cpu_seconds"]),
            phase_seconds=dict(data["phase_seconds"]),
            engine_start_seconds=data["engine_start_seconds"],
            load_average=load_average,
            mismatch=data.get("mismatch"),
        )


def arm_summary(rounds: Sequence[Measurement], *, tokens_per_step: int) -> dict[str, Any]:
    """Medians over all timed steps of all rounds; training is what is left of the median step.

    Raises:
        ValueError: no step was timed.
    """
    steps = [seconds for measurement in rounds for seconds in measurement.step_seconds]
    if not steps:
        raise ValueError("no timed step in any round")
    step = median(steps)
    phases = {
        name: median([s for m in rounds for s in m.phase_seconds.get(name, [0.0])]) for name in ("generation", "sync")
    }
    found: dict[str, Any] = {
        "seconds_per_step": step,
        "cpu_seconds_per_step": median([seconds for m in rounds for seconds in m.step_cpu_seconds]),
        "seconds_generation": phases["generation"],
        "seconds_sync": phases["sync"],
        "seconds_training": max(0.0, step - sum(phases.values())),
        "tokens_per_second": tokens_per_step / step,
        "seconds_engine_start": median(m.engine_start_seconds for m in rounds),
        "seconds_per_step_by_round": [median(m.step_seconds) for m in rounds],
        "timed_steps": len(steps),
    }
    mismatches = [m.mismatch for m in rounds if m.mismatch is not None]
    if mismatches:
        found["max_logp_difference"] = max(mismatches)
    return found


def speedup(slow: Mapping[str, Any], fast: Mapping[str, Any]) -> dict[str, Any]:
    """Ratio of median step times, of each round taken alone, and of processor times.

    >>> a = {"seconds_per_step": 3.0, "seconds_per_step_by_round": [2.0, 4.0], "cpu_seconds_per_step": 3.0}
    >>> b = {"seconds_per_step": 1.5, "seconds_per_step_by_round": [2.0, 1.0], "cpu_seconds_per_step": 1.2}
    >>> speedup(a, b)
    {'ratio': 2.0, 'by_round': [1.0, 4.0], 'cpu_ratio': 2.5}
    """
    by_round = zip(slow["seconds_per_step_by_round"], fast["seconds_per_step_by_round"], strict=True)
    return {
        "ratio": slow["seconds_per_step"] / fast["seconds_per_step"],
        "by_round": [s / f for s, f in by_round],
        "cpu_ratio": slow["cpu_seconds_per_step"] / fast["cpu_seconds_per_step"],
    }


def job_summary(job: str, measured: Mapping[str, Sequence[Measurement]], *, tokens_per_step: int) -> dict[str, Any]:
    """All arms of one job, with the speedups whose arms were both run."""
    arms = {name: arm_summary(rounds, tokens_per_step=tokens_per_step) for name, rounds in measured.items() if rounds}
    found: dict[str, Any] = {"tokens_per_step": tokens_per_step, "arms": arms}
    for key, peer in SPEEDUPS.items():
        own = AGAINST_TRL_HF[job] if peer == TRL_HF else OURS_VLLM
        if peer in arms and own in arms:
            found[key] = speedup(arms[peer], arms[own]) | {"arm": own, "peer": peer}
    return found


def overall(jobs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The object of the benchmark's last line: per comparison the smallest ratio over the jobs, then the jobs."""
    found: dict[str, Any] = {}
    for key in SPEEDUPS:
        ratios = [job[key]["ratio"] for job in jobs.values() if key in job]
        found[key] = min(ratios) if ratios else None
    return found | dict(jobs)


def rounded(value: Any, digits: int = 4) -> Any:
    """``value`` with every float inside it cut to so many significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item, digits) for item in value]
    return value
