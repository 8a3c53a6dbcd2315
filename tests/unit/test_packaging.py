"""What gets installed, that launch scripts compose, and that the Makefile's promises hold."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from hybridengine.config import walk
from hybridengine.config.compose import build
from tests import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SCRIPTS = sorted(ROOT.glob("examples/*/*.sh"))
EXPERIMENTS = sorted(path.stem for path in ROOT.glob("conf/experiment/*.yaml"))


def overrides(script: Path) -> list[str]:
    """The arguments after ``-m hybridengine.train`` of every launch in a script, variables set to a stand-in."""
    text = script.read_text().replace("\\\n", " ")
    text = re.sub(r'"?\$\{?@\}?"?', "", text)
    text = re.sub(r"\$\{\w+[^}]*\}|\$\w+|\$\([^)]*\)", "stand-in", text)
    found: list[str] = []
    for line in text.splitlines():
        if "-m hybridengine.train" in line and not line.lstrip().startswith("#"):
            found += shlex.split(line.split("-m hybridengine.train", 1)[1], comments=True)
    return found


# -- what gets installed ---------------------------------------------------------------------------


def test_every_package_is_listed() -> None:
    on_disk = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "hybridengine").rglob("__init__.py")}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == on_disk | {"hybridengine.conf", "hybridengine.csrc"}


def test_version_is_the_packages() -> None:
    import hybridengine

    assert PROJECT["project"]["version"] == hybridengine.__version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree, so that no build products land in it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("hybridengine", "conf", "csrc"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(target)]
    subprocess.run([*command, str(source)], check=True, cwd=source)
    return next(target.glob("hybridengine-*.whl"))


def test_wheel_has_the_yaml_the_sources_and_the_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    yaml = {f"hybridengine/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.yaml")}
    native = {f"hybridengine/csrc/{path.name}" for path in (ROOT / "csrc").glob("*.[ch]*")}
    data = {"hybridengine/report/template.html", "hybridengine/embedded_model.safetensors"}
    assert data <= names
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "hybridengine").rglob("*.py")}
    assert yaml | native | code <= names, sorted((yaml | native | code) - names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests", "benchmarks", "conf/")) for name in names)


def test_an_installed_wheel_composes_outside_the_clone(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "-q", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, cwd=tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import hybridengine.config.compose as c\n"
        f"assert c.__file__.startswith({str(site)!r}), c.__file__\n"
        f"assert str(c.conf_dir()).startswith({str(site)!r}), c.conf_dir()\n"
        "print(c.build(['+experiment=qwen2_5_7b', 'model.path=m', 'data.train=d.jsonl']).name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "qwen2_5_7b"


# -- launch scripts --------------------------------------------------------------------------------


def test_there_are_launch_scripts_for_eight_gpus() -> None:
    names = {script.name for script in SCRIPTS if script.parent.name == "qwen2_5_7b_8gpu"}
    assert {"fsdp2_vllm_tp2.sh", "fsdp2_vllm_tp4.sh"} <= names


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_launch_script_composes(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    arguments = overrides(script)
    if "-m hybridengine.train" not in script.read_text():
        pytest.skip("does not launch a training")
    assert arguments, f"no overrides found in {script}"
    keys = {name for name, _ in walk()}
    for argument in arguments:
        key = argument.split("=", 1)[0]
        if not key.startswith("+") and "." in key:
            assert key in keys or any(key.startswith(f"{name}.") for name in keys), f"{script}: unknown key {key}"
    build(arguments)


@pytest.mark.parametrize("tp", [2, 4], ids=["tp2", "tp4"])
def test_eight_gpu_scripts_differ_in_overrides_only(tp: int) -> None:
    config = build(overrides(ROOT / "examples" / "qwen2_5_7b_8gpu" / f"fsdp2_vllm_tp{tp}.sh"))
    assert config.rollout.tp == tp
    assert (config.train.engine, config.train.dtype, config.rollout.engine) == ("fsdp", "bfloat16", "vllm")
    assert config.reward.fn == "math"
    sequences = config.data.prompts_per_step * config.rollout.samples_per_prompt
    assert sequences % (8 * config.algorithm.mini_batches) == 0


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_composes(name: str) -> None:
    build([f"+experiment={name}", "model.path=m", "data.train=d.jsonl"])


# -- Makefile and CI -------------------------------------------------------------------------------


def test_bare_make_lists_every_public_target() -> None:
    done = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True)
    targets = "run install install-cuda test test-slow test-gpu bench-peers bench-reshard docs clean help".split()
    assert all(f"make {target} " in done.stdout for target in targets)


def test_make_run_launches_the_quickstart() -> None:
    command = ["make", "-n", "run", "VENV=/nonexistent/venv", "ARGS=seed=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "scripts/install.sh auto /nonexistent/venv" in done.stdout
    assert (
        "OMP_NUM_THREADS=1 /nonexistent/venv/bin/torchrun --standalone --nproc-per-node 2 "
        "-m hybridengine.train +experiment=quickstart seed=2" in done.stdout
    )


def test_ci_runs_the_readmes_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "set -euo pipefail" in script
    assert script.strip().splitlines()[-1] == "make test"
    assert "make test" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("script", sorted(ROOT.glob("scripts/*.sh")), ids=lambda path: path.name)
def test_scripts_are_valid_bash_and_executable(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.stat().st_mode & 0o111


# -- scripts/install.sh ----------------------------------------------------------------------------

FAKE_PYTHON = """#!/usr/bin/env bash
echo "$*" >> "$LOG"
case "$*" in *--dry-run*) exit "$INDEX_LACKS_CPU_BUILD" ;; esac
cat > /dev/null
"""


def installed(tmp_path: Path, *arguments: str, gpu: bool = False, index_lacks_cpu_build: bool = False) -> list[str]:
    """The pip commands that the script runs in a venv whose Python only writes down how it was called."""
    tools = tmp_path / "tools"
    fakes = {tmp_path / "venv/bin/python": FAKE_PYTHON, tools / "nvidia-smi": f"#!/bin/sh\nexit {int(not gpu)}\n"}
    for path, text in fakes.items():
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    log = tmp_path / "log"
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "LOG": str(log),
        "INDEX_LACKS_CPU_BUILD": str(int(index_lacks_cpu_build)),
    }
    script = ROOT / "scripts" / "install.sh"
    command = ["bash", str(script), *(arguments or ("auto",)), str(tmp_path / "venv")]
    subprocess.run(command, env=environment, check=True, stdin=subprocess.DEVNULL)
    lines = [line.removeprefix("-m pip --disable-pip-version-check ") for line in log.read_text().splitlines()]
    return [re.sub(r"--constraint \S+", "--constraint FILE", line) for line in lines if "install" in line]


def test_install_takes_the_cpu_torch_of_the_configured_indexes(tmp_path: Path) -> None:
    assert installed(tmp_path) == [
        "install --quiet --dry-run --no-deps torch==2.13.0+cpu",
        "install torch==2.13.0+cpu",
        "install --constraint FILE --editable .[cpu,megatron,dev]",
        "uninstall --quiet --yes torchvision torchaudio torchcodec",
    ]


def test_install_falls_back_to_pytorchs_cpu_index(tmp_path: Path) -> None:
    commands = installed(tmp_path, index_lacks_cpu_build=True)
    assert commands[1] == "install torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu"


def test_install_takes_the_cuda_set_where_there_is_a_gpu(tmp_path: Path) -> None:
    assert installed(tmp_path, gpu=True)[-1] == "install --constraint FILE --editable .[cuda,megatron,dev]"


def test_constraints_are_of_what_is_required() -> None:
    """Every requirement of the CPU set has its tested version, which the requirement allows."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "scripts" / "constraints-cpu.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    extras = PROJECT["project"]["optional-dependencies"]
    for text in [*PROJECT["project"]["dependencies"], *extras["cpu"], *extras["megatron"], *extras["dev"]]:
        requirement = Requirement(text)
        if requirement.name != "torch":
            assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), text


def test_install_takes_the_tested_versions(tmp_path: Path) -> None:
    script = (ROOT / "scripts" / "install.sh").read_text()
    assert 'cat "scripts/constraints-$variant.txt" >"$constraint"' in script
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/constraints.py"), "cpu", str(tmp_path / "file")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "packages" in done.stdout and "omegaconf==" in (tmp_path / "file").read_text()


def test_install_refuses_an_unknown_set(tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "scripts" / "install.sh"), "rocm", str(tmp_path / "venv")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "'rocm' is not one of cpu, cuda, auto" in done.stderr
    assert not (tmp_path / "venv").exists()


# -- README ----------------------------------------------------------------------------------------


def test_readmes_reward_and_launch_line_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridengine.rewards.load import load_rewards
    from hybridengine.types import Prompt, Trajectory

    text = (ROOT / "README.md").read_text()
    launch, reward = re.search(r"(?s)(torchrun .*?)```", text), re.search(r"(?s)```python\n(.*?)```", text)
    assert launch and reward
    monkeypatch.chdir(tmp_path)
    Path("my_reward.py").write_text(reward[1])
    Path("launch.sh").write_text(launch[1])
    config = build(overrides(Path("launch.sh")))
    assert (config.reward.fn, config.rollout.tp, config.train.dtype) == ("my_reward.py:score", 2, "bfloat16")

    (score,) = load_rewards(config.reward)
    trajectory = Trajectory(
        prompt=Prompt(index=0, token_ids=[1], text="2+2", answer="4"),
        sample_index=0,
        token_ids=[7],
        logprobs=[0.0],
        versions=[0],
        truncated=False,
    )
    assert [score(trajectory, response) for response in ("it is 4", "5")] == [1.0, 0.0]


def test_readmes_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
