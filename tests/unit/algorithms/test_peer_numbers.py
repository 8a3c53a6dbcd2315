"""Ours beside verl 0.9.1, TRL 1.16.0 and NeMo-RL: losses, gradients, weights, advantages of recorded batches.

``peer_numbers.json`` was written by scripts/peer_numbers.py with the peers' own functions. Where definitions differ,
the test says how and converts.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridengine.algorithms.advantages import Rewards, group_advantages
from hybridengine.algorithms.base import Algorithm
from hybridengine.algorithms.correction import accepted_tokens, correction_of, importance_weights, log_weights
from hybridengine.algorithms.kl import kl_estimate
from hybridengine.algorithms.losses import LossCounts
from hybridengine.algorithms.registry import ALGORITHMS
from hybridengine.algorithms.values import generalised_advantages, value_losses
from hybridengine.config import AlgorithmConfig, CorrectionConfig, RolloutConfig
from hybridengine.engines.train.base import MicroBatch
from hybridengine.engines.train.batching import build_micro_batch
from hybridengine.types import Sample

BATCHES = json.loads((Path(__file__).parent / "peer_numbers.json").read_text())
VERL, TRL, NEMO = "verl 0.9.1", "TRL 1.16.0", "NeMo-RL 7ea279a"
#: The peers add 1e-8 to some denominators.
CLOSE = {"rtol": 1e-7, "atol": 1e-9}


class Batch:
    """B recorded responses of up to L tokens, flat and packed; ``mask`` [B, L] says where they were."""

    def __init__(self, recorded: dict[str, Any]) -> None:
        self.tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in recorded["batch"].items()}
        self.mask = self.tensors["mask"].bool()
        self.samples = [
            Sample(
                prompt_ids=[1], response_ids=[2] * int(row.sum()), loss_mask=[True] * int(row.sum()),
                advantages=[0.0] * int(row.sum()),
            )
            for row in self.mask
        ]  # fmt: skip

    def flat(self, name: str) -> torch.Tensor:
        return self.tensors[name][self.mask]

    def micro(self, loss_mask: torch.Tensor | None = None) -> MicroBatch:
        found = build_micro_batch(self.samples, list(range(len(self.samples))), pad_id=0, packing=True)
        found.old_logprobs, found.ref_logprobs = self.flat("old"), self.flat("ref")
        found.rollout_logprobs = self.flat("rollout")
        found.advantages = self.tensors["advantages"][:, None].expand_as(self.mask)[self.mask]
        if loss_mask is not None:
            found.loss_mask = loss_mask
        return found

    def ours(self, subject: Algorithm, loss_mask: torch.Tensor | None = None) -> tuple[float, torch.Tensor]:
        """Loss and gradient [B, L], by the counts of the whole batch."""
        leaf = self.tensors["logprobs"].clone().requires_grad_()
        loss_fn = subject.loss_fn(LossCounts.of(self.samples))
        loss = loss_fn(leaf[self.mask], None, self.micro(loss_mask)).loss
        loss.backward()
        assert leaf.grad is not None
        return loss.item(), leaf.grad


def algorithm(name: str, **changes: Any) -> Algorithm:
    base: dict[str, Any] = {"name": name, "clip_low": 0.2, "clip_high": 0.28}
    return ALGORITHMS[name](AlgorithmConfig(**(base | changes)), RolloutConfig(samples_per_prompt=4, max_tokens=6))


def correction(**keys: Any) -> dict[str, Any]:
    return {"correction": CorrectionConfig(**keys)}


def seq_mean(name: str) -> dict[str, Any]:
    return {"name": name, "loss_aggregation": "seq-mean-token-mean"}


#: Peer, path to its numbers, our algorithm and keys.
LOSSES: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    (VERL, ("vanilla", "token-mean"), {"name": "grpo", "clip_dual": 3.0}),
    (VERL, ("vanilla", "seq-mean-token-mean"), seq_mean("grpo") | {"clip_dual": 3.0}),
    (
        VERL,
        ("vanilla", "seq-mean-token-sum"),
        {"name": "grpo", "loss_aggregation": "seq-mean-token-sum", "clip_dual": 3.0},
    ),
    (VERL, ("dual_clip_1.1",), {"name": "grpo", "clip_dual": 1.1}),
    (VERL, ("gspo",), seq_mean("gspo")),
    (VERL, ("cispo",), {"name": "cispo"}),
    (VERL, ("sapo",), seq_mean("sapo")),
    (VERL, ("vanilla_tis",), {"name": "grpo", "clip_dual": 3.0} | correction(preset="tis", bounds=[0.0, 1.3])),
    (TRL, ("dapo",), {"name": "grpo"}),
    (TRL, ("grpo",), seq_mean("grpo")),
    (TRL, ("dr_grpo",), {"name": "grpo", "loss_aggregation": "constant-length", "constant_length": 6}),
    (TRL, ("delta_1.3",), {"name": "grpo", "clip_dual": 1.3}),  # equal where delta is above 1 + epsilon_high
    (TRL, ("cispo",), {"name": "cispo", "clip_low": 1.0}),  # TRL clips from above only; its epsilon_high is ours + 1
    (TRL, ("sapo",), seq_mean("sapo")),
    (TRL, ("gspo",), seq_mean("gspo")),
    (TRL, ("k3",), {"name": "grpo", "kl_coef": 0.1}),
    (TRL, ("k3_ratio",), {"name": "grpo", "kl_coef": 0.1, "kl_estimator": "k3_ratio"}),
    (TRL, ("token_truncate",), {"name": "grpo"} | correction(preset="tis", bounds=[0.0, 1.3])),
    (TRL, ("sequence_mask",), {"name": "grpo"} | correction(weight="sequence", bounds=[0.0, 1.3], outside="zero")),
    (NEMO, ("clipped",), {"name": "grpo"}),
    (NEMO, ("dual_clip_1.1",), {"name": "grpo", "clip_dual": 1.1}),
    (NEMO, ("cispo",), {"name": "cispo"}),
    (NEMO, ("gspo",), seq_mean("gspo")),
    (NEMO, ("tis",), {"name": "grpo"} | correction(preset="tis", bounds=[0.0, 1.3])),
    (NEMO, ("icepop",), {"name": "grpo"} | correction(preset="icepop", bounds=[0.8, 1.3])),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(BATCHES)))
@pytest.mark.parametrize(("peer", "path", "keys"), LOSSES, ids=[f"{p.split()[0]}-{'-'.join(n)}" for p, n, _ in LOSSES])
def test_losses_and_gradients(index: int, peer: str, path: tuple[str, ...], keys: dict[str, Any]) -> None:
    theirs = BATCHES[index][peer]
    for name in path:
        theirs = theirs[name]
    loss, gradient = Batch(BATCHES[index]).ours(algorithm(**keys))
    assert loss == pytest.approx(theirs["loss"], rel=1e-7)
    torch.testing.assert_close(gradient, torch.tensor(theirs["gradient"], dtype=torch.float64), **CLOSE)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("recorded", BATCHES)
def test_nemo_masks_sequences_without_leaving_their_count(recorded: dict[str, Any]) -> None:
    """Numerators agree; ours divides by what is left (here: by NeMo-RL's count, to compare)."""
    batch = Batch(recorded)
    config = CorrectionConfig(preset="seq_mask_tis", reject_bounds=[0.8, 1.3])
    rows = [
        accepted_tokens(correction_of(config), old[m].tolist(), rollout[m].tolist())
        for old, rollout, m in zip(batch.tensors["old"], batch.tensors["rollout"], batch.mask, strict=True)
    ]
    accepted = torch.tensor(np.concatenate(rows))
    assert 0 < accepted.sum() < len(accepted)
    loss, gradient = batch.ours(algorithm("grpo", correction=config), accepted)
    theirs = recorded[NEMO]["seq_mask_tis"]
    assert loss == pytest.approx(theirs["loss"], rel=1e-7)
    torch.testing.assert_close(gradient, torch.tensor(theirs["gradient"], dtype=torch.float64), **CLOSE)


@pytest.mark.parametrize("recorded", BATCHES)
@pytest.mark.parametrize("preset", ["tis", "tis_sequence", "icepop"])
def test_weights(recorded: dict[str, Any], preset: str) -> None:
    batch = Batch(recorded)
    low = 0.8 if preset == "icepop" else 0.0
    chosen = correction_of(CorrectionConfig(preset=preset, bounds=[low, 1.3]))
    micro = batch.micro()
    logs = log_weights(batch.flat("old") - batch.flat("rollout"), micro.loss_mask, micro.sequence_ids, chosen.weight)
    theirs = torch.tensor(recorded[VERL]["weights"][preset], dtype=torch.float64)[batch.mask]
    torch.testing.assert_close(importance_weights(chosen, logs), theirs, **CLOSE)


@pytest.mark.parametrize("recorded", BATCHES)
def test_rejected_tokens(recorded: dict[str, Any]) -> None:
    """verl bounds rollout/trainer, ours trainer/rollout: its [.8, 1.25] is its own reciprocal."""
    batch = Batch(recorded)
    chosen = correction_of(CorrectionConfig(reject="token", reject_bounds=[0.8, 1.25]))
    found = accepted_tokens(chosen, batch.flat("old").tolist(), batch.flat("rollout").tolist())
    assert found.tolist() == torch.tensor(recorded[VERL]["kept_tokens"])[batch.mask].bool().tolist()


@pytest.mark.parametrize("recorded", BATCHES)
@pytest.mark.parametrize(
    ("peer", "kind", "scale"),
    [
        (VERL, "group_std", 1.0),
        (VERL, "group_mean", 1.0),
        (VERL, "leave_one_out", 1.0),
        (VERL, "greedy", 1.0),
        # verl whitens tokens, with the sample's variance: 12 responses of 6 tokens each
        (VERL, "batch_std", math.sqrt(71 / 72)),
        (VERL, "group_mean_batch_std", math.sqrt(71 / 72)),
        (NEMO, "leave_one_out", 1.0),
        (NEMO, "batch_std", 1.0),
        (NEMO, "group_mean_batch_std", 1.0),
    ],
)
def test_advantages(recorded: dict[str, Any], peer: str, kind: str, scale: float) -> None:
    rewards = Rewards.of(recorded["batch"]["rewards"], 4, greedy=recorded["batch"]["greedy"])
    ours = group_advantages(rewards, kind).ravel() * scale
    np.testing.assert_allclose(ours, recorded[peer]["advantages"][kind], rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("recorded", BATCHES)
def test_kl(recorded: dict[str, Any]) -> None:
    """verl's k2 and k3; its k3+ (k3's value, k2's gradient) is our k3_ratio on policy, as NeMo-RL's k3 is."""
    batch = Batch(recorded)
    nemo, without = recorded[NEMO]["k3_ratio"], recorded[NEMO]["clipped"]
    expected = {
        "k2": [recorded[VERL]["kl"]["k2"]],
        "k3": [recorded[VERL]["kl"]["k3"]],
        "k3_ratio": [recorded[VERL]["kl"]["k3+"]],
    }
    expected["k3_ratio"].append(
        {
            "loss": (nemo["loss"] - without["loss"]) / 0.1,
            "gradient": (np.subtract(nemo["gradient"], without["gradient"]) / 0.1).tolist(),
        }
    )
    for estimator, peers in expected.items():
        leaf = batch.tensors["logprobs"].clone().requires_grad_()
        policy = leaf[batch.mask]
        loss = kl_estimate(policy, batch.flat("ref"), estimator, ratio=(policy - policy.detach()).exp()).mean()
        loss.backward()
        for theirs in peers:
            assert loss.item() == pytest.approx(theirs["loss"], rel=1e-7)
            torch.testing.assert_close(leaf.grad, torch.tensor(theirs["gradient"], dtype=torch.float64), **CLOSE)


@pytest.mark.parametrize("recorded", BATCHES)
def test_off_policy_metrics(recorded: dict[str, Any]) -> None:
    batch = Batch(recorded)
    subject = algorithm("grpo", **correction(preset="tis"))
    result = subject.loss_fn(LossCounts.of(batch.samples))(batch.flat("logprobs"), None, batch.micro())
    found = subject.metrics([{name: float(value) for name, value in result.metrics.items()}])
    assert found["sampling/chi2"] == pytest.approx(recorded[VERL]["offpolicy"]["chi2_token"], rel=1e-5)
    assert found["sampling/kl"] == pytest.approx(recorded[VERL]["offpolicy"]["kl"], rel=1e-5)


@pytest.mark.parametrize("recorded", BATCHES)
def test_generalised_advantages(recorded: dict[str, Any]) -> None:
    theirs = recorded[VERL]["gae"]
    for rewards, values, mask, expected in zip(
        theirs["rewards"], theirs["values"], theirs["mask"], theirs["advantages"], strict=True
    ):
        ours, _ = generalised_advantages(
            rewards, values, [m > 0 for m in mask], gamma=theirs["gamma"], lam=theirs["lam"]
        )  # fmt: skip
        np.testing.assert_allclose(ours, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("recorded", BATCHES)
def test_value_losses(recorded: dict[str, Any]) -> None:
    batch, theirs = Batch(recorded), recorded[VERL]["value_loss"]
    leaf = batch.tensors["logprobs"].clone().requires_grad_()
    loss = value_losses(leaf[batch.mask], batch.flat("old"), batch.flat("ref"), clip=theirs["clip"]).mean()
    loss.backward()
    assert loss.item() == pytest.approx(theirs["loss"], rel=1e-7)
    torch.testing.assert_close(leaf.grad, torch.tensor(theirs["gradient"], dtype=torch.float64), **CLOSE)
