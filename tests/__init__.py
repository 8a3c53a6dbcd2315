"""Tests; unit/ and distributed/ have the package's folders."""

from pathlib import Path

#: The repository.
ROOT = Path(__file__).resolve().parents[1]
