"""The export of both engines: exact, shared out over the ranks, all or nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from hybridengine.config import TrainConfig
from hybridengine.distributed.world import World
from hybridengine.engines.train import export
from hybridengine.engines.train.fsdp.engine import FSDPEngine
from hybridengine.engines.train.megatron.engine import MegatronEngine
from hybridengine.export import export_checkpoint
from hybridengine.models.safetensors_source import SafetensorsSource
from tests.distributed.engines.train.fsdp.test_engine import columns
from tests.distributed.ranks import run_ranks
from tests.tiny import make_tiny

FILE_BYTES = 24_000
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # One KV head cut by two ranks, a padded vocabulary, tied over stages.
    "llama-tied": ("llama", {"num_key_value_heads": 1, "vocab_size": 181, "tie_word_embeddings": True, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 24}),
}
SP = {"tp": 2, "sequence_parallel": True}
CUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one": (1, "qwen2", {"engine": "megatron"}),
    "ep2": (2, "qwen3-moe", {"engine": "megatron", "ep": 2}),
    "dp2": (2, "llama-tied", {"engine": "megatron"}),
    "fsdp2": (2, "qwen2", {}),
    # Shards in reverse order of the ranks, row-parallel weights cut by columns.
    "fsdp2-columns-permuted": (2, "qwen2", {"rank_order": [1, 0], "placements": columns}),
    "fsdp2-tied": (2, "llama-tied", {}),
    "fsdp2-moe": (2, "qwen3-moe", {}),
    "tp2-pp2": (4, "llama-tied", {"engine": "megatron", "tp": 2, "pp": 2}),
    "tp2-pp2-untied": (4, "qwen2", {"engine": "megatron", "tp": 2, "pp": 2}),
    "tp2-ep2": (4, "qwen3-moe", {"engine": "megatron", **SP, "ep": 2}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    found = {name: make_tiny(root / name, arch, **overrides) for name, (arch, overrides) in MODELS.items()}
    for path in found.values():
        (path / "tokenizer_config.json").write_text("{}")
    return found


def make_engine(world: World, path: Path, changes: dict[str, Any]) -> Any:
    kwargs = {key: changes[key] for key in ("rank_order", "placements") if key in changes}
    train = replace(TrainConfig(), **{key: value for key, value in changes.items() if key not in kwargs})
    kind: Any = MegatronEngine if train.engine == "megatron" else FSDPEngine
    return kind(path, train, world=world, total_steps=1, **kwargs)


def export_all(world: World, paths: dict[str, Path], cuts: dict[str, Any], target: Path) -> dict[str, dict[str, int]]:
    """Exports, and what this rank did in each: bytes of its largest file, and of all parameters that were ever whole
    on it."""
    export.FILE_BYTES = FILE_BYTES
    found: dict[str, dict[str, int]] = {}
    plain_sync, plain_assembled = export._sync, export._assembled

    def sync(file: Path) -> None:
        counts["largest"] = max(counts["largest"], file.stat().st_size)
        plain_sync(file)

    def assembled(*args: Any) -> torch.Tensor:
        full = plain_assembled(*args)
        counts["whole"] += full.nbytes
        return full

    export._sync, export._assembled = sync, assembled
    for name, (_, model, changes) in cuts.items():
        engine = make_engine(world, paths[model], changes)
        for _ in range(2):  # the second replaces the first
            counts = found[name] = {"largest": 0, "whole": 0}
            engine.export(target / name)
        saved = checkpoint_of(target, name) / "engine"
        if world.rank == 0:
            saved.mkdir(parents=True)
        dist.barrier()
        engine.save(saved)
    return found


def checkpoint_of(target: Path, name: str) -> Path:
    return target.parent / "checkpoints" / name


@pytest.fixture(scope="module")
def exported(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[dict[str, int]]]]:
    target = tmp_path_factory.mktemp("exported")
    found: dict[str, list[dict[str, int]]] = {}
    for ranks in (1, 2, 4):
        cuts = {name: cut for name, cut in CUTS.items() if cut[0] == ranks}
        results = run_ranks(ranks, export_all, models, cuts, target, timeout=280)
        found |= {name: [result[name] for result in results] for name in cuts}
    return target, found


@pytest.mark.parametrize("cut", CUTS)
def test_an_export_is_the_checkpoint_bit_for_bit(exported: Any, models: dict[str, Path], cut: str) -> None:
    from transformers import AutoModelForCausalLM

    path, original = exported[0] / cut, models[CUTS[cut][1]]
    theirs, mine = load_file(original / "model.safetensors"), SafetensorsSource(path)
    assert sorted(mine.names()) == sorted(theirs)
    assert all(torch.equal(mine[name], value) and mine[name].dtype == value.dtype for name, value in theirs.items())
    loaded, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    again = AutoModelForCausalLM.from_pretrained(original).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in loaded.state_dict().items())
    assert {p.name for p in path.iterdir() if p.suffix == ".json"} == {p.name for p in original.iterdir()} - {
        "model.safetensors"
    } | {"model.safetensors.index.json"}


@pytest.mark.parametrize("cut", CUTS)
def test_one_process_reads_the_model_out_of_any_checkpoint(
    exported: Any, models: dict[str, Path], tmp_path: Path, cut: str
) -> None:
    """Of either engine, whatever its layout: the parameters of the model that it started from, bit for bit."""
    original, checkpoint = models[CUTS[cut][1]], checkpoint_of(exported[0], cut)
    theirs = load_file(original / "model.safetensors")
    export_checkpoint(checkpoint, original, tmp_path / "model")
    mine = SafetensorsSource(tmp_path / "model")
    assert sorted(mine.names()) == sorted(theirs)
    assert all(torch.equal(mine[name], value) for name, value in theirs.items())
    export_checkpoint(checkpoint, original, tmp_path / "half", dtype="bfloat16")
    half = SafetensorsSource(tmp_path / "half")
    assert all(torch.equal(half[name], value.bfloat16()) for name, value in theirs.items())
    assert '"bfloat16"' in (tmp_path / "half" / "config.json").read_text()


def test_a_checkpoint_of_another_model_is_refused(exported: Any, models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not of the model .*: it has no"):
        export_checkpoint(checkpoint_of(exported[0], "fsdp2"), models["qwen3-moe"], tmp_path / "model")
    with pytest.raises(ValueError, match="can't be read"):
        export_checkpoint(tmp_path / "nowhere", models["qwen2"], tmp_path / "model")
    with pytest.raises(FileExistsError):
        export_checkpoint(checkpoint_of(exported[0], "fsdp2"), models["qwen2"], tmp_path)


@pytest.mark.parametrize("cut", CUTS)
def test_every_rank_writes_an_even_share_file_by_file(exported: Any, cut: str) -> None:
    """Of the whole model a rank sees its share and no more; shares differ by less than a large parameter, and no file,
    which is what a rank holds at a time, is above the limit (headers aside)."""
    shares, ranks = exported[1][cut], CUTS[cut][0]
    source = SafetensorsSource(exported[0] / cut)
    assert sum(share["whole"] for share in shares) == sum(source[name].nbytes for name in source.names())
    total = sum(share["whole"] for share in shares)
    assert len(shares) == ranks
    for share in shares:
        assert share["largest"] < FILE_BYTES + 2500
        assert abs(share["whole"] - total / ranks) < FILE_BYTES


def test_nothing_is_left_beside_an_export(exported: Any) -> None:
    assert sorted(p.name for p in exported[0].iterdir()) == sorted(CUTS)


def fail_on_rank_1(world: World, path: Path, target: Path, changes: dict[str, Any]) -> list[str]:
    """The second file of rank 1 can't be written; then the directory can't be completed by rank 0."""
    export.FILE_BYTES = FILE_BYTES
    engine, messages = make_engine(world, path, changes), []
    plain_sync, plain_rest = export._sync, export.write_rest
    calls = 0

    def full_disk(file: Path) -> None:
        nonlocal calls
        calls += 1
        if world.rank == 1 and calls == 2:
            raise OSError(28, "No space left on device")
        plain_sync(file)

    def no_index(*args: Any, **options: Any) -> None:
        raise OSError(5, "Input/output error")

    for broken in ({"_sync": full_disk}, {"write_rest": no_index}):
        for name, function in broken.items():
            setattr(export, name, function)
        try:
            engine.export(target)
        except Exception as error:  # noqa: BLE001
            messages.append(f"{type(error).__name__}: {error}")
        export._sync, export.write_rest = plain_sync, plain_rest
    return messages


@pytest.mark.parametrize("changes", [{}, {"engine": "megatron", "tp": 2}], ids=["fsdp", "megatron"])
def test_a_failure_leaves_what_was_there(models: dict[str, Path], tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "mark").touch()
    messages = run_ranks(2, fail_on_rank_1, models["qwen2"], tmp_path / "kept", changes)
    assert [text.split(":")[0] for text in messages[0]] == ["PeerError", "OSError"]
    assert [text.split(":")[0] for text in messages[1]] == ["OSError", "PeerError"]
    assert "rank 1 failed" in messages[0][0] and "No space left" in messages[0][0]
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
    assert [p.name for p in (tmp_path / "kept").iterdir()] == ["mark"]
