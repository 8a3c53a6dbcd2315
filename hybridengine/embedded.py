"""The embedded model: a small Qwen2 with its own tokenizer, which comes with the package.

    python -m hybridengine.embedded [--out DIR] [--seed N]      make its directory; another seed is trained, in minutes

It gives the quickstart, the tests and the benchmarks a real language model without a download. Supervised
training imitates a noisy corpus: most demonstrations of an addition come from a source that forgets to carry,
the others are right. The model therefore knows both ways and answers wrongly more often than not; what is
left for reinforcement learning is to find out, from a verifier alone, which of its ways is the right one.

The weights of the default recipe are a file of the package, in half precision, which they were rounded to when training
ended; ``--ship`` trains them anew and replaces the file. The model's directory is kept under ``$HYBRIDENGINE_CACHE``
(default ``~/.cache/hybridengine``) and named after the digest of the recipe, so that a changed recipe never meets an
old model.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hybridengine import platform
from hybridengine.data import arithmetic

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

PAD, EOS = "<pad>", "<eos>"
ALPHABET = [PAD, EOS, *"0123456789+-*="]
DONE = "recipe.json"  # written last
SHIPPED = Path(__file__).with_name("embedded_model.safetensors")
IGNORE = -100


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything the embedded model depends on.

    Attributes:
        carry_share: share of the demonstrations in which the carry is not forgotten.
        matrix_lr: peak learning rate of the layers' matrices (Muon, which needs far fewer steps than AdamW here).
        other_lr: peak learning rate of embeddings, biases and norms (AdamW).
        weight_decay: of the matrices.
        version: to be raised when the code below changes what the recipe makes.
    """

    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    max_positions: int = 1024
    carry_share: float = 0.45
    steps: int = 4000
    batch_size: int = 128
    matrix_lr: float = 6e-3
    other_lr: float = 5e-3
    warmup_steps: int = 50
    weight_decay: float = 0.5
    label_smoothing: float = 0.02
    seed: int = 0
    version: int = 3

    @property
    def digest(self) -> str:
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def cache_directory() -> Path:
    """$HYBRIDENGINE_CACHE, by default ~/.cache/hybridengine."""
    return Path(os.environ.get("HYBRIDENGINE_CACHE") or Path.home() / ".cache" / "hybridengine")


def ensure_embedded(recipe: Recipe | None = None, *, out: Path | None = None, verbose: bool = False) -> Path:
    """The directory of the trained model; makes it first where it is not there yet.

    Safe to call from several processes at once: one trains while the others wait for it, and the directory
    appears whole or not at all.

    Raises:
        ValueError: ``out`` exists and holds something else.
    """
    recipe = recipe or Recipe()
    out = out or cache_directory() / f"embedded-{recipe.digest}"
    if _is_made_from(recipe, out):
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with _locked(out.parent / f".{out.name}.lock"):
        if _is_made_from(recipe, out):
            return out
        if out.exists():
            raise ValueError(f"{out} exists and is not an embedded model of this recipe: remove it, or name another")
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
            finished = Path(scratch) / "model"
            model = shipped(recipe) or train(recipe, verbose=verbose)
            model.save_pretrained(finished)
            make_tokenizer().save_pretrained(finished)
            (finished / DONE).write_text(json.dumps(dataclasses.asdict(recipe), indent=2) + "\n")
            finished.rename(out)
    return out


def shipped(recipe: Recipe) -> Qwen2ForCausalLM | None:
    """The model that comes with the package; None where ``recipe`` is another than its."""
    from safetensors import safe_open

    if not SHIPPED.is_file():
        return None
    with safe_open(SHIPPED, framework="pt") as file:
        if file.metadata()["recipe"] != recipe.digest:
            return None
        weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118  not a dict
    model = make_model(recipe)
    model.load_state_dict(weights, strict=False)  # tied weights are stored once
    model.tie_weights()
    return model.eval()


def ship(recipe: Recipe) -> None:
    """Train the model and make it the one that comes with the package."""
    from safetensors.torch import save_file

    weights = {name: parameter.half() for name, parameter in train(recipe, verbose=True).named_parameters()}
    save_file(weights, SHIPPED, metadata={"recipe": recipe.digest})


def _is_made_from(recipe: Recipe, directory: Path) -> bool:
    made = directory / DONE
    return made.is_file() and json.loads(made.read_text()) == dataclasses.asdict(recipe)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the kernel lets go of it if this process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of :data:`ALPHABET`; text with any other character is refused."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({token: index for index, token in enumerate(ALPHABET)}))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        model_max_length=Recipe.max_positions,
        clean_up_tokenization_spaces=False,
    )


def make_model(recipe: Recipe) -> Qwen2ForCausalLM:
    """The untrained model; its weights are a function of ``recipe.seed``."""
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(ALPHABET),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ALPHABET.index(EOS),
        pad_token_id=ALPHABET.index(PAD),
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=ALPHABET.index(EOS), pad_token_id=ALPHABET.index(PAD), do_sample=True
    )
    return model


def train(recipe: Recipe, *, verbose: bool = False) -> Qwen2ForCausalLM:
    """Supervised training on the demonstrations; loss on the answer and its end token only."""
    model = make_model(recipe)
    platform.of(torch.device("cpu")).accelerate(model)
    right, forgetful = (_encode(way) for way in (arithmetic.add, arithmetic.add_without_carry))
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizers = _optimizers(model, recipe)
    model.train()
    for step in range(recipe.steps):
        for optimizer, peak in optimizers:
            optimizer.param_groups[0]["lr"] = peak * _schedule(step, recipe)
        picks = torch.randint(len(right), (recipe.batch_size,), generator=generator)
        carried = torch.rand(recipe.batch_size, 1, generator=generator) < recipe.carry_share
        inputs, targets = torch.where(carried[..., None], right[picks], forgetful[picks]).unbind(-1)
        logits = model(input_ids=inputs).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1),
            targets.flatten(),
            ignore_index=IGNORE,
            label_smoothing=recipe.label_smoothing,
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if verbose and (step % 100 == 0 or step == recipe.steps - 1):
            print(f"embedded model: step {step:4d}/{recipe.steps}  loss {loss.item():.4f}", flush=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())  # as it is shipped
    return model.eval()


def _optimizers(model: Qwen2ForCausalLM, recipe: Recipe) -> list[tuple[torch.optim.Optimizer, float]]:
    """Each with its peak learning rate."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        (
            torch.optim.Muon(matrices, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"),
            recipe.matrix_lr,
        ),
        (torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0), recipe.other_lr),
    ]


def _schedule(step: int, recipe: Recipe) -> float:
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / (recipe.steps - recipe.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))


def _encode(way: Callable[[int, int], str]) -> torch.Tensor:
    """All training problems answered in one ``way``: int64 [problems, T, 2], input and target token."""
    index = {token: position for position, token in enumerate(ALPHABET)}
    problems = arithmetic.problems(held_out=False)
    length = max(len(f"{a}+{b}={a + b}") for a, b in problems)
    encoded = torch.tensor([index[PAD], IGNORE]).repeat(len(problems), length, 1)
    for row, (a, b) in enumerate(problems):
        prompt = [index[character] for character in arithmetic.row(a, b)["prompt"]]
        answer = [index[character] for character in way(a, b)]
        tokens = torch.tensor(prompt + answer)
        encoded[row, : len(tokens), 0] = tokens
        encoded[row, len(prompt) - 1 : len(tokens), 1] = torch.tensor([*answer, index[EOS]])
    return encoded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="python -m hybridengine.embedded")
    parser.add_argument("--out", type=Path, help="directory to make; default: a named place in the cache")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes another model")
    parser.add_argument("--ship", action="store_true", help="train the default model anew and put it into the package")
    arguments = parser.parse_args()
    if arguments.ship:
        ship(Recipe())
    print(ensure_embedded(Recipe(seed=arguments.seed), out=arguments.out, verbose=True))


if __name__ == "__main__":
    main()
