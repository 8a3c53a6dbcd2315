"""Keys that one algorithm has and the others don't: ``algorithm.kwargs``, checked by a dataclass of its own."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException


@dataclass(kw_only=True)
class NoOptions:
    """Of an algorithm that has no keys of its own."""


def parse_options(schema: type, given: Mapping[str, Any], *, owner: str) -> Any:
    """``algorithm.kwargs`` as an instance of the dataclass ``schema``.

    Ranges are the schema's own: its ``__post_init__`` raises ValueError, with :func:`must_be_positive` for example.

    Args:
        owner: what the error message calls the algorithm.

    Raises:
        ValueError: an unknown key, a value of the wrong type, or one that the schema refuses; by name.
    """
    names = [item.name for item in dataclasses.fields(schema)]
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1) or names
            hint = f"did you mean algorithm.kwargs.{close[0]}?" if names else "it has none"
            raise ValueError(f"algorithm.kwargs.{name}: not a key of {owner}; {hint}")
    try:
        typed = OmegaConf.merge(OmegaConf.structured(schema), dict(given))
    except OmegaConfBaseException as error:
        raise ValueError(f"algorithm.kwargs.{error.full_key}: {str(error).splitlines()[0]}") from None
    return schema(**{str(name): value for name, value in typed.items()})


def must_be_positive(options: Any, *names: str) -> None:
    """Raise ValueError for the first of these options that is not a finite number above 0."""
    for name in names:
        if not 0 < getattr(options, name) < float("inf"):
            raise ValueError(f"algorithm.kwargs.{name}={getattr(options, name)}: must be greater than 0, and finite")
