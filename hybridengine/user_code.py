"""Functions and classes that the configuration names in a user's own file or package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any


def load_attribute(spec: str, *, label: str, kind: str) -> Any:
    """What ``path.py:name`` or ``package.module:name`` names; a file is imported once per process.

    Args:
        label: what the error message begins with, such as "algorithm.fn=loss.py:MyLoss".
        kind: what is looked for, such as "function".

    Raises:
        ValueError: no such file, module or name, or the import failed.
    """
    source, _, attribute = spec.rpartition(":")
    module = _import_file(Path(source).expanduser(), label) if source.endswith(".py") else _import_module(source, label)
    found = getattr(module, attribute, None)
    if not callable(found):
        names = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise ValueError(f"{label}: {source} has no {kind} {attribute!r}; it has {', '.join(names) or 'none'}")
    return found


def _import_file(path: Path, label: str) -> Any:
    path = path.resolve()
    if not path.is_file():
        raise ValueError(f"{label}: no such file {path}")
    name = f"hybridengine_user_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # before execution: dataclasses and pickle look modules up by name
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{label}: importing {path} failed: {type(error).__name__}: {error}") from error
    return module


def _import_module(name: str, label: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ValueError(f"{label}: importing {name} failed: {type(error).__name__}: {error}") from error
