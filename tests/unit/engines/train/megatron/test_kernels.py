"""Which layers megatron builds: the choice, its refusals, and the names it hides."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hybridengine import platform
from hybridengine.config import TrainConfig
from hybridengine.config.compose import ConfigError, build
from hybridengine.distributed.world import World
from hybridengine.engines.train.megatron.kernels import choose
from hybridengine.sync.plan.naming.megatron import local_name
from hybridengine.tools import doctor
from hybridengine.validate.contradictions import validate
from tests.tiny import make_tiny


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


class Hidden:
    """A finder that says so before another finds it."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == "transformer_engine":
            raise ModuleNotFoundError(name, name=name)


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Hidden(), *sys.meta_path])


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "pytorch.py").write_text("raise OSError('libcublas.so.13: cannot open')")
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))


PLATFORM = {on_gpu: platform.of(torch.device("cuda" if on_gpu else "cpu")) for on_gpu in (False, True)}
TF32 = "Transformer Engine multiplies float32 matrices as TF32"
BROKEN = "transformer_engine does not import (OSError: libcublas.so.13: cannot open)"
CHOICES = {
    "auto": ("installed", "auto", True, "bfloat16", "auto: Transformer Engine's layers, SwiGLU compiled"),
    "auto-float32": (
        "installed", "auto", True, "float32", f"auto: megatron's local layers, SwiGLU compiled, because {TF32}",
    ),
    "auto-cpu": (
        "installed", "auto", False, "bfloat16",
        "auto: megatron's local layers, because Transformer Engine needs a CUDA GPU",
    ),
    "auto-missing": (
        "missing", "auto", True, "bfloat16",
        "auto: megatron's local layers, SwiGLU compiled, because transformer_engine is not installed",
    ),
    "auto-broken": (
        "broken", "auto", True, "bfloat16", f"auto: megatron's local layers, SwiGLU compiled, because {BROKEN}",
    ),
    "true": ("installed", "true", True, "bfloat16", "true: Transformer Engine's layers, SwiGLU compiled"),
    "true-float32": (
        "installed", "true", True, "float32", f"true: Transformer Engine's layers, SwiGLU compiled; {TF32}",
    ),
    "false": ("installed", "false", True, "bfloat16", "false: megatron's local layers, SwiGLU compiled"),
    "false-broken": ("broken", "false", False, "float32", "false: megatron's local layers"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHOICES)
def test_what_is_chosen_and_why(request: pytest.FixtureRequest, case: str) -> None:
    here, wanted, on_gpu, dtype, explanation = CHOICES[case]
    request.getfixturevalue(here)
    kernels = choose(TrainConfig(transformer_engine=wanted, dtype=dtype), PLATFORM[on_gpu])
    assert kernels.explanation == f"train.transformer_engine={explanation}"
    assert kernels.transformer_engine == ("Engine's layers" in explanation)
    on = {name for name, value in kernels.fusions().items() if value}
    assert on == ({"bias_activation_fusion"} if on_gpu else set()) | (
        {"apply_rope_fusion", "moe_grouped_gemm"} if kernels.transformer_engine else set()
    )


REFUSED = {
    "installed": (False, "Transformer Engine needs a CUDA GPU; use auto"),
    "missing": (True, "transformer_engine is not installed; pip install --no-build-isolation 'hybridengine["),
    "broken": (True, f"{BROKEN}; pip install --no-build-isolation"),
}


@pytest.mark.parametrize("here", REFUSED)
def test_asked_for_where_it_cannot_run(request: pytest.FixtureRequest, here: str) -> None:
    request.getfixturevalue(here)
    on_gpu, message = REFUSED[here]
    with pytest.raises(ValueError) as caught:
        choose(TrainConfig(transformer_engine="true"), PLATFORM[on_gpu])
    assert str(caught.value).startswith(f"train.transformer_engine=true: {message}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train=megatron", "train.transformer_engine=true"], "=true: Transformer Engine needs a CUDA GPU; use auto"),
        (["train.transformer_engine=true"], "=true: has no effect with train.engine=fsdp; use train=megatron, or auto"),
        (["train=megatron", "train.transformer_engine=yes"], "=yes: must be one of auto | true | false"),
    ],
    ids=["cpu", "fsdp", "value"],
)
def test_refused_before_anything_starts(tmp_path: Path, overrides: list[str], message: str) -> None:
    model = make_tiny(tmp_path / "model", "qwen2", max_position_embeddings=4096, head_dim=32)
    job = [f"model.path={model}", "data.train=d.jsonl", "reward.fn=exact_match", *overrides]
    with pytest.raises(ConfigError) as caught:
        validate(build(job), World())
    assert str(caught.value) == f"train.transformer_engine{message}"


@pytest.mark.parametrize("here", ["installed", "missing"])
def test_the_doctor_looks_for_it_on_a_gpu(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, here: str
) -> None:
    request.getfixturevalue(here)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    (finding,) = doctor.check_kernels()
    assert (finding.status, bool(finding.remedy)) == (
        (doctor.OK, False) if here == "installed" else (doctor.WARN, True)
    )


NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "mlp.experts.linear_fc1.weight0": "mlp.experts.local_experts.0.linear_fc1.weight",
    "mlp.experts.linear_fc2.weight17": "mlp.experts.local_experts.17.linear_fc2.weight",
}
SAME = (
    "self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias", "self_attention.q_layernorm.weight",
    "pre_mlp_layernorm.weight", "mlp.router.weight", "mlp.shared_experts.linear_fc1.weight",
    "mlp.experts.local_experts.3.linear_fc1.weight",
)  # fmt: skip


@pytest.mark.parametrize("name", [*NAMES, *SAME])
def test_names_of_the_local_layers(name: str) -> None:
    assert local_name(f"decoder.layers.11.{name}") == f"decoder.layers.11.{NAMES.get(name, name)}"
