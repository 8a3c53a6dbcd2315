"""What transformers' own conversions say about a checkpoint: the tables' content, and the same weights as it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.families import FAMILIES, make_model
from hybridengine.engines.train import describe as describing
from hybridengine.engines.train.describe import describe
from hybridengine.engines.train.loading import build_empty
from hybridengine.engines.train.stacking import StoredSource, unstack
from hybridengine.models.buffers import persistent_buffers
from hybridengine.models.safetensors_source import SafetensorsSource


@pytest.mark.parametrize("family", ["qwen2-moe", "qwen3-moe", "mixtral", "llama", "gemma3"])
def test_conversions_say_what_the_tables_say(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model(tmp_path / "m", FAMILIES[family])
    source, model = SafetensorsSource(path), build_empty(path)
    params, stored = describe(model, source)
    monkeypatch.setattr(describing, "ARCHITECTURES", {})
    learnt, tensors = describe(model, source)
    assert learnt == params and set(learnt) == set(source.names())

    def by_name(found: list[Any]) -> dict[str, Any]:
        return {t.name: (t.shape, sorted(t.parts), t.whole) for t in found}

    assert by_name(tensors) == by_name(stored)


@pytest.mark.parametrize("family", ["glm4-moe", "olmoe", "ernie4.5-moe", "granite-moe", "phimoe", "apertus", "gpt2"])
def test_models_are_read_as_transformers_reads_them(tmp_path: Path, family: str) -> None:
    """Every tensor of the model, and back: every tensor of the checkpoint."""
    from transformers import AutoModelForCausalLM

    path = make_model(tmp_path / "m", FAMILIES[family])
    checkpoint, model = SafetensorsSource(path), build_empty(path)
    params, stored = describe(model, checkpoint)
    source = StoredSource(checkpoint, stored)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = dict(plain.named_parameters()) | persistent_buffers(plain)
    assert {t.name for t in stored} == set(expected)
    assert {t.name for t in stored if t.whole} == set(persistent_buffers(plain))
    assert set(params) <= set(checkpoint.names())
    shapes = {name: spec.shape for name, spec in params.items()}
    for tensor in stored:
        full = source[tensor.name].float()
        assert torch.equal(full, expected[tensor.name]), tensor.name
        for name, value in unstack(tensor, full, shapes):
            assert torch.equal(value, checkpoint[name].float()), name


def test_a_checkpoint_without_the_prefix_that_transformers_writes(tmp_path: Path) -> None:
    """GPT-2 as it was published: ``h.0.attn...`` and not ``transformer.h.0.attn...``."""
    path = make_model(tmp_path / "m", FAMILIES["gpt2"])
    tensors = load_file(path / "model.safetensors")
    save_file({name.removeprefix("transformer."): t for name, t in tensors.items()}, path / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    params, stored = describe(build_empty(path), SafetensorsSource(path))
    assert "h.0.attn.c_attn.weight" in params and "transformer.h.0.attn.c_attn.weight" in {t.name for t in stored}
    assert not any(name.startswith("transformer.") for name in params)


def test_a_conversion_that_computes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model(tmp_path / "m", FAMILIES["olmo2"])
    import transformers.core_model_loading as loading

    monkeypatch.setattr(loading, "revert_weight_conversion",
                        lambda model, state: {name: t + 1 for name, t in state.items()})  # fmt: skip
    with pytest.raises(ValueError, match="a weight sync moves slices only"):
        describe(build_empty(path), SafetensorsSource(path))
