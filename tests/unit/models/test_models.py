"""What is read of a configuration, and the one rule for rotary tables."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.families import FAMILIES, make_model
from hybridengine.models.buffers import persistent_buffers
from hybridengine.models.facts import context_length, head_sizes, rope_parameters, sliding_windows
from hybridengine.models.logits import LogitsRule
from hybridengine.models.rotary import fix_rotary
from hybridengine.models.tensor_names import tensor_names


def config(kind: str = "llama", **keys: Any) -> Any:
    return SimpleNamespace(model_type=kind, hidden_size=128, num_attention_heads=4, **keys)


@pytest.mark.parametrize(
    ("keys", "limit"),
    [
        pytest.param({"max_position_embeddings": 256}, 256, id="plain"),
        pytest.param({"n_positions": 512}, 512, id="gpt2"),
        pytest.param({}, None, id="nothing-says"),
        pytest.param(
            {"max_position_embeddings": 64, "rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            256, id="yarn-not-yet-scaled"),
        pytest.param(
            {"max_position_embeddings": 256, "rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            256, id="yarn-already-scaled"),
        pytest.param(
            {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 128,
            id="linear"),
        pytest.param(
            {"max_position_embeddings": 131072, "rope_parameters": {
                "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}},
            131072, id="llama3"),
    ],
)  # fmt: skip
def test_context_that_scaled_rotary_embeddings_reach(keys: dict[str, Any], limit: int | None) -> None:
    assert context_length(config(**keys)) == limit


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({"sliding_window": 32}, [32]),
        ({"sliding_window": 32, "use_sliding_window": False}, []),
        ({"sliding_window": 32, "layer_types": ["full_attention"]}, []),
        ({"sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"]}, [32]),
        ({"sliding_window": None}, []),
    ],
    ids=["all", "switched-off", "no-layer", "some-layers", "null"],
)
def test_sliding_windows(keys: dict[str, Any], windows: list[int]) -> None:
    assert sliding_windows(config(**keys)) == windows


def test_rope_parameters_of_kinds_of_layers() -> None:
    kinds = {"full_attention": {"rope_type": "yarn"}, "sliding_attention": {"rope_type": "default"}}
    assert [rope["rope_type"] for rope in rope_parameters(config(rope_parameters=kinds))] == ["yarn", "default"]


def test_head_sizes() -> None:
    assert head_sizes(config()) == (32, 32)
    assert head_sizes(config(head_dim=64)) == (64, 64)
    latent = config(kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)
    assert head_sizes(latent) == (48, 32)


@pytest.mark.parametrize(
    ("kind", "keys", "rule"),
    [
        ("qwen2", {}, LogitsRule(1.0, None)),
        ("cohere", {"logit_scale": 0.25}, LogitsRule(0.25, None)),
        ("granite", {"logits_scaling": 4.0}, LogitsRule(0.25, None)),
        ("gemma2", {"final_logit_softcapping": 30.0}, LogitsRule(1.0, 30.0)),
    ],
)
def test_logits(kind: str, keys: dict[str, Any], rule: LogitsRule) -> None:
    assert LogitsRule.of(config(kind, **keys)) == rule


def test_logits_by_hand() -> None:
    """Raw 2 at scale 0.5 is 1; capped at 2 that is 2 tanh(1/2) = 0.92423. Over temperature 0.5: the cap is 4."""
    assert LogitsRule(0.5, 2.0).apply(torch.tensor([2.0])).item() == pytest.approx(0.924234, abs=1e-6)
    assert LogitsRule(0.5, 2.0).softcap_at(0.5) == 4.0


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m", FAMILIES["phi3-longrope"])


@torch.no_grad()
def test_long_factors_do_not_depend_on_the_neighbours(longrope: Path) -> None:
    """The original context is 48. A row of 20 tokens beside one of 60: transformers' score of it changes, ours does
    not; alone it has the short factors there, and the long ones here, as beside the long row."""
    short = torch.arange(3, 23)[None]
    both = torch.zeros(2, 60, dtype=torch.int64)
    both[0, :20], both[1] = short, torch.arange(3, 63)
    mask = torch.zeros(2, 60, dtype=torch.int64)
    mask[0, :20], mask[1] = 1, 1
    plain, fixed = load(longrope), load(longrope)
    assert fix_rotary(fixed, 96) and not fix_rotary(load(longrope), None)
    alone, beside = plain(short).logits[0], plain(both, attention_mask=mask).logits[0, :20]
    assert (alone - beside).abs().max() > 1e-3
    torch.testing.assert_close(fixed(short).logits[0], beside, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fixed(both, attention_mask=mask).logits[0, :20], beside, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_short_factors_within_the_original_context(longrope: Path) -> None:
    plain, fixed = load(longrope), load(longrope)
    fix_rotary(fixed, 48)
    short = torch.arange(3, 23)[None]
    torch.testing.assert_close(fixed(short).logits, plain(short).logits, atol=1e-6, rtol=1e-6)


def test_persistent_buffers_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", FAMILIES["apertus"])
    buffers = persistent_buffers(load(path))
    assert buffers and set(buffers) < tensor_names(path)
    assert all(name.endswith(("act_fn.beta", "act_fn.eps")) for name in buffers)
    assert not any("inv_freq" in name for name in buffers)
