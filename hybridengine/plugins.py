"""Things of the user's own, named in the configuration: ``path.py:name`` or ``package.module:name``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any


def load_object(spec: str, key: str) -> Any:
    """The object that ``spec`` names.

    Args:
        key: the configuration key, for messages.

    Raises:
        ValueError: no such file, module or name, or it can't be imported.
    """
    source, colon, attribute = spec.rpartition(":")
    if not colon or not source or not attribute:
        raise ValueError(f"{key}={spec}: must be path.py:name or package.module:name")
    if source.endswith(".py"):
        module = _import_file(Path(source).expanduser(), f"{key}={spec}")
    else:
        try:
            module = importlib.import_module(source)
        except (Exception, SystemExit) as error:
            raise ValueError(f"{key}={spec}: importing {source} failed: {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if found is None:
        names = ", ".join(sorted(name for name in vars(module) if not name.startswith("_"))) or "nothing"
        raise ValueError(f"{key}={spec}: {source} has no {attribute!r}; it has {names}")
    return found


def _import_file(path: Path, where: str) -> Any:
    path = path.resolve()
    if not path.is_file():
        raise ValueError(f"{where}: no such file {path}")
    name = f"hybridengine_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution: dataclasses and pickle look modules up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(f"{where}: importing {path} failed: {type(error).__name__}: {error}") from error
    return module
