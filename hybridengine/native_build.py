"""Compiling csrc/. Standard library only: setup.py runs this file before anything is installed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

_CXX_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-Wall", "-Wno-psabi")
_NVCC_FLAGS = ("-O3", "-std=c++17", "-Xcompiler", "-fPIC")


def source_dir() -> Path:
    """csrc/: beside the package in a checkout, inside it when installed.

    Raises:
        FileNotFoundError: in neither place.
    """
    package = Path(__file__).resolve().parent
    for found in (package.parent / "csrc", package / "csrc"):
        if (found / "boxes.cpp").exists():
            return found
    raise FileNotFoundError(f"csrc/boxes.cpp is neither in {package.parent} nor in {package}")


def compile_cpu(sources: Path, output: Path) -> Path:
    """``sources/boxes.cpp`` to the shared library ``output``, with $CXX or the first compiler found.

    Raises:
        FileNotFoundError: no compiler on PATH.
        subprocess.CalledProcessError: it failed.
    """
    chosen = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if chosen is None:
        raise FileNotFoundError("no C++ compiler (c++, g++, clang++) on PATH")
    return _run([*shlex.split(chosen), *_CXX_FLAGS, str(sources / "boxes.cpp")], output)


def compile_cuda(sources: Path, output: Path, *, arch: str = "all-major", object_only: bool = False) -> Path:
    """``sources/boxes.cu`` to a shared library (or only an object file).

    Args:
        arch: nvcc's -arch; "native" is the machine's own GPU.

    Raises:
        FileNotFoundError: no nvcc on PATH.
        subprocess.CalledProcessError: it failed.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise FileNotFoundError("no nvcc on PATH")
    kind = "-c" if object_only else "-shared"
    return _run([nvcc, kind, *_NVCC_FLAGS, f"-arch={arch}", str(sources / "boxes.cu")], output)


def _run(command: list[str], output: Path) -> Path:
    # Into place in one step: a process that has the old library mapped keeps the old file.
    partial = output.with_name(f"{output.name}.{os.getpid()}.partial")
    try:
        subprocess.run([*command, "-o", str(partial)], check=True)
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    return output
