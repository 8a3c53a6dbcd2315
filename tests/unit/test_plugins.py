"""Things of the user's own by ``path.py:name`` or ``module:name``: what is found, and what is said when it isn't."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from hybridengine.plugins import load_object


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text("LOADED = []\nLOADED.append(1)\n\nclass Thing:\n    pass\n\nNOTHING = None\n")
    return path


def test_a_module_and_a_file(file: Path) -> None:
    assert load_object("math:pi", "some.key") == sys.modules["math"].pi
    assert load_object("os.path:join", "some.key") is __import__("os").path.join
    assert load_object(f"{file}:Thing", "some.key").__name__ == "Thing"


def test_a_file_is_run_once_whatever_way_it_is_written(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    loaded = [load_object(f"{name}:LOADED", "some.key") for name in (file, "mine.py", "./mine.py", "~/mine.py")]
    assert all(one is loaded[0] for one in loaded) and loaded[0] == [1]


def test_files_of_the_same_name_are_different_modules(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "mine.py"
    other.parent.mkdir()
    other.write_text("class Thing:\n    other = True\n")
    assert load_object(f"{other}:Thing", "k").other and not hasattr(load_object(f"{file}:Thing", "k"), "other")


def test_what_a_file_defines_can_be_pickled(file: Path) -> None:
    thing = load_object(f"{file}:Thing", "some.key")()
    assert type(pickle.loads(pickle.dumps(thing))) is type(thing)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("Thing", "some.key=Thing: must be path.py:name or package.module:name"),
        (":Thing", "must be path.py:name or package.module:name"),
        ("math:", "must be path.py:name or package.module:name"),
        ("math:tau_and_a_half", r"math has no 'tau_and_a_half'; it has acos, acosh"),
        ("no.such:Thing", "importing no.such failed: ModuleNotFoundError: No module named 'no'"),
        ("/nowhere.py:Thing", "some.key=/nowhere.py:Thing: no such file /nowhere.py"),
        ("{file}:Other", r"has no 'Other'; it has LOADED, NOTHING, Thing"),
        ("{file}:NOTHING", "has no 'NOTHING'"),
    ],
)
def test_what_is_not_there_is_named(file: Path, spec: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        load_object(spec.format(file=file), "some.key")


def test_a_file_that_fails_leaves_no_module_behind_and_can_be_repaired(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("value = 1\nraise OSError('no licence')\n")
    before = set(sys.modules)
    with pytest.raises(ValueError, match=rf"some\.key={path}:value: importing {path} failed: OSError: no licence"):
        load_object(f"{path}:value", "some.key")
    assert set(sys.modules) == before
    path.write_text("value = 1\n")
    assert load_object(f"{path}:value", "some.key") == 1
