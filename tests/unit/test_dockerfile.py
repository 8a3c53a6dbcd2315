"""The Dockerfile's paths, stages, pins and targets exist; building it takes a network, which tests have not."""

from __future__ import annotations

import fnmatch
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from tests import ROOT

TEXT = (ROOT / "Dockerfile").read_text()
#: (instruction, arguments) in order, continuation lines joined.
INSTRUCTIONS = [
    tuple(line.split(maxsplit=1))
    for line in re.sub(r"\\\n", "", re.sub(r"(?m)^#.*\n", "", TEXT)).splitlines()
    if line.strip()
]
STAGES = [arguments.split(" AS ")[1] for name, arguments in INSTRUCTIONS if name == "FROM"]


def copies() -> list[list[str]]:
    return [shlex.split(arguments) for name, arguments in INSTRUCTIONS if name == "COPY"]


@pytest.mark.parametrize("source", sorted({s for c in copies() if not c[0].startswith("--from") for s in c[:-1]}))
def test_what_is_copied_is_there_and_not_ignored(source: str) -> None:
    assert (ROOT / source).exists(), source
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not any(fnmatch.fnmatch(source, pattern.removeprefix("**/")) for pattern in ignored), source


def test_stages_are_built_before_they_are_copied_from() -> None:
    for copy in copies():
        if copy[0].startswith("--from="):
            assert copy[0].removeprefix("--from=") in STAGES[:-1]
    assert STAGES == ["native", "runtime"]


def test_images_are_arguments_and_name_no_host() -> None:
    arguments = dict(a.split("=", 1) for name, a in INSTRUCTIONS if name == "ARG" and "=" in a)
    for name, image in INSTRUCTIONS:
        if name == "FROM":
            assert re.fullmatch(r"\$\{(\w+)\} AS \w+", image)
            chosen = arguments[re.findall(r"\w+", image)[0]]
            assert "." not in chosen.split("/")[0] and ":13.0" in chosen, chosen
    assert not re.search(r"https?://|--index-url|--extra-index-url", TEXT)


def test_targets_and_scripts_exist() -> None:
    rules = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    targets = re.findall(r"\bmake ([a-z-]+)\b", " ".join(a for name, a in INSTRUCTIONS if name == "RUN"))
    targets = [target for target in targets if target != "git"]  # apt-get's list has a package "make"
    assert targets == ["install-cuda"] and set(targets) <= rules


def test_what_the_installation_reads_is_copied_before_it_runs() -> None:
    """pyproject.toml's readme, licence and packages, setup.py's sources, and the scripts that make calls."""
    before = []
    for name, arguments in INSTRUCTIONS[INSTRUCTIONS.index(("WORKDIR", "/opt/hybridengine")) :]:
        if name == "RUN":
            break
        before += shlex.split(arguments)[:-1] if name == "COPY" else []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {project["readme"], *project["license-files"], "pyproject.toml", "setup.py", "Makefile", "scripts"}
    assert needed | {"hybridengine", "conf", "csrc"} <= set(before)


def test_the_box_copy_is_compiled_by_what_is_there() -> None:
    """The command of the stage with nvcc, up to nvcc itself."""
    from hybridengine import native_build

    assert "native_build as b" in TEXT and "b.compile_cuda(" in TEXT
    assert native_build.compile_cuda.__kwdefaults__ is not None and "arch" in native_build.compile_cuda.__kwdefaults__
    imported = re.findall(r"(?m)^(?:import|from) (\w+)", Path(native_build.__file__).read_text())
    assert set(imported) <= {"__future__", "os", "shlex", "shutil", "subprocess", "pathlib", "collections"}, imported


def test_pins_of_the_cuda_set_are_those_of_the_project() -> None:
    """constraints-cuda.txt agrees with pyproject.toml, and with the CPU's but for what differs by platform."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    def read(name: str) -> dict[str, str]:
        lines = [line for line in (ROOT / "scripts" / name).read_text().splitlines() if not line.startswith("#")]
        return {
            canonicalize_name(package): version for package, version in (re.split("={2,3}", line) for line in lines)
        }

    pins, cpu = read("constraints-cuda.txt"), read("constraints-cpu.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [text for extra in ("cuda", "megatron", "dev") for text in project["optional-dependencies"][extra]]
    for requirement in map(Requirement, [*project["dependencies"], *extras]):
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}: pinned to {version}"
    other = {name for name in pins.keys() & cpu.keys() if pins[name] != cpu[name]}
    assert other <= {"apache-tvm-ffi", "torchaudio", "triton"}, other
