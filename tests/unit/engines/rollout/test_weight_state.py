"""WeightState: an update that is not complete is no version, whichever way it comes."""

from __future__ import annotations

import pytest
import torch

from hybridengine.engines.rollout.base import StaleWeightsError
from hybridengine.engines.rollout.weight_state import WeightState


def live() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(4, 3), "b": torch.zeros(4)}


def finish(state: WeightState, tensors: dict[str, torch.Tensor], version: int) -> None:
    state.check_complete(["w", "b"], tensors)
    state.finish(version)


def test_from_nothing_to_two_versions() -> None:
    state, tensors = WeightState(), live()
    with pytest.raises(StaleWeightsError):
        state.check_servable()
    for version in (0, 1):
        with pytest.raises(RuntimeError, match="finish_update.. without begin_update"):
            finish(state, tensors, version)
        state.begin(tensors)
        with pytest.raises(StaleWeightsError, match=rf"no complete policy version \(last: {version - 1}\)"):
            state.check_servable()
        for tensor in tensors.values():
            tensor.fill_(version + 1)
        finish(state, tensors, version)
        state.check_servable()
        assert state.version == version


def test_memory_without_weights_shows_what_a_transfer_left_out() -> None:
    state, tensors = WeightState(), live()
    state.begin(tensors)
    tensors["w"].fill_(1.0)
    with pytest.raises(RuntimeError, match="1 parameters got no data in this sync, first: b"):
        finish(state, tensors, 0)
    with pytest.raises(StaleWeightsError):
        state.check_servable()
    tensors["b"].fill_(1.0)
    finish(state, tensors, 0)


def test_parameters_that_come_one_by_one_are_counted() -> None:
    state, tensors = WeightState(), live()
    with pytest.raises(RuntimeError, match="'w' came outside of begin_update"):
        state.mark_delivered("w")
    state.begin(tensors)
    state.mark_delivered("w")
    with pytest.raises(RuntimeError, match="1 parameters got no data in this sync, first: b"):
        finish(state, tensors, 0)
    state.mark_delivered("b")
    for tensor in tensors.values():
        tensor.fill_(1.0)
    finish(state, tensors, 0)
    state.begin(tensors)  # what came in the last update does not count in this one
    state.mark_delivered("b")
    with pytest.raises(RuntimeError, match="first: w"):
        finish(state, tensors, 1)


def test_a_later_update_leaves_what_is_there() -> None:
    """A transfer may write less than all of it (what is aliased changes by itself)."""
    state, tensors = WeightState(), live()
    for version in (0, 1):
        state.begin(tensors)
        if version == 0:
            for tensor in tensors.values():
                tensor.fill_(1.0)
        finish(state, tensors, version)
    assert all(bool((tensor == 1).all()) for tensor in tensors.values())


def test_lost_memory_has_no_version() -> None:
    state, tensors = WeightState(), live()
    state.begin(tensors)
    for tensor in tensors.values():
        tensor.fill_(1.0)
    finish(state, tensors, 5)
    state.lose()
    assert state.version == -1
    with pytest.raises(StaleWeightsError):
        state.check_servable()
    state.begin(tensors)
    with pytest.raises(RuntimeError, match="2 parameters got no data"):
        finish(state, tensors, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_weight_that_is_nan_has_come(dtype: torch.dtype) -> None:
    """Whatever made it; only the mark itself counts as nothing."""
    made = [
        torch.tensor(float("nan")),
        -torch.tensor(float("nan")),
        torch.tensor(0.0) / 0.0,
        torch.tensor(float("inf")) * 0,
    ]
    for value in made:
        state, tensors = WeightState(), {"w": torch.zeros(4, 3, dtype=dtype)}
        state.begin(tensors)
        with pytest.raises(RuntimeError, match="got no data in this sync, first: w"):
            state.check_complete(["w"], tensors)
        tensors["w"].fill_(value.to(dtype))
        state.check_complete(["w"], tensors)
