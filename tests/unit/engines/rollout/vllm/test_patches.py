"""vLLM as a guest: its remarks are hidden and no others, and the job keeps its process group."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
import torch.distributed as dist

from hybridengine.engines.rollout.vllm.patches import keep_process_group, quiet_start


@pytest.fixture(autouse=True)
def level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "error")


def test_only_the_named_warning_is_hidden() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with quiet_start():
            warnings.warn("`torch.distributed.reduce_op` is deprecated, please use ...", FutureWarning, stacklevel=1)
            warnings.warn("ours", FutureWarning, stacklevel=1)
        warnings.warn("`torch.distributed.reduce_op` is deprecated, please use ...", FutureWarning, stacklevel=1)
    assert [str(warning.message)[:4] for warning in seen] == ["ours", "`tor"]


def test_vllm_logs_from_the_level_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, level in [("error", logging.ERROR), ("INFO", logging.INFO)]:
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", name)
        with quiet_start():
            assert logging.getLogger("vllm.triton_utils.importing").getEffectiveLevel() == level
    assert logging.getLogger("hybridengine").isEnabledFor(logging.WARNING)


def test_memory_is_bound_to_no_node_meanwhile() -> None:
    with pytest.raises(ZeroDivisionError), quiet_start():
        assert torch.ops._C.init_cpu_memory_env([0]) is None
        raise ZeroDivisionError
    assert "init_cpu_memory_env" not in vars(torch.ops._C)


def test_the_default_group_survives_a_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed: list[object] = []
    monkeypatch.setattr(dist, "destroy_process_group", destroyed.append)
    with pytest.raises(ZeroDivisionError), keep_process_group():
        dist.destroy_process_group()
        dist.destroy_process_group("vLLM's own")  # type: ignore[arg-type]
        raise ZeroDivisionError
    dist.destroy_process_group(None)
    assert destroyed == ["vLLM's own", None]
