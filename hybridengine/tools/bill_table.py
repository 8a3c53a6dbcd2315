"""The bill as a table for the terminal, and as the committed tables of docs/results/.

python -m hybridengine.tools.bill_table docs/results        writes memory-bill-8x80.md and memory-bill-8x141.md
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from hybridengine.config import Config
from hybridengine.memory.residency import GRADS, OPTIMIZER, TRAINER_PARAMS
from hybridengine.tools.advice import Changes, advise
from hybridengine.tools.bill import GIB, Bill, make_bill
from hybridengine.tools.machine import Machine, Offload

_QWEN: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064}
#: The numbers of the published config.json files that decide memory.
QWEN2_5: dict[str, dict[str, Any]] = {
    "Qwen2.5-1.5B": _QWEN
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    | {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "Qwen2.5-7B": _QWEN
    | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4},
    "Qwen2.5-32B": _QWEN
    | {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
    | {"num_key_value_heads": 8},
    "Qwen2.5-72B": _QWEN
    | {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64}
    | {"num_key_value_heads": 8},
}
#: Rows that come first.
_TRAINING = (TRAINER_PARAMS, GRADS, OPTIMIZER)
#: Tensor-parallel size the tables start from.
TP = {"Qwen2.5-1.5B": 1, "Qwen2.5-7B": 2, "Qwen2.5-32B": 4, "Qwen2.5-72B": 8}
MACHINES = {
    "8x80": Machine(ranks=8, device_gib=80, host_gib=1000),
    "8x141": Machine(ranks=8, device_gib=141, host_gib=2000),
}


def table_config(name: str) -> Config:
    """What the committed tables assume: the settings of ``+experiment=qwen2_5_7b``."""
    config = _experiment()
    return replace(config, rollout=replace(config.rollout, tp=TP[name]))


@functools.cache
def _experiment() -> Config:
    from hybridengine.config.compose import build

    return build(["+experiment=qwen2_5_7b", "model.path=.", "data.train=."])


def rich_table(bill: Bill, title: str) -> Table:
    """Owners down, phases across, GiB per rank."""
    table = Table(title=title, title_justify="left")
    table.add_column("GiB per rank")
    for phase in bill.phases:
        table.add_column(phase, justify="right")
    for owner in _owners(bill):
        table.add_row(owner, *(_gib(owners.get(owner, 0)) for owners in bill.phases.values()))
    table.add_section()
    style = {phase: "" if peak <= bill.limit else "bold red" for phase, peak in bill.peaks.items()}
    cells = [f"[{style[p]}]{_gib(v)}[/]" if style[p] else _gib(v) for p, v in bill.peaks.items()]
    table.add_row("peak", *cells, style="bold")
    table.add_row("of", *([_gib(bill.limit)] * len(bill.phases)), style="dim")
    return table


def override_text(changes: Changes) -> str:
    return " ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in changes.items()
    )


def markdown(machine_name: str) -> str:
    """One committed table: every model as configured, and with the changes that make it fit."""
    machine = MACHINES[machine_name]
    head = (
        f"# Memory bill: {machine.ranks} × {machine.device_gib:g} GiB, {machine.host_gib:g} GiB of host memory\n\n"
        "Predicted, not measured; written by `python -m hybridengine.tools.bill_table docs/results`. GiB on the\n"
        "fullest rank (host: all ranks together), for the settings of `+experiment=qwen2_5_7b`: bfloat16 compute over\n"
        "float32 master weights, micro-batches of 16,384 tokens, 512 + 1,024 tokens per sequence, deep sleep,\n"
        "optimizer and training weights offloaded to host memory during rollouts. `docs/memory.md` has the formulas.\n"
    )
    return head + "".join(_model_section(name, machine) for name in QWEN2_5)


def _model_section(name: str, machine: Machine) -> str:
    config, model, offload = table_config(name), QWEN2_5[name], Offload()
    bill = make_bill(model, config, machine, offload)
    changes, changed = advise(model, config, machine, offload)
    lines = [f"\n## {name}, rollout.tp={config.rollout.tp}\n", _markdown_table(bill)]
    if bill.fits:
        lines.append(f"\nFits; {bill.notes[1]}.\n" if len(bill.notes) > 2 else "\nFits.\n")
    else:
        lines.append("\nDoes not fit: " + "; ".join(bill.problems) + ".\n")
        if changed.fits:
            lines.append(f"\nFits with `{override_text(changes)}`; {changed.notes[1]}:\n\n" + _markdown_table(changed))
        else:
            lines.append(f"\nNo combination of keys makes it fit; the closest is `{override_text(changes)}`:\n\n")
            lines.append(_markdown_table(changed) + "\nStill missing: " + "; ".join(changed.problems) + ".\n")
    return "\n".join(line.rstrip("\n") for line in lines) + "\n"


def _markdown_table(bill: Bill) -> str:
    rows = ["| | " + " | ".join(bill.phases) + " |", "|---|" + "---:|" * len(bill.phases)]
    for owner in _owners(bill):
        rows.append(f"| {owner} | " + " | ".join(_gib(o.get(owner, 0)) for o in bill.phases.values()) + " |")
    rows.append("| **peak** | " + " | ".join(f"**{_gib(peak)}**" for peak in bill.peaks.values()) + " |")
    rows.append(f"\nHost memory: {bill.host / GIB:.0f} of {bill.host_limit / GIB:.0f} GiB.")
    return "\n".join(rows) + "\n"


def _owners(bill: Bill) -> list[str]:
    named = {owner: None for owners in bill.phases.values() for owner in owners}
    return [*(owner for owner in _TRAINING if owner in named), *(owner for owner in named if owner not in _TRAINING)]


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f}" if nbytes else "–"


def main(directory: str) -> None:
    for name in MACHINES:
        path = Path(directory) / f"memory-bill-{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(markdown(name))
        print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1])
