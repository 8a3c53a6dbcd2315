"""What is promised to whoever writes an algorithm: one file, one line, one YAML; or one file anywhere, and no line."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from hybridengine.algorithms import registry
from hybridengine.algorithms.correction import PRESETS
from hybridengine.algorithms.kl import KL_ESTIMATORS
from hybridengine.algorithms.losses import LossCounts
from hybridengine.algorithms.registry import ALGORITHMS, make_algorithm
from hybridengine.algorithms.validate import algorithm_problems
from hybridengine.config import AlgorithmConfig, Config, RolloutConfig, compose, schema
from hybridengine.config.compose import build, config_groups
from hybridengine.distributed.world import World
from hybridengine.engines.train.batching import build_micro_batch
from hybridengine.plugins import load_object
from hybridengine.types import Prompt, Sample, Trajectory
from hybridengine.validate.contradictions import validate
from tests.tiny import make_tiny

TOY = '''
    """-A · ratio^power."""

    from dataclasses import dataclass

    from hybridengine.algorithms.base import Algorithm
    from hybridengine.algorithms.losses import Surrogate, TokenBatch, masked_sum, token_ratio
    from hybridengine.algorithms.options import must_be_positive


    class Toy(Algorithm):
        @dataclass(kw_only=True)
        class Options:
            power: float = 1.0

            def __post_init__(self) -> None:
                must_be_positive(self, "power")

        def surrogate(self, batch: TokenBatch) -> Surrogate:
            value = token_ratio(batch) ** self.options.power
            return Surrogate(-batch.advantages * value, {"toy": masked_sum(value.detach(), batch.mask)})


    NOT_ONE = dict
'''
BASE = ["data.train=d.jsonl", "reward.fn=exact_match"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("model"), "qwen2", max_position_embeddings=4096, head_dim=32))


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy.py"
    path.write_text(dedent(TOY))
    return path


def loss_and_gradient(config: Config) -> tuple[float, list[float]]:
    """One token with advantage 3, log-probability 0.5 above the old one."""
    sample = Sample(prompt_ids=[1], response_ids=[2], loss_mask=[True], advantages=[3.0], old_logprobs=[-1.0])
    micro = build_micro_batch([sample], [0], pad_id=0, packing=True)
    values = torch.tensor([-0.5], requires_grad=True)
    result = make_algorithm(config).loss_fn(LossCounts.of([sample]))(values, None, micro)
    result.loss.backward()
    assert values.grad is not None
    return result.loss.item(), values.grad.tolist()


def test_a_file_of_the_user_s_own(model: str, toy: Path) -> None:
    """power 2: loss -3 · e^(2 · 0.5) = -3e, and its gradient is twice that."""
    config = build([f"model.path={model}", *BASE, f"algorithm.fn={toy}:Toy", "algorithm.kwargs.power=2"])
    validate(config, World())
    loss, gradient = loss_and_gradient(config)
    assert loss == pytest.approx(-3 * 2.718281828, rel=1e-6)
    assert gradient == pytest.approx([-6 * 2.718281828], rel=1e-6)


def test_one_file_one_line_and_one_yaml(model: str, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other file knows the algorithms' names: a class, a line in the registry and a YAML make ``algorithm=toy``."""
    conf = toy.parent / "conf"
    shutil.copytree(compose.conf_dir(), conf)
    (conf / "algorithm" / "toy.yaml").write_text("name: toy\nkwargs: {power: 3.0}\n")
    for module in (compose, schema):
        monkeypatch.setattr(module, "conf_dir", lambda: conf)
    monkeypatch.setitem(registry.ALGORITHMS, "toy", load_object(f"{toy}:Toy", "toy"))
    config = build([f"model.path={model}", *BASE, "algorithm=toy"])
    validate(config, World())
    assert loss_and_gradient(config)[0] == pytest.approx(-3 * 4.48168907, rel=1e-6)  # e^1.5


def test_a_baseline_of_its_own_needs_no_group(tmp_path: Path) -> None:
    """Reward minus a half, one sample per prompt: nothing else has to know."""
    path = tmp_path / "own.py"
    path.write_text(
        dedent(TOY)
        + dedent("""
        class Own(Toy):
            def advantages(self, rewards):
                return rewards.table - 0.5
    """)
    )
    config = Config(
        algorithm=AlgorithmConfig(fn=f"{path}:Own"), rollout=RolloutConfig(samples_per_prompt=1, max_tokens=4)
    )
    assert algorithm_problems(config) == []
    trajectory = Trajectory(
        prompt=Prompt(index=0, token_ids=[1]), sample_index=0, token_ids=[2, 3], logprobs=[-1.0] * 2, versions=[0] * 2,
        truncated=False, reward=1.0,
    )  # fmt: skip
    samples, _ = make_algorithm(config).samples([trajectory])
    assert samples[0].advantages == [0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "fn", "kwargs", "message"),
    [
        ("grpo", "{toy}:Toy", {"powr": 2}, "kwargs.powr: not a key of {toy}:Toy; did you mean algorithm.kwargs.power?"),
        ("grpo", "{toy}:Toy", {"power": "high"}, "kwargs.power: Value 'high'"),
        ("grpo", "{toy}:Toy", {"power": 0}, "kwargs.power=0.0: must be greater than 0"),
        ("grpo", "{toy}:Toy", {"power": float("nan")}, "kwargs.power=nan: must be greater than 0, and finite"),
        ("grpo", "{toy}:Tory", {}, "fn={toy}:Tory: {toy} has no 'Tory'; it has"),
        ("grpo", "{toy}:NOT_ONE", {}, "fn={toy}:NOT_ONE: must be a subclass of"),
        ("grpo", "/nowhere.py:Toy", {}, "fn=/nowhere.py:Toy: no such file /nowhere.py"),
        ("grpo", "Toy", {}, "fn=Toy: must be path.py:name or package.module:name"),
        ("grpo", "no_such_package:Toy", {}, "fn=no_such_package:Toy: importing no_such_package failed"),
        ("ppo2", None, {}, "name=ppo2: must be one of grpo"),
        ("grpo", None, {"power": 2}, "kwargs.power: not a key of grpo; it has none"),
    ],
)
def test_what_can_t_be_is_refused(toy: Path, name: str, fn: str | None, kwargs: dict[str, Any], message: str) -> None:
    section = AlgorithmConfig(name=name, fn=fn and fn.format(toy=toy), kwargs=kwargs)
    (problem,) = algorithm_problems(Config(algorithm=section))
    assert problem.startswith("algorithm." + message.format(toy=toy))


def test_an_algorithm_that_can_t_be_imported_names_its_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import nothing_of_this_name\n")
    with pytest.raises(ValueError, match="algorithm.fn=.*broken.py:A: importing .* failed: ModuleNotFoundError"):
        make_algorithm(Config(algorithm=AlgorithmConfig(fn=f"{path}:A")))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_short(name: str) -> None:
    import inspect

    assert len(Path(inspect.getfile(ALGORITHMS[name])).read_text().splitlines()) <= 60


DOCS = Path(__file__).parents[3] / "docs" / "algorithms.md"


def test_the_example_in_the_documentation_works(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    (tmp_path / "my_loss.py").write_text(example)
    section = AlgorithmConfig(fn=f"{tmp_path / 'my_loss.py'}:MyLoss", kwargs={"power": 2})
    assert loss_and_gradient(Config(algorithm=section))[0] == pytest.approx(-3 * 2.718281828, rel=1e-6)


def test_the_documentation_lists_what_there_is() -> None:
    text = DOCS.read_text()
    for names in (config_groups()["algorithm"], PRESETS, KL_ESTIMATORS):
        assert [name for name in names if f"| `{name}` |" not in text] == []
