"""The configuration against the model: its files, its shape, its context."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridengine.config import Config
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.traits import traits_of
from hybridengine.models.facts import context_length, head_sizes, text_config
from hybridengine.sync.plan.naming.vllm import mlp_width, padded_vocab, tensor_parallel_fits
from hybridengine.validate.family import check_family
from hybridengine.validate.weights import shape_problems, weight_problems

#: Ends of the names of architectures without a head that predicts the next token.
OTHER_HEADS = (
    "ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
    "ForMultipleChoice", "ForRewardModel",
)  # fmt: skip


def check_model(config: Config, world: World, *, layout_fits: bool) -> Iterator[str]:
    """``layout_fits``: the degrees of train=megatron are fit to be looked at against the model."""
    if config.model.chat_template is not None and not Path(config.model.chat_template).is_file():
        yield f"model.chat_template={config.model.chat_template}: no such file"
    if config.model.path == "embedded":
        return  # made on demand, its shape divides by every tensor-parallel size up to its KV heads
    path = Path(config.model.path)
    if not (path / "config.json").is_file():
        what = "no config.json in it" if path.is_dir() else "no such directory"
        yield f"model.path={config.model.path}: {what}; give a Hugging Face model directory, or 'embedded'"
        return
    broken = [f"model.path={config.model.path}: {problem}" for problem in weight_problems(path)]
    yield from broken
    from transformers import AutoConfig

    try:
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except (ValueError, OSError, KeyError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        yield f"model.path={config.model.path}: its config.json can't be read ({reason})"
        return
    if problem := _not_causal(hf_config):
        yield f"model.path={config.model.path}: {problem}; a causal language model is needed"
        return
    yield from check_shape(config, world, hf_config)
    if not broken:
        yield from check_family(config, path, hf_config, platform=world.platform.name)
        if not config.model.trust_remote_code:
            yield from _shapes(config, path, hf_config)
    if config.train.engine == "megatron" and layout_fits and not broken:
        yield from _megatron_model(config, world, path, hf_config)


def _not_causal(hf_config: Any) -> str | None:
    """What kind of model it is that generates no text from left to right."""
    names = [str(name) for name in getattr(hf_config, "architectures", None) or []]
    if getattr(hf_config, "is_encoder_decoder", False):
        return f"{(names or [hf_config.model_type])[0]} is an encoder with a decoder"
    for name in names:
        if name.endswith(OTHER_HEADS):
            return f"{name} is no language model that generates"
    return None


def _shapes(config: Config, path: Path, hf_config: Any) -> Iterator[str]:
    try:
        for problem in shape_problems(path, hf_config):
            yield f"model.path={config.model.path}: {problem}"
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, ZeroDivisionError) as error:
        reason = str(error).strip().partition("\n")[0]
        yield f"model.path={config.model.path}: no model can be made from its config.json ({reason})"


def check_shape(config: Config, world: World, hf_config: Any) -> Iterator[str]:
    """What follows from the numbers of a config.json alone."""
    hf_config = text_config(hf_config)
    heads = int(getattr(hf_config, "num_attention_heads", None) or 0)
    kv_heads = int(getattr(hf_config, "num_key_value_heads", None) or heads)
    tp = config.rollout.tp
    if heads and tp > 0 and not tensor_parallel_fits(hf_config, tp):
        yield (
            f"rollout.tp={tp}: must divide the model's {heads} attention heads (and fit its {kv_heads} KV heads), its "
            f"MLP width {mlp_width(hf_config)} and its vocabulary, padded to {padded_vocab(hf_config.vocab_size)}; "
            f"possible: {[size for size in range(1, heads + 1) if tensor_parallel_fits(hf_config, size)]}"
        )
    head_dim = head_sizes(hf_config)[0] if heads else 0
    traits, here = traits_of(config.rollout.engine), world.platform.name
    latent = getattr(hf_config, "kv_lora_rank", None)  # refused by name, with what it is
    if heads and not latent and not traits.kernels_for(here, head_dim):
        yield (
            f"model.path={config.model.path}: {traits.name}'s attention on a {here} device has no kernel for heads of "
            f"{head_dim}, only for {dict(traits.head_sizes)[here]}; use rollout=transformers"
        )
    if config.train.moe_balancing != "none":
        from hybridengine.engines.train.balancing import check_balancing

        try:
            check_balancing(config.train, hf_config)
        except ValueError as error:
            yield str(error)
    limit = context_length(hf_config)
    longest = config.rollout.max_model_len or config.data.max_prompt_tokens + config.rollout.max_tokens
    if limit and longest > limit:
        yield (
            f"data.max_prompt_tokens + rollout.max_tokens = {longest}: the model's context is {limit} tokens "
            "(max_position_embeddings, and what scaled rotary embeddings add)"
        )


def _megatron_model(config: Config, world: World, path: Path, hf_config: Any) -> Iterator[str]:
    """What the megatron engine would refuse: an unmapped architecture, sizes that do not divide, other tensors."""
    from hybridengine.engines.train.megatron.degrees import layout_of
    from hybridengine.engines.train.megatron.families import check_model as check_family
    from hybridengine.engines.train.megatron.families import mapped_decoder
    from hybridengine.engines.train.megatron.weights import check_tensors
    from hybridengine.models.safetensors_source import SafetensorsSource
    from hybridengine.sync.plan.naming import megatron_shard_map

    ranks = world.size - (config.placement.rollout_ranks if config.placement.name == "disaggregated" else 0)
    try:
        layout = layout_of(config.train, mapped_decoder(hf_config), ranks)
        decoder = check_family(hf_config, layout, config.train)
        check_tensors(SafetensorsSource(path), megatron_shard_map(hf_config, layout), tied=decoder.tied)
    except ValueError as error:
        yield str(error)
