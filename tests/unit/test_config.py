"""The command line: types, unknown keys, contradictions; every YAML composes."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from hybridengine.config import Config, explanation, limits_of, walk
from hybridengine.config.compose import ConfigError, build, conf_dir, config_groups
from hybridengine.config.help import help_text
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.vllm.traits import CPU_HEAD_SIZES
from hybridengine.sync.plan.naming.vllm import VOCAB_MULTIPLE
from hybridengine.sync.transfer.registry import TRANSFERS
from hybridengine.validate.contradictions import validate
from hybridengine.validate.model import check_shape
from hybridengine.validate.values import check_values, value_of
from tests.tiny import make_tiny

BASE = ["data.train=d.jsonl", "reward.fn=exact_match"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("model"), "qwen2", max_position_embeddings=4096, head_dim=32))


@pytest.fixture(scope="module")
def composed() -> Config:
    return build(["model.path=m", *BASE])


def set_value(config: Config, path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    setattr(value_of(config, ".".join(parents)) if parents else config, leaf, value)


def problems(overrides: list[str], *, ranks: int = 4) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(build(overrides), World(size=ranks, local_size=ranks))
    return str(caught.value)


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "'1e-6'", "0.000001"])
def test_every_way_to_write_a_float(text: str) -> None:
    assert build(["model.path=m", *BASE, f"train.lr={text}"]).train.lr == 1e-6


@pytest.mark.parametrize("prefix", ["", "+", "++", "~"])
def test_unknown_key_is_refused_with_its_path_and_the_nearest(prefix: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'actor\.lrr'; did you mean 'train\.lr'"):
        build(["model.path=m", *BASE, f"{prefix}actor.lrr=3"])


def test_unknown_key_inside_a_value_and_a_group() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'train\.lrr'"):
        build(["model.path=m", *BASE, "train={lrr: 3}"])
    with pytest.raises(ConfigError, match=r"rollout=sglangg: no such choice; rollout can be"):
        build(["model.path=m", *BASE, "rollout=sglangg"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sync=pull", "sync=pull: sync is a group of keys; did you mean sync.method=pull?"),
        ("+sync=pull", "sync=pull: sync is a group of keys; did you mean sync.method=pull?"),
        ("memory=false", "memory=false: memory is a group of keys; did you mean memory.offload_optimizer=false?"),
        ("rollout.validation=4", "rollout.validation is a group of keys; did you mean rollout.validation.n=4?"),
        ("train=3", "train=3: no such choice; train can be fsdp | fsdp_bf16 | megatron"),
        ("rollout=null", "rollout=null: no such choice; rollout can be"),
        ("train=fsdp,megatron", "train=fsdp,megatron: a run takes one value"),
    ],
)
def test_a_value_for_a_whole_group(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(["model.path=m", *BASE, override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sync.verify=perhaps", "sync.verify=perhaps: must be true | false"),
        ("sync={verify: perhaps}", "sync.verify=perhaps: must be true | false"),
        ("memory.offload_optimizer=3", "memory.offload_optimizer=3: must be true | false"),
        ("train.reshard_after_forward=2", "train.reshard_after_forward=2: must be true | false | null"),
    ],
)
def test_what_is_neither_true_nor_false(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(["model.path=m", *BASE, override])
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["false", "False", "off", "no", "0"])
def test_ways_to_write_false(text: str) -> None:
    assert build(["model.path=m", *BASE, f"sync.verify={text}"]).sync.verify is False


@pytest.mark.parametrize("text", ["false", "False", "'false'"])
def test_chat_can_be_switched_off_as_one_would_write_it(text: str) -> None:
    assert build(["model.path=m", *BASE, f"data.chat={text}"]).data.chat == "false"


def test_wrong_type_and_missing_values_name_the_key() -> None:
    with pytest.raises(ConfigError, match=r"train\.lr: .*'abc'"):
        build(["model.path=m", *BASE, "train.lr=abc"])
    with pytest.raises(ConfigError, match=r"model\.path: Hugging Face"):
        build(BASE)


def test_dictionaries_take_new_entries_without_plus() -> None:
    config = build(["model.path=m", "data.train=d", "reward.terms.a.fn=math", "rollout.engine_kwargs.seed=3"])
    assert config.reward.terms["a"].fn == "math" and config.reward.terms["a"].weight == 1.0
    assert config.rollout.engine_kwargs == {"seed": 3}
    config = build(["+experiment=smollm2", "model.path=m", "data.kwargs={min_terms: 3}"])
    assert config.data.kwargs == {"min_terms": 3, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    with pytest.raises(ConfigError, match="unknown key 'reward.terms.a.fun'"):
        build(["model.path=m", "data.train=d", "reward.terms.a.fun=math"])


@pytest.mark.parametrize("name", [f"{g}={o}" for g, options in config_groups().items() for o in options])
def test_every_yaml_composes(name: str) -> None:
    prefix = "+" if name.startswith("experiment=") else ""
    build([f"{prefix}{name}", "model.path=m", *BASE])


def test_schema_is_small_and_explained() -> None:
    leaves = walk()
    assert len(leaves) < 200
    assert all(item.metadata["help"] for _, item in leaves)
    text = help_text()
    assert all(f"{name}=" in text and explanation(item) in text for name, item in leaves)
    assert (conf_dir() / "config.yaml").is_file()


def test_choices_are_the_names_that_the_program_knows() -> None:
    choices = {name: set(limits_of(item).choices) for name, item in walk()}
    assert choices["sync.method"] == {"auto", *TRANSFERS}
    groups = config_groups()
    assert choices["schedule.name"] == set(groups["schedule"]) and choices["placement.name"] == set(groups["placement"])


def test_defaults_lie_within_their_limits() -> None:
    assert list(check_values(build(["model.path=m", *BASE]))) == []


NUMBERS = [
    (name, item)
    for name, item in walk()
    if str(item.type).split(" ")[0] in ("int", "float") and not limits_of(item).choices
]


@pytest.mark.parametrize(("name", "item"), NUMBERS, ids=[name for name, _ in NUMBERS])
def test_every_number_is_finite_and_within_its_limits(composed: Config, name: str, item: Any) -> None:
    """Out of each bound by one, and, for a float, NaN and infinities; the bound itself where it is allowed."""
    config = copy.deepcopy(composed)
    limits, kind = limits_of(item), str(item.type).split(" ")[0]
    below = limits.gt if limits.gt is not None else limits.ge - 1 if limits.ge is not None else None
    above = limits.lt if limits.lt is not None else limits.le + 1 if limits.le is not None else None
    special = [math.nan, math.inf, -math.inf] if kind == "float" else []
    for value in [value for value in (below, above, *special) if value is not None]:
        set_value(config, name, value)
        (problem,) = check_values(config)
        assert problem.startswith(f"{name}={value}: must be ")
    for value in [value for value in (limits.ge, limits.le) if value is not None]:
        set_value(config, name, value)
        assert list(check_values(config)) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.engine_kwargs={a: [1, nan]}", "must hold finite numbers only"),
        ("reward.terms.a.weight=nan", "reward.terms.a.weight=nan: must be a finite number"),
        ("reward.kwargs.bound=inf", ""),
    ],
    ids=["inside-a-dictionary", "weight-of-a-term", "a-function's-own-argument"],
)
def test_numbers_that_are_none(override: str, message: str) -> None:
    """``reward.kwargs`` go to the user's function as they are."""
    found = list(check_values(build(["model.path=m", *BASE, "reward.terms.a.fn=math", override])))
    assert message in found[0] if message else not found


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.tp=3", "rollout.tp=3: must divide the world size 4"),
        ("rollout.samples_per_prompt=1", "rollout.samples_per_prompt=1: algorithm.advantage=group_std"),
        ("algorithm.mini_batches=3", "algorithm.mini_batches=3: must divide data.prompts_per_step=64"),
        ("data.prompts_per_step=2", "data.prompts_per_step=2: fewer prompts than the 4 rollout replicas"),
        ("train.dtype=fp8", "train.dtype=fp8: must be one of float32 | bfloat16"),
        ("train.lr=-1", "train.lr=-1.0: must be greater than 0"),
        ("rollout.top_p=0", "rollout.top_p=0.0: must be in (0, 1]"),
        ("train.max_tokens_per_micro_batch=100", "train.max_tokens_per_micro_batch=100: one sequence can have"),
        ("rollout.max_model_len=8", "rollout.max_model_len=8: shorter than"),
        ("rollout.validation.n=4", "rollout.validation.n=4: greedy samples are all equal"),
        ("algorithm.clip_dual=0.5", "algorithm.clip_dual=0.5: must be above 1"),
        ("reward.fn=null", "reward.fn=null: no reward"),
        ("rollout.max_tokens=100000", "the model's context is"),
        ("schedule=async", "schedule.name=async: generates while it trains"),
        ("schedule.staleness=-1", "schedule.staleness=-1: must be 0 or more"),
        ("schedule.over_provision=nan", "schedule.over_provision=nan: must be 1 or more"),
        ("train.max_grad_norm=inf", "train.max_grad_norm=inf: must be a finite number"),
        ("steps=0", "steps=0: must be greater than 0, or null"),
        ("schedule.over_provision=0.5", "schedule.over_provision=0.5: must be 1 or more"),
        ("sync.method=delta", "sync.method=delta: between pools of ranks"),
        ("memory.offload_dir=/nowhere", "memory.offload_dir=/nowhere: no such directory"),
        ("memory.offload_dir=/dev/shm", "memory.offload_dir=/dev/shm: that is memory itself"),
        ("memory.offload_dir=/proc", "memory.offload_dir=/proc: files can't be made there ("),
        ("rollout.gpu_memory_utilization=1.5", "rollout.gpu_memory_utilization=1.5: must be in (0, 1]"),
        ("train.lr=nan", "train.lr=nan: must be greater than 0"),
    ],
)
def test_contradictions_are_named(model: str, override: str, message: str) -> None:
    assert message in problems([f"model.path={model}", *BASE, override])


def test_a_warm_up_that_never_ends(model: str) -> None:
    overrides = [f"model.path={model}", *BASE, "steps=20", "algorithm.epochs=2", "algorithm.mini_batches=4"]
    validate(build([*overrides, "train.warmup_steps=160"]), World())
    with pytest.raises(ConfigError, match=r"train.warmup_steps=161: the run has 160 optimizer steps \(20 rollouts × "):
        validate(build([*overrides, "train.warmup_steps=161"]), World())


def test_an_environment_variable_that_is_not_set() -> None:
    with pytest.raises(ConfigError, match="^output_dir: .*Environment variable 'HYBRIDENGINE_NOT_SET' not found"):
        build(["model.path=m", *BASE, "output_dir=${oc.env:HYBRIDENGINE_NOT_SET}"])


@pytest.mark.parametrize("override", ["algorithm.correction=tis", "schedule=partial"])
def test_truncated_sampling_and_ratios(model: str, override: str) -> None:
    text = problems([f"model.path={model}", *BASE, "rollout.top_p=0.9", override])
    assert "rollout.top_p=0.9: the trainer scores the full distribution" in text


@pytest.mark.parametrize(
    ("overrides", "ranks", "message"),
    [
        (["placement.rollout_ranks=4"], 4, "placement.rollout_ranks=4: must leave ranks for training, 1 to 3 of 4"),
        ([], 1, "start the job with torchrun --nproc-per-node 2 or more"),
        (["placement.rollout_ranks=2", "rollout.tp=4"], 8, "rollout.tp=4: must divide placement.rollout_ranks = 2"),
        (["sync.method=gather"], 4, "sync.method=gather: colocated only"),
        (["train.shard_order=rank"], 4, "train.shard_order=rank: shards can't nest"),
    ],
)
def test_two_pools_that_cannot_be(model: str, overrides: list[str], ranks: int, message: str) -> None:
    text = problems([f"model.path={model}", *BASE, "placement=disaggregated", *overrides], ranks=ranks)
    assert message in text


def test_a_directory_that_gpus_would_offload_to(model: str, tmp_path: Path) -> None:
    """Refused by what the job would run on; no GPU is asked."""
    gpus = World(size=2, local_size=2, device=torch.device("cuda", 0))
    with pytest.raises(ConfigError, match=f"memory.offload_dir={tmp_path}: for CPU runs"):
        validate(build([f"model.path={model}", *BASE, f"memory.offload_dir={tmp_path}"]), gpus)


def test_heads_against_tp(model: str) -> None:
    assert "rollout.tp=8: must divide the model's" in problems([f"model.path={model}", *BASE, "rollout.tp=8"], ranks=8)


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [({}, True), ({"vocab_size": 129}, True), ({"vocab_size": 128}, False), ({"intermediate_size": 1024}, False)],
)
def test_vocabulary_and_mlp_against_tp(tmp_path: Path, sizes: dict[str, int], fits: bool) -> None:
    """Engines pad the vocabulary to a multiple of 64, whatever divides it: 129 becomes 192 and 128 stays."""
    shape = {"vocab_size": 192, "intermediate_size": 1536, "hidden_size": 576, "num_attention_heads": 9,
             "num_key_value_heads": 3}  # fmt: skip
    config = build([f"model.path={tmp_path}", *BASE, "rollout.tp=3", "data.prompts_per_step=3"])
    found = "\n".join(check_shape(config, World(size=3), LlamaConfig(**(shape | sizes))))
    assert ("rollout.tp=3: must divide the model's 9" in found) != fits, found


def test_missing_and_unreadable_models(tmp_path: Path) -> None:
    assert "model.path=/nowhere: no such directory" in problems(["model.path=/nowhere", *BASE])
    (tmp_path / "config.json").write_text('{"hidden_size": ')
    assert f"model.path={tmp_path}: its config.json can't be read" in problems([f"model.path={tmp_path}", *BASE])


GPUS = World(size=4, local_size=4, device=torch.device("cuda", 0))
AWAKE = ["rollout.sleep_level=0", "memory.offload_weights=false"]
APART = ["placement=disaggregated", "placement.rollout_ranks=2"]
SEPARATE = ["rollout.process=separate", "rollout.sleep_level=0"]


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("overrides", "ways_out"),
    [
        ([], "rollout.sleep_level=0"),
        ([*AWAKE, "sync.method=pull"], "sync.method=collective"),
        ([*APART, "sync.method=pull"], "sync.method=broadcast"),
        (SEPARATE, "rollout.process=same"),
        ([*APART, "rollout.process=separate"], "rollout.process=same"),
        (["rollout=sglang", "rollout.sleep_level=0"], "rollout=vllm"),
        (["memory.offload_weights=false", "sync.method=pull"], "rollout.sleep_level=0 sync.method=collective"),
    ],
    ids=["sleep", "pull", "pull-apart", "separate", "separate-apart", "sglang", "both"],
)
def test_expandable_segments_where_gpu_memory_sleeps_or_is_exported(
    model: str, monkeypatch: pytest.MonkeyPatch, name: str, overrides: list[str], ways_out: str
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments: True")
    monkeypatch.setenv("HYBRIDENGINE_SGLANG_PYTHON", sys.executable)
    with pytest.raises(ConfigError) as caught:
        validate(build([f"model.path={model}", *BASE, *overrides]), GPUS)
    assert str(caught.value).startswith(f"{name}=max_split_size_mb:64,expandable_segments: True: expandable segments")
    assert str(caught.value).endswith(f"unset it or set {ways_out}")


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        (["sync.method=pull"], World(size=4, local_size=4)),
        ([*AWAKE, "sync.method=collective"], GPUS),
        (APART, GPUS),
        (["rollout=transformers"], GPUS),
        (["rollout.sleep_level=0", "sync.method=pull"], World(device=torch.device("cuda", 0))),
    ],
    ids=["cpu", "awake", "apart", "transformers", "one-gpu"],
)
def test_expandable_segments_are_otherwise_the_user_s_business(
    model: str, monkeypatch: pytest.MonkeyPatch, overrides: list[str], world: World
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    validate(build([f"model.path={model}", *BASE, *overrides]), world)


@pytest.mark.parametrize(
    ("overrides", "instead"), [([], "collective"), (APART, "broadcast")], ids=["colocated", "apart"]
)
def test_pull_over_several_nodes(model: str, overrides: list[str], instead: str) -> None:
    """Ranks map each other's memory: refused by what the launcher says, before engines start."""
    config = build([f"model.path={model}", *BASE, "sync.method=pull", *overrides])
    validate(config, World(size=4, local_size=4))
    with pytest.raises(ConfigError) as caught:
        validate(config, World(size=4, local_size=2))
    assert str(caught.value) == (
        "sync.method=pull: maps memory between ranks of one node, and this node has 2 of the 4 ranks; "
        f"use sync.method={instead}, or auto"
    )


def test_all_problems_at_once(model: str) -> None:
    text = problems([f"model.path={model}", *BASE, "algorithm.mini_batches=3", "train.lr=0"])
    assert [line.split(":")[0] for line in text.splitlines()] == ["train.lr=0.0", "algorithm.mini_batches=3"]


def test_the_command_refuses_once_and_exits_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hybridengine.train", "+actor.lrr=3"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.count("unknown key 'actor.lrr'") == 1
    assert "Traceback" not in done.stderr


def test_head_sizes_of_vllm_on_cpu(model: str, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs vllm to compare with")
    from vllm.model_executor.layers.vocab_parallel_embedding import DEFAULT_VOCAB_PADDING_SIZE
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()
    assert VOCAB_MULTIPLE == DEFAULT_VOCAB_PADDING_SIZE
    small = make_tiny(tmp_path, "qwen2", max_position_embeddings=4096)
    assert "no kernel for heads of 8" in problems([f"model.path={small}", *BASE])
    validate(build([f"model.path={small}", *BASE, "rollout=transformers"]), World())
