"""How the installed vLLM serves an architecture, read from its registry's source without importing vLLM."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path

#: Tables of architectures that have an implementation of their own in vLLM.
NATIVE_TABLES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")


_PHIMOE = (
    "vLLM leaves out the bias of PhiMoE's output projection (lm_head.bias; |difference| up to 0.3 of a log-probability "
    "in a model of three layers)"
)
#: (architecture, platform or "any") -> what vLLM 0.32 computes otherwise than the model's authors, found by
#: ``make families``.
KNOWN_WRONG: dict[tuple[str, str], str] = {
    ("BloomForCausalLM", "any"): (
        "vLLM computes an exact GELU where the model has the tanh approximation (|difference| up to 5e-4 of a "
        "log-probability in a model of three layers)"
    ),
    ("PhiMoEForCausalLM", "any"): _PHIMOE,
    ("PhimoeForCausalLM", "any"): _PHIMOE,
    ("DiffLlamaForCausalLM", "any"): "vLLM has no implementation of differential attention",
    ("Ernie4_5_MoeForCausalLM", "cpu"): (
        "vLLM's routing on a CPU leaves out the correction bias of the router (moe_statics.e_score_correction_bias)"
    ),
}
#: Architectures whose sliding window is one token longer in vLLM than in transformers.
LONGER_WINDOW = ("Cohere2ForCausalLM", "Cohere2MoeForCausalLM")


#: What does not run on several ranks.
WHOLE_ONLY = {
    "GptOssForCausalLM": "has a bias of its experts that vLLM's loader gives to one rank alone (down_proj_bias)",
    "BitNetForCausalLM": "normalises over a width that is split over the ranks (attn_sub_norm, ffn_sub_norm)",
}


def known_wrong(architectures: Sequence[str], platform: str) -> str | None:
    """What vLLM gets wrong of a model on this kind of device; None where nothing is known."""
    found = (KNOWN_WRONG.get((name, where)) for name in architectures for where in (platform, "any"))
    return next((text for text in found if text is not None), None)


@cache
def native_architectures() -> frozenset[str]:
    """Those that vLLM implements itself; empty where vLLM is not installed, or keeps no such tables."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return frozenset()
    file = Path(found.origin).parent / "model_executor" / "models" / "registry.py"
    if not file.is_file():
        return frozenset()
    names: set[str] = set()
    for statement in ast.parse(file.read_text()).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(isinstance(t, ast.Name) and t.id in NATIVE_TABLES for t in targets):
            assert isinstance(statement, ast.Assign)
            keys = statement.value.keys if isinstance(statement.value, ast.Dict) else []
            names |= {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return frozenset(names)


def rewrites_transformers(architectures: Sequence[str]) -> bool:
    """Whether vLLM runs transformers' own code for a model (its Transformers backend).

    It rewrites the model's classes for the whole process: a trainer in the same process would run the rewritten ones.
    """
    native = native_architectures()
    return bool(native) and bool(architectures) and not any(name in native for name in architectures)
