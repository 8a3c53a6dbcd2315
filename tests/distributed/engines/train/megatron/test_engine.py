"""The megatron engine against plain transformers, the fsdp engine and itself at other degrees of parallelism.

One set of processes per world size runs everything, megatron's groups made anew for each configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from hybridengine.distributed.world import World
from hybridengine.engines.train.base import LossResult, MicroBatch
from hybridengine.engines.train.fsdp.engine import FSDPEngine
from hybridengine.engines.train.megatron.engine import MegatronEngine
from hybridengine.engines.train.megatron.weights import full_parameters
from hybridengine.sync.plan.naming import stored_tensors
from tests.distributed.engines.train.fsdp.test_engine import (
    STEPS,
    TEMPERATURE,
    TRAIN,
    PolicyGradient,
    make_samples,
    reference,
    reference_logits,
)
from tests.distributed.ranks import RankFailure, run_ranks
from tests.tiny import make_tiny

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
FOUR_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    # One KV head cut by two ranks, heads not hidden / count, a vocabulary that needs padding, four layers.
    "llama-tied": ("llama", {"num_key_value_heads": 1, "vocab_size": 181, "tie_word_embeddings": True, "head_dim": 16,
                             "num_hidden_layers": 4}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE}),
    # The last of four ranks has no row of the vocabulary.
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen3-moe": ("qwen3_moe", FOUR_EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "qwen2-moe": ("qwen2_moe", FOUR_EXPERTS | {"shared_expert_intermediate_size": 40, "norm_topk_prob": False}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip
SP = {"tp": 2, "sequence_parallel": True}
SMALL = {"max_tokens_per_micro_batch": 40}
#: (ranks, model, changes of TRAIN) by name.
CUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tp2": (2, "qwen2", {"tp": 2}),
    "tp2-chunks": (2, "qwen2", {"tp": 2, "logprob_chunk_tokens": 5, **SMALL}),
    "tp2-sp": (2, "qwen2", SP),
    "tp2-padded": (2, "qwen2", {**SP, "packing": False, "max_tokens_per_micro_batch": 60}),
    "pp2": (2, "qwen2", {"pp": 2, **SMALL}),
    "pp2-padded-recompute": (2, "qwen2", {"pp": 2, "packing": False, "activation_checkpointing": True}),
    "dp2": (2, "qwen2", {**SMALL}),
    "tp2-biases": (2, "llama-biases", SP),
    "tp2-entropy": (2, "qwen3-tied", {"tp": 2, "with_entropy": True}),
    "tp2-sp-entropy": (2, "qwen3-tied", {**SP, "with_entropy": True, "logprob_chunk_tokens": 7}),
    "pp2-entropy": (2, "qwen3-tied", {"pp": 2, "with_entropy": True}),
    "ep2": (2, "qwen3-moe", {"ep": 2}),
    "ep2-shared": (2, "qwen2-moe", {"ep": 2}),
    "ep2-mixtral": (2, "mixtral", {"ep": 2}),
    "moe-pp2": (2, "qwen2-moe", {"pp": 2}),
    "tp4": (4, "llama-tied", {"tp": 4}),
    "tp4-mistral": (4, "mistral", {"tp": 4}),
    "tp2-pp2": (4, "llama-tied", {"tp": 2, "pp": 2, **SMALL}),
    "tp2-pp2-sp": (4, "llama-tied", {**SP, "pp": 2}),
    "tp2-dp2": (4, "llama-tied", {"tp": 2}),
    "pp2-dp2": (4, "llama-tied", {"pp": 2, **SMALL}),
    "pp2-vpp2": (4, "llama-tied", {**SP, "pp": 2, "vpp": 2, **SMALL}),
    "tp2-ep2-sp": (4, "qwen3-moe", {**SP, "ep": 2}),
    "ep2-pp2": (4, "qwen3-moe", {"ep": 2, "pp": 2}),
}
CHECKPOINT = "llama-tied"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("megatron")
    return {name: make_tiny(root / name, arch, **overrides) for name, (arch, overrides) in MODELS.items()}


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> Callable[[str, bool], dict[str, Any]]:
    """Plain transformers on a model, once per model: the training steps, and the first gradient and logits."""
    found: dict[tuple[str, bool], dict[str, Any]] = {}

    def of(model: str, entropy: bool) -> dict[str, Any]:
        if (model, entropy) not in found:
            result = reference(models[model], TRAIN, entropy=entropy)
            result |= reference_logits(models[model], entropy=entropy)
            for key in ("params", "gradients"):
                result[key] = split_experts(models[model], result[key])
            found[model, entropy] = result
        return found[model, entropy]

    return of


def split_experts(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers' own tensors as the checkpoint's parameters."""
    from transformers import AutoConfig

    found = {}
    for stored in stored_tensors(AutoConfig.from_pretrained(path)):
        whole = tensors[stored.name].detach()
        for part in stored.parts:
            if len(stored.shape) == len(part.axes):
                found[part.param] = whole
                continue
            expert, row = part.origin[0], part.origin[1]
            rows = whole.shape[1] // (2 if "gate_up" in stored.name else 1)
            found[part.param] = whole[expert, row : row + rows]
    return found


# -- what the ranks do ----------------------------------------------------------------------------------------------


def make_engine(world: World, path: Path, changes: dict[str, Any], **kwargs: Any) -> MegatronEngine:
    changes = dict(changes)
    entropy = changes.pop("with_entropy", False)
    return MegatronEngine(
        path, replace(TRAIN, **changes), world=world, temperature=TEMPERATURE, total_steps=STEPS,
        with_entropy=entropy, **kwargs,
    )  # fmt: skip


def share(engine: Any, samples: list[Any]) -> list[Any]:
    return samples[engine.replica :: engine.num_replicas]


def total(value: float) -> float:
    """Summed over ranks."""
    tensor = torch.tensor(value)
    dist.all_reduce(tensor)
    return tensor.item()


@contextmanager
def recorded_logits(engine: MegatronEngine) -> Iterator[list[torch.Tensor]]:
    """The logits, over the whole vocabulary, that log-probabilities are made of on the last stage."""
    from hybridengine.engines.train.megatron import model

    found: list[torch.Tensor] = []
    plain = model.chunked_logprobs

    def recording(hidden: torch.Tensor, weight: torch.Tensor, *args: Any, shard: Any, **kwargs: Any) -> Any:
        parts = [(hidden.detach() @ weight.detach().T)]
        if shard is not None:
            parts = [None] * dist.get_world_size(shard.group)  # type: ignore[list-item]
            dist.all_gather_object(parts, hidden.detach() @ weight.detach().T, group=shard.group)
        found.append(torch.cat(parts, dim=1))
        return plain(hidden, weight, *args, shard=shard, **kwargs)

    model.chunked_logprobs = recording  # type: ignore[assignment]
    try:
        yield found
    finally:
        model.chunked_logprobs = plain


def train_cuts(world: World, paths: dict[str, Path], cuts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: train_cut(world, paths[model], changes) for name, (_, model, changes) in cuts.items()}


def train_cut(world: World, path: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """The steps of ``reference``; what is compared is the same on all ranks."""
    engine = make_engine(world, path, changes)
    samples = make_samples()
    mine = share(engine, samples)
    found: dict[str, Any] = {"losses": [], "norms": [], "seen": 0.0}
    before_last: list[int] = []
    for step in range(STEPS):
        scored = engine.logprobs(mine)
        with recorded_logits(engine) as logits:
            metrics, logprobs = engine.forward_backward(
                mine, PolicyGradient(samples), collect_logprobs=True,
                before_last_backward=lambda step=step: before_last.append(step),
            )  # fmt: skip
        assert logprobs is not None
        if step == 0:
            # The embedding of a packed single micro-batch is in sample order; several are compared by their loss.
            found["logits"] = engine.policy.broadcast_from_last_stage(logits[0] if len(logits) == 1 else None)
            found["gradients"] = gradients(engine) if engine.num_replicas == 1 else None
        differences = [abs(a - b) for x, y in zip(scored, logprobs, strict=True) for a, b in zip(x, y, strict=True)]
        found["seen"] = max(found["seen"], *differences)
        found["losses"].append(total(metrics["loss"]))
        found["norms"].append(engine.optimizer_step()["grad_norm"])
    assert before_last == list(range(STEPS)) and engine.version == STEPS
    everyone = [None] * world.size
    indices = range(engine.replica, len(samples), engine.num_replicas)
    dist.all_gather_object(everyone, dict(zip(indices, logprobs, strict=True)))
    found["logprobs"] = [next(part[i] for part in everyone if i in part) for i in range(len(samples))]
    found["params"] = {name: full.clone() for name, full in engine.full_parameters()}
    found["first"] = mine == samples
    return found


def gradients(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    grads = {name: param.main_grad for name, param in engine.policy.tensors.items()}
    return {
        name: full.clone()
        for name, full in full_parameters(engine.shard_map(), grads, engine.world.rank, engine.world.device)
    }


@pytest.fixture(scope="module")
def trained(models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for ranks in (2, 4):
        cuts = {name: cut for name, cut in CUTS.items() if cut[0] == ranks}
        found |= run_ranks(ranks, train_cuts, models, cuts, timeout=280)[0]
    return found


# -- equality -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", CUTS)
def test_equals_plain_transformers(
    trained: dict[str, Any], expected: Callable[[str, bool], dict[str, Any]], cut: str
) -> None:
    """Logits 1e-5, losses 1e-6, every gradient 1e-5, then norms and weights over the steps."""
    found, (_, model, changes) = trained[cut], CUTS[cut]
    theirs = expected(model, changes.get("with_entropy", False))
    assert found["seen"] <= 1e-6
    assert found["losses"] == pytest.approx(theirs["losses"], abs=1e-6)
    assert found["norms"] == pytest.approx(theirs["norms"], rel=1e-5)
    if found["logits"] is not None and found["first"]:
        torch.testing.assert_close(found["logits"], theirs["logits"], atol=1e-5, rtol=0)
    if found["gradients"] is not None:
        close(found["gradients"], theirs["gradients"])
    for mine, reference_logprobs in zip(found["logprobs"], theirs["logprobs"], strict=True):
        assert mine == pytest.approx(reference_logprobs, abs=1e-5)
    close(found["params"], theirs["params"])


def close(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert set(mine) == set(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(
            mine[name], value.detach(), atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_single_micro_batches_were_compared_logit_by_logit(trained: dict[str, Any]) -> None:
    assert sum(found["logits"] is not None and found["first"] for found in trained.values()) >= 6
    assert sum(found["gradients"] is not None for found in trained.values()) >= 10


def graphs_kept(world: World, path: Path) -> list[bool]:
    engine, samples = make_engine(world, path, {"activation_checkpointing": True}), make_samples()
    engine.forward_backward(samples, PolicyGradient(samples))
    layers = engine.policy.chunks[0].module.decoder.layers
    return [layer.mlp.token_dispatcher.probs is not None for layer in layers]


def test_recomputed_experts_keep_no_graph(models: dict[str, Path]) -> None:
    """Megatron's dispatcher would hold on to the router's weights, and by them to what attention saved."""
    assert run_ranks(1, graphs_kept, models["mixtral"])[0] == [False, False]


# -- one life: memory, export, checkpoints, failures ----------------------------------------------------------------


def life(world: World, paths: dict[str, Path], directory: Path) -> dict[str, Any]:
    """Two ranks; each entry is a claim that the test below states."""
    found: dict[str, Any] = {}
    path, samples = paths[CHECKPOINT], make_samples()

    engine = make_engine(world, path, {"tp": 2}, reference=True)
    mine = share(engine, samples)
    before = engine.logprobs(mine), engine.logprobs(mine, reference=True)
    movers = engine.movers(directory, keep_in_place=False)
    for mover in movers.values():
        mover.offload()
    movers["grads"].drop()
    for mover in movers.values():
        mover.onload()
    engine.forward_backward(mine, PolicyGradient(samples))
    try:
        engine.forward_backward(mine, PolicyGradient(samples))
    except RuntimeError as error:
        found["second backward"] = str(error)
    engine.optimizer_step()
    movers["optimizer"].offload()
    movers["optimizer"].onload()
    found["reference"] = (*before, engine.logprobs(mine), engine.logprobs(mine, reference=True))
    found["sizes"] = {name: mover.nbytes() for name, mover in movers.items()}
    engine.save(directory / "tp2")
    engine.export(directory / "exported")
    found["exported"] = {name: full.clone() for name, full in engine.full_parameters()}
    found["next"] = next_losses(engine, samples)

    for name, changes in (("pp2", {"pp": 2}), ("dp2", {})):
        other = make_engine(world, path, changes)
        other.load(directory / "tp2")
        found[f"resumed {name}"] = next_losses(other, samples)
    fsdp = FSDPEngine(path, TRAIN, world=world, temperature=TEMPERATURE, total_steps=STEPS)
    fsdp.load(directory / "tp2")
    fsdp.save(directory / "fsdp")
    found["resumed fsdp"] = next_losses(fsdp, samples)
    back = make_engine(world, path, {"pp": 2})
    back.load(directory / "fsdp")
    found["resumed from fsdp"] = next_losses(back, samples)
    found["moved"] = [moved_steps(world, path, {"dtype": dtype}) for dtype in ("float32", "bfloat16")]

    found["wrong checkpoint"] = message(lambda: make_engine(world, paths["qwen2"], {}).load(directory / "tp2"))
    bf16 = make_engine(world, path, {"tp": 2, "dtype": "bfloat16"})
    found["bfloat16"] = [], {str(t.dtype) for t in bf16.local_tensors().values()}
    for _ in range(STEPS):
        found["bfloat16"][0].append(total(bf16.forward_backward(mine, PolicyGradient(samples))[0]["loss"]))
        bf16.optimizer_step()
    bf16.save(directory / "bf16")

    found["failure"] = failing_loss(world, path)
    found["not finite"] = unchanged_by_nan(world, path)
    tight = make_engine(world, path, {"pp": 2, "max_tokens_per_micro_batch": 10})
    found["budget"] = message(lambda: tight.logprobs(mine))
    return found


def next_losses(engine: Any, samples: list[Any]) -> list[float]:
    """Losses of the next two steps: the second shows that the moments came along."""
    losses = []
    for _ in range(2):
        losses.append(total(engine.forward_backward(share(engine, samples), PolicyGradient(samples))[0]["loss"]))
        engine.optimizer_step()
    return losses


def moved_steps(world: World, path: Path, changes: dict[str, Any]) -> bool:
    """Parameters moved into a shared Region, as the pull transfer does, train on bit for bit as those that stayed."""
    from hybridengine.sync.transfer.region import Region

    states, samples = [], make_samples()
    for move in (False, True):
        engine = make_engine(world, path, changes)  # two replicas: the optimizer gathers into the parameters' memory
        if move:
            region = Region.adopt(engine.local_tensors(), readers=world.size, holders=engine.memory_holders())
        next_losses(engine, samples)
        if move:
            region.check(engine.local_tensors())
        states.append({name: full.clone() for name, full in engine.full_parameters()})
    return all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def failing_loss(world: World, path: Path) -> str:
    """The last stage's loss function raises; all ranks raise, nobody hangs, and the engine goes on."""
    engine, samples = make_engine(world, path, {"pp": 2, **SMALL}), make_samples()

    def loss_fn(logprobs: torch.Tensor, entropy: torch.Tensor | None, micro: MicroBatch) -> LossResult:
        raise KeyError("advantages")

    found = message(lambda: engine.forward_backward(samples, loss_fn))
    engine.forward_backward(samples, PolicyGradient(samples))
    engine.optimizer_step()
    return found


def unchanged_by_nan(world: World, path: Path) -> tuple[str, bool, int]:
    """One rank has a gradient that is no number: all ranks raise, nothing changes, and the next steps work."""
    engine, samples = make_engine(world, path, {"tp": 2}), make_samples()
    before = {name: tensor.clone() for name, tensor in engine.local_tensors().items()}
    engine.forward_backward(samples, PolicyGradient(samples))
    if world.rank == 1:
        engine.policy.tensors["embedding.word_embeddings.weight"].main_grad[0, 0] = float("nan")
    found = message(engine.optimizer_step)
    same = all(torch.equal(before[name], tensor) for name, tensor in engine.local_tensors().items())
    next_losses(engine, samples)
    return found, same, engine.version


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.fixture(scope="module")
def lived(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    directory = tmp_path_factory.mktemp("life")
    return run_ranks(2, life, models, directory, timeout=280), directory


def test_the_reference_stays_and_moved_memory_comes_back(lived: Any) -> None:
    results, _ = lived
    policy_before, before, policy_after, after = results[0]["reference"]
    assert before == after
    for mine, theirs, later in zip(policy_before, before, policy_after, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6) and mine != pytest.approx(later, abs=1e-4)
    sizes = results[0]["sizes"]
    assert sizes["grads"] >= sizes["trainer_params"] > 0 and sizes["optimizer"] > sizes["trainer_params"]
    assert results[0]["moved"] == [True, True]


def test_one_gradient_per_step(lived: Any) -> None:
    assert "one forward_backward per optimizer_step" in lived[0][0]["second backward"]


@pytest.mark.parametrize("where", ["pp2", "dp2", "fsdp", "from fsdp"])
def test_a_checkpoint_resumes_elsewhere(lived: Any, where: str) -> None:
    results, _ = lived
    assert results[0][f"resumed {where}"] == pytest.approx(results[0]["next"], abs=1e-5)


def test_export_is_loaded_by_transformers(lived: Any) -> None:
    from transformers import AutoModelForCausalLM

    results, directory = lived
    model, info = AutoModelForCausalLM.from_pretrained(directory / "exported", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    params = dict(model.named_parameters())
    assert set(params) == set(results[0]["exported"])
    assert all(torch.equal(params[name], full) for name, full in results[0]["exported"].items())


def test_bfloat16_compute_keeps_float32_masters(lived: Any, expected: Any) -> None:
    import torch.distributed.checkpoint as dcp

    results, directory = lived
    losses, dtypes = results[0]["bfloat16"]
    assert dtypes == {"torch.bfloat16"}
    assert losses == pytest.approx(expected(CHECKPOINT, False)["losses"], abs=0.03)
    stored = dcp.FileSystemReader(directory / "bf16").read_metadata().state_dict_metadata
    assert stored["model.model.norm.weight"].properties.dtype == torch.float32


def test_failures_are_agreed_on(lived: Any) -> None:
    results, _ = lived
    assert results[0]["failure"].startswith("PeerError: loss function: rank 1")
    assert results[1]["failure"].startswith("KeyError")
    for result in results:
        text, same, version = result["not finite"]
        assert text.startswith("FloatingPointError: gradient norm is nan") and same and version == 2
    assert all("cannot be loaded into this model" in result["wrong checkpoint"] for result in results)
    assert all("train.max_tokens_per_micro_batch=10" in result["budget"] for result in results)


def save_at_four(world: World, path: Path, directory: Path) -> dict[str, list[float]]:
    """Saved at TP2 x PP2, resumed at TP1 (four replicas) and TP4."""
    samples = make_samples()
    engine = make_engine(world, path, {"tp": 2, "pp": 2})
    next_losses(engine, samples)
    engine.save(directory)
    found = {"goes on": next_losses(engine, samples)}
    for name, changes in (("tp1", {}), ("tp4", {"tp": 4}), ("vpp", {"pp": 2, "vpp": 2})):
        other = make_engine(world, path, changes)
        other.load(directory)
        assert other.version == 2
        found[name] = next_losses(other, samples)
    return found


def resume_fsdp(world: World, path: Path, directory: Path) -> list[float]:
    engine = FSDPEngine(path, TRAIN, world=world, temperature=TEMPERATURE, total_steps=STEPS)
    engine.load(directory)
    return next_losses(engine, make_samples())


def test_saved_at_tp2_pp2_resumes_at_tp1_tp4_and_fsdp2(models: dict[str, Path], tmp_path: Path) -> None:
    found = run_ranks(4, save_at_four, models[CHECKPOINT], tmp_path, timeout=280)[0]
    found["fsdp2"] = run_ranks(2, resume_fsdp, models[CHECKPOINT], tmp_path)[0]
    for name, losses in found.items():
        assert losses == pytest.approx(found["goes on"], abs=1e-5), name


# -- refusals -------------------------------------------------------------------------------------------------------


def build(world: World, path: Path, changes: dict[str, Any]) -> list[str]:
    return message(lambda: make_engine(world, path, changes))


def refused(world: World, cases: list[tuple[Path, dict[str, Any]]]) -> list[str]:
    return [build(world, path, changes) for path, changes in cases]


def test_what_does_not_fit_is_refused_by_name(models: dict[str, Path], tmp_path: Path) -> None:
    def damaged(name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
        path = make_tiny(tmp_path / name, "qwen2")
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path

    gemma = make_tiny(tmp_path / "gemma", "gemma", head_dim=8)
    windowed = make_tiny(tmp_path / "windowed", "mistral", sliding_window=16)
    three = make_tiny(tmp_path / "three", "qwen2", num_hidden_layers=3)
    odd = make_tiny(tmp_path / "odd", "llama", intermediate_size=49)
    cases: dict[str, tuple[Path, dict[str, Any]]] = {
        "no mapping for architecture ['GemmaForCausalLM']": (gemma, {}),
        "sliding_window=16, only full attention": (windowed, {}),
        "train.pp=2: the model's 3 layers must divide by 2; possible: [1, 3]": (three, {"pp": 2}),
        "train.pp=2 train.vpp=2: the model's 2 layers": (models["qwen2"], {"pp": 2, "vpp": 2}),
        "49 MLP hidden units are not divisible by tp=2": (odd, {"tp": 2}),
        "ep=2 for Qwen2ForCausalLM, which has no experts": (models["qwen2"], {"ep": 2}),
        "its experts with train.tp=2 need train.sequence_parallel=true": (models["mixtral"], {"tp": 2}),
        "1 tensors of the checkpoint are missing, first: model.norm.weight": (
            damaged("missing", lambda t: t.pop("model.norm.weight")), {},
        ),
        "1 tensors of the checkpoint are not part of this architecture, first: model.extra": (
            damaged("extra", lambda t: t.update({"model.extra": torch.ones(2)})), {},
        ),
        "model.norm.weight has shape (31,) in the checkpoint, (32,) by config.json": (
            damaged("shape", lambda t: t.update({"model.norm.weight": torch.ones(31)})), {},
        ),
    }  # fmt: skip
    messages = run_ranks(2, refused, list(cases.values()), timeout=200)
    for index, expected_text in enumerate(cases):
        for rank in range(2):
            assert expected_text in messages[rank][index], messages[rank][index]
    with pytest.raises(RankFailure, match="train.tp=2 train.pp=2: 4 ranks hold one model"):
        run_ranks(2, make_engine, models["qwen2"], {"tp": 2, "pp": 2})
