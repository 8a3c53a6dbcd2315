"""Which program a response contains."""

from __future__ import annotations

import ast
import re

FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
OPEN_FENCE = re.compile(r"^[ \t]*```[ \t]*(?:python|py)?[ \t]*\n", re.MULTILINE | re.IGNORECASE)
PYTHON = {"", "python", "py", "python3"}


def program_of(response: str, *, prefix: str = "", entry_point: str | None = None) -> str:
    """The source text to run.

    The last fenced block of Python; without one the response itself. It may continue ``prefix``, the head of a function
    in the prompt: where it does not define ``entry_point`` itself, it follows it directly. Where it does, the prefix
        comes
    first all the same, for its imports and helpers.
    """
    code, fenced = _block(response)
    if not prefix:
        return code
    if entry_point is None or _defines(code, entry_point):
        return f"{prefix}\n\n{code}" if is_python(prefix) else code
    return prefix + (_indented(code) if fenced else _body(code))


def _block(response: str) -> tuple[str, bool]:
    blocks = [match[2] for match in FENCE.finditer(response) if match[1].lower() in PYTHON]
    if blocks:
        return blocks[-1], True
    if match := OPEN_FENCE.search(response):  # cut at the token limit, or the closing fence left out
        return response[match.end() :], True
    return response, False


def _defines(code: str, name: str) -> bool:
    """Whether the code defines ``name`` at its top level; of code that is no Python, whether it looks like it."""
    if not is_python(code):
        return re.search(rf"^(?:async\s+)?(?:def|class)\s+{re.escape(name)}\b", code, re.MULTILINE) is not None
    for node in ast.parse(code).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name:
            return True
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return True
    return False


def is_python(text: str) -> bool:
    """Whether ``text`` is a program, or part of one, and not empty."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return bool(text.strip())


def _body(code: str) -> str:
    """A model that continues a function goes on with the next one, which the token limit then cuts in the middle."""
    lines = code.splitlines(keepends=True)
    for i, line in enumerate(lines):
        if i and line.strip() and not line[0].isspace():
            return "".join(lines[:i])
    return code


def _indented(code: str) -> str:
    """A function's body in a fenced block often has lost its indentation."""
    lines = [line for line in code.splitlines() if line.strip()]
    if lines and not lines[0][0].isspace():
        return "".join(f"    {line}\n" if line.strip() else "\n" for line in code.splitlines())
    return code
