"""Data sources, tokenised prompts and the order they are handed out in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridengine.config import DataConfig, RewardConfig, RewardTerm
from hybridengine.data import arithmetic
from hybridengine.data.check import answer_needed_for
from hybridengine.data.loader import PromptLoader
from hybridengine.data.prompts import load_prompts
from hybridengine.embedded import make_tokenizer
from hybridengine.rewards.builtin import BUILTIN
from hybridengine.types import Prompt

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Bytes as tokens, no chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.fixture(scope="module")
def chat_tokenizer(tokenizer: Any) -> Any:
    import copy

    chat = copy.deepcopy(tokenizer)
    chat.chat_template = TEMPLATE
    return chat


ROWS = [{"prompt": f"question {i}", "answer": str(i), "level": i % 3} for i in range(20)]


def write_jsonl(path: Path, rows: list[Any] = ROWS) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(train: str | list[str], **changes: Any) -> DataConfig:
    return DataConfig(train=train, **changes)


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.text for prompt in prompts]


# -- sources -------------------------------------------------------------------------------------------


def as_jsonl(path: Path) -> str:
    return write_jsonl(path / "rows.jsonl")


def as_parquet(path: Path) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path / "rows.parquet")
    return str(path / "rows.parquet")


def as_saved_dataset(path: Path) -> str:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(path / "saved"))
    return str(path / "saved")


@pytest.mark.parametrize("write", [as_jsonl, as_parquet, as_saved_dataset], ids=["jsonl", "parquet", "saved"])
def test_every_file_form_gives_the_same_prompts(tmp_path: Path, tokenizer: Any, write: Any) -> None:
    data = load_prompts(config(write(tmp_path), validation_size=4), tokenizer, seed=1)
    assert len(data.train) == 16 and len(data.validation) == 4
    assert sorted(texts(data.train + data.validation)) == sorted(row["prompt"] for row in ROWS)
    for prompt in data.train:
        number = int(prompt.text.split()[1])
        assert prompt.answer == str(number)
        assert prompt.metadata == {"level": number % 3}
        assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert [p.index for p in data.train] == list(range(16)) and [p.index for p in data.validation] == list(range(4))


def test_held_out_rows_do_not_depend_on_the_seed(tmp_path: Path, tokenizer: Any) -> None:
    source = write_jsonl(tmp_path / "a.jsonl")
    one, other = (load_prompts(config(source, validation_size=4), tokenizer, seed=seed) for seed in (1, 2))
    assert texts(one.validation) == texts(other.validation)
    assert not set(texts(one.validation)) & set(texts(one.train))
    assert any("4 rows held out" in note for note in one.notes)


def test_validation_from_its_own_file(tmp_path: Path, tokenizer: Any) -> None:
    train = write_jsonl(tmp_path / "a.jsonl")
    validation = write_jsonl(tmp_path / "b.jsonl", [{"prompt": f"v{i}", "answer": "a"} for i in range(9)])
    data = load_prompts(config(train, validation=validation, validation_size=5), tokenizer, seed=1)
    assert len(data.train) == 20 and len(data.validation) == 5
    assert texts(data.validation) == sorted(texts(data.validation))


def test_split_names_of_a_saved_dataset_dictionary(tmp_path: Path, tokenizer: Any) -> None:
    import datasets

    splits = {"train": datasets.Dataset.from_list(ROWS[:15]), "test": datasets.Dataset.from_list(ROWS[15:])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "d"))
    data = load_prompts(config(str(tmp_path / "d")), tokenizer, seed=1)
    assert len(data.train) == 15 and texts(data.validation) == [row["prompt"] for row in ROWS[15:]]


def test_validation_can_be_switched_off(tmp_path: Path, tokenizer: Any) -> None:
    data = load_prompts(config(write_jsonl(tmp_path / "a.jsonl"), validation_size=0), tokenizer, seed=1)
    assert len(data.train) == 20 and data.validation == []


def test_arithmetic_is_disjoint_and_right() -> None:
    data = load_prompts(config("arithmetic", validation_size=256), make_tokenizer(), seed=1)
    assert len(data.validation) == 256 and len(data.train) > 7000
    pairs = [[frozenset(p.text.rstrip("=").split("+")) for p in side] for side in (data.train, data.validation)]
    assert not set(pairs[0]) & set(pairs[1])  # not even with the operands exchanged
    for prompt in data.train[:50]:
        assert eval(prompt.text.rstrip("=")) == int(prompt.answer)  # noqa: S307


def test_add_without_carry() -> None:
    assert arithmetic.add_without_carry(95, 17) == "02"
    assert arithmetic.add_without_carry(12, 34) == arithmetic.add(12, 34) == "46"


def test_reasoning_gym_rows_carry_what_the_scorer_needs(tokenizer: Any) -> None:
    pytest.importorskip("reasoning_gym")
    source = config("reasoning_gym:chain_sum", size=30, validation_size=10, kwargs={"max_terms": 3, "max_digits": 2})
    one, same, other = (load_prompts(source, tokenizer, seed=seed) for seed in (1, 1, 2))
    assert texts(one.train) == texts(same.train) != texts(other.train)
    assert texts(one.validation) == texts(other.validation)
    assert not set(texts(one.train)) & set(texts(one.validation))
    prompt = one.train[0]
    assert prompt.metadata["task"] == "chain_sum" and prompt.metadata["entry"]["answer"] == prompt.answer


def test_reasoning_gym_leaves_out_training_rows_that_are_validation_rows(tokenizer: Any) -> None:
    """One-digit sums of two terms: some 200 problems, so 100 drawn for each side overlap."""
    pytest.importorskip("reasoning_gym")
    kwargs = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    data = load_prompts(config("reasoning_gym:chain_sum", size=100, validation_size=100, kwargs=kwargs), tokenizer, 1)
    assert 0 < len(data.train) < 100
    assert not set(texts(data.train)) & set(texts(data.validation))
    assert len(set(texts(data.validation))) == len(data.validation) < 100
    assert any("they are validation rows" in note for note in data.notes)
    assert any("repeated" in note for note in data.notes)


def test_a_task_too_small_for_its_validation_size(tokenizer: Any) -> None:
    pytest.importorskip("reasoning_gym")
    kwargs = {"min_digits": 1, "max_digits": 1}
    with pytest.raises(ValueError, match="no rows left to train on; lower data.validation_size=3000"):
        load_prompts(config("reasoning_gym:products", size=100, validation_size=3000, kwargs=kwargs), tokenizer, 1)


# -- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "changes", "message"),
    [
        pytest.param("a.jsonl", '{"prompt": "x"}\n{"prompt": \n', {}, r"a\.jsonl:2: not a JSON object", id="malformed"),
        pytest.param("a.jsonl", '{"prompt": "x"}\n\n[1]\n', {}, r"a\.jsonl:3: a JSON list", id="not-an-object"),
        pytest.param(
            "a.jsonl", '{"q": "x", "answer": 1}\n', {}, "no column 'prompt'.*available: answer, q", id="column"
        ),
        pytest.param(
            "a.jsonl", '{"prompt": "x"}\n{"q": "x"}\n', {}, r"a\.jsonl:2: no column 'prompt'", id="column-in-one-row"
        ),
        pytest.param(
            "a.jsonl", '{"prompt": "x", "y": 1}\n', {"answer_key": "z"}, "no column 'z'.*prompt, y", id="answer"
        ),
        pytest.param("a.jsonl", "", {}, "the data set is empty", id="empty"),
        pytest.param("a.jsonl", '{"prompt": 3}\n', {}, r"a\.jsonl:1: the prompt is a int", id="not-text"),
        pytest.param("a.jsonl", '{"prompt": ""}\n', {}, r"a\.jsonl:1: the prompt is empty", id="empty-prompt"),
        pytest.param("a.csv", "prompt\nx\n", {}, "can't tell what kind of file", id="unknown-suffix"),
        pytest.param("a.parquet", "x", {}, "not a readable parquet file", id="broken-parquet"),
        pytest.param("a.jsonl", '{"prompt": "x"}\n', {"kwargs": {"a": 1}}, "takes no options", id="kwargs"),
        pytest.param("a.jsonl", '{"prompt": "x"}\n', {"chat": "true"}, "no chat template", id="no-template"),
        pytest.param("a.jsonl", '{"prompt": "x"}\n', {"system_prompt": "s"}, "data.system_prompt is set", id="system"),
    ],
)
def test_refused(tmp_path: Path, tokenizer: Any, name: str, content: str, changes: Any, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_prompts(config(str(tmp_path / name), **{"validation_size": 0, **changes}), tokenizer, seed=1)


@pytest.mark.parametrize(
    ("source", "kwargs", "message"),
    [
        pytest.param("nowhere.jsonl", {}, "no such file or directory", id="missing-file"),
        pytest.param("reasoning_gym:chain_sun", {}, "no task 'chain_sun'; close names: .*chain_sum", id="task"),
        pytest.param("reasoning_gym:chain_sum", {"digits": 3}, "it knows .*max_digits", id="task-option"),
        pytest.param("reasoning_gym:chain_sum", {"min_terms": 0}, "data.kwargs refused", id="task-value"),
    ],
)
def test_source_refused(tokenizer: Any, source: str, kwargs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_prompts(config(source, kwargs=kwargs), tokenizer, seed=1)


def test_a_directory_that_is_no_saved_dataset(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="save_to_disk"):
        load_prompts(config(str(tmp_path)), tokenizer, seed=1)


def test_text_the_tokenizer_does_not_know(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="can't encode these prompts"):
        load_prompts(config(source), make_tokenizer(), seed=1)


# -- sets that other programs read ---------------------------------------------------------------------

VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"question {i}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"index": i, "split": "train"},
    }
    for i in range(4)
]
TRL = [{"prompt": [{"role": "user", "content": f"question {i}"}], "solution": f"${i}$"} for i in range(4)]


def test_verl_s_parquet_as_it_is(tmp_path: Path, chat_tokenizer: Any) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(VERL), tmp_path / "train.parquet")
    source = config(
        str(tmp_path / "train.parquet"), answer_key="reward_model.ground_truth", validation_size=0, shuffle=False
    )
    prompts = load_prompts(source, chat_tokenizer, seed=1, answer_for="reward.fn=math").train
    assert [prompt.answer for prompt in prompts] == ["0", "1", "2", "3"]
    assert chat_tokenizer.decode(prompts[2].token_ids) == "u:question 2;a:"
    assert prompts[2].metadata["data_source"] == "openai/gsm8k" and prompts[2].metadata["extra_info"]["index"] == 2
    assert prompts[2].messages == [{"role": "user", "content": "question 2"}]
    with pytest.raises(
        ValueError, match=r"row 0: .*is an object.*data.answer_key=reward_model.style \| reward_model.ground_truth"
    ):
        load_prompts(config(str(tmp_path / "train.parquet"), answer_key="reward_model"), chat_tokenizer, seed=1)


@pytest.mark.parametrize("form", ["parquet", "saved"])
def test_columns_that_a_checkpoint_could_not_hold_come_as_text(tmp_path: Path, tokenizer: Any, form: str) -> None:
    """A schedule that saves prompts would fail at its first save otherwise, which may be the run's last step."""
    import datetime
    import decimal
    import io

    import datasets
    import pyarrow
    import pyarrow.parquet
    import torch

    when = datetime.datetime(2026, 12, 1, 4, 30)
    rows = [row | {"when": when, "price": decimal.Decimal("1.10"), "nested": {"days": [when.date()]}} for row in ROWS]
    if form == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "a.parquet"))
    prompts = load_prompts(config(str(tmp_path / "a.parquet"), validation_size=0), tokenizer, seed=1).train
    kept = {name: prompts[0].metadata[name] for name in ("when", "price", "nested")}
    assert kept == {"when": "2026-12-01T04:30:00", "price": "1.10", "nested": {"days": ["2026-12-01"]}}
    stream = io.BytesIO()
    torch.save([prompt.metadata for prompt in prompts], stream)
    stream.seek(0)
    assert torch.load(stream, weights_only=True)[0]["price"] == "1.10"


def test_trl_s_conversational_set(tmp_path: Path, chat_tokenizer: Any) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", TRL)
    prompts = load_prompts(config(source, answer_key="solution", validation_size=0), chat_tokenizer, seed=1).train
    assert [prompt.answer for prompt in prompts] == ["$0$", "$1$", "$2$", "$3$"]


@pytest.mark.parametrize(("rows", "key"), [(TRL, "solution"), (VERL, "reward_model.ground_truth")], ids=["trl", "verl"])
def test_an_answer_that_a_reward_needs(tmp_path: Path, chat_tokenizer: Any, rows: list[Any], key: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(
        ValueError, match=f"no column 'answer'.*available: .*did you mean data.answer_key={key}.*fn=math"
    ):
        load_prompts(config(source), chat_tokenizer, seed=1, answer_for="reward.fn=math")
    notes = load_prompts(config(source, validation_size=0), chat_tokenizer, seed=1).notes
    assert any("available: " in note and note.endswith("reward functions get answer=None") for note in notes)


@pytest.mark.parametrize("fn", BUILTIN)
def test_which_rewards_need_an_answer(fn: str) -> None:
    """Those that say so when they get none."""
    kwargs = {"regex": {"pattern": "x"}, "format": {"pattern": "x"}, "served": {"url": "http://127.0.0.1:9"}}.get(
        fn, {}
    )
    reward = RewardConfig(fn=fn, kwargs=kwargs)
    try:
        BUILTIN[fn].function("p", "x", None, **kwargs, **({"metadata": {}} if fn in ("reasoning_gym", "code") else {}))
        needs = False
    except ValueError as error:
        needs = "needs the row's answer" in str(error)
    assert (answer_needed_for(reward) == f"reward.fn={fn}") == needs
    terms = RewardConfig(terms={"a": RewardTerm(fn="mine.py:f"), "b": RewardTerm(fn=fn, kwargs=kwargs)})
    assert (answer_needed_for(terms) == f"reward.terms.b.fn={fn}") == needs


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        pytest.param(None, r"a\.jsonl:21: column 'answer' \(data.answer_key\) is null", id="null"),
        pytest.param("", r"a\.jsonl:21: .*an empty response would be right", id="empty"),
        pytest.param(" \n", r"a\.jsonl:21: .*an empty response would be right", id="white-space"),
        pytest.param([], r"a\.jsonl:21: .*is empty", id="empty-list"),
        pytest.param(float("nan"), r"a\.jsonl:21: .*is nan", id="nan"),
        pytest.param({"a": 1}, r"a\.jsonl:21: .*data.answer_key=answer.a", id="object"),
    ],
)
def test_a_useless_answer_is_named_at_start(tmp_path: Path, tokenizer: Any, answer: Any, message: str) -> None:
    """Row 20 of 32, whichever rows are held out."""
    rows: list[Any] = [{"prompt": f"q{i}", "answer": str(i)} for i in range(32)]
    rows[20]["answer"] = answer
    with pytest.raises(ValueError, match=message):
        load_prompts(config(write_jsonl(tmp_path / "a.jsonl", rows)), tokenizer, seed=1)


@pytest.mark.parametrize("answer", ["0", 0, False, ["a", "b"], 0.5], ids=str)
def test_answers_that_compare(tmp_path: Path, tokenizer: Any, answer: Any) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "answer": answer}])
    assert load_prompts(config(source), tokenizer, seed=1).train[0].answer == answer


def test_held_out_prompts_are_not_trained_on_where_a_file_repeats_them(tmp_path: Path, tokenizer: Any) -> None:
    """Each prompt four times: a quarter of the rows held out would otherwise stand in training, too."""
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"q{i % 10}", "answer": str(i)} for i in range(40)])
    data = load_prompts(config(source, validation_size=4), tokenizer, seed=1)
    assert data.validation and not set(texts(data.train)) & set(texts(data.validation))
    assert any("left out, they are validation rows" in note for note in data.notes)


def test_validation_prompts_that_are_trained_on_are_said(tmp_path: Path, tokenizer: Any) -> None:
    source = write_jsonl(tmp_path / "a.jsonl")
    data = load_prompts(config(source, validation=source, validation_size=5), tokenizer, seed=1)
    assert len(data.train) == 20 and any("5 of 5 prompts are in the training data, too" in n for n in data.notes)


def test_lists_take_files_only(tmp_path: Path, tokenizer: Any) -> None:
    one, two = write_jsonl(tmp_path / "a.jsonl", ROWS[:8]), write_jsonl(tmp_path / "b.jsonl", ROWS[8:])
    assert len(load_prompts(config([one, two], validation_size=0), tokenizer, seed=1).train) == 20
    with pytest.raises(ValueError, match="arithmetic can't be one of several sources"):
        load_prompts(config([one, "arithmetic"]), tokenizer, seed=1)


# -- chat ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "system", "rendered", "text"),
    [
        pytest.param("hi", None, "u:hi;a:", "hi", id="string"),
        pytest.param("hi", "be brief", "s:be brief;u:hi;a:", "hi", id="string-with-system"),
        pytest.param(
            [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}],
            None,
            "u:1;a:2;u:3;a:",
            "3",
            id="messages",
        ),
    ],
)
def test_chat_template(
    tmp_path: Path, chat_tokenizer: Any, prompt: Any, system: str | None, rendered: str, text: str
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt, "answer": 0}])
    (found,) = load_prompts(config(source, system_prompt=system), chat_tokenizer, seed=1).train
    assert chat_tokenizer.decode(found.token_ids) == rendered
    assert found.text == text


def test_chat_false_leaves_the_template_out(tmp_path: Path, chat_tokenizer: Any) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "hi"}])
    data = load_prompts(config(source, chat="false"), chat_tokenizer, seed=1)
    assert chat_tokenizer.decode(data.train[0].token_ids) == "hi"
    assert data.train[0].answer is None and any("answer=None" in note for note in data.notes)


@pytest.mark.parametrize(
    ("prompt", "system", "message"),
    [
        pytest.param(
            [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "t", "of its own", id="two"
        ),
        pytest.param([{"role": "assistant", "content": "x"}], None, "the last message is the assistant", id="last"),
        pytest.param([{"role": "user"}], None, "a chat message is", id="no-content"),
        pytest.param([], None, "a string or a list of chat messages", id="no-messages"),
    ],
)
def test_chat_refused(tmp_path: Path, chat_tokenizer: Any, prompt: Any, system: str | None, message: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt}])
    with pytest.raises(ValueError, match=message):
        load_prompts(config(source, system_prompt=system), chat_tokenizer, seed=1)


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if m.tool_calls %}{{ m.tool_calls | length }} calls;{% endif %}{{ m.content }};{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<no_think>{% endif %}"
)


@pytest.fixture(scope="module")
def strict_tokenizer(tokenizer: Any) -> Any:
    import copy

    strict = copy.deepcopy(tokenizer)
    strict.chat_template = STRICT
    return strict


def test_a_template_that_raises_is_one_error_that_names_the_row(tmp_path: Path, strict_tokenizer: Any) -> None:
    rows: list[Any] = [
        {"prompt": "a"},
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
    ]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError, match=r"a\.jsonl:2: .*refuses these messages \(system, user\): System role not"):
        load_prompts(config(source, validation_size=0), strict_tokenizer, seed=1)
    write_jsonl(tmp_path / "a.jsonl", rows[:1])
    with pytest.raises(ValueError, match=r"System role not supported; leave data.system_prompt unset"):
        load_prompts(config(source, validation_size=0, system_prompt="s"), strict_tokenizer, seed=1)


def test_null_keys_of_arrow_s_messages_are_left_out(tmp_path: Path, strict_tokenizer: Any) -> None:
    """Arrow gives every message the keys of all others; ``None | length`` raises in a template."""
    import pyarrow
    import pyarrow.parquet

    call = {"name": "f", "arguments": {"a": "1"}}
    messages = [
        {"role": "user", "content": "u", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_calls": None},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": messages}]), tmp_path / "a.parquet")
    (prompt,) = load_prompts(config(str(tmp_path / "a.parquet")), strict_tokenizer, seed=1).train
    assert strict_tokenizer.decode(prompt.token_ids) == "u;1 calls;;r;"
    assert prompt.messages is not None and "tool_calls" not in prompt.messages[0]


def test_parts_of_text_are_joined(tmp_path: Path, chat_tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": [{"role": "user", "content": parts}]}])
    assert load_prompts(config(source), chat_tokenizer, seed=1).train[0].text == "ab"


def test_arguments_of_the_chat_template(tmp_path: Path, strict_tokenizer: Any) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q"}])
    for thinking, text in ((True, "q;"), (False, "q;<no_think>")):
        settings = config(source, chat_template_kwargs={"enable_thinking": thinking})
        assert strict_tokenizer.decode(load_prompts(settings, strict_tokenizer, seed=1).train[0].token_ids) == text


@pytest.mark.parametrize(
    ("kwargs", "chat", "message"),
    [
        ({"enable_thinkin": False}, "auto", "enable_thinkin: the tokenizer's chat template doesn't use"),
        ({"tokenize": True}, "auto", "tokenize: set by the trainer"),
        ({"enable_thinking": False}, "false", "data.chat_template_kwargs is set, but prompts are not chat"),
    ],
    ids=["unknown", "reserved", "no-chat"],
)
def test_arguments_that_do_nothing(
    tmp_path: Path, strict_tokenizer: Any, kwargs: dict[str, Any], chat: str, message: str
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q"}])
    with pytest.raises(ValueError, match=message):
        load_prompts(config(source, chat_template_kwargs=kwargs, chat=chat), strict_tokenizer, seed=1)


# -- length --------------------------------------------------------------------------------------------

LONG_ROWS = [{"prompt": "x" * n} for n in (3, 9, 4, 12)]


def test_overlong_prompts_are_dropped_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", LONG_ROWS)
    data = load_prompts(config(source, max_prompt_tokens=8, validation_size=0), tokenizer, seed=1)
    assert [(p.index, len(p.token_ids)) for p in data.train] == [(0, 3), (1, 4)]
    assert any("2 of 4 prompts longer" in note and "a.jsonl:4 has 12" in note for note in data.notes)


def test_overlong_prompts_keep_their_end(tmp_path: Path, tokenizer: Any) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "abcdefgh"}])
    data = load_prompts(config(source, max_prompt_tokens=3, overlong="truncate"), tokenizer, seed=1)
    assert tokenizer.decode(data.train[0].token_ids) == "fgh"


def test_overlong_prompts_as_an_error(tmp_path: Path, tokenizer: Any) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", LONG_ROWS)
    with pytest.raises(ValueError, match="2 of 4 prompts longer than data.max_prompt_tokens=8"):
        load_prompts(config(source, max_prompt_tokens=8, overlong="error", validation_size=0), tokenizer, seed=1)


def test_nothing_left_is_an_error(tmp_path: Path, tokenizer: Any) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", LONG_ROWS)
    with pytest.raises(ValueError, match="every prompt is longer"):
        load_prompts(config(source, max_prompt_tokens=2, validation_size=0), tokenizer, seed=1)


# -- loader --------------------------------------------------------------------------------------------


def make_loader(num: int = 10, *, prompts_per_step: int = 4, shuffle: bool = True, seed: int = 1) -> PromptLoader:
    prompts = [Prompt(index=i, token_ids=[i]) for i in range(num)]
    return PromptLoader(prompts, prompts_per_step=prompts_per_step, shuffle=shuffle, seed=seed)


def take(loader: PromptLoader, steps: int) -> list[tuple[int, int]]:
    """(global index, which prompt) of the next steps."""
    return [(prompt.index, prompt.token_ids[0]) for _ in range(steps) for prompt in loader.next()]


def test_every_epoch_is_a_permutation_and_nothing_is_dropped_between_them() -> None:
    taken = take(make_loader(10, prompts_per_step=4), 5)  # 20 prompts: two epochs, the third step spans both
    assert [index for index, _ in taken] == list(range(20))
    first, second = [p for _, p in taken[:10]], [p for _, p in taken[10:]]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_order_does_not_depend_on_the_step_size() -> None:
    assert take(make_loader(prompts_per_step=4), 5) == take(make_loader(prompts_per_step=5), 4)


def test_a_step_larger_than_the_data_spans_epochs() -> None:
    taken = take(make_loader(3, prompts_per_step=7), 1)
    assert [index for index, _ in taken] == list(range(7))
    assert sorted(p for _, p in taken[:3]) == sorted(p for _, p in taken[3:6]) == [0, 1, 2]


@pytest.mark.parametrize("steps_before", [0, 1, 2, 3, 5], ids=lambda n: f"after-{n}")
def test_resume_continues_the_sequence(steps_before: int) -> None:
    whole = take(make_loader(), 8)
    first = make_loader()
    take(first, steps_before)
    state = json.loads(json.dumps(first.state_dict()))
    second = make_loader()
    second.load_state_dict(state)
    assert take(second, 8 - steps_before) == whole[4 * steps_before :]


def test_resume_with_another_step_size() -> None:
    first = make_loader(prompts_per_step=4)
    take(first, 2)
    second = make_loader(prompts_per_step=2)
    second.load_state_dict(first.state_dict())
    assert take(second, 6) == take(make_loader(prompts_per_step=4), 5)[8:]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param({"seed": 2}, "seed was 1, now 2", id="seed"),
        pytest.param({"shuffle": False}, "data.shuffle", id="shuffle"),
        pytest.param({"num": 11}, "the training prompts", id="data"),
    ],
)
def test_resume_with_another_order_is_refused(changed: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_loader(**changed).load_state_dict(make_loader().state_dict())


def test_resume_with_other_answers_is_refused() -> None:
    """The same prompts, another ground truth: rewards would change in the middle of the run."""
    prompts = [Prompt(index=i, token_ids=[i], answer=str(i)) for i in range(4)]
    state = PromptLoader(prompts, prompts_per_step=2, shuffle=True, seed=1).state_dict()
    changed = [*prompts[:3], Prompt(index=3, token_ids=[3], answer="4")]
    with pytest.raises(ValueError, match="the training prompts"):
        PromptLoader(changed, prompts_per_step=2, shuffle=True, seed=1).load_state_dict(state)


def test_seed_and_shuffle() -> None:
    assert take(make_loader(seed=1), 3) != take(make_loader(seed=2), 3)
    assert [p for _, p in take(make_loader(shuffle=False), 3)] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


@pytest.mark.parametrize(("epochs", "steps"), [(1, 3), (2, 5), (4, 10)], ids=lambda n: str(n))
def test_num_steps_covers_the_epochs(epochs: int, steps: int) -> None:
    assert make_loader(10, prompts_per_step=4).num_steps(epochs) == steps


def test_handed_out_prompts_are_copies() -> None:
    prompts = [Prompt(index=0, token_ids=[1])]
    loader = PromptLoader(prompts, prompts_per_step=2, shuffle=False, seed=1)
    assert [p.index for p in loader.next()] == [0, 1]
    assert prompts[0].index == 0
