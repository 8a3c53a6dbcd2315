"""From the messages of a chat prompt to the text that the model reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hybridengine.config import DataConfig

Message = dict[str, Any]

#: Arguments of ``apply_chat_template`` that a prompt decides by itself.
RESERVED = ("conversation", "tokenize", "add_generation_prompt", "continue_final_message")


class ChatTemplate:
    """The tokenizer's chat template with the arguments of ``data.chat_template_kwargs``.

    Args:
        config: the ``data`` section.
        tokenizer: Hugging Face tokenizer with a chat template.

    Raises:
        ValueError: an argument that the template doesn't use, or that isn't the user's to set.
    """

    def __init__(self, config: DataConfig, tokenizer: Any) -> None:
        self._config, self._tokenizer = config, tokenizer
        template = tokenizer.chat_template
        text = template if isinstance(template, str) else str(template)
        for name in config.chat_template_kwargs:
            if name in RESERVED:
                raise ValueError(f"data.chat_template_kwargs.{name}: set by the trainer, remove it")
            if not re.search(rf"\b{re.escape(str(name))}\b", text):
                raise ValueError(
                    f"data.chat_template_kwargs.{name}: the tokenizer's chat template doesn't use {name!r}; "
                    "check its spelling, or remove it"
                )

    def messages(self, value: Any, where: str) -> list[Message]:
        """The messages of one prompt, ``data.system_prompt`` included.

        Raises:
            ValueError: naming ``where`` and what is wrong with them.
        """
        given = [{"role": "user", "content": value}] if isinstance(value, str) else value
        if not isinstance(given, list) or not given:
            raise ValueError(f"{where}: a prompt is a string or a list of chat messages, not {type(value).__name__}")
        messages = [_message(message, where) for message in given]
        if messages[-1]["role"] == "assistant":
            raise ValueError(f"{where}: the last message is the assistant's; a prompt ends with another role's turn")
        if self._config.system_prompt is None:
            return messages
        if messages[0]["role"] == "system":
            raise ValueError(f"{where}: has a system message of its own; leave data.system_prompt unset")
        return [{"role": "system", "content": self._config.system_prompt}, *messages]

    def render(self, messages: list[Message], where: str) -> str:
        """The text with the beginning of the assistant's turn.

        Raises:
            ValueError: the template refuses the messages.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._config.chat_template_kwargs
            )
        except Exception as error:  # noqa: BLE001  a template is a program of its own
            roles = ", ".join(message["role"] for message in messages)
            hint = "; leave data.system_prompt unset" if self._config.system_prompt is not None else ""
            raise ValueError(f"{where}: the chat template refuses these messages ({roles}): {error}{hint}") from None
        return str(text)


def _message(message: Any, where: str) -> Message:
    """One message without the keys that are null: Arrow gives every message the keys of all others."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{where}: a chat message is {{'role': ..., 'content': text}}, not {message!r}")
    kept = _without_nulls(message)
    content = kept.get("content", "" if "tool_calls" in kept else None)
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{where}: a chat message is {{'role': ..., 'content': text}}, not {message!r}")
    return kept | {"content": content}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
