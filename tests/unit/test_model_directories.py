"""Model directories as broken downloads leave them: each is named by file and reason, in seconds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridengine.config.compose import ConfigError, build
from hybridengine.distributed.world import World
from hybridengine.models.safetensors_source import SafetensorsSource
from hybridengine.validate.contradictions import validate
from tests.tiny import make_tiny


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In two shards with an index."""
    path = make_tiny(tmp_path_factory.mktemp("whole") / "model", "qwen2", max_position_embeddings=4096, head_dim=32)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def problems(path: Path) -> str:
    overrides = [f'model.path="{path}"', "data.train=d.jsonl", "reward.fn=exact_match"]
    with pytest.raises(ConfigError) as caught:
        validate(build([*overrides, "rollout=transformers"]), World())
    return str(caught.value)


FIRST = "model-00001-of-00002.safetensors"


def lose_shard(path: Path) -> None:
    (path / FIRST).unlink()


def cut(path: Path) -> None:
    (path / FIRST).write_bytes((path / FIRST).read_bytes()[:-100])


def cut_in_the_header(path: Path) -> None:
    (path / FIRST).write_bytes((path / FIRST).read_bytes()[:60])


def empty(path: Path) -> None:
    (path / FIRST).write_bytes(b"")


def lfs_pointer(path: Path) -> None:
    (path / FIRST).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1f\nsize 4096\n")


def web_page(path: Path) -> None:
    (path / FIRST).write_text("<!DOCTYPE html><html>Sign in</html>")


def broken_index(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text('{"weight_map": ')


def shards_mixed_up(path: Path) -> None:
    shutil.copy(path / "model-00002-of-00002.safetensors", path / FIRST)


def pickles_only(path: Path) -> None:
    for file in path.glob("model*"):
        file.unlink()
    torch.save({}, path / "pytorch_model.bin")


def wrong_shape(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] + 8}))


def with_architecture(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"architectures": [name]}))

    return change


def t5(path: Path) -> None:
    from transformers import T5Config

    T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(path)


def bert(path: Path) -> None:
    from transformers import BertConfig

    BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_shard, f"{FIRST}: is named by model.safetensors.index.json and missing; download it"),
        (cut, f"{FIRST}: has "),
        (cut_in_the_header, f"{FIRST}: is no safetensors file, or cut off in its header"),
        (empty, f"{FIRST}: has 0 bytes"),
        (lfs_pointer, f"{FIRST}: is a Git LFS pointer, not the weights; run `git lfs pull`"),
        (web_page, f"{FIRST}: is no safetensors file"),
        (broken_index, "model.safetensors.index.json can't be read"),
        (shards_mixed_up, f"{FIRST}: has no "),
        (pickles_only, "no model.safetensors in it; convert the checkpoint to safetensors"),
        (wrong_shape, "by config.json"),
        (
            with_architecture("Qwen2ForSequenceClassification"),
            "Qwen2ForSequenceClassification is no language model that",
        ),
        (t5, "T5ForConditionalGeneration is an encoder with a decoder; a causal language model is needed"),
        (bert, "BertForMaskedLM is no language model that generates"),
    ],
    ids=lambda value: getattr(value, "__name__", None) if callable(value) else "",
)
def test_broken_directories_are_named(
    whole: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "model"
    shutil.copytree(whole, path)
    damage(path)
    found = problems(path)
    assert f"model.path={path}: " in found and message in found


def test_a_whole_one_has_no_problem(whole: Path) -> None:
    overrides = [f'model.path="{whole}"', "data.train=d.jsonl", "reward.fn=exact_match", "rollout=transformers"]
    validate(build(overrides), World())


def test_weights_that_are_nan_are_named_when_they_are_read(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(whole, path)
    tensors = load_file(path / FIRST)
    name = sorted(tensors)[3]
    tensors[name].view(-1)[-1] = float("nan")
    save_file(tensors, path / FIRST, metadata={"format": "pt"})
    source = SafetensorsSource(path)
    with pytest.raises(ValueError, match=f"model.path={path}: {name} holds NaN"):
        source[name]
    shape = source.shape(name)
    with pytest.raises(ValueError, match="holds NaN"):
        source.read(name, [0] * len(shape), shape)
    source[sorted(tensors)[0]]
