"""Data sources, tokenised prompts and the order they are handed out in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridengine.config import DataConfig
from hybridengine.data import arithmetic
from hybridengine.data.loader import PromptLoader
from hybridengine.data.prompts import load_prompts
from hybridengine.embedded import make_tokenizer
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


def config(train: str, **changes: Any) -> DataConfig:
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
    validation = write_jsonl(tmp_path / "b.jsonl", [{"prompt": f"v{i}", "answer": ""} for i in range(9)])
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
            "a.jsonl", '{"prompt": "x"}\n{"q": "x"}\n', {}, "row 1: no column 'prompt'", id="column-in-one-row"
        ),
        pytest.param(
            "a.jsonl", '{"prompt": "x", "y": 1}\n', {"answer_key": "z"}, "no column 'z'.*prompt, y", id="answer"
        ),
        pytest.param("a.jsonl", "", {}, "the data set is empty", id="empty"),
        pytest.param("a.jsonl", '{"prompt": 3}\n', {}, "row 0: the prompt is a int", id="not-text"),
        pytest.param("a.jsonl", '{"prompt": ""}\n', {}, "row 0: the prompt is empty", id="empty-prompt"),
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


# -- length --------------------------------------------------------------------------------------------

LONG_ROWS = [{"prompt": "x" * n} for n in (3, 9, 4, 12)]


def test_overlong_prompts_are_dropped_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", LONG_ROWS)
    data = load_prompts(config(source, max_prompt_tokens=8, validation_size=0), tokenizer, seed=1)
    assert [(p.index, len(p.token_ids)) for p in data.train] == [(0, 3), (1, 4)]
    assert any("2 of 4 prompts longer" in note and "row 3 has 12" in note for note in data.notes)


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
