"""What to answer to a key that the schema doesn't have."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from hybridengine.config.equivalents import lookup


def unknown_key(path: str, leaves: Sequence[str]) -> str:
    """One sentence: the unknown key and, where there is one, what it is called here.

    The table of equivalents comes first: ``beta`` is near to no name of ours and has one all the same.
    """
    last = path.rsplit(".", 1)[-1]
    same_leaf = [name for name in leaves if name.rsplit(".", 1)[-1] == last]
    match = lookup(path) or (None if same_leaf else lookup(last))
    if match is not None and match.ours is None:
        return f"unknown key {path!r}: {match.advice}"
    if match is not None:
        known = "name for it" if match.name == path else match.name
        note = f"; {match.advice}" if match.advice else ""
        return f"unknown key {path!r}; did you mean {match.ours!r} ({match.program}'s {known}{note})?"
    nearest = _nearest(path, same_leaf, leaves)
    did_you_mean = f"; did you mean {nearest!r}?" if nearest else ""
    return f"unknown key {path!r}{did_you_mean} (`--help` lists all keys)"


def _nearest(path: str, same_leaf: Sequence[str], leaves: Sequence[str]) -> str | None:
    last = path.rsplit(".", 1)[-1]
    by_leaf = {name.rsplit(".", 1)[-1]: name for name in reversed(leaves)}  # of several the first
    close = difflib.get_close_matches(path, same_leaf, n=1, cutoff=0.0)
    close = close or difflib.get_close_matches(path, leaves, n=1, cutoff=0.75)
    close = close or [by_leaf[leaf] for leaf in difflib.get_close_matches(last, by_leaf, n=1, cutoff=0.75)]
    return close[0] if close else None
