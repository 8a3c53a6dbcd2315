"""Which platform a device gets, and what can be asked of every one of them without the device itself."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from hybridengine import platform
from hybridengine.distributed.world import World
from hybridengine.platform import PLATFORMS
from hybridengine.platform.base import Platform

MEMBERS = [name for name, _ in inspect.getmembers(Platform, inspect.isfunction) if not name.startswith("_")]


@pytest.mark.parametrize("name", PLATFORMS)
def test_one_object_per_kind_of_device(name: str) -> None:
    found = platform.of(torch.device(name, 0) if name == "cuda" else torch.device(name))
    assert found.name == name and World(device=torch.device(name)).platform.name == name
    assert platform.of(torch.device(name)) is platform.of(torch.device(name))


@pytest.mark.parametrize("name", PLATFORMS)
def test_every_question_has_an_answer_with_the_same_arguments(name: str) -> None:
    """mypy does not look at what is imported by name."""
    found = platform.of(torch.device(name))
    for attribute, kind in Platform.__annotations__.items():
        assert type(getattr(found, attribute)).__name__ == kind, attribute
    for member in MEMBERS:
        asked = list(inspect.signature(getattr(Platform, member)).parameters)[1:]
        assert list(inspect.signature(getattr(found, member)).parameters) == asked, member


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="device meta: must be one of cpu, cuda"):
        platform.of(torch.device("meta"))


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (4, "cuda:3")], ids=["cpu", "gpus"])
def test_the_device_of_a_rank(monkeypatch: pytest.MonkeyPatch, gpus: int, device: str) -> None:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: gpus > 0))
    assert platform.local_device(3) == torch.device(device)


def test_a_cpus_memory_is_the_hosts() -> None:
    cpu = platform.of(torch.device("cpu"))
    assert cpu.memory(torch.device("cpu")) is None and not cpu.separate_memory and cpu.rng_state() is None
    assert platform.of(torch.device("cuda")).separate_memory
