"""Write the versions that this environment has of everything that an installation pulls in.

    .venv/bin/python scripts/constraints.py cpu scripts/constraints-cpu.txt       (make constraints)

pip takes the file as --constraint, so that a clone in a year gets the versions that were tested today. Only packages
that the project's own requirements lead to are listed, whatever else the environment has.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]

#: Extras of the project that scripts/install.sh installs.
EXTRAS = {"cpu": ("cpu", "megatron", "dev"), "cuda": ("cuda", "megatron", "dev")}

#: torch's build is chosen by scripts/install.sh, which also removes the three again; pinned, pip need not try versions.
SKIPPED = {"torch", "hybridengine"}
REMOVED_AFTERWARDS = ("torchvision==0.28.0", "torchaudio==2.11.1", "torchcodec==0.17.0")


def main() -> int:
    """The command line; returns the exit status."""
    if len(sys.argv) != 3 or sys.argv[1] not in EXTRAS:
        sys.stderr.write("usage: constraints.py cpu|cuda FILE\n")
        return 2
    variant, out = sys.argv[1], Path(sys.argv[2])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in EXTRAS[variant]:
        wanted += project["optional-dependencies"][extra]
    found = versions(Requirement(text) for text in wanted)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    lines = [f"# Tested versions of the {variant} set, Python {python}; written by `make constraints`."]
    lines += [f"{name}=={version}" for name, version in sorted(found.items()) if name not in SKIPPED]
    if variant == "cpu":
        lines += ["# Removed after installation.", *REMOVED_AFTERWARDS]
    else:  # "===" keeps a CPU build of the same version out, where an index has one
        lines += [f"torch==={found['torch'].split('+')[0]}"]
    out.write_text("\n".join(lines) + "\n")
    print(f"{out}: {len(found)} packages")
    return 0


def versions(requirements: Iterable[Requirement]) -> dict[str, str]:
    """Installed versions of these packages and, through their requirements and extras, of those they need."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    left = [(requirement, extra) for requirement in requirements for extra in ("", *requirement.extras)]
    while left:
        requirement, extra = left.pop()
        name = canonicalize_name(requirement.name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue  # of another platform, or removed after installation
        found[name] = installed.version
        for text in installed.requires or ():
            inner = Requirement(text)
            if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                left += [(inner, wanted) for wanted in ("", *inner.extras)]
    return found


if __name__ == "__main__":
    sys.exit(main())
