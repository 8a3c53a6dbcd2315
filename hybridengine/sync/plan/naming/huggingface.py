"""How transformers stores the checkpoint's parameters: names, shapes, and which of them share a tensor.

Dense models store every parameter under its checkpoint name. Since transformers 5 the experts of a layer
are two tensors, ``mlp.experts.gate_up_proj`` [E, 2f, h] (gate rows above up rows) and
``mlp.experts.down_proj`` [E, h, f], and Mixtral's block is called ``mlp``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

from hybridengine.sync.plan.boxes import Ints
from hybridengine.sync.plan.layouts import Part, StoredTensor
from hybridengine.sync.plan.naming.families import ARCHITECTURES, HFConfig, decoder_of
from hybridengine.sync.plan.naming.parameters import SCORE, canonical_params
from hybridengine.sync.plan.spec import ParamSpec


def stored_tensors(config: HFConfig) -> list[StoredTensor]:
    """The tensors of the transformers model for ``config``, and the checkpoint parameters inside each."""
    decoder, moe = decoder_of(config), decoder_of(config).experts
    params = canonical_params(config)
    stored = []
    for name, spec in params.items():
        if ".experts." in name:
            continue
        plain = StoredTensor.plain(spec)
        if moe is not None and moe.block != "mlp":
            plain = StoredTensor(name.replace(f".{moe.block}.", ".mlp."), plain.shape, plain.parts)
        stored.append(plain)
    for layer in sorted(moe.layers) if moe is not None else ():
        assert moe is not None
        prefix = f"model.layers.{layer}.{moe.block}.experts"
        gate_up = [
            Part(f"{prefix}.{expert}.{leaf}.weight", (expert, row, 0), (1, 2))
            for expert in range(moe.count)
            for leaf, row in ((moe.gate, 0), (moe.up, moe.size))
        ]
        down = [Part(f"{prefix}.{expert}.{moe.down}.weight", (expert, 0, 0), (1, 2)) for expert in range(moe.count)]
        head = f"model.layers.{layer}.mlp.experts"
        hidden = decoder.hidden
        stored.append(StoredTensor(f"{head}.gate_up_proj", (moe.count, 2 * moe.size, hidden), tuple(gate_up)))
        stored.append(StoredTensor(f"{head}.down_proj", (moe.count, hidden, moe.size), tuple(down)))
    return stored


def describe_model(
    config: HFConfig, shapes: Mapping[str, Ints], dtype: str = "float32"
) -> tuple[dict[str, ParamSpec], list[StoredTensor]]:
    """Canonical parameters and stored tensors of a transformers model with these parameter shapes.

    Architectures without a table are taken as they are, provided that no tensor stacks experts.

    Args:
        config: its configuration.
        shapes: full (unsharded) shape by ``named_parameters()`` name; tied parameters once.
        dtype: dtype name of the parameters.

    Raises:
        ValueError: the model has other parameters than its configuration's table says (names and shapes listed).
    """
    if not any(name in ARCHITECTURES for name in getattr(config, "architectures", None) or []):
        stacked = [name for name, shape in shapes.items() if len(shape) > 2]
        if stacked:
            decoder_of(config)  # raises: names the architectures that have a table
        params = {name: ParamSpec(name, tuple(shape), dtype) for name, shape in shapes.items()}
        return params, [StoredTensor.plain(spec) for spec in params.values()]
    stored = stored_tensors(config)
    expected = {tensor.name: tensor.shape for tensor in stored}
    actual = {name: tuple(shape) for name, shape in shapes.items()}
    if expected != actual:
        wrong = sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))
        listed = ", ".join(f"{n}: {actual.get(n)} in the model, {expected.get(n)} in the table" for n in wrong[:5])
        raise ValueError(f"the model is not as its architecture {config.architectures} is known ({listed})")
    return canonical_params(config, dtype), stored


def as_causal(config: HFConfig) -> HFConfig:
    """The configuration of a sequence classifier with its architecture named as the causal language model's."""
    found = copy.deepcopy(config)
    names = getattr(config, "architectures", None) or []
    found.architectures = [name.replace("ForSequenceClassification", "ForCausalLM") for name in names]
    return found


def describe_value_model(
    config: HFConfig, shapes: Mapping[str, Ints], dtype: str = "float32"
) -> tuple[dict[str, ParamSpec], list[StoredTensor]]:
    """As :func:`describe_model`, of a sequence classifier with one label: no output projection, but ``score.weight``.

    Args:
        config: its own, or the causal language model's that it is made from.
    """
    causal = as_causal(config)
    causal.tie_word_embeddings = True  # no projection of its own
    params, stored = describe_model(causal, {name: shape for name, shape in shapes.items() if name != SCORE}, dtype)
    head = ParamSpec(SCORE, tuple(shapes[SCORE]), dtype)
    return params | {SCORE: head}, [*stored, StoredTensor.plain(head)]
