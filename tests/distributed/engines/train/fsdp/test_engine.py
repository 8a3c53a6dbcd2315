"""The fsdp engine against plain transformers, and against itself at other world sizes and cuts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridengine.config import TrainConfig
from hybridengine.distributed.world import World
from hybridengine.engines.train.base import LossResult, MicroBatch
from hybridengine.engines.train.fsdp.engine import FSDPEngine
from hybridengine.types import Sample
from tests.distributed.ranks import RankFailure, run_ranks
from tests.tiny import make_tiny

TEMPERATURE = 0.8


def columns(name: str, shape: tuple[int, ...]) -> int:
    """Row-parallel weights sharded on their input dimension, as tensor parallelism cuts them."""
    return 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0


STEPS = 3
#: eps keeps Adam from turning rounding noise in vanishing gradients into whole steps.
TRAIN = TrainConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, eps=1e-4, lr_schedule="linear", warmup_steps=1)

#: Ways to cut and compute the same batch: name -> changes of TRAIN, or arguments of the engine.
CUTS: dict[str, dict[str, Any]] = {
    "packed": {},
    "small-budget": {"max_tokens_per_micro_batch": 24},
    "padded": {"packing": False, "max_tokens_per_micro_batch": 60},
    "resharding-recomputing": {
        "reshard_after_forward": True,
        "max_tokens_per_micro_batch": 40,
        "activation_checkpointing": True,
    },
    "small-chunks": {"logprob_chunk_tokens": 5},
    "columns-permuted": {"placements": columns, "rank_order": "reversed"},
}


def make_samples(count: int = 12, seed: int = 0) -> list[Sample]:
    """Ragged samples; one has no trained token, one a single prompt token."""
    rng = random.Random(seed)
    samples = []
    for i in range(count):
        prompt = [rng.randrange(3, 96) for _ in range(1 if i == 1 else rng.randint(2, 9))]
        response = [rng.randrange(3, 96) for _ in range(rng.randint(1, 14))]
        samples.append(
            Sample(
                prompt_ids=prompt,
                response_ids=response,
                loss_mask=[i != 2 and rng.random() < 0.9 for _ in response],
                advantages=[rng.uniform(-1, 1) for _ in response],
            )
        )
    return samples


class PolicyGradient:
    """-Σ A log p / count - 0.01 Σ entropy / count over the trained tokens."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.count = sum(sum(sample.loss_mask) for sample in samples)

    def __call__(self, logprobs: torch.Tensor, entropy: torch.Tensor | None, micro: MicroBatch) -> LossResult:
        total = -(micro.advantages * logprobs)
        if entropy is not None:
            total = total - 0.01 * entropy
        loss = torch.where(micro.loss_mask, total, 0.0).sum() / self.count
        return LossResult(loss, {"loss": loss, "tokens": micro.loss_mask.sum()})


def train_all(world: World, path: Path) -> dict[str, dict[str, Any]]:
    """Every cut, one after the other; results by name."""
    return {name: train(world, path, dict(changes)) for name, changes in CUTS.items()}


def train(world: World, path: Path, changes: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    """A few optimizer steps on this rank's share; what a test compares, the same on all ranks."""
    import torch.distributed as dist

    kwargs = {key: changes.pop(key) for key in ("placements", "rank_order", "with_entropy") if key in changes}
    if kwargs.get("rank_order") == "reversed":
        kwargs["rank_order"] = list(reversed(range(world.size)))
    config = replace(TRAIN, **changes)
    engine = FSDPEngine(path, config, world=world, temperature=TEMPERATURE, total_steps=STEPS, **kwargs)
    samples = make_samples()
    mine = samples[world.rank :: world.size]
    losses, norms, seen, first = [], [], [], None
    for _ in range(steps):
        scored = engine.logprobs(mine)
        first = first or scored
        metrics, logprobs = engine.forward_backward(mine, PolicyGradient(samples), collect_logprobs=True)
        assert logprobs is not None
        seen.append(max(abs(a - b) for x, y in zip(scored, logprobs, strict=True) for a, b in zip(x, y, strict=True)))
        loss = torch.tensor(metrics["loss"])
        dist.all_reduce(loss)
        losses.append(loss.item())
        norms.append(engine.optimizer_step()["grad_norm"])
    assert engine.version == steps
    return {
        "losses": losses,
        "norms": norms,
        "logprobs": in_order(logprobs, world, len(samples)),
        "first_logprobs": in_order(first, world, len(samples)),
        "scored_against_seen": max(seen),
        "params": {name: full.clone() for name, full in engine.full_parameters()},
    }


def in_order(mine: Any, world: World, total: int) -> list[Any]:
    """This rank's per-sample values with everyone else's, in sample order."""
    import torch.distributed as dist

    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, mine)
    ordered: list[Any] = [None] * total
    for rank, part in enumerate(gathered):
        ordered[rank :: world.size] = part
    return ordered


def reference(path: Path, config: TrainConfig, *, entropy: bool = False) -> dict[str, Any]:
    """The same steps with transformers and torch.optim alone: one process, one sequence at a time, no packing."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    samples = make_samples()
    count = sum(sum(s.loss_mask) for s in samples)
    losses, norms, logprobs = [], [], []
    for lr in [1e-2, 0.5e-2, 0.0]:  # one warm-up step, which is the peak, then linear to 0 over 3 steps
        total, logprobs = torch.zeros(()), []
        for sample in samples:
            ids = torch.tensor([sample.prompt_ids + sample.response_ids])
            log_p = torch.log_softmax(model(ids).logits[0] / TEMPERATURE, -1)[len(sample.prompt_ids) - 1 : -1]
            picked = log_p.gather(1, torch.tensor(sample.response_ids)[:, None]).squeeze(1)
            logprobs.append(picked.tolist())
            value = -torch.tensor(sample.advantages) * picked
            if entropy:
                value = value + 0.01 * (log_p.exp() * log_p).sum(-1)
            total = total + value[torch.tensor(sample.loss_mask)].sum() / count
        total.backward()
        losses.append(total.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm).item())
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    params = dict(model.named_parameters())
    return {"losses": losses, "norms": norms, "logprobs": logprobs, "params": params}


def reference_logits(path: Path, *, entropy: bool = False) -> dict[str, Any]:
    """Of plain transformers, before any step: [R, V] logits of all response tokens, and the gradient by name."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    samples = make_samples()
    loss_fn, logits, total = PolicyGradient(samples), [], torch.zeros(())
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        rows = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1]
        log_p = torch.log_softmax(rows / TEMPERATURE, -1)
        value = -torch.tensor(sample.advantages) * log_p.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        if entropy:
            value = value + 0.01 * (log_p.exp() * log_p).sum(-1)
        total = total + value[torch.tensor(sample.loss_mask)].sum() / loss_fn.count
        logits.append(rows.detach())
    total.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"logits": torch.cat(logits), "gradients": grads}


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], abs=tolerance)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    for mine, theirs in zip(found["logprobs"], expected["logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=tolerance)
    assert list(found["params"]) == list(expected["params"])
    for name, value in expected["params"].items():
        torch.testing.assert_close(
            found["params"][name], value.detach(), atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "qwen2", "qwen2")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "tied", "llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def expected(qwen2: Path) -> dict[str, Any]:
    return reference(qwen2, TRAIN)


@pytest.fixture(scope="module", params=[1, 2, 4], ids=["world1", "world2", "world4"])
def trained(request: pytest.FixtureRequest, qwen2: Path) -> dict[str, dict[str, Any]]:
    return run_ranks(request.param, train_all, qwen2)[0]


@pytest.mark.parametrize("cut", CUTS)
def test_equals_plain_transformers(trained: dict[str, Any], expected: dict[str, Any], cut: str) -> None:
    assert trained[cut]["scored_against_seen"] <= 1e-6
    assert_same(trained[cut], expected)


def test_packed_equals_padded_to_rounding(trained: dict[str, Any]) -> None:
    """First step: the same weights, so nothing but the attention path differs."""
    packed, padded = trained["packed"], trained["padded"]
    assert packed["losses"][0] == pytest.approx(padded["losses"][0], abs=1e-6)
    for mine, theirs in zip(packed["first_logprobs"], padded["first_logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6)


# -- layout -----------------------------------------------------------------------------------------


def describe(world: World, path: Path, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The shard map, this rank's tensors, and the full parameters."""
    engine = FSDPEngine(path, TRAIN, world=world, total_steps=STEPS, **kwargs)
    return {
        "ranks": [tuple(slices) for slices in engine.shard_map().ranks],
        "local": {name: tensor.clone() for name, tensor in engine.local_tensors().items()},
        "full": {name: tensor.clone() for name, tensor in engine.full_parameters()},
    }


@pytest.mark.parametrize(
    ("world_size", "kwargs"),
    [(2, {}), (4, {"placements": columns, "rank_order": [2, 0, 3, 1]})],
    ids=["rows", "columns-permuted"],
)
def test_shard_map_says_where_everything_is(tmp_path: Path, world_size: int, kwargs: dict[str, Any]) -> None:
    """Rebuild each parameter from the ranks' local tensors by the shard map alone. 41 rows divide by nothing."""
    from safetensors.torch import load_file

    path = make_tiny(tmp_path, "llama", vocab_size=41, tie_word_embeddings=True)
    found = run_ranks(world_size, describe, path, kwargs)
    stored = load_file(path / "model.safetensors")
    assert set(found[0]["full"]) == set(stored) and "lm_head.weight" not in stored
    for name, value in stored.items():
        rebuilt = torch.full_like(value, float("nan"))
        for rank, result in enumerate(found):
            assert torch.equal(result["full"][name], value), name
            for piece in result["ranks"][rank]:
                if piece.param == name:
                    box = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
                    rebuilt[box] = result["local"][piece.tensor].as_strided(piece.sizes, piece.strides, piece.start)
        assert torch.equal(rebuilt, value), name
    assert all(result["ranks"] == found[0]["ranks"] for result in found)


def train_in_moved_memory(world: World, path: Path) -> dict[str, Any]:
    """Move the shards into a shared Region, as the pull transfer does, then train."""
    from hybridengine.sync.transfer.region import Region

    engine = FSDPEngine(path, TRAIN, world=world, temperature=TEMPERATURE, total_steps=STEPS)
    samples = make_samples()
    before = dict(engine.local_tensors())
    region = Region.adopt(engine.local_tensors(), readers=world.size, holders=engine.memory_holders())
    assert all(engine.local_tensors()[name] is tensor for name, tensor in before.items())
    for _ in range(STEPS):
        engine.forward_backward(samples[world.rank :: world.size], PolicyGradient(samples))
        engine.optimizer_step()
    region.check(engine.local_tensors())
    return {name: full.clone() for name, full in engine.full_parameters()}


def test_training_goes_on_where_the_shards_were_moved(qwen2: Path) -> None:
    moved = run_ranks(2, train_in_moved_memory, qwen2)[0]
    stayed = run_ranks(2, train, qwen2, {})[0]["params"]
    assert all(torch.equal(moved[name], stayed[name]) for name in stayed)


def train_over_gloo(world: World, path: Path) -> dict[str, Any]:
    """As ranks on several nodes communicate."""
    from hybridengine.platform.cpu import node_comm

    node_comm.share_node_memory = lambda modules, group: False
    return train(world, path, {"max_tokens_per_micro_batch": 24})


def test_shared_memory_and_gloo_give_the_same_bits(qwen2: Path) -> None:
    """A sum of two has one result; over four ranks gloo adds in another order."""
    gloo = run_ranks(2, train_over_gloo, qwen2)[0]["params"]
    shared = run_ranks(2, train, qwen2, {"max_tokens_per_micro_batch": 24})[0]["params"]
    assert all(torch.equal(gloo[name], shared[name]) for name in shared)


# -- models -----------------------------------------------------------------------------------------


def test_entropy_bonus_equals_plain_transformers(qwen2: Path) -> None:
    found = run_ranks(2, train, qwen2, {"with_entropy": True, "logprob_chunk_tokens": 7})[0]
    assert_same(found, reference(qwen2, TRAIN, entropy=True))


def test_tied_embeddings_one_update_changes_both_ends(tied: Path) -> None:
    found = run_ranks(2, train, tied, {})[0]
    assert "lm_head.weight" not in found["params"]
    assert_same(found, reference(tied, TRAIN))


def export_and_score(world: World, path: Path, target: Path) -> dict[str, Any]:
    from hybridengine.engines.train import export

    export.FILE_BYTES = 8192  # several files
    engine = FSDPEngine(path, TRAIN, world=world, total_steps=STEPS)
    samples = make_samples()
    engine.forward_backward(samples[world.rank :: world.size], PolicyGradient(samples))
    engine.optimizer_step()
    for _ in range(2):  # the second replaces the first
        engine.export(target)
    mine = engine.logprobs(samples[world.rank :: world.size])
    return {"logprobs": in_order(mine, world, len(samples))}


def test_export_is_loaded_by_transformers(tied: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    (tied / "tokenizer_config.json").write_text("{}")
    target = tmp_path / "exported"
    found = run_ranks(2, export_and_score, tied, target)[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["exported"]
    assert (target / "model.safetensors.index.json").exists() and (target / "tokenizer_config.json").exists()
    model, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for sample, logprobs in zip(make_samples(), found["logprobs"], strict=True):
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        log_p = torch.log_softmax(model(ids).logits[0], -1)[len(sample.prompt_ids) - 1 : -1]
        expected = log_p.gather(1, torch.tensor(sample.response_ids)[:, None]).squeeze(1).tolist()
        assert logprobs == pytest.approx(expected, abs=1e-5)


def score_reference(world: World, path: Path) -> tuple[Any, Any, Any]:
    engine = FSDPEngine(path, TRAIN, world=world, total_steps=STEPS, reference=True)
    samples = make_samples()
    mine = samples[world.rank :: world.size]
    before = engine.logprobs(mine)
    engine.forward_backward(mine, PolicyGradient(samples))
    engine.optimizer_step()
    return before, engine.logprobs(mine, reference=True), engine.logprobs(mine)


def test_reference_model_stays_frozen(qwen2: Path) -> None:
    before, reference_after, policy_after = run_ranks(2, score_reference, qwen2)[0]
    assert reference_after == before
    assert policy_after != before


def train_bfloat16(world: World, path: Path) -> tuple[list[float], set[str]]:
    config = replace(TRAIN, dtype="bfloat16")
    engine = FSDPEngine(path, config, world=world, temperature=TEMPERATURE, total_steps=STEPS)
    samples = make_samples()
    losses = []
    for _ in range(STEPS):
        metrics, _ = engine.forward_backward(samples[world.rank :: world.size], PolicyGradient(samples))
        total = torch.tensor(metrics["loss"])
        torch.distributed.all_reduce(total)
        losses.append(total.item())
        engine.optimizer_step()
    return losses, {str(t.dtype) for t in engine.local_tensors().values()}


def test_bfloat16_compute_keeps_float32_masters(qwen2: Path, expected: dict[str, Any]) -> None:
    losses, dtypes = run_ranks(2, train_bfloat16, qwen2)[0]
    assert dtypes == {"torch.float32"}
    assert losses == pytest.approx(expected["losses"], abs=0.03)


# -- failures ---------------------------------------------------------------------------------------


def loss_fails_on_rank_1(world: World, path: Path) -> str:
    """One rank's loss function raises in the first of several micro-batches; all raise, nobody hangs."""
    config = replace(TRAIN, max_tokens_per_micro_batch=24)
    engine = FSDPEngine(path, config, world=world, total_steps=STEPS)
    samples = make_samples()
    good = PolicyGradient(samples)

    def loss_fn(logprobs: torch.Tensor, entropy: torch.Tensor | None, micro: MicroBatch) -> LossResult:
        if world.rank == 1:
            raise KeyError("advantages")
        return good(logprobs, entropy, micro)

    try:
        engine.forward_backward(samples[world.rank :: world.size], loss_fn)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_failing_loss_function_fails_everywhere(qwen2: Path) -> None:
    first, second = run_ranks(2, loss_fails_on_rank_1, qwen2)
    assert first.startswith("PeerError: loss function: rank 1") and "advantages" in first
    assert second.startswith("KeyError")


def sample_too_long(world: World, path: Path) -> None:
    engine = FSDPEngine(path, replace(TRAIN, max_tokens_per_micro_batch=10), world=world, total_steps=STEPS)
    engine.logprobs(make_samples()[:1] if world.rank == 0 else make_samples())


def build(world: World, path: Path, kwargs: dict[str, Any]) -> None:
    FSDPEngine(path, TRAIN, world=world, total_steps=STEPS, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rank_order": [0, 0]}, r"rank_order=\[0, 0\] is not a permutation"),
        ({"placements": columns}, "dimension 1 of .* does not divide into 2"),
    ],
    ids=["order", "uneven-columns"],
)
def test_layouts_that_cannot_be(tmp_path: Path, kwargs: dict[str, Any], message: str) -> None:
    path = make_tiny(tmp_path, "llama", intermediate_size=41)
    with pytest.raises(RankFailure, match=message):
        run_ranks(2, build, path, kwargs)


def test_a_sample_above_the_budget_is_refused_everywhere(qwen2: Path) -> None:
    with pytest.raises(RankFailure, match="more than train.max_tokens_per_micro_batch=10"):
        run_ranks(2, sample_too_long, qwen2)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_model_directory_without_its_files_is_refused(tmp_path: Path, missing: str) -> None:
    path = make_tiny(tmp_path, "llama")
    (path / missing).unlink()
    with pytest.raises(RankFailure, match=rf"model.path={path}.*no {missing}"):
        run_ranks(1, build, path, {})
