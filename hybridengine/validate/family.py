"""What a model is like, against what the engines can do: from its config.json, a build without memory, and the index of
its checkpoint. Seconds, before any engine starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridengine.config import Config
from hybridengine.models.facts import head_sizes, rope_parameters, sliding_windows, text_config

#: Kinds of layers that both sides know: attention, whole or over a window.
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
#: Configuration keys of layers that carry a state instead of keys and values.
STATEFUL = ("mamba_d_state", "mamba_d_ssm", "ssm_state_size", "state_size", "linear_num_key_heads", "conv_L_cache",
            "rwkv_hidden_size", "attention_hidden_size_rwkv")  # fmt: skip


def check_family(config: Config, path: Path, hf_config: Any, *, platform: str) -> Iterator[str]:
    """What of the model these engines can't run rightly.

    Args:
        path: the model's directory; it has weights.
        platform: the kind of device.
    """
    text, where = text_config(hf_config), f"model.path={config.model.path}"
    problems = [*check_configuration(config, text, platform=platform)]
    yield from (f"{where}: {problem}" for problem in problems)
    if problems or config.train.engine != "fsdp":
        return  # megatron has a table of what it maps, and checks the tensors itself
    yield from check_build(config, path)


def check_configuration(config: Config, text: Any, *, platform: str) -> Iterator[str]:
    """What follows from config.json; without the model's path in front."""
    kind = text.model_type
    quantized = getattr(text, "quantization_config", None)
    if quantized:
        method = quantized.get("quant_method", "?") if isinstance(quantized, dict) else quantized.quant_method
        yield f"{kind} is quantized ({method}); training needs the weights themselves: dequantise the checkpoint first"
    keys, values = head_sizes(text) if hasattr(text, "hidden_size") else (0, 0)
    if getattr(text, "kv_lora_rank", None):
        yield (
            f"{kind} has multi-head latent attention (kv_lora_rank={text.kv_lora_rank}; heads of {keys} for keys and "
            f"{values} for values): inference engines run it on matrices derived from the weights, which a weight sync "
            "does not reach; it is not supported"
        )
    elif keys != values:
        yield f"{kind} has heads of unequal size, {keys} for keys and {values} for values; it is not supported"
    if (why := _state(text)) is not None:
        yield f"{kind} {why}: only decoders whose layers are all attention are supported"
    for rope in rope_parameters(text):
        if rope.get("rope_type") == "dynamic":
            yield (
                f"{kind} has rotary embeddings of type dynamic, whose frequencies follow the longest sequence of a "
                "batch in transformers and the configuration in inference engines; use rope_type linear or yarn"
            )
    if config.rollout.engine == "transformers":
        from hybridengine.engines.rollout.transformers.engine import check_attention

        length = config.rollout.max_model_len or config.data.max_prompt_tokens + config.rollout.max_tokens
        try:
            check_attention(text, length)
        except ValueError as error:
            yield str(error)
    if config.rollout.engine == "vllm":
        yield from _for_vllm(config, text, platform)


def _state(text: Any) -> str | None:
    """What a decoder carries from token to token beside keys and values, and so can't be run."""
    kinds = sorted({str(kind) for kind in getattr(text, "layer_types", None) or ()} - set(ATTENTION))
    if kinds:
        return f"has layers of kind {', '.join(kinds)}"
    found = [key for key in STATEFUL if getattr(text, key, None)]
    if found:
        return f"has layers with a state of their own ({found[0]}={getattr(text, found[0])})"
    if not getattr(text, "num_attention_heads", None):
        return "has no attention (num_attention_heads)"
    return None


def _for_vllm(config: Config, text: Any, platform: str) -> Iterator[str]:
    from hybridengine.engines.rollout.vllm.architectures import (
        LONGER_WINDOW,
        WHOLE_ONLY,
        known_wrong,
        rewrites_transformers,
    )
    from hybridengine.validate.resolve import architectures_of

    names = architectures_of(config.model.path)
    kinds = set(getattr(text, "layer_types", None) or ())
    most = getattr(text, "max_window_layers", None)
    if len(kinds) > 1 and most is not None and most != text.num_hidden_layers and text.model_type.startswith("qwen"):
        yield (
            f"max_window_layers={most} of {text.num_hidden_layers} layers: vLLM applies a sliding window to all layers "
            "or to none; where the context is within the window, set use_sliding_window=false in config.json"
        )
    if (why := known_wrong(names, platform)) is not None:
        yield f"{why}; it is refused with rollout=vllm"
    if config.rollout.tp > 1 and (whole := [name for name in names if name in WHOLE_ONLY]):
        yield f"rollout.tp={config.rollout.tp}: {whole[0]} {WHOLE_ONLY[whole[0]]}; rollout.tp=1 runs it"
    length = config.rollout.max_model_len or config.data.max_prompt_tokens + config.rollout.max_tokens
    window = min(sliding_windows(text), default=None)
    if window is not None and length > window and any(name in LONGER_WINDOW for name in names):
        yield (
            f"the run's context is {length} tokens, and the sliding window of {text.model_type} is {window} in "
            f"transformers and {window + 1} in vLLM; keep data.max_prompt_tokens + rollout.max_tokens within {window}"
        )
    if rewrites_transformers(names):
        if (why := backend_refusal(config, names)) is not None:
            yield why
        if config.rollout.process == "same" and config.placement.name == "colocated":
            yield (
                f"rollout.process=same: vLLM runs {', '.join(names)} through its Transformers backend, which rewrites "
                "classes that the trainer uses; leave rollout.process at auto"
            )


def backend_refusal(config: Config, names: list[str]) -> str | None:
    """Why vLLM's Transformers backend can't run one of these architectures either; None where it can."""
    import transformers

    if config.model.trust_remote_code:
        return None
    classes = [found for name in names if (found := getattr(transformers, name, None)) is not None]
    if not classes:
        return f"neither vLLM nor transformers knows the architecture {', '.join(names)}"
    if not any(getattr(found, "_supports_attention_backend", False) for found in classes):
        return (
            f"vLLM has no implementation of {', '.join(names)}, and its Transformers backend needs a model that calls "
            "transformers' attention interface; it is refused with rollout=vllm"
        )
    return None


def check_build(config: Config, path: Path) -> Iterator[str]:
    """The model, built without memory, against the checkpoint's index: names, shapes, a head beside a tied one."""
    from safetensors import SafetensorError

    from hybridengine.engines.train.describe import describe, tied_heads
    from hybridengine.engines.train.fsdp.policy import decoder_layers
    from hybridengine.engines.train.loading import build_empty
    from hybridengine.models.safetensors_source import SafetensorsSource

    where = f"model.path={config.model.path}"
    try:
        source = SafetensorsSource(path)
        model = build_empty(path, trust_remote_code=config.model.trust_remote_code)
        decoder_layers(model)
        params, stored = describe(model, source)
    except SafetensorError as error:
        yield f"{where}: its weights can't be read ({error}); was the download complete?"
        return
    except (ValueError, OSError, KeyError, AttributeError, TypeError, NotImplementedError, ImportError) as error:
        text = str(error).strip() or type(error).__name__
        yield text if text.startswith("model.path") else f"{where}: {text}"
        return
    if config.rollout.engine == "transformers":
        names = {tensor.name for tensor in stored}
        if other := sorted(names ^ set(params)):
            yield (
                f"{where}: transformers keeps {other[0]} otherwise than the checkpoint has it (stacked experts, other "
                "names), which the transformers rollout engine does not take; use rollout=vllm"
            )
    optional = {part.param for tensor in stored if tensor.whole for part in tensor.parts}
    missing = [name for name in params if name not in source and name not in optional]
    if missing:
        yield (
            f"{where}: {len(missing)} parameters of {type(model).__name__} are not in the checkpoint, first: "
            f"{missing[0]}"
        )
    for name, spec in params.items():
        if name in source and source.shape(name) != spec.shape:
            yield (f"{where}: {name} has shape {source.shape(name)} in the checkpoint, {spec.shape} by config.json")
            break
    for head, table in tied_heads(model, source):
        if not same_tensor(source, head, table):
            yield (
                f"{where}: config.json ties the output projection (tie_word_embeddings=true), and the checkpoint has a "
                f"{head} that differs from {table}: one of them would be lost; set tie_word_embeddings to false in "
                f"config.json to keep it, or remove it from the checkpoint"
            )


def same_tensor(source: Any, a: str, b: str, *, rows: int = 4096) -> bool:
    """Whether two tensors of a checkpoint are equal; read a block of rows at a time."""
    import torch

    shape = source.shape(a)
    if shape != source.shape(b):
        return False
    for start in range(0, shape[0], rows):
        count = min(rows, shape[0] - start)
        box = ((start, *(0,) * (len(shape) - 1)), (count, *shape[1:]))
        if not torch.equal(source.read(a, *box), source.read(b, *box)):
            return False
    return True
