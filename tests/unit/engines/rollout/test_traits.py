"""EngineTraits: engines by name, of this package and of the user's own, and which class runs where."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridengine.config import RolloutConfig
from hybridengine.config.compose import build
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.remote.engine import RemoteEngine
from hybridengine.engines.rollout.traits import ENGINES, EngineTraits, engine_class, runs_in_own_processes, traits_of
from hybridengine.engines.rollout.transformers.engine import TransformersEngine
from hybridengine.validate.contradictions import contradictions

OWN = '''
from hybridengine.engines.rollout.traits import EngineTraits

class Mine:
    """Not much of an engine."""

TRAITS = EngineTraits(name="mine", same_process=f"{__file__}:Mine", tensor_parallel=False)
NOT_TRAITS = {"name": "mine"}
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A file with an engine of the user's own."""
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    return file


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_of_the_package_has_traits_by_its_name(name: str) -> None:
    traits = traits_of(name)
    assert traits.name == name and (traits.same_process or traits.own_processes)
    assert traits is traits_of(name), "looked up once"


@pytest.mark.parametrize(
    ("engine", "process", "kind", "apart"),
    [
        ("transformers", "auto", TransformersEngine, False),
        ("transformers", "same", TransformersEngine, False),
        ("vllm", "separate", RemoteEngine, True),
        ("sglang", "auto", RemoteEngine, True),
        ("sglang", "separate", RemoteEngine, True),
    ],
)
def test_which_class_runs_it(engine: str, process: str, kind: type, apart: bool) -> None:
    rollout = RolloutConfig(engine=engine, process=process)
    assert engine_class(rollout) is kind and runs_in_own_processes(rollout) == apart


def test_vllm_is_in_the_trainers_processes_unless_it_is_asked_otherwise() -> None:
    assert engine_class(RolloutConfig(engine="vllm")).__name__ == "VLLMEngine"
    assert not runs_in_own_processes(RolloutConfig(engine="vllm"))


@pytest.mark.parametrize(("engine", "process"), [("transformers", "separate"), ("sglang", "same")])
def test_an_engine_runs_where_it_can(engine: str, process: str) -> None:
    with pytest.raises(ValueError, match=f"rollout.process={process}: {engine} does not run that way"):
        engine_class(RolloutConfig(engine=engine, process=process))


def test_an_engine_of_the_users_own_is_found_by_its_file(own: Path) -> None:
    rollout = RolloutConfig(engine=f"{own}:TRAITS")
    assert traits_of(rollout.engine).name == "mine"
    assert engine_class(rollout).__name__ == "Mine" and not runs_in_own_processes(rollout)


def test_an_engine_of_the_users_own_is_found_by_its_module() -> None:
    assert traits_of("hybridengine.engines.rollout.vllm.traits:TRAITS") is not None
    assert traits_of("hybridengine.engines.rollout.vllm.traits:TRAITS").name == "vllm"


def test_a_registered_name_is_one_line(monkeypatch: pytest.MonkeyPatch, own: Path) -> None:
    monkeypatch.setitem(ENGINES, "mine-by-name", f"{own}:TRAITS")
    assert traits_of("mine-by-name").name == "mine"


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("vlm", "rollout.engine=vlm: must be one of vllm | sglang | transformers, or name an engine of your own"),
        ("/nowhere/mine.py:TRAITS", "rollout.engine=/nowhere/mine.py:TRAITS: no such file /nowhere/mine.py"),
        ("{own}:TRAIT", "has no 'TRAIT'; it has EngineTraits, Mine, NOT_TRAITS, TRAITS"),
        ("{own}:NOT_TRAITS", "is a dict, not EngineTraits"),
        ("no.such.module:TRAITS", "importing no.such.module failed: ModuleNotFoundError"),
    ],
    ids=["misspelt", "no-file", "no-name", "no-traits", "no-module"],
)
def test_what_is_no_engine_is_refused_with_the_rest_of_the_configuration(own: Path, spec: str, told: str) -> None:
    spec = spec.format(own=own)
    with pytest.raises(ValueError) as caught:
        traits_of(spec)
    assert told in str(caught.value)
    config = build(["+experiment=quickstart", f"rollout.engine={spec}", "rollout.tp=1"])
    assert [text for text in contradictions(config, World()) if told in text]


def test_traits_are_what_validation_goes_by(own: Path) -> None:
    wrong = ["rollout.tp=2", "rollout.process=separate"]
    config = build(["+experiment=quickstart", f"rollout.engine={own}:TRAITS", *wrong])
    told = "\n".join(contradictions(config, World(size=2, local_size=2)))
    assert f"rollout.tp=2: the {own}:TRAITS engine has no tensor parallelism" in told
    assert "rollout.process=separate: mine has no process of its own" in told


def test_head_sizes_without_a_kernel() -> None:
    traits = EngineTraits(name="picky", head_sizes=(("cpu", (32, 64)),))
    assert traits.kernels_for("cpu", 64) and not traits.kernels_for("cpu", 48)
    assert traits.kernels_for("cuda", 48), "nothing is said about others"
