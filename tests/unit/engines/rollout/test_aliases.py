"""Parameters that run on the trainer's memory: which may, and what becomes of the engine's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridengine.engines.rollout.aliases import AliasedParameters
from hybridengine.memory.sleeper import Sleeper


def engine() -> tuple[nn.ParameterDict, Sleeper, AliasedParameters]:
    own = nn.ParameterDict({name: nn.Parameter(torch.ones(8, 4), requires_grad=False) for name in "ab"})
    sleeper = Sleeper(parameter.data for parameter in own.values())
    return own, sleeper, AliasedParameters(sleeper)


def test_the_engines_own_memory_goes_and_sleep_leaves_the_trainers_alone() -> None:
    own, sleeper, aliases = engine()
    theirs = torch.full((8, 4), 7.0)
    assert aliases.alias("a", own["a"], theirs) and own["a"].data_ptr() == theirs.data_ptr()
    assert sleeper.nbytes == own["b"].nbytes
    live = {name: parameter.data for name, parameter in own.items()}
    assert aliases.without(live).keys() == {"b"}
    sleeper.sleep()
    sleeper.wake()
    assert bool((own["a"] == 7).all()) and not own["b"].any()


def test_the_trainers_memory_may_move() -> None:
    """The second time nothing of the engine's is given up."""
    own, sleeper, aliases = engine()
    for value in (7.0, 8.0):
        theirs = torch.full((8, 4), value)
        assert aliases.alias("a", own["a"], theirs) and own["a"].data_ptr() == theirs.data_ptr()
    assert sleeper.nbytes == own["b"].nbytes


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(4, 8), torch.ones(4, 8).t(), torch.ones(8, 4, dtype=torch.bfloat16), torch.ones(8, 4, device="meta")],
    ids=["shape", "strides", "dtype", "device"],
)
def test_what_is_not_alike_is_not_run_on(tensor: torch.Tensor) -> None:
    own, sleeper, aliases = engine()
    before, nbytes = own["a"].data_ptr(), sleeper.nbytes
    assert not aliases.alias("a", own["a"], tensor)
    assert own["a"].data_ptr() == before and sleeper.nbytes == nbytes and aliases.names == set()


def test_an_engine_that_can_not_run_elsewhere() -> None:
    own, _, _ = engine()
    assert not AliasedParameters(None).alias("a", own["a"], torch.ones(8, 4))
