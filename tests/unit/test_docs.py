"""The documentation: every command in it is one that works, quoting included; every link leads somewhere."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from hybridengine.cli import COMMANDS, split_options
from hybridengine.config.arguments import read_arguments
from hybridengine.config.compose import build
from hybridengine.config.overrides import check_overrides
from hybridengine.config.schema import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/*/README.md"))]

#: Programs of ours, and what starts them. Each is replaced by a stand-in that writes its arguments down.
PROGRAMS = ("torchrun", "python", "python3", "hybridengine", "make", "git", "tensorboard", "pip", "eval")
STAND_IN = """#!{python}
import json, os, sys
with open(os.environ["COMMANDS"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
if "prepare.py" in " ".join(sys.argv):
    print("/models/SmolLM2")
"""
INLINE = re.compile(r"`((?:(?:make|torchrun|hybridengine|python -m|for s in)\s|examples/\S+\.sh)[^`]*)`")
#: How a block of commands begins.
FIRST = re.compile(
    r"(#.*\n)*\s*((make|torchrun|hybridengine|python|git|export|tensorboard|for)\s|make$|examples/|\.venv/bin/)"
)


def blocks(page: Path) -> list[str]:
    """Shell commands of a page: fenced blocks, indented blocks, and those within the text."""
    text = page.read_text()
    fenced = re.findall(r"(?m)^```(?:bash|sh|shell)?\n((?:(?!^```).*\n)*?)^```$", text)
    rest = re.sub(r"(?ms)^```.*?^```$", "", text)
    indented = ["\n".join(line.strip() for line in b.splitlines()) for b in re.findall(r"(?m)(?:^ {4}\S.*\n)+", rest)]
    found = [*fenced, *indented, *(re.sub(r"\s+", " ", inline) for inline in INLINE.findall(rest))]
    return [block for block in found if FIRST.match(block)]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory like a clone, with stand-ins for the programs."""
    place = tmp_path_factory.mktemp("clone")
    for directory in ("bin", ".venv/bin"):
        (place / directory).mkdir(parents=True)
        for name in PROGRAMS:
            stand_in = place / directory / name
            stand_in.write_text(STAND_IN.format(python=sys.executable))
            stand_in.chmod(0o755)
    (place / "examples").symlink_to(ROOT / "examples")
    return place


def typed(shell: Path, text: str) -> list[list[str]]:
    """What the programs get when a person types ``text`` into bash."""
    log = shell / "log"
    log.unlink(missing_ok=True)
    environment = {"PATH": f"{shell / 'bin'}:/usr/bin:/bin", "COMMANDS": str(log), "HOME": str(shell)}
    done = subprocess.run(["bash", "-c", text], cwd=shell, env=environment, capture_output=True, text=True, timeout=60)
    assert "syntax error" not in done.stderr and "unexpected" not in done.stderr, f"{text}\n{done.stderr}"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@functools.cache
def help_of(module: str) -> str:
    """What ``python -m module --help`` prints; in this process, which has torch imported already."""
    name, *rest = module.split()
    before, shown = sys.argv, io.StringIO()
    sys.argv = [name, *rest, "--help"]
    try:
        with contextlib.redirect_stdout(shown), warnings.catch_warnings(), contextlib.suppress(SystemExit):
            warnings.filterwarnings("ignore", ".*found in sys.modules after import of package", RuntimeWarning)
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = before
    return shown.getvalue()


def check(command: list[str]) -> None:
    """Raise where a command would not be understood."""
    program, *arguments = command
    arguments = [argument for argument in arguments if argument != "..."]
    if program == "make":
        check_make(arguments)
    elif program == "hybridengine":
        name = arguments[0] if arguments else ""
        assert name in (*COMMANDS, "completion", "--version"), command
        rest = arguments[1:]
        if name in COMMANDS:
            check_module(COMMANDS[name].module, split_options(rest)[1] if COMMANDS[name].launched else rest)
    elif "-m" in arguments and program in ("torchrun", "python", "python3"):
        start = arguments.index("-m")
        module = arguments[start + 1]
        if module == "torch.distributed.run":
            return check(["torchrun", *arguments[start + 2 :]])
        check_module(module, arguments[start + 2 :])
    elif program in ("python", "python3"):
        assert (ROOT / arguments[0]).is_file(), command


def check_make(arguments: list[str]) -> None:
    targets = [argument for argument in arguments if "=" not in argument]
    rules = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    assert set(targets) <= rules, arguments
    keys = [a.removeprefix("ARGS=").split() for a in arguments if a.startswith("ARGS=")]
    if targets == ["run"] and keys:
        build(["+experiment=quickstart", *keys[0]])


def check_module(module: str, arguments: list[str]) -> None:
    if module == "hybridengine.train":
        check_training(arguments)
        return
    if arguments[:1] == ["memory"] and module == "hybridengine.doctor":
        module, arguments = "hybridengine.doctor memory", arguments[1:]
    elif module.endswith(".bill_table"):
        assert len(arguments) == 1 and (ROOT / arguments[0]).is_dir()
        return
    shown = help_of(module)
    for argument in arguments:
        if argument.startswith("--"):
            assert argument.split("=")[0] in shown, f"{module} has no option {argument}"
    if module in ("hybridengine.evaluate", "hybridengine.doctor memory", "hybridengine.compare"):
        check_overrides([a for a in arguments if re.match(r"\+?[a-z_.]+=", a)])


def check_training(arguments: list[str]) -> None:
    """Composes; only what the page leaves out may be missing. Files of keys stand for themselves."""
    if any(argument.startswith("--config") or argument in ("--help", "--version") for argument in arguments):
        pairs = zip(arguments, arguments[1:], strict=False)
        files = {value for name, value in pairs if name.startswith("--config")}
        keys = [a for a in arguments if not a.startswith("--") and a not in files and a != "experiment=mine"]
        return check_overrides(keys)
    given = read_arguments(arguments)
    try:
        build(given.overrides)
    except ConfigError as error:
        if not str(error).startswith("these keys need a value"):
            raise


def commands() -> list[tuple[str, str]]:
    return [(str(page.relative_to(ROOT)), block) for page in PAGES for block in blocks(page)]


@pytest.mark.parametrize(("page", "block"), commands(), ids=[f"{page}-{i}" for i, (page, _) in enumerate(commands())])
def test_every_command_works_as_printed(shell: Path, page: str, block: str) -> None:
    found = typed(shell, block)
    for command in found:
        check(command)
    quoted_only = re.fullmatch(r"(export .*\n?|source .*\n?)+", block)
    assert found or quoted_only, f"{page}: nothing is run by\n{block}"


def test_commands_are_found() -> None:
    """A page whose commands stopped being recognised would pass."""
    by_page = [page for page, _ in commands()]
    for page, least in {"README.md": 4, "docs/training.md": 8, "docs/faq.md": 5, "docs/data.md": 3}.items():
        assert by_page.count(page) >= least, page


@pytest.mark.parametrize(
    "command",
    [
        "hybridengine train beta=1",
        "hybridengine train data.system_prompt=Put_it_into_\\boxed{}.",
        "hybridengine trian",
        "make nothing",
        "hybridengine export outputs/run --outt x",
        "make run ARGS=stepss=2",
    ],
)
def test_wrong_commands_are_noticed(shell: Path, command: str) -> None:
    with pytest.raises((ConfigError, AssertionError)):
        for words in typed(shell, command):
            check(words)


def test_the_file_of_keys_in_the_documentation_composes(tmp_path: Path) -> None:
    (example,) = re.findall(r"(?s)```yaml\n(# run.yaml.*?)```", (ROOT / "docs" / "training.md").read_text())
    (tmp_path / "run.yaml").write_text(example)
    given = read_arguments(["--config", str(tmp_path / "run.yaml")])
    config = build(given.overrides)
    assert config.rollout.tp == 4 and config.data.system_prompt == "Put the final answer into \\boxed{}."


def test_the_functions_in_the_documentation_are_rewards(tmp_path: Path) -> None:
    from hybridengine.config import RewardConfig
    from hybridengine.rewards.load import load_rewards

    for i, code in enumerate(re.findall(r"(?s)```python\n(.*?)```", (ROOT / "docs" / "faq.md").read_text())):
        (tmp_path / f"reward{i}.py").write_text(code)
        load_rewards(RewardConfig(fn=f"{tmp_path / f'reward{i}.py'}:score"))


# -- links -----------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    heads = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?^```$", "", page.read_text()))
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head) for head in heads]
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text())
    for link in re.findall(r"(?<!!)\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)", text):
        target = link[0] or link[1]
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.relative_to(ROOT)}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.relative_to(ROOT)}: {target}"


def test_every_page_is_in_the_site() -> None:
    listed = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")} <= listed


def test_the_site_is_built_with_strict_links(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs mkdocs-material: pip install 'hybridengine[dev]'")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    assert "mkdocs build --strict" in (ROOT / "Makefile").read_text()
    for broken in ("", "\n[to nowhere](nowhere.md)\n", "\n[to no heading](training.md#nothing)\n"):
        (tmp_path / "docs" / "faq.md").write_text((ROOT / "docs" / "faq.md").read_text() + broken)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=120)
        assert (done.returncode == 0) == (not broken), done.stdout + done.stderr
    assert (tmp_path / "site" / "faq" / "index.html").is_file()
