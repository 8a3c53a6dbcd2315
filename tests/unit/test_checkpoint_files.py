"""What a full disk, a bad disk or a careless copy does to a checkpoint: noticed, named, with a way on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hybridengine.checkpoint import checkpointer
from hybridengine.checkpoint.checkpointer import Checkpointer
from hybridengine.config.compose import build
from hybridengine.validate.earlier_run import find_earlier_run


class Engine:
    """One file of weights."""

    version = 3

    def save(self, path: Path) -> None:
        (path / "weights.bin").write_bytes(bytes(range(256)) * 40)

    def load(self, path: Path) -> None:
        self.loaded = (path / "weights.bin").read_bytes()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An output_dir with checkpoints of steps 1 and 2."""
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep=0, config={"seed": 1})
    for step in (1, 2):
        checkpointer.save(step, Engine(), {"step": step})
    return tmp_path


def resume(run: Path) -> int:
    extra = Checkpointer(run / "checkpoints", keep=0).load(Engine())
    assert extra is not None
    return int(extra["step"])


def newest(run: Path) -> str:
    """As it is found before torch is imported."""
    found = find_earlier_run(build(["model.path=m", "data.train=d.jsonl", "reward.fn=math", f"output_dir={run}"]))
    assert found is not None
    return found.path.name


def test_every_file_has_its_checksum(run: Path) -> None:
    path = run / "checkpoints" / "step_00000002"
    sums = json.loads((path / "meta.json").read_text())["checksums"]
    files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert set(sums) == files - {"meta.json"} == {"engine/weights.bin", "extra.pt", "rng_0.pt"}


@pytest.mark.parametrize("bit", [0, 7, 8 * 5000 + 3, 8 * 10240 - 1])
def test_a_flipped_bit_is_named_and_the_checkpoint_before_is_offered(run: Path, bit: int) -> None:
    file = run / "checkpoints" / "step_00000002" / "engine" / "weights.bin"
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    before = run / "checkpoints" / "step_00000001"
    with pytest.raises(ValueError, match=rf"{file} is not what was written .*checkpoint.resume={before} goes on"):
        resume(run)
    assert Checkpointer(run / "checkpoints").load(Engine(), str(before)) == {"step": 1}


@pytest.mark.parametrize(("damage", "message"), [("cut", "has 100 bytes, 10240 were written"), ("gone", "is missing")])
def test_other_damage_is_named(run: Path, damage: str, message: str) -> None:
    file = run / "checkpoints" / "step_00000002" / "engine" / "weights.bin"
    file.unlink() if damage == "gone" else file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{file} {message}"):
        resume(run)


@pytest.mark.parametrize(
    ("file", "content", "step"),
    [
        ("latest", "", 2),
        ("latest", "step_00000009", 2),
        ("step_00000002/meta.json", "", 1),
        ("step_00000002/meta.json", '{"step": 2, "wor', 1),
        ("step_00000001/meta.json", "", 2),
        ("best.json", "", 2),
    ],
)
def test_files_that_a_full_disk_left_empty_do_not_hide_good_checkpoints(
    run: Path, file: str, content: str, step: int
) -> None:
    (run / "checkpoints" / file).write_text(content)
    assert newest(run) == f"step_{step:08d}" and resume(run) == step
    Checkpointer(run / "checkpoints", keep=1).save(3, Engine(), {"step": 3})
    assert resume(run) == 3


def test_a_checkpoint_without_checksums_is_read(run: Path) -> None:
    """Older ones."""
    meta = run / "checkpoints" / "step_00000002" / "meta.json"
    content = json.loads(meta.read_text())
    del content["checksums"]
    meta.write_text(json.dumps(content))
    assert resume(run) == 2


def test_a_checkpoint_gets_its_name_when_its_files_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that a power cut needs: files, their directories, the name, its directory, the pointer."""
    done: list[str] = []
    rename = os.rename

    def renamed(old: Path, new: Path) -> None:
        done.append(f"name {new.name}")
        rename(old, new)

    monkeypatch.setattr(checkpointer, "_sync", lambda path: done.append(path.name))
    monkeypatch.setattr(os, "rename", renamed)
    Checkpointer(tmp_path).save(5, Engine(), {})
    named = done.index("name step_00000005")
    assert {"rng_0.pt", "extra.pt", "meta.json", "engine", "step_00000005.tmp"} <= set(done[:named])
    assert done[named + 1 :] == [tmp_path.name, "latest.tmp", "name latest", tmp_path.name]


def test_weights_of_another_version_than_the_record_says(run: Path) -> None:
    engine = Engine()
    engine.version = 4
    with pytest.raises(ValueError, match="policy version 3, the engine's state is of version 4"):
        Checkpointer(run / "checkpoints", keep=0).load(engine)
