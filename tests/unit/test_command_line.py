"""What people type: names of other programs, files of keys, quoting, options; and what the program answers."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridengine.config import Config, walk
from hybridengine.config.arguments import read_arguments
from hybridengine.config.compose import ConfigError, build
from hybridengine.config.equivalents import EQUIVALENTS, NOT_HERE, lookup
from hybridengine.config.overrides import quoted
from hybridengine.config.schema import is_known, sections
from hybridengine.config.suggest import unknown_key

BASE = ["model.path=m", "data.train=d.jsonl", "reward.fn=exact_match"]
LEAVES = [name for name, _ in walk()]


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        given = read_arguments(arguments)
        build(given.overrides, given.config_dirs)
    return str(caught.value)


def composed(*arguments: str) -> Config:
    given = read_arguments(arguments)
    return build(given.overrides, given.config_dirs)


# -- names of other programs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("learning_rate", "train.lr"),
        ("train.learning_rate", "train.lr"),
        ("num_generations", "rollout.samples_per_prompt"),
        ("actor_rollout_ref.rollout.n", "rollout.samples_per_prompt"),
        ("rollout.n", "rollout.samples_per_prompt"),
        ("beta", "algorithm.kl_coef"),
        ("trainer.total_epochs", "epochs"),
        ("data.train_batch_size", "data.prompts_per_step"),
        ("actor_rollout_ref.actor.optim.lr", "train.lr"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload", "memory.offload_weights"),
        ("custom_reward_function.path", "reward.fn"),
        ("max_completion_length", "rollout.max_tokens"),
        ("rollout.temprature", "rollout.temperature"),
        ("lr", "train.lr"),
        ("actor.lrr", "train.lr"),
    ],
)
def test_did_you_mean(typed: str, ours: str) -> None:
    assert f"did you mean {ours!r}" in unknown_key(typed, LEAVES)


@pytest.mark.parametrize("typed", ["foo.bar", "xyz", "quantum.flux", "a"])
def test_nothing_is_suggested_for_what_is_like_nothing(typed: str) -> None:
    assert unknown_key(typed, LEAVES) == f"unknown key {typed!r} (`--help` lists all keys)"


@pytest.mark.parametrize("name", NOT_HERE)
def test_what_is_not_here_says_what_to_do(name: str) -> None:
    match = lookup(f"{name}x" if name.endswith(".") else name)
    assert match is not None and match.ours is None and match.advice == NOT_HERE[name]


def test_every_name_in_the_table_is_known_here() -> None:
    for line in EQUIVALENTS:
        for name in line.ours.split(", "):
            assert name in LEAVES or name in sections(), name
    assert not [name for name in NOT_HERE if is_known(name)]


def test_all_unknown_keys_at_once() -> None:
    text = refused(*BASE, "learning_rate=1e-6", "foo.bar=1", "train={lrr: 3}", "rollout=sglangg")
    lines = text.splitlines()
    assert len(lines) == 4
    assert all(any(name in line for line in lines) for name in ("learning_rate", "foo.bar", "train.lrr", "sglangg"))


# -- quoting -------------------------------------------------------------------------------------------

TEXTS = ["/ckpt/epoch=3", r"Put it into \boxed{}.", "a, b", "it's", 'say "x"', "</answer>", "a\\", "x: y", "[1]", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_a_quoted_text_arrives_as_it_is(text: str) -> None:
    assert build([*BASE, f"data.system_prompt={quoted(text)}"]).data.system_prompt == text


@pytest.mark.parametrize("text", ["/ckpt/epoch=3", r"Put it into \boxed{}.", "</answer>", "a,b"])
def test_how_to_quote_is_said_and_works(text: str) -> None:
    """The advice is a word for the shell: what bash makes of it is read back as the text."""
    message = refused(*BASE, f"data.system_prompt={text}")
    advice = message.rsplit("quotes: ", 1)[1]
    typed = subprocess.run(["bash", "-c", f"printf %s {advice}"], capture_output=True, text=True, check=True).stdout
    assert build([*BASE, typed]).data.system_prompt == text


def test_what_is_no_override() -> None:
    assert "'model.path' is no override; write key=value" in refused(*BASE, "model.path", "/x")


def test_dictionaries_on_the_command_line() -> None:
    config = composed(*BASE, "data.kwargs={min_terms: 2}", "data.chat_template_kwargs.enable_thinking=false")
    assert config.data.kwargs == {"min_terms": 2} and config.data.chat_template_kwargs == {"enable_thinking": False}


def test_texts_and_lists_of_texts() -> None:
    assert composed(*BASE, "rollout.stop='</answer>'").rollout.stop == "</answer>"
    assert composed(*BASE, "rollout.stop=['</a>', x]").rollout.stop == ["</a>", "x"]
    assert composed(*BASE, "data.train=[a.jsonl,b/*.parquet]").data.train == ["a.jsonl", "b/*.parquet"]


# -- options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learning_rate", "1e-6"], "keys are written key=value, without dashes; .*did you mean 'train.lr'"),
        (["--num-generations=8"], "did you mean 'rollout.samples_per_prompt'"),
        (["--train.lr", "3"], "keys are written without dashes: train.lr=3"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml: no such file"),
        (["--config"], "--config: needs a value"),
        (["--config-dir=nowhere"], "--config-dir nowhere: no such directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_are_none(arguments: list[str], message: str) -> None:
    import re

    assert re.search(message, refused(*arguments))


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_flags_that_only_show(flag: str) -> None:
    done = subprocess.run([sys.executable, "-m", "hybridengine.train", flag], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("hybridengine")


def test_cfg_shows_the_composed_configuration(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train: {lr: 0.5}\n")
    command = [
        sys.executable,
        "-m",
        "hybridengine.train",
        "--cfg",
        "job",
        "--config",
        str(tmp_path / "run.yaml"),
        *BASE,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "lr: 0.5" in done.stdout and "train: d.jsonl" in done.stdout


# -- files of keys -------------------------------------------------------------------------------------

RUN = r"""
model: {path: /ckpt/epoch=3}
train: fsdp_bf16
rollout:
  tp: 2
  stop: ["</answer>"]
data.train: d.jsonl
data:
  system_prompt: 'Put it into \boxed{}.'
  kwargs: {a: 1}
reward:
  terms:
    right: {fn: math, weight: 2.0}
"""


@pytest.fixture
def run_yaml(tmp_path: Path) -> str:
    (tmp_path / "run.yaml").write_text(RUN)
    return str(tmp_path / "run.yaml")


def test_a_file_of_keys(run_yaml: str) -> None:
    config = composed("--config", run_yaml)
    assert config.model.path == "/ckpt/epoch=3" and config.data.system_prompt == r"Put it into \boxed{}."
    assert (config.train.dtype, config.train.activation_checkpointing, config.rollout.tp) == ("bfloat16", True, 2)
    assert config.data.kwargs == {"a": 1} and config.reward.terms["right"].weight == 2.0
    assert config.rollout.stop == ["</answer>"]


def test_the_command_line_comes_after_the_file(run_yaml: str) -> None:
    config = composed("rollout.tp=4", "--config", run_yaml, "train=megatron", "data.kwargs.b=2")
    assert (config.rollout.tp, config.train.engine, config.train.dtype) == (4, "megatron", "float32")
    assert config.data.kwargs == {"a": 1, "b": 2}


def test_later_files_come_after_earlier_ones(run_yaml: str, tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("rollout: {tp: 8}\nexperiment: quickstart\n")
    config = composed("--config", run_yaml, "--config", str(tmp_path / "more.yaml"))
    assert (config.rollout.tp, config.name, config.steps) == (8, "quickstart", 40)


def test_the_config_json_of_an_earlier_run(tmp_path: Path) -> None:
    """Composed again it is the same, and the command line can still change it, a group's option included."""
    first = composed(
        "+experiment=smollm2", 'model.path="/m/x=1"', "reward.fn=null", "reward.terms.a.fn=math",
        "rollout.stop=['</a>']", "data.system_prompt=\"it's {x}\"",
    )  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dataclasses.asdict(first)))
    assert composed("--config", str(path)) == first
    other = composed("--config", str(path), "rollout=sglang", "train.lr=1")
    assert other == dataclasses.replace(
        first,
        rollout=dataclasses.replace(first.rollout, engine="sglang"),
        train=dataclasses.replace(first.train, lr=1.0),
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("train: {lrr: 1}\nfoo: 2\n", "run.yaml: unknown key 'train.lrr'; did you mean 'train.lr'"),
        ("train: fsdpp\n", "run.yaml: train=fsdpp: no such choice"),
        ("[1, 2]\n", "run.yaml: holds a list, expected keys"),
        ("a: [\n", "run.yaml: can't be read"),
        ("defaults: [train]\n", "run.yaml: defaults: name a group's option as a key"),
        ("trainer: {total_epochs: 3}\n", "did you mean 'epochs'"),
    ],
    ids=["unknown", "choice", "list", "broken", "defaults", "verl"],
)
def test_wrong_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(content)
    text = refused(*BASE, "--config", str(tmp_path / "run.yaml"))
    assert message in text
    if "foo" in content:
        assert len(text.splitlines()) == 2


def test_an_experiment_goes_into_the_file(run_yaml: str) -> None:
    assert "as experiment: quickstart" in refused("--config", run_yaml, "+experiment=quickstart")


@pytest.mark.parametrize("way", ["--config-dir", "hydra.searchpath"])
def test_groups_of_the_user_s_own(tmp_path: Path, way: str) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nname: mine\ntrain: {lr: 0.25}\n")
    where = ["--config-dir", str(tmp_path)] if way == "--config-dir" else [f"hydra.searchpath=[file://{tmp_path}]"]
    config = composed(*BASE, *where, "experiment=mine")
    assert (config.name, config.train.lr) == ("mine", 0.25)
    assert "experiment=mine: no such choice; experiment can be code | quickstart" in refused(*BASE, "experiment=mine")


def test_an_unknown_key_in_a_group_of_the_user_s_own(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrain: {learning_rate: 0.25}\n")
    text = refused(*BASE, "--config-dir", str(tmp_path), "experiment=mine")
    assert text == "experiment/mine: unknown key 'train.learning_rate'; did you mean 'train.lr' (TRL's learning_rate)?"


def test_the_default_engine_missing_is_refused_with_two_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from hybridengine.distributed.world import World
    from hybridengine.validate.here import check_here

    found: Any = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else found(name, *rest))
    (text,) = check_here(build(BASE), World())
    assert "rollout.engine=vllm: vLLM is not installed; pip install 'hybridengine[cpu]'" in text
    assert text.endswith("or use rollout=transformers")
    assert list(check_here(build([*BASE, "rollout=transformers"]), World())) == []


@pytest.mark.parametrize(
    ("environment", "netrc", "ready"),
    [
        ({}, "", False),
        ({"WANDB_MODE": "offline"}, "", True),
        ({"WANDB_API_KEY": "k"}, "", True),
        ({}, "machine api.wandb.ai login user password k", True),
        ({"WANDB_BASE_URL": "https://wandb.example"}, "machine api.wandb.ai login user password k", False),
    ],
    ids=["nobody", "offline", "key", "logged-in", "logged-in-elsewhere"],
)
def test_weights_and_biases_without_a_key_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: dict[str, str], netrc: str, ready: bool
) -> None:
    pytest.importorskip("wandb", reason="needs wandb: pip install wandb")
    from hybridengine.distributed.world import World
    from hybridengine.validate.here import check_here

    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "netrc").write_text(netrc)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    problems = list(check_here(build([*BASE, "logging.wandb_project=p"]), World()))
    assert (problems == []) == ready
    assert ready or "`wandb login` first, or set WANDB_MODE=offline" in problems[0]
