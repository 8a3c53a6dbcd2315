"""Writes docs/config.md from the schema: every key, and where the keys of verl and TRL went.

python -m hybridengine.tools.config_docs docs/config.md
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from hybridengine.config import limits_of, walk
from hybridengine.config.equivalents import EQUIVALENTS, NOT_HERE, TRL_VERSION, VERL_VERSION
from hybridengine.config.help import default_text

HEADER = """# Configuration

<!-- Written by `make docs` from hybridengine/config/; edit those. -->

Every key can be set on the command line as `key=value`. Groups (`train=fsdp_bf16`, `algorithm=dapo`,
`rollout=transformers`, ...) are files in `conf/`; `+experiment=NAME` sets a whole run. An unknown key is refused.
`python -m hybridengine.train --help` prints this list in the terminal.
"""


def render() -> str:
    """The text of docs/config.md."""
    leaves = walk()
    lines = [HEADER, f"## All {len(leaves)} keys"]
    section: str | None = None
    for name, item in leaves:
        head = name.rsplit(".", 1)[0] if "." in name else "the run"
        if head != section:
            lines += ["", f"### {head}", "", "| key | default | values | |", "| --- | --- | --- | --- |"]
            section = head
        cells = [f"`{name}`", f"`{default_text(item)}`", values_text(item), _cell(item.metadata["help"])]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    lines += ["", "### Keys of single algorithms", "", "| key | default | |", "| --- | --- | --- |", *_own_keys()]
    lines += [
        "",
        "## Coming from verl or TRL",
        "",
        f"Names as of verl {VERL_VERSION} and TRL {TRL_VERSION} (`GRPOConfig`). verl's `actor_rollout_ref.actor`,",
        "`.rollout`, `.ref` and `.model` are shortened to `actor`, `rollout`, `ref` and `model`. The values need not",
        "carry over: compare the explanations above.",
        "",
        "| here | verl | TRL | |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {_names(e.ours)} | {_names(e.verl)} | {_names(e.trl)} | {_cell(e.note)} |".replace("|  |", "| |")
        for e in EQUIVALENTS
    ]
    lines += ["", "No key here has the part of these:", "", "| verl, TRL | instead |", "| --- | --- |"]
    lines += [f"| `{name}{'*' if name.endswith('.') else ''}` | {_cell(text)} |" for name, text in NOT_HERE.items()]
    return "\n".join(lines) + "\n"


def values_text(item: dataclasses.Field[Any]) -> str:
    """What a key can be set to; empty where every value of its type will do."""
    text = str(limits_of(item)) or ("true | false" if "bool" in str(item.type) else "")
    return _cell(f"{text} | null" if text and "None" in str(item.type) else text)


def _own_keys() -> list[str]:
    from hybridengine.algorithms.registry import ALGORITHMS

    return [
        f"| `algorithm.kwargs.{item.name}` | `{default_text(item)}` | {name}: {_cell(item.metadata.get('help', ''))} |"
        for name, algorithm in ALGORITHMS.items()
        for item in dataclasses.fields(algorithm.Options)
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _names(text: str) -> str:
    """Code font for the keys; remarks stay as they are."""
    return "—" if text == "—" else ", ".join(f"`{part}`" for part in text.split(", "))


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m hybridengine.tools.config_docs docs/config.md")
    Path(sys.argv[1]).write_text(render())


if __name__ == "__main__":
    main()
