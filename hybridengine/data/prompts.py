"""From data rows to tokenised prompts: chat template, tokens, length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridengine.config import DataConfig
from hybridengine.data import sources
from hybridengine.data.chat import ChatTemplate, Message
from hybridengine.data.check import check_rows
from hybridengine.data.rows import ABSENT, Row
from hybridengine.types import Prompt


@dataclass(slots=True, kw_only=True)
class PromptData:
    """The prompts of a run, ``Prompt.index`` being the position in its list.

    Attributes:
        train: prompts to train on, in the order of the data.
        validation: the same in every run, whatever its seed; may be empty.
        notes: what was held out, dropped or cut, one sentence each, for the user to see.
    """

    train: list[Prompt]
    validation: list[Prompt]
    notes: list[str] = field(default_factory=list)


def load_prompts(config: DataConfig, tokenizer: Any, seed: int, *, answer_for: str | None = None) -> PromptData:
    """Read, check, template and tokenise the training and validation prompts.

    A function of its arguments and the files alone, so every rank comes to the same lists.

    Args:
        config: the ``data`` section.
        tokenizer: Hugging Face tokenizer, with the chat template to use.
        seed: the run's seed; chooses the rows of procedural training data.
        answer_for: the reward that can't do without the rows' answers; None where each can.

    Raises:
        ValueError: naming the key, or the file and row, and what would be right.
    """
    rows = sources.read(config, seed)
    notes = rows.notes
    origins = {
        "train": f"data.train={sources.in_words(config.train)}",
        "validation": f"data.validation={sources.in_words(config.validation or config.train)}",
    }
    for side, origin in origins.items():
        check_rows(getattr(rows, side), config, origin, answer_for=answer_for, notes=notes)
    train = _to_prompts(rows.train, config, tokenizer, origins["train"], notes)
    if not train:
        raise ValueError(
            f"{origins['train']}: every prompt is longer than data.max_prompt_tokens={config.max_prompt_tokens}"
        )
    validation = _to_prompts(rows.validation, config, tokenizer, origins["validation"], notes)
    return PromptData(train=train, validation=validation, notes=notes)


def _to_prompts(rows: Sequence[Row], config: DataConfig, tokenizer: Any, origin: str, notes: list[str]) -> list[Prompt]:
    if not rows:
        return []
    values = [row.get(config.prompt_key) for row in rows]
    chat = _chat_template(config, tokenizer)
    conversations: list[list[Message]] | list[None]
    if chat is not None:
        conversations = [chat.messages(value, row.where) for row, value in zip(rows, values, strict=True)]
        rendered = [chat.render(messages, row.where) for row, messages in zip(rows, conversations, strict=True)]
        texts = [messages[-1]["content"] for messages in conversations]
    else:
        conversations = [None] * len(rows)
        rendered = texts = [_plain(value, row.where) for row, value in zip(rows, values, strict=True)]
    tokens = _tokenize(rendered, tokenizer, rows, origin, special=chat is None)
    used = {config.prompt_key, config.answer_key}
    prompts = [
        Prompt(
            index=i,
            token_ids=token_ids,
            text=text,
            answer=None if (answer := row.get(config.answer_key)) is ABSENT else answer,
            metadata={name: value for name, value in row.columns.items() if name not in used},
            messages=messages,
        )
        for i, (row, text, token_ids, messages) in enumerate(zip(rows, texts, tokens, conversations, strict=True))
    ]
    return _limit_length(prompts, rows, config, origin, notes)


def _chat_template(config: DataConfig, tokenizer: Any) -> ChatTemplate | None:
    """None where prompts are plain text."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if config.chat == "true" and not has_template:
        raise ValueError(
            "data.chat=true: the tokenizer has no chat template; set model.chat_template, or data.chat=auto"
        )
    if config.chat == "true" or (config.chat == "auto" and has_template):
        return ChatTemplate(config, tokenizer)
    for name in ("system_prompt", "chat_template_kwargs"):
        if getattr(config, name):
            raise ValueError(
                f"data.{name} is set, but prompts are not chat (data.chat={config.chat}, tokenizer "
                f"{'with' if has_template else 'without'} a chat template)"
            )
    return None


def _plain(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: the prompt is a {type(value).__name__}; without a chat template (data.chat) only strings work"
        )
    return value


def _tokenize(texts: list[str], tokenizer: Any, rows: Sequence[Row], origin: str, *, special: bool) -> list[list[int]]:
    """A chat template writes its own special tokens; for plain text the tokenizer adds them."""
    try:
        tokens: list[list[int]] = tokenizer(texts, add_special_tokens=special)["input_ids"]
    except Exception as error:  # tokenizers raises nothing more specific
        raise ValueError(
            f"{origin}: the tokenizer can't encode these prompts ({error}); is it this model's data?"
        ) from error
    for row, token_ids in zip(rows, tokens, strict=True):
        if not token_ids:
            raise ValueError(f"{row.where}: the prompt is empty")
    return tokens


def _limit_length(
    prompts: list[Prompt], rows: Sequence[Row], config: DataConfig, origin: str, notes: list[str]
) -> list[Prompt]:
    limit = config.max_prompt_tokens
    overlong = [prompt for prompt in prompts if len(prompt.token_ids) > limit]
    if not overlong:
        return prompts
    longest = max(overlong, key=lambda prompt: len(prompt.token_ids))
    what = (
        f"{origin}: {len(overlong)} of {len(prompts)} prompts longer than data.max_prompt_tokens={limit} "
        f"({rows[longest.index].where} has {len(longest.token_ids)})"
    )
    if config.overlong == "error":
        raise ValueError(f"{what}; raise the limit, or set data.overlong to drop or truncate")
    if config.overlong == "truncate":
        for prompt in overlong:
            prompt.token_ids = prompt.token_ids[-limit:]
        notes.append(f"{what}: cut, their ends kept")
        return prompts
    kept = [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
    for index, prompt in enumerate(kept):
        prompt.index = index
    notes.append(f"{what}: dropped")
    return kept
