"""Everything here needs a CUDA GPU, and the box copy built for it."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def cuda_library() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    from hybridengine import native, native_cuda

    native.build()
    native_cuda.build()
