"""The text of ``--help``: how to launch, the config groups, every key with its default and explanation."""

from __future__ import annotations

import dataclasses
import sys

from hybridengine.compose import config_groups
from hybridengine.config import explanation, walk

USAGE = """hybridengine: colocated reinforcement learning of language models

  torchrun --nproc-per-node <GPUs> -m hybridengine.train +experiment=<name> [key=value ...]
  python -m hybridengine.train +experiment=<name> [key=value ...]        (world size 1)

Your own model, data and reward:
  torchrun --nproc-per-node 8 -m hybridengine.train \\
      model.path=/models/Qwen2.5-7B data.train=train.jsonl reward.fn=my_reward.py:score rollout.tp=2

Show without running: --cfg job (the composed configuration), --info (where it comes from).
"""


def default_text(item: dataclasses.Field[object]) -> str:
    """A field's default as it would be written on the command line."""
    if item.default is not dataclasses.MISSING:
        value = item.default
    elif item.default_factory is not dataclasses.MISSING:
        value = item.default_factory()
    else:
        value = None
    if value == "???":
        return "required"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def help_text() -> str:
    groups = "\n".join(
        f"  {'+' if name == 'experiment' else ' '}{name}={'|'.join(options)}"
        for name, options in config_groups().items()
    )
    leaves = walk()
    width = max(len(name) + len(default_text(item)) for name, item in leaves if len(default_text(item)) < 24) + 1
    lines, section = [], None
    for name, item in leaves:
        head = name.rsplit(".", 1)[0] if "." in name else ""
        if head != section:
            lines.append("")
            section = head
        left = f"{name}={default_text(item)}"
        lines.append(f"  {left:<{width + 1}} {explanation(item)}")
    return f"{USAGE}\nGroups (a file in conf/ each):\n{groups}\n\nKeys, defaults and what they do:" + "\n".join(lines)


def wants_help(arguments: list[str]) -> bool:
    return any(argument in ("-h", "--help") for argument in arguments)


if __name__ == "__main__":
    sys.stdout.write(help_text() + "\n")
