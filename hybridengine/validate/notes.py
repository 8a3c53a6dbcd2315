"""What was chosen because of the model or the length of the run, said once at the start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hybridengine.config import Config, TrainConfig
from hybridengine.models.facts import rope_parameters, text_config
from hybridengine.validate.resolve import architectures_of, served_by_transformers


def rate_notes(train: TrainConfig, updates: int) -> Iterator[str]:
    """Of a learning rate that ends at 0, where the update that then changes nothing is a good part of a run.

    Args:
        updates: optimizer steps of the whole run.
    """
    if train.lr_schedule != "constant" and not train.min_lr_ratio and train.warmup_steps < updates <= 20:
        yield (
            f"train.lr_schedule={train.lr_schedule} ends at rate 0: the last of the run's {updates} optimizer steps "
            "changes nothing; train.min_lr_ratio=0.1 ends at a tenth of train.lr"
        )


def model_notes(config: Config, model_path: Path, *, max_model_len: int) -> Iterator[str]:
    """One line per choice.

    Args:
        max_model_len: context of the run.
    """
    from transformers import AutoConfig

    from hybridengine.engines.train.fsdp.packing import packs

    trust = config.model.trust_remote_code
    hf_config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust)
    if config.rollout.process == "separate" and served_by_transformers(config):
        yield (
            f"rollout.process=separate: vLLM runs {', '.join(architectures_of(str(model_path)))} through its "
            "Transformers backend, which rewrites classes that the trainer uses; so the engine has processes of its own"
        )
    if config.train.engine == "fsdp" and config.train.packing and not packs(hf_config, trust_remote_code=trust):
        yield (
            f"train.packing: the attention of {hf_config.model_type} can't keep packed sequences apart, so "
            "micro-batches are padded rows"
        )
    for rope in rope_parameters(hf_config):
        if rope.get("rope_type") == "longrope":
            original = int(rope["original_max_position_embeddings"])
            which = "long" if max_model_len > original else "short"
            yield (
                f"LongRoPE: {which} factors for every sequence, on both sides, because the run's context is "
                f"{max_model_len} tokens and the original one {original} (transformers alone would choose by the "
                "longest sequence of a batch)"
            )
    limit = getattr(text_config(hf_config), "max_position_embeddings", None)
    if limit and max_model_len > limit:
        yield f"context: {max_model_len} tokens, beyond max_position_embeddings={limit}, by scaled rotary embeddings"
