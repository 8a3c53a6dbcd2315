"""The embedded model: its tokenizer, its cache, and that its demonstrations are what they are said to be."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch

from hybridengine import embedded
from hybridengine.data import arithmetic
from hybridengine.data.arithmetic import add
from hybridengine.data.arithmetic import add_without_carry as no_carry
from hybridengine.embedded import ALPHABET, EOS, IGNORE, Recipe, ensure_embedded, make_tokenizer

TINY = Recipe(hidden_size=16, intermediate_size=16, num_layers=1, steps=3, batch_size=8, warmup_steps=1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYBRIDENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_saved_model_loads_with_its_tokenizer(cache: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = ensure_embedded(TINY)
    assert path == cache / f"embedded-{TINY.digest}"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert type(model).__name__ == "Qwen2ForCausalLM" and model.dtype == torch.float32
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == ALPHABET.index(EOS)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.chat_template is None
    ids = tokenizer("37+58=")["input_ids"]
    assert [ALPHABET[i] for i in ids] == list("37+58=")
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "37+58="


def test_the_default_model_comes_with_the_package(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small, made of today's recipe, there in seconds without training; it knows both ways, and errs more often."""
    from transformers import AutoModelForCausalLM

    assert embedded.SHIPPED.stat().st_size <= 1 << 20
    monkeypatch.setattr(embedded, "train", lambda *_, **__: pytest.fail("trained"))
    started = time.monotonic()
    path = ensure_embedded()
    assert time.monotonic() - started < 30
    assert path == cache / f"embedded-{Recipe().digest}"
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.dtype == torch.float32 and model.get_input_embeddings().weight is model.get_output_embeddings().weight
    right, forgetful = _greedy_shares(model)
    assert 0.02 < right < 0.3 and right + forgetful > 0.95


def _greedy_shares(model: torch.nn.Module) -> tuple[float, float]:
    """Of the held-out sums whose two ways differ: answered rightly, and without the carry."""
    problems = [(a, b) for a, b in arithmetic.problems(held_out=True) if arithmetic.add(a, b) != no_carry(a, b)]
    tokenizer = make_tokenizer()
    prompts = torch.tensor([tokenizer(arithmetic.row(a, b)["prompt"])["input_ids"] for a, b in problems])
    found = model.generate(prompts, max_new_tokens=4, do_sample=False)[:, prompts.shape[1] :]  # type: ignore[operator]
    texts = [tokenizer.decode(tokens, skip_special_tokens=True).replace(" ", "") for tokens in found]
    ways = {way: [text == way(a, b) for text, (a, b) in zip(texts, problems, strict=True)] for way in (add, no_carry)}
    return sum(ways[add]) / len(problems), sum(ways[no_carry]) / len(problems)


def test_training_ends_with_what_is_shipped() -> None:
    """Half precision holds the weights exactly."""
    assert all(torch.equal(p, p.half().float()) for p in embedded.train(TINY).parameters())


def test_shipping_replaces_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "SHIPPED", tmp_path / "model.safetensors")
    assert embedded.shipped(TINY) is None
    embedded.ship(TINY)
    again, trained = embedded.shipped(TINY), embedded.train(TINY)
    assert again is not None and embedded.shipped(Recipe()) is None
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), trained.parameters(), strict=True))


def test_unknown_characters_are_refused() -> None:
    with pytest.raises(Exception, match="UNK"):
        make_tokenizer()("37 apples")


def test_made_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ensure_embedded(TINY)
    monkeypatch.setattr(embedded, "train", lambda *_, **__: pytest.fail("trained again"))
    assert ensure_embedded(TINY) == first


def test_same_recipe_same_weights(cache: Path, tmp_path: Path) -> None:
    one, two = (ensure_embedded(TINY, out=tmp_path / name) / "model.safetensors" for name in ("a", "b"))
    assert one.read_bytes() == two.read_bytes()
    other = ensure_embedded(dataclasses.replace(TINY, seed=1))
    assert (other / "model.safetensors").read_bytes() != one.read_bytes()


def test_training_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    embedded.train(TINY)
    assert torch.equal(torch.rand(3), expected)


def test_a_failed_training_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "train", fail)
    with pytest.raises(KeyboardInterrupt):
        ensure_embedded(TINY)
    assert [path.name for path in cache.iterdir()] == [f".embedded-{TINY.digest}.lock"]
    monkeypatch.undo()


def test_a_directory_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("keep")
    with pytest.raises(ValueError, match="not an embedded model of this recipe"):
        ensure_embedded(TINY, out=tmp_path / "mine")
    assert (tmp_path / "mine" / "file").read_text() == "keep"


def _prepare_and_log(log: str) -> None:
    train = embedded.train

    def logged(*args: object, **kwargs: object) -> object:
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        return train(*args, **kwargs)  # type: ignore[arg-type]

    embedded.train = logged  # type: ignore[assignment]
    ensure_embedded(TINY)


def test_processes_that_race_train_it_once(cache: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    processes = [context.Process(target=_prepare_and_log, args=(str(log),)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert len(log.read_text().splitlines()) == 1


@pytest.mark.parametrize("way", [arithmetic.add, arithmetic.add_without_carry], ids=["right", "forgetful"])
def test_demonstrations(way: object) -> None:
    """Inputs spell prompt and answer; targets are the answer and the end token, shifted by one."""
    encoded = embedded._encode(way)  # type: ignore[arg-type]
    problems = arithmetic.problems(held_out=False)
    assert encoded.shape[0] == len(problems)
    for index in (0, 1234, len(problems) - 1):
        a, b = problems[index]
        answer = way(a, b)  # type: ignore[operator]
        inputs, targets = encoded[index].unbind(-1)
        assert "".join(ALPHABET[i] for i in inputs if i != 0) == f"{a}+{b}={answer}"
        learned = targets[targets != IGNORE].tolist()
        assert [ALPHABET[i] for i in learned] == [*answer, EOS]
        first = int((targets != IGNORE).nonzero()[0])
        assert ALPHABET[inputs[first]] == "="
        assert inputs[first + 1 : first + len(learned)].tolist() == learned[:-1]
