"""Two sides' log-probabilities of the same tokens, what rounding explains of their difference, and what else may."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridengine.config import Config
from hybridengine.models.facts import rope_parameters, sliding_windows

#: Largest |difference| of one token's log-probability that rounding explains. In float32 the tiny and the published
#: models of docs/families.md stay below 1e-4; on a GPU some float32 kernels multiply in TF32, with 10 bits.
FLOAT32, FLOAT32_ON_GPU = 1e-3, 2e-2
#: In bfloat16, of 8 bits, single tokens are off by tenths; the mean over a probe's tokens is held to this.
BFLOAT16_MEAN = 0.1


@dataclass(frozen=True, slots=True)
class Tolerance:
    """``value`` bounds the mean over a probe's tokens, or every token."""

    value: float
    of_mean: bool

    @classmethod
    def of(cls, config: Config, *, on_gpu: bool) -> Tolerance:
        """``parity.tolerance``, or what the dtypes explain."""
        half = "bfloat16" in (config.train.dtype, config.rollout.dtype)
        default = BFLOAT16_MEAN if half else FLOAT32_ON_GPU if on_gpu else FLOAT32
        return cls(default if config.parity.tolerance is None else config.parity.tolerance, of_mean=half)

    def __str__(self) -> str:
        return f"{self.value:g} ({'mean of a probe' if self.of_mean else 'every token'})"


@dataclass(frozen=True, slots=True)
class Difference:
    """|log-probability(a) - log-probability(b)| of one probe's response tokens; NaN counts as infinite."""

    probe: str
    tokens: int
    mean: float
    largest: float

    @classmethod
    def between(cls, probe: str, a: Sequence[float], b: Sequence[float]) -> Difference:
        """``a`` and ``b``: one value per response token.

        >>> Difference.between("p", [-1.0, -2.0], [-1.5, -2.0])
        Difference(probe='p', tokens=2, mean=0.25, largest=0.5)
        """
        gaps = [abs(x - y) for x, y in zip(a, b, strict=True)]
        gaps = [math.inf if math.isnan(gap) else gap for gap in gaps]
        return cls(probe, len(gaps), sum(gaps) / len(gaps), max(gaps))

    def within(self, tolerance: Tolerance) -> bool:
        return (self.mean if tolerance.of_mean else self.largest) <= tolerance.value


@dataclass(slots=True)
class Parity:
    """What a parity check found.

    Attributes:
        against: "packed", "padded", "transformers" -> per probe, the rollout engine's difference from it.
        notes: what was left out, and why.
    """

    tolerance: Tolerance
    against: dict[str, list[Difference]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, side: str, names: Sequence[str], engine: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> None:  # fmt: skip  # noqa: E501
        """Compare the engine's scores with ``side``'s, sequence by sequence."""
        self.against[side] = [
            Difference.between(name, a, b) for name, a, b in zip(names, engine, other, strict=True) if a
        ]

    @property
    def largest(self) -> float:
        return max((d.largest for found in self.against.values() for d in found), default=0.0)

    @property
    def wrong(self) -> dict[str, list[Difference]]:
        """Sides with a difference that rounding does not explain, and the probes that show it."""
        outside = {side: [d for d in found if not d.within(self.tolerance)] for side, found in self.against.items()}
        return {side: found for side, found in outside.items() if found}

    def lines(self) -> list[str]:
        """The comparison, one line per side."""
        found = []
        for side, differences in self.against.items():
            worst = max(differences, key=lambda d: d.largest)
            mean = sum(d.mean * d.tokens for d in differences) / sum(d.tokens for d in differences)
            found.append(
                f"rollout engine against {LONG_NAMES[side]}: mean |Δlogprob| {mean:.2g}, largest {worst.largest:.2g} "
                f"(probe {worst.probe}) over {sum(d.tokens for d in differences)} tokens"
            )
        return [*found, *self.notes]


LONG_NAMES = {
    "packed": "the trainer, packed",
    "padded": "the trainer, padded",
    "transformers": "plain transformers",
}


def likely_cause(parity: Parity, hf_config: Any) -> str:
    """What usually is behind such differences, for the family and the pattern at hand."""
    wrong = parity.wrong
    probes = {d.probe for found in wrong.values() for d in found}
    everywhere = all(len(found) == len(parity.against[side]) for side, found in wrong.items())
    agreeing = [side for side in parity.against if side not in wrong]
    name = getattr(hf_config, "model_type", "this model")
    if "packed" in wrong and "padded" in agreeing:
        return f"{name}'s attention does not keep packed sequences apart: set train.packing=false"
    if "transformers" in wrong and len(agreeing) == len(parity.against) - 1:
        return (
            "engine and trainer agree with each other and not with transformers: both leave out something of the "
            f"checkpoint or of {name}'s forward pass, such as an own lm_head, a buffer, or scaled logits"
        )
    if not everywhere and probes and all("rope" in probe or probe == "longest" for probe in probes):
        kinds = sorted({str(rope.get("rope_type")) for rope in rope_parameters(hf_config)})
        return f"only long sequences differ: rotary embeddings of type {', '.join(kinds)} are scaled by two rules"
    if not everywhere and probes and all("window" in probe or probe == "longest" for probe in probes):
        windows = ", ".join(map(str, sliding_windows(hf_config))) or "none in config.json"
        return f"only sequences beyond the sliding window ({windows}) differ: one side does not apply it in every layer"
    return _by_family(hf_config)


def _by_family(hf_config: Any) -> str:
    """What the configuration has that implementations treat differently."""
    suspects: Mapping[str, str] = {
        "attn_logit_softcapping": "soft-capped attention",
        "final_logit_softcapping": "soft-capped logits",
        "logit_scale": "scaled logits",
        "logits_scaling": "scaled logits",
        "num_experts": "routing of experts",
        "num_local_experts": "routing of experts",
        "n_routed_experts": "routing of experts",
    }
    found = sorted({text for key, text in suspects.items() if getattr(hf_config, key, None) not in (None, 0, 1, 1.0)})
    name = getattr(hf_config, "model_type", "this model")
    if found:
        return f"{name} has {', '.join(found)}, which implementations are known to do differently"
    return (
        f"the two implementations of {name} differ, or a weight or buffer does not reach one of them; compare with "
        "rollout=transformers, and see docs/families.md"
    )
