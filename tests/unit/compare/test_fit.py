"""Arms that are left out before anything starts, with their reasons."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridengine.compare.arms import Arm
from hybridengine.compare.fit import bills_of, too_large, why_not
from hybridengine.compare.plan import Settings, make_plan
from hybridengine.config import Config
from hybridengine.config.compose import build
from hybridengine.config.schema import ConfigError
from hybridengine.memory.residency import KV_CACHE, OPTIMIZER, ROLLOUT_WEIGHTS, TRAINER_PARAMS
from hybridengine.tools.bill import GIB, OPTIMIZE, ROLLOUT
from hybridengine.tools.machine import Machine
from tests.tiny import make_tiny

CPU = Machine(ranks=2, device_gib=0, host_gib=64)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A model with 4 heads of 32 and 2 key heads."""
    path = make_tiny(tmp_path_factory.mktemp("model"), "qwen2", max_position_embeddings=4096, head_dim=32)
    return [f"model.path={path}", "data.train=d.jsonl", "reward.fn=exact_match", "rollout=transformers"]


def arm(name: str, ranks: int = 2) -> Arm:
    return Arm.parse(name, ranks=ranks)


def arm_config(arm: Arm, job: list[str]) -> Config:
    return build([*job, *arm.overrides()])


def test_what_the_program_refuses_is_left_out_with_its_reason(job: list[str]) -> None:
    assert why_not(arm("colocated-sync"), job, CPU) is None
    reason = why_not(arm("colocated-sync-tp2"), job, CPU)
    assert reason is not None and reason.startswith("rollout.tp=2: the transformers engine has no tensor parallelism")


def test_a_plan_has_the_arms_that_fit_in_their_order(job: list[str], tmp_path: Path) -> None:
    plan = make_plan(Settings(job=tuple(job), ranks=2, out=tmp_path), CPU, tp=1)
    names = [one.name for one in plan.arms]
    assert names[:2] == ["colocated-sync", "disaggregated-1+1-sync"] and len(names) == 7
    assert set(plan.left_out) == {"colocated-sync-tp2", "colocated-partial-tp2"}


def test_the_users_own_mistake_is_said_once(job: list[str], tmp_path: Path) -> None:
    wrong = Settings(job=(*job, "train.lr=0"), ranks=2, out=tmp_path)
    with pytest.raises(ConfigError) as caught:
        make_plan(wrong, CPU, tp=1)
    assert str(caught.value) == "train.lr=0.0: must be greater than 0"
    with pytest.raises(ValueError, match="no arm 'colocated-asinc'"):
        make_plan(Settings(job=tuple(job), ranks=2, out=tmp_path, arms=("colocated-asinc",)), CPU, tp=1)


@pytest.mark.parametrize("name", ["colocated-sync", "disaggregated-1+1-sync"])
def test_the_memory_bill_is_the_reason(job: list[str], name: str) -> None:
    """A process takes 2 GiB by the bill, so two ranks never fit into 3 GiB."""
    assert too_large(arm(name), arm_config(arm(name), job), CPU) is None
    small = Machine(ranks=2, device_gib=0, host_gib=3)
    reason = too_large(arm(name), arm_config(arm(name), job), small)
    assert reason is not None and "GiB of" in reason


def test_pools_are_billed_apart(job: list[str]) -> None:
    """3 training ranks hold a third of the optimizer each and no rollout weights; 1 rollout rank no optimizer."""
    split, whole = arm("disaggregated-3+1-sync", ranks=4), arm("colocated-sync", ranks=4)
    machine = Machine(ranks=4, device_gib=80, host_gib=1000)
    bills = bills_of(split, arm_config(split, job), machine)
    colocated = bills_of(whole, arm_config(whole, job), machine)
    assert bills is not None and colocated is not None and (len(bills), len(colocated)) == (2, 1)
    third, quarter = (found[0].phases[OPTIMIZE][OPTIMIZER] for found in (bills, colocated))
    assert third == pytest.approx(4 / 3 * quarter, rel=0.1)
    assert bills[1].phases[ROLLOUT][ROLLOUT_WEIGHTS] == colocated[0].phases[ROLLOUT][ROLLOUT_WEIGHTS]
    assert bills[1].phases[ROLLOUT][KV_CACHE] > 0 and bills[0].phases[OPTIMIZE][TRAINER_PARAMS] > 0


def test_a_pool_that_does_not_fit_a_gpu(job: list[str]) -> None:
    split = arm("disaggregated-1+1-sync")
    tight = Machine(ranks=2, device_gib=1.0, host_gib=100)
    reason = too_large(split, arm_config(split, job), tight)
    assert reason is not None and reason.startswith("training needs 1.6 GiB of 1.0 GiB per rank; generation needs ")


def test_a_model_without_a_bill_is_run(job: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["FutureForCausalLM"]}')
    config = arm_config(arm("colocated-sync"), [*job, f"model.path={tmp_path}"])
    assert bills_of(arm("colocated-sync"), config, CPU) is None
    assert too_large(arm("colocated-sync"), config, Machine(ranks=2, device_gib=0, host_gib=1 / GIB)) is None
