"""From data rows to tokenised prompts: columns, chat template, length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridengine.config import DataConfig
from hybridengine.data import sources
from hybridengine.types import Prompt

Message = dict[str, str]


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


def load_prompts(config: DataConfig, tokenizer: Any, seed: int) -> PromptData:
    """Read, template and tokenise the training and validation prompts.

    A function of its arguments and the files alone, so every rank comes to the same lists.

    Args:
        config: the ``data`` section.
        tokenizer: Hugging Face tokenizer, with the chat template to use.
        seed: the run's seed; chooses the rows of procedural training data.

    Raises:
        ValueError: naming the key or file and row, and what would be right.
    """
    rows = sources.read(config, seed)
    notes = rows.notes
    train = _to_prompts(rows.train, config, tokenizer, "data.train", config.train, notes)
    if not train:
        raise ValueError(
            f"data.train={config.train}: every prompt is longer than data.max_prompt_tokens={config.max_prompt_tokens}"
        )
    where = f"{config.validation or config.train}"
    validation = _to_prompts(rows.validation, config, tokenizer, "data.validation", where, notes)
    return PromptData(train=train, validation=validation, notes=notes)


def _to_prompts(
    rows: Sequence[sources.Row], config: DataConfig, tokenizer: Any, key: str, source: str, notes: list[str]
) -> list[Prompt]:
    if not rows:
        return []
    origin = f"{key}={source}"
    has_answer = _check_columns(rows, config, origin)
    if not has_answer:
        notes.append(f"{origin}: no column {config.answer_key!r}; reward functions get answer=None")
    chat = _use_chat(config, tokenizer)
    values = [row[config.prompt_key] for row in rows]
    if chat:
        conversations = [_messages(value, config, f"{origin}, row {i}") for i, value in enumerate(values)]
        rendered = [
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            for messages in conversations
        ]
        texts = [messages[-1]["content"] for messages in conversations]
    else:
        rendered = texts = [_plain(value, f"{origin}, row {i}") for i, value in enumerate(values)]
    tokens = _tokenize(rendered, tokenizer, origin, special=not chat)
    used = {config.prompt_key, config.answer_key}
    prompts = [
        Prompt(
            index=i,
            token_ids=token_ids,
            text=text,
            answer=row.get(config.answer_key),
            metadata={name: value for name, value in row.items() if name not in used},
            messages=None if isinstance(row[config.prompt_key], str) else row[config.prompt_key],
        )
        for i, (row, text, token_ids) in enumerate(zip(rows, texts, tokens, strict=True))
    ]
    return _limit_length(prompts, config, origin, notes)


def _check_columns(rows: Sequence[sources.Row], config: DataConfig, origin: str) -> bool:
    """Whether the rows have answers. A prompt is required of all of them, an answer of all or none."""
    columns = sorted({name for row in rows for name in row})
    for i, row in enumerate(rows):
        if row.get(config.prompt_key) is None:
            raise ValueError(
                f"{origin}, row {i}: no column {config.prompt_key!r} (data.prompt_key); available: {', '.join(columns)}"
            )
    if config.answer_key not in columns:
        if config.answer_key != DataConfig.answer_key:
            raise ValueError(
                f"{origin}: no column {config.answer_key!r} (data.answer_key); available: {', '.join(columns)}"
            )
        return False
    for i, row in enumerate(rows):
        if config.answer_key not in row:
            raise ValueError(f"{origin}, row {i}: no column {config.answer_key!r}, which other rows have")
    return True


def _use_chat(config: DataConfig, tokenizer: Any) -> bool:
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if config.chat == "true" and not has_template:
        raise ValueError(
            "data.chat=true: the tokenizer has no chat template; set model.chat_template, or data.chat=auto"
        )
    chat = config.chat == "true" or (config.chat == "auto" and has_template)
    if config.system_prompt is not None and not chat:
        raise ValueError(
            f"data.system_prompt is set, but prompts are not chat (data.chat={config.chat}, tokenizer "
            f"{'with' if has_template else 'without'} a chat template)"
        )
    return chat


def _messages(value: Any, config: DataConfig, origin: str) -> list[Message]:
    messages: list[Message] = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{origin}: a prompt is a string or a list of chat messages, not {type(value).__name__}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str) or "role" not in message:
            raise ValueError(f"{origin}: a chat message is {{'role': ..., 'content': text}}, not {message!r}")
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"{origin}: the last message is the assistant's; a prompt ends with another role's turn")
    if config.system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise ValueError(f"{origin}: has a system message of its own; leave data.system_prompt unset")
    return [{"role": "system", "content": config.system_prompt}, *messages]


def _plain(value: Any, origin: str) -> str:
    if not isinstance(value, str):
        raise ValueError(
            f"{origin}: the prompt is a {type(value).__name__}; without a chat template (data.chat) only strings work"
        )
    return value


def _tokenize(texts: list[str], tokenizer: Any, origin: str, *, special: bool) -> list[list[int]]:
    """A chat template writes its own special tokens; for plain text the tokenizer adds them."""
    try:
        tokens: list[list[int]] = tokenizer(texts, add_special_tokens=special)["input_ids"]
    except Exception as error:  # tokenizers raises nothing more specific
        raise ValueError(
            f"{origin}: the tokenizer can't encode these prompts ({error}); is it this model's data?"
        ) from error
    for i, token_ids in enumerate(tokens):
        if not token_ids:
            raise ValueError(f"{origin}, row {i}: the prompt is empty")
    return tokens


def _limit_length(prompts: list[Prompt], config: DataConfig, origin: str, notes: list[str]) -> list[Prompt]:
    limit = config.max_prompt_tokens
    overlong = [prompt for prompt in prompts if len(prompt.token_ids) > limit]
    if not overlong:
        return prompts
    longest = max(overlong, key=lambda prompt: len(prompt.token_ids))
    what = (
        f"{origin}: {len(overlong)} of {len(prompts)} prompts longer than data.max_prompt_tokens={limit} "
        f"(row {longest.index} has {len(longest.token_ids)})"
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
