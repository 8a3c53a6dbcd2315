"""Turn a local copy of GSM8K or MATH into JSONL files with the columns prompt, answer and data_source.

    python -m hybridengine.data gsm8k --source DIRECTORY --out DIRECTORY
    python -m hybridengine.data math --source DIRECTORY --out DIRECTORY

``--source`` is the copy as it is published: a snapshot from the Hugging Face Hub (parquet or JSONL files), or the
repositories of the authors (GSM8K: train.jsonl and test.jsonl; MATH: train/ and test/, a JSON file per problem).
Nothing is downloaded. The answer is GSM8K's number after ``####``, MATH's last ``\\boxed{}``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybridengine.data.files import Splits, read_stored
from hybridengine.data.rows import ABSENT, Row

INSTRUCTION = "Think step by step, and put the final answer into \\boxed{}."

Convert = Callable[[Row], dict[str, Any]]


def gsm8k_row(row: Row) -> dict[str, Any]:
    """Prompt and answer of a row with the columns ``question`` and ``answer`` ("... #### 1,200").

    Raises:
        ValueError: naming the row and what it lacks.
    """
    question, solution = _text(row, "question"), _text(row, "answer")
    _, found, number = solution.rpartition("####")
    if not found:
        raise ValueError(f"{row.where}: column 'answer' has no '####' with the final number after it")
    return {"prompt": question, "answer": number.strip().replace(",", ""), "data_source": "gsm8k"}


def math_row(row: Row) -> dict[str, Any]:
    """Prompt and answer of a row with the columns ``problem`` and ``solution``; level and subject where it has them.

    Raises:
        ValueError: naming the row and what it lacks.
    """
    problem, solution = _text(row, "problem"), _text(row, "solution")
    answer = last_boxed(solution)
    if answer is None:
        raise ValueError(f"{row.where}: column 'solution' has no \\boxed{{...}} with the final answer")
    subject = row.get("subject") if row.get("subject") is not ABSENT else row.get("type")
    extra = {"level": row.get("level"), "subject": subject}
    known = {name: value for name, value in extra.items() if value is not ABSENT}
    return {"prompt": problem, "answer": answer, "data_source": "math", **known}


def last_boxed(text: str) -> str | None:
    r"""The contents of the last ``\boxed{...}`` (or ``\fbox{...}``) whose braces are closed.

    >>> last_boxed(r"so \boxed{1}, no: $\boxed{\frac{1}{2}}$.")
    '\\frac{1}{2}'
    """
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].split("box", 1)[1].removeprefix("ed").lstrip()
    if not rest.startswith("{"):  # \boxed 5 takes the next token
        return rest.split("$")[0].split()[0] if rest.split() else None
    depth = 0
    for position, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:position].strip()
    return last_boxed(text[:start])


CONVERTERS: dict[str, Convert] = {"gsm8k": gsm8k_row, "math": math_row}


def prepare(name: str, source: Path, out: Path, *, subset: str | None = None, instruction: str = INSTRUCTION) -> str:
    """Write ``out/<split>.jsonl`` for every split of the copy; returns what was written, in words.

    Args:
        name: "gsm8k" or "math".
        subset: which one, of a snapshot that has several.
        instruction: put after each problem; "" for none.

    Raises:
        ValueError: naming the file, row or column that is not as it is published.
    """
    if not source.is_dir():
        raise ValueError(f"--source {source}: no such directory")
    splits = _author_splits(source) or read_stored([str(source)], "--source", subset=subset)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for split, rows in splits.items():
        converted = [CONVERTERS[name](row) for row in rows]
        lines = (json.dumps(_with_instruction(row, instruction), ensure_ascii=False) + "\n" for row in converted)
        path = out / f"{split}.jsonl"
        path.write_text("".join(lines), encoding="utf-8")
        written.append(f"{path}: {len(converted)} rows")
    return "\n".join(written)


def _author_splits(source: Path) -> Splits:
    """As the authors publish them: train.jsonl; MATH: train/<subject>/<number>.json, one problem in each file."""
    splits: Splits = {}
    for split in ("train", "test"):
        files = sorted((source / split).glob("*/[0-9]*.json"), key=lambda path: (path.parent.name, int(path.stem)))
        if (single := source / f"{split}.jsonl").is_file():
            splits |= {split: read_stored([str(single)], "--source")["train"]}
        elif files:
            splits[split] = [Row(json.loads(file.read_text(encoding="utf-8")), str(file)) for file in files]
    return splits


def _text(row: Row, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        columns = ", ".join(sorted(row.columns))
        raise ValueError(f"{row.where}: no text in column {column!r}; the row has {columns}")
    return value


def _with_instruction(row: dict[str, Any], instruction: str) -> dict[str, Any]:
    return row | {"prompt": f"{row['prompt']}\n\n{instruction}"} if instruction else row


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m hybridengine.data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted(CONVERTERS))
    parser.add_argument("--source", type=Path, required=True, help="directory with the published files")
    parser.add_argument("--out", type=Path, required=True, help="directory for train.jsonl, test.jsonl")
    parser.add_argument("--subset", help="which subset, of a snapshot that has several; gsm8k: main")
    parser.add_argument("--instruction", default=INSTRUCTION, help="put after each problem, '' for none; %(default)s")
    given = parser.parse_args(arguments)
    source = given.source
    if given.name == "gsm8k" and given.subset is None and (source / "main").is_dir():
        source = source / "main"  # the snapshot's other subset is "socratic"
    try:
        print(prepare(given.name, source, given.out, subset=given.subset, instruction=given.instruction))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"hybridengine.data: {error}\n")
        return 2
    print(f"train with: data.train={given.out / 'train.jsonl'} data.validation={given.out / 'test.jsonl'} reward=math")
    return 0
