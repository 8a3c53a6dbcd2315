"""Which layers megatron builds, and which of its kernels are fused.

Transformer Engine's layers where they can run and keep the numbers: norm and projection in one, all experts of a rank
in one grouped product, rotary angles applied in one kernel. Megatron's local layers otherwise, whose names every other
part of the program goes by. Attention, rotary angles, routing and log-probabilities are the same in both.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from hybridengine.config import TrainConfig
from hybridengine.platform import Platform

REMEDY = "pip install --no-build-isolation 'hybridengine[transformer-engine]'"


@dataclass(frozen=True, slots=True)
class Kernels:
    """The layers and fusions chosen for a run, with the line that is logged.

    Attributes:
        transformer_engine: its layers; False: megatron's local ones.
        compiled: megatron's compiled activation, which needs CUDA to be worth its compilation.
        explanation: what was chosen and why.
    """

    transformer_engine: bool
    compiled: bool
    explanation: str

    def fusions(self) -> dict[str, bool]:
        """Arguments of megatron's TransformerConfig: on where the result is the unfused one, rounded less often."""
        return {
            "bias_activation_fusion": self.compiled,
            "apply_rope_fusion": self.transformer_engine,
            "moe_grouped_gemm": self.transformer_engine,
            # Of megatron's own attention and norms, which are not used.
            "masked_softmax_fusion": False,
            "persist_layer_norm": False,
            # Without dropout, one addition.
            "bias_dropout_fusion": False,
            # Which experts are chosen must not depend on a kernel; the balancing loss reads the router's logits too.
            "moe_router_fusion": False,
            "moe_permute_fusion": False,
            # The output layer's would need apex beside it, and nothing here could test it.
            "gradient_accumulation_fusion": False,
        }


def obstacle(platform: Platform) -> str:
    """Why Transformer Engine's layers can't run here; empty when nothing stands in the way."""
    if not platform.runs_transformer_engine:
        return "Transformer Engine needs a CUDA GPU"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ModuleNotFoundError as error:
        if error.name == "transformer_engine":
            return "transformer_engine is not installed"
        return f"transformer_engine does not import ({error})"
    except Exception as error:  # noqa: BLE001  a library that does not fit raises whatever its loader does
        return f"transformer_engine does not import ({type(error).__name__}: {error})"
    return ""


def choose(train: TrainConfig, platform: Platform) -> Kernels:
    """The layers that ``train.transformer_engine`` selects on this machine.

    ``auto`` leaves float32 to the local layers: Transformer Engine multiplies float32 matrices as TF32, with 10 bits of
    mantissa for 23, and training in float32 is there to agree with the rollout engine to the last digits.

    Raises:
        ValueError: it was asked for and can't run here; with the remedy.
    """
    wanted = train.transformer_engine
    problem = obstacle(platform) if wanted != "false" else ""
    if wanted == "true" and problem:
        remedy = f"{REMEDY}, or auto" if platform.runs_transformer_engine else "use auto"
        raise ValueError(f"train.transformer_engine=true: {problem}; {remedy}")
    coarse = "Transformer Engine multiplies float32 matrices as TF32" if train.dtype == "float32" else ""
    if wanted == "auto":
        problem = problem or coarse
    taken = wanted != "false" and not problem
    layers = "Transformer Engine's layers" if taken else "megatron's local layers"
    why = f", because {problem}" if problem else f"; {coarse}" if taken and coarse else ""
    compiles = platform.runs_transformer_engine
    compiled = ", SwiGLU compiled" if compiles else ""
    return Kernels(taken, compiles, f"train.transformer_engine={wanted}: {layers}{compiled}{why}")
