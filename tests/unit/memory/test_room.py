"""Settings whose second rollout could not wake are refused before the first."""

from __future__ import annotations

from typing import Any

import pytest

from hybridengine.memory.residency import KV_CACHE, OPTIMIZER, ROLLOUT_WEIGHTS, TRAINER_PARAMS, Residency, State
from hybridengine.memory.room import GIB, shortage


class Holds:
    def __init__(self, gib: float) -> None:
        self.gib = gib

    def nbytes(self) -> int:
        return int(self.gib * GIB)

    def offload(self) -> None: ...

    onload = drop = offload


def residency(*, optimizer: State, weights: State, moments: float = 0.0, aliased: bool = False) -> Residency:
    sizes = {TRAINER_PARAMS: 10.0, OPTIMIZER: moments, ROLLOUT_WEIGHTS: 5.0, KV_CACHE: 40.0}
    movers: dict[str, Any] = {owner: Holds(gib) for owner, gib in sizes.items()}
    return Residency(movers, rest={TRAINER_PARAMS: weights, OPTIMIZER: optimizer}, aliased=aliased)


#: 80 GiB, of which weights 10, rollout 45 and the context 2 are in use at the start; moments will be 20.
CASES = {
    "everything-leaves": ({"optimizer": State.HOST, "weights": State.HOST}, 75, None),
    "optimizer-stays-and-fits": ({"optimizer": State.DEVICE, "weights": State.DEVICE}, 57, None),
    "optimizer-stays-in-the-weights-place": ({"optimizer": State.DEVICE, "weights": State.HOST}, 70, None),
    "optimizer-stays-and-does-not": ({"optimizer": State.DEVICE, "weights": State.DEVICE}, 65, 5.0),
    "aliased-weights-stay": ({"optimizer": State.DEVICE, "weights": State.HOST, "aliased": True}, 65, 5.0),
    "resumed": ({"optimizer": State.DEVICE, "weights": State.DEVICE, "moments": 20.0}, 79, None),
}


@pytest.mark.parametrize(("setting", "used", "short"), CASES.values(), ids=CASES.keys())
def test_room_for_the_optimizer_beside_a_rollout(setting: dict[str, Any], used: float, short: float | None) -> None:
    found = shortage(residency(**setting), used=int(used * GIB), total=80 * GIB, gpu_memory_utilization=0.6)
    if short is None:
        assert found is None
        return
    assert found is not None
    assert "memory.offload_optimizer=false: the optimizer's 20.0 GiB" in found and f"{short:.1f} GiB short" in found
    # 5 of 80 GiB are 0.0625 of the device: 0.6 - 0.0625 leaves 0.53.
    assert "memory.offload_optimizer=true or rollout.gpu_memory_utilization=0.5" in found
