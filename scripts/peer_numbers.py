"""Writes tests/unit/algorithms/peer_numbers.json: what verl, TRL and NeMo-RL make of small recorded batches.

    python scripts/peer_numbers.py --verl DIR --trl DIR --nemo DIR tests/unit/algorithms/peer_numbers.json

Each DIR is where the peer's package can be imported from, such as an unpacked wheel. Only their pure functions run:
what they import and this machine lacks is replaced by empty modules. The file holds random inputs and the peers'
losses, gradients, weights and advantages, in float64; tests/unit/algorithms/test_peer_numbers.py compares ours with them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

torch.set_default_dtype(torch.float64)


def import_peer(name: str) -> Any:
    """Import a module, with empty ones for packages that are missing."""
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = str(error.name)
            if missing in sys.modules or missing.split(".")[0] in name.split(".")[:1]:
                raise
            empty_module(missing)


def empty_module(name: str) -> None:
    module = MagicMock(name=name)
    module.__spec__, module.__path__, module.__version__ = None, [], "0.0.0"
    sys.modules[name] = module


def batch(seed: int, *, prompts: int = 3, samples: int = 4, length: int = 6) -> dict[str, torch.Tensor]:
    """Right-padded responses: log-probabilities near each other, advantages, rewards."""
    g = torch.Generator().manual_seed(seed)
    count = prompts * samples
    lengths = torch.randint(1, length + 1, (count,), generator=g)
    mask = (torch.arange(length)[None] < lengths[:, None]).double()
    old = torch.randn(count, length, generator=g) * 0.5 - 1.5
    found = {
        "mask": mask,
        "logprobs": old + 0.3 * torch.randn(count, length, generator=g),
        "old": old,
        "ref": old + 0.3 * torch.randn(count, length, generator=g),
        "rollout": old + 0.4 * torch.randn(count, length, generator=g),
        "advantages": torch.randn(count, generator=g),
        "rewards": torch.randint(0, 4, (count,), generator=g) / 2.0,
        "greedy": torch.randint(0, 2, (prompts,), generator=g).double(),
    }
    return {name: value.round(decimals=4) for name, value in found.items()}


def graded(data: dict[str, torch.Tensor], loss: Any) -> dict[str, Any]:
    """A loss of the log-probabilities and its gradient."""
    leaf = data["logprobs"].clone().requires_grad_()
    value = loss(leaf)
    value.backward()
    assert leaf.grad is not None
    return {"loss": value.item(), "gradient": leaf.grad.tolist()}


# -- verl ------------------------------------------------------------------------------------------------------------


def verl_numbers(data: dict[str, torch.Tensor]) -> dict[str, Any]:
    core = import_peer("verl.trainer.ppo.core_algos")
    helper = import_peer("verl.trainer.ppo.rollout_corr_helper")
    actor = import_peer("verl.workers.config.actor")
    mask, old = data["mask"], data["old"]
    advantages = data["advantages"][:, None].expand_as(mask)
    keys = {
        "clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0, "strategy": "fsdp",
        "rollout_n": 4, "ppo_micro_batch_size_per_gpu": 1, "tau_pos": 1.0, "tau_neg": 1.05,
    }  # fmt: skip

    def policy(name: str, mode: str, weights: torch.Tensor | None = None, **changes: Any) -> dict[str, Any]:
        config = actor.ActorConfig(**(keys | changes))
        object.__setattr__(config, "global_batch_info", {})
        function = core.get_policy_loss_fn(name)
        return graded(data, lambda lp: function(old, lp, advantages, mask, mode, config, weights)[0])

    def weights(level: str, threshold: Any) -> torch.Tensor:
        found, _ = helper.compute_rollout_correction_weights(
            old - data["rollout"], mask, rollout_is=level, rollout_is_threshold=threshold
        )
        return found

    index = np.repeat(np.arange(len(mask) // 4), 4)
    scores = torch.zeros_like(mask)
    scores[:, 0] = data["rewards"]

    def advantage(name: str, **extra: Any) -> list[float]:
        found, _ = core.get_adv_estimator_fn(name)(
            token_level_rewards=scores.clone(), response_mask=mask, index=index, **extra
        )
        return found[:, 0].tolist()

    def kl(estimator: str) -> dict[str, Any]:
        return graded(data, lambda lp: core.agg_loss(core.kl_penalty(lp, data["ref"], estimator), mask, "token-mean"))

    equal = torch.ones_like(mask)
    full = scores.clone()
    full[:, 0] = 0
    full[:, -1] = data["rewards"]
    whitened, _ = core.get_adv_estimator_fn("reinforce_plus_plus")(
        token_level_rewards=full, response_mask=equal, config=SimpleNamespace(gamma=1.0)
    )
    baseline, _ = core.get_adv_estimator_fn("reinforce_plus_plus_baseline")(
        token_level_rewards=full.clone(), response_mask=equal, index=index
    )
    remax, _ = core.get_adv_estimator_fn("remax")(
        token_level_rewards=full, response_mask=equal, reward_baselines=data["greedy"].repeat_interleave(4)
    )
    kept, _ = helper.compute_rollout_rejection_mask(
        old - data["rollout"], mask, rollout_rs="token_k1", rollout_rs_threshold="0.8_1.25"
    )
    offpolicy = helper.compute_offpolicy_metrics(old, data["rollout"], mask)
    return {
        "vanilla": {
            mode: policy("vanilla", mode) for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
        },
        "dual_clip_1.1": policy("vanilla", "token-mean", clip_ratio_c=1.1),
        "gspo": policy("gspo", "seq-mean-token-mean"),
        "cispo": policy("cispo", "token-mean"),
        "sapo": policy("sapo", "seq-mean-token-mean"),
        "weights": {
            "tis": (weights("token", 1.3) * mask).tolist(),
            "tis_sequence": (weights("sequence", 1.3) * mask).tolist(),
            "icepop": (weights("token", "0.8_1.3") * mask).tolist(),
        },
        "vanilla_tis": policy("vanilla", "token-mean", weights("token", 1.3)),
        "advantages": {
            "group_std": advantage("grpo"),
            "group_mean": advantage("grpo", norm_adv_by_std_in_grpo=False),
            "leave_one_out": advantage("rloo"),
            "batch_std": whitened[:, 0].tolist(),
            "group_mean_batch_std": baseline[:, 0].tolist(),
            "greedy": remax[:, 0].tolist(),
        },
        "kl": {name: kl(name) for name in ("k2", "k3", "k3+")},
        "kept_tokens": kept.tolist(),
        "offpolicy": {"kl": offpolicy["kl"], "chi2_token": offpolicy["chi2_token"]},
        "gae": gae(core, data, mask),
        "value_loss": value_loss(core, data, mask),
    }


def gae(core: Any, data: dict[str, torch.Tensor], mask: torch.Tensor) -> dict[str, Any]:
    """verl whitens the advantages it returns; returns - values are the plain ones."""
    rewards, values = data["ref"] * 0.1, data["rollout"] * 0.2
    holes = mask.clone()
    holes[:, 1] = 0
    _, returns = core.compute_gae_advantage_return(rewards, values, holes, 0.97, 0.9)
    return {"rewards": rewards.tolist(), "values": values.tolist(), "mask": holes.tolist(), "gamma": 0.97, "lam": 0.9,
            "advantages": ((returns - values) * holes).tolist()}  # fmt: skip


def value_loss(core: Any, data: dict[str, torch.Tensor], mask: torch.Tensor) -> dict[str, Any]:
    old, returns = data["old"], data["ref"]
    found = graded(
        data, lambda values: core.compute_value_loss(values, returns, old, mask, 0.2, loss_agg_mode="token-mean")[0]
    )
    return found | {"clip": 0.2}


# -- TRL -------------------------------------------------------------------------------------------------------------


def trl_numbers(data: dict[str, torch.Tensor]) -> dict[str, Any]:
    trainer = import_peer("trl.trainer.grpo_trainer").GRPOTrainer
    mask = data["mask"]

    def loss(kind: str, weights: torch.Tensor | None = None, **changes: Any) -> dict[str, Any]:
        options = {
            "beta": 0.0,
            "use_bias_correction_kl": True,
            "level": "token",
            "delta": None,
            "low": 0.2,
            "high": 0.28,
        }
        options |= changes
        accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
        args = SimpleNamespace(
            use_bias_correction_kl=options["use_bias_correction_kl"], delta=options["delta"], sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05, steps_per_generation=1,
        )  # fmt: skip
        inputs = {
            "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long), "prompt_mask": torch.ones(len(mask), 1),
            "completion_ids": torch.zeros(mask.shape, dtype=torch.long), "completion_mask": mask,
            "advantages": data["advantages"], "old_per_token_logps": data["old"], "ref_per_token_logps": data["ref"],
            "num_items_in_batch": mask.sum(), "importance_sampling_ratio": weights,
        }  # fmt: skip

        def value(logprobs: torch.Tensor) -> torch.Tensor:
            fake = MagicMock(
                aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, args=args,
                importance_sampling_level=options["level"], beta=options["beta"], loss_type=kind,
                epsilon_low=options["low"], epsilon_high=options["high"], use_vllm=weights is not None,
                vllm_importance_sampling_correction=True, current_gradient_accumulation_steps=1,
                accelerator=accelerator, max_completion_length=mask.shape[1], _entropy_bonus_enabled=False,
                model=SimpleNamespace(training=True),
            )  # fmt: skip
            fake._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None)
            return trainer._compute_loss(fake, None, inputs)

        return graded(data, value)

    token = torch.exp(data["old"] - data["rollout"])
    sequence = torch.exp(((data["old"] - data["rollout"]) * mask).sum(-1, keepdim=True))
    return {
        "dapo": loss("dapo"),
        "grpo": loss("grpo"),
        "dr_grpo": loss("dr_grpo"),
        "delta_1.3": loss("dapo", delta=1.3),
        "cispo": loss("cispo", high=1.28),
        "sapo": loss("sapo"),
        "gspo": loss("grpo", level="sequence"),
        "k3": loss("dapo", beta=0.1, use_bias_correction_kl=False),
        "k3_ratio": loss("dapo", beta=0.1),
        "token_truncate": loss("dapo", token.clamp(max=1.3)),
        "sequence_mask": loss("dapo", sequence.masked_fill(sequence > 1.3, 0.0)),
    }


# -- NeMo-RL ---------------------------------------------------------------------------------------------------------


def nemo_numbers(data: dict[str, torch.Tensor]) -> dict[str, Any]:
    for name in ("nemo_rl.models.policy", "nemo_rl.models.dtensor.parallelize", "nemo_rl.distributed.model_utils"):
        empty_module(name)  # tied to versions of transformers and of engines that no loss needs
    losses = import_peer("nemo_rl.algorithms.loss.loss_functions")
    estimators = import_peer("nemo_rl.algorithms.advantage_estimator")
    mask = data["mask"]

    def shifted(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros(len(values), 1), values], dim=1)

    def loss(**keys: Any) -> dict[str, Any]:
        base = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28, "reference_policy_kl_penalty": 0.0}
        function = losses.ClippedPGLossFn(losses.ClippedPGLossConfig(**(base | keys)))
        inputs = {
            "token_mask": shifted(mask), "sample_mask": torch.ones(len(mask)), "prev_logprobs": shifted(data["old"]),
            "advantages": shifted(data["advantages"][:, None].expand_as(mask)),
            "generation_logprobs": shifted(data["rollout"]), "reference_policy_logprobs": shifted(data["ref"]),
        }  # fmt: skip
        return graded(data, lambda lp: function(lp, inputs, torch.tensor(float(len(mask))), mask.sum())[0])

    config = losses.ClippedPGLossConfig(reference_policy_kl_penalty=0.0)
    prompt_ids = torch.arange(len(mask) // 4).repeat_interleave(4)[:, None]

    def advantages(kind: Any, **keys: Any) -> list[float]:
        estimator = kind(estimators.AdvEstimatorConfig(**keys), config)
        return estimator.compute_advantage(prompt_ids, data["rewards"], torch.ones_like(mask))[:, 0].tolist()

    plus = estimators.ReinforcePlusPlusAdvantageEstimator
    corrected = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 1.3}
    return {
        "clipped": loss(),
        "dual_clip_1.1": loss(ratio_clip_c=1.1),
        "cispo": loss(use_cispo=True),
        "gspo": loss(sequence_level_importance_ratios=True, token_level_loss=False),
        "k3_ratio": loss(reference_policy_kl_penalty=0.1),
        "tis": loss(truncated_importance_sampling_type="tis", **corrected),
        "icepop": loss(
            truncated_importance_sampling_type="icepop", truncated_importance_sampling_ratio_min=0.8, **corrected
        ),
        "seq_mask_tis": loss(
            truncated_importance_sampling_type="seq-mask-tis", truncated_importance_sampling_ratio_min=0.8, **corrected
        ),
        "advantages": {
            "leave_one_out": advantages(
                estimators.GRPOAdvantageEstimator, normalize_rewards=False, use_leave_one_out_baseline=True
            ),
            "batch_std": advantages(plus, minus_baseline=False),
            "group_mean_batch_std": advantages(plus, minus_baseline=True),
        },
    }


def shortened(value: Any) -> Any:
    """Floats with 11 significant digits."""
    if isinstance(value, float):
        return float(f"{value:.11g}")
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    return [shortened(item) for item in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("verl", "trl", "nemo"):
        parser.add_argument(f"--{name}", type=Path, required=True, help="where its package can be imported from")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    sys.path[:0] = [str(path) for path in (arguments.verl, arguments.trl, arguments.nemo)]
    found = []
    for seed in (0, 1):
        data = batch(seed)
        found.append(
            {
                "batch": {name: value.tolist() for name, value in data.items()},
                "verl 0.9.1": verl_numbers(data),
                "TRL 1.16.0": trl_numbers(data),
                "NeMo-RL 7ea279a": nemo_numbers(data),
            }
        )
    arguments.out.write_text(json.dumps(shortened(found), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
