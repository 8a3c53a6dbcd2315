"""Write a checkpoint of a run as a Hugging Face model directory.

    python -m hybridengine.export outputs/run --out model              the newest checkpoint
    python -m hybridengine.export outputs/run --step 40 --out model    an earlier one
    python -m hybridengine.export outputs/run --best --out model       the one that checkpoint.best kept

One process reads one parameter at a time: it needs the memory of one file, and no GPU.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hybridengine.config.schema import ConfigError
from hybridengine.report.runs import choose_checkpoint

DTYPES = ("float32", "bfloat16", "float16")


def export_checkpoint(checkpoint: Path, model_path: Path, out: Path, *, dtype: str = "float32") -> None:
    """Write the model in ``checkpoint`` to ``out``, which appears when it is complete.

    Args:
        checkpoint: a run's ``checkpoints/step_*``.
        model_path: the model that the run started from: its config.json, tokenizer and other small files go along.
        dtype: of the weights that are written.

    Raises:
        ValueError: the checkpoint is not of this model.
        OSError: ``out`` exists, or can't be written.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    from hybridengine.checkpoint.weights import CheckpointWeights
    from hybridengine.engines.train.export import plan_files, write_rest

    if out.exists():
        raise FileExistsError(f"{out} exists; remove it or name another directory")
    weights = CheckpointWeights(checkpoint, model_path)
    kind: torch.dtype = getattr(torch, dtype)
    sizes = {name: kind.itemsize * torch.Size(shape).numel() for name, shape in weights.shapes.items()}
    files = plan_files(sizes)
    staging = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        for file in files:
            tensors = {name: weights[name].to(kind) for name in file.params}
            save_file(tensors, staging / file.name, metadata={"format": "pt"})
        write_rest(staging, files, sizes, AutoConfig.from_pretrained(model_path), model_path, dtype=dtype)
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m hybridengine.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run's directory, or one of its checkpoints/step_*")
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument("--step", type=int, help="the checkpoint after this step; default: the newest")
    parser.add_argument("--best", action="store_true", help="the one that checkpoint.best kept")
    parser.add_argument("--model", type=Path, help="the model that the run started from, if it was moved")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    given = parser.parse_args(arguments)
    try:
        found = choose_checkpoint(given.run, step=given.step, best=given.best)
        model_path = given.model or source_model(found.config)
        export_checkpoint(found.path, model_path, given.out, dtype=given.dtype)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"hybridengine.export: {error}\n")
        return 2
    print(f"{given.out}: the model after step {found.step}, {given.dtype}")
    return 0


def source_model(config: dict[str, dict[str, str]]) -> Path:
    """The model directory that a run's configuration names.

    Raises:
        ConfigError: it is not there any more.
    """
    named = config.get("model", {}).get("path", "")
    if named == "embedded":
        from hybridengine.embedded import ensure_embedded

        return ensure_embedded()
    path = Path(named)
    if not (path / "config.json").is_file():
        raise ConfigError(f"the run's model.path={named} is not there; name its place with --model")
    return path


if __name__ == "__main__":
    sys.exit(main())
