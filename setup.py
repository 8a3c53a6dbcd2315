"""Builds the native box copy (csrc/) with the installation; everything else is in pyproject.toml.

Without a working C++ compiler the installation still succeeds and says so: the plain-torch copy serves then.
"""

import importlib.util
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent


def has_cuda_torch() -> bool:
    """Under build isolation there is no torch: the CUDA copy is then built later, on request."""
    try:
        import torch
    except ImportError:
        return False
    return torch.version.cuda is not None


class BuildNative(build_ext):
    """Compiles through ``hybridengine/native_build.py``, the same way ``python -m hybridengine.native build`` does."""

    def build_extension(self, ext: Extension) -> None:
        spec = importlib.util.spec_from_file_location("native_build", ROOT / "hybridengine" / "native_build.py")
        native_build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native_build)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            native_build.compile_cpu(ROOT / "csrc", target)
        except Exception as error:
            self.warn(f"native box copy not built ({error}); the slower plain-torch copy will be used")
        if has_cuda_torch() and shutil.which("nvcc"):
            try:
                native_build.compile_cuda(ROOT / "csrc", target.with_name("_boxes_cuda.so"))
            except Exception as error:
                self.warn(
                    f"CUDA box copy not built ({error}); build it with `python -m hybridengine.native build-cuda`"
                )

    def get_ext_filename(self, fullname: str) -> str:
        """A plain shared library, loaded through ctypes: no Python ABI in its name."""
        return fullname.replace(".", "/") + ".so"

    def copy_extensions_to_source(self) -> None:
        """Editable installation: beside the sources, if it was built."""
        for built in (Path(self.build_lib) / "hybridengine").glob("_boxes*.so"):
            self.copy_file(str(built), str(ROOT / "hybridengine" / built.name))


setup(
    ext_modules=[
        Extension(
            "hybridengine._boxes",
            sources=["csrc/boxes.cpp"],
            depends=["csrc/rows.h", "csrc/team.h", "csrc/normalise.h", "csrc/boxes.h"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
