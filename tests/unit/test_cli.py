"""The console command: subcommands, launching, tab completion."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hybridengine.cli import COMMANDS, complete_key, main, split_options

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hybridengine.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment, timeout=120)


def test_the_command_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"hybridengine": "hybridengine.cli:main"}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules after import of package:RuntimeWarning")
def test_every_subcommand_says_what_it_takes(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)  # the command sets it
    assert main([name, "--help"]) == 0
    assert "hybridengine" in capsys.readouterr().out


def test_help_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and "train a model" in capsys.readouterr().out
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"    {name}" in shown for name in COMMANDS)
    assert main(["--version"]) == 0 and capsys.readouterr().out.startswith("hybridengine ")
    with pytest.raises(SystemExit) as caught:
        main(["trian"])
    assert caught.value.code == 2 and "no such command: trian; there are train" in capsys.readouterr().err


def test_a_wrong_key_is_refused_before_processes_start() -> None:
    done = run("train", "--nproc-per-node", "8", "beta=1")
    assert done.returncode == 2
    assert done.stderr == "hybridengine: unknown key 'beta'; did you mean 'algorithm.kl_coef' (TRL's name for it)?\n"


@pytest.mark.parametrize(
    ("arguments", "options", "rest"),
    [
        (["--nproc-per-node", "8", "train.lr=1"], {"--nproc-per-node": "8"}, ["train.lr=1"]),
        (["a=1", "--nproc_per_node=2", "--config", "f"], {"--nproc-per-node": "2"}, ["a=1", "--config", "f"]),
        (["--rdzv-endpoint=h:29", "--nnodes=2"], {"--rdzv-endpoint": "h:29", "--nnodes": "2"}, []),
        (["data.system_prompt=--nnodes"], {}, ["data.system_prompt=--nnodes"]),
    ],
    ids=["value-after", "underscores", "two-nodes", "inside-a-value"],
)
def test_options_of_the_launcher(arguments: list[str], options: dict[str, str], rest: list[str]) -> None:
    assert split_options(arguments) == (options, rest)


def test_an_option_of_the_launcher_needs_a_value() -> None:
    with pytest.raises(SystemExit, match="--nnodes needs a value"):
        split_options(["--nnodes"])


PROGRAM = """
import json, os, sys, time
rank = int(os.environ["RANK"])
if rank == 1:
    time.sleep(1)
if sys.argv[1:] == ["fail"]:
    from hybridengine.failure import report
    from hybridengine.config.schema import ConfigError
    sys.exit(report(ConfigError("seed=-1: must be 0 or more"), rank))
if sys.argv[1:] == ["killed"] and rank == 0:
    os.kill(os.getpid(), 9)
print(f"rank {rank} of {os.environ['WORLD_SIZE']}")
"""


@pytest.mark.parametrize(
    ("word", "status", "last"),
    [
        ("work", 0, ""),
        ("fail", 2, "hybridengine: seed=-1: must be 0 or more"),
        ("killed", 137, "rank 0 was ended by SIGKILL"),
    ],
)
def test_processes_are_started_and_their_status_passed_on(tmp_path: Path, word: str, status: int, last: str) -> None:
    """Real torchrun processes of a small program; one message, which is the last line."""
    (tmp_path / "program.py").write_text(PROGRAM)
    code = (
        "import sys; from hybridengine.cli import torchrun; "
        f"sys.exit(torchrun('program', [{word!r}], {{'--nproc-per-node': '2'}}))"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120
    )
    assert done.returncode == status, done.stderr
    if word == "work":
        assert sorted(done.stdout.split("\n"))[1:] == ["rank 0 of 2", "rank 1 of 2"]
    else:
        assert last in done.stderr.strip().splitlines()[-1] and "Traceback" not in done.stderr
        assert done.stderr.count(last) == 1


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("rollout.samples", ["rollout.samples_per_prompt="]),
        ("algorithm.kl_in=", ["algorithm.kl_in=loss", "algorithm.kl_in=reward"]),
        ("sync.verify=t", ["sync.verify=true"]),
        ("rollout=v", ["rollout=vllm"]),
        ("+experiment=q", ["+experiment=quickstart", "+experiment=qwen2_5_7b"]),
        ("nothing.like=", []),
    ],
)
def test_what_a_key_is_completed_to(prefix: str, expected: list[str]) -> None:
    found = complete_key(prefix)
    assert sorted(found) == sorted(expected)


def test_files_are_completed_where_a_key_takes_any_text(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "traces").mkdir()
    assert complete_key(f"data.train={tmp_path}/tra") == [
        f"data.train={tmp_path}/traces/", f"data.train={tmp_path}/train.jsonl",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hybridengine tr", {"train"}),
        ("hybridengine train algorithm.old", {"algorithm.old_logprobs="}),
        ("hybridengine train algorithm.old_logprobs=re", {"algorithm.old_logprobs=recompute"}),
        ("hybridengine completion ", {"bash", "zsh", "fish"}),
    ],
)
def test_tab_completion_as_bash_asks_for_it(tmp_path: Path, line: str, expected: set[str]) -> None:
    """The shell's side of argcomplete's protocol: the line in the environment, the answers on descriptor 8."""
    environment = os.environ | {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n", "COMP_LINE": line,
        "COMP_POINT": str(len(line)), "_ARGCOMPLETE_SUPPRESS_SPACE": "1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    answers = tmp_path / "answers"
    shell = f'exec 8>"{answers}" 9>/dev/null; "{sys.executable}" -m hybridengine.cli'
    subprocess.run(["bash", "-c", shell], env=environment, check=False, capture_output=True, timeout=60, cwd=tmp_path)
    assert {answer.strip() for answer in answers.read_text().split("\n") if answer.strip()} == expected


def test_the_shell_code_for_completion() -> None:
    done = run("completion", "bash")
    assert done.returncode == 0 and "complete" in done.stdout and "hybridengine" in done.stdout
    assert run("completion", "tcsh").returncode == 2
