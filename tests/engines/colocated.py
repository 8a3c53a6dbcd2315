"""Both engines of one rank under the phases of a run, with everything they hold compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hybridengine.config import Config, DataConfig, MemoryConfig, ModelConfig, RolloutConfig, TrainConfig
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.generate import generate
from hybridengine.engines.train.base import LossResult, MicroBatch
from hybridengine.memory import kv_plan
from hybridengine.memory.residency import (
    GRADS,
    KV_CACHE,
    OPTIMIZE,
    OPTIMIZER,
    REFERENCE,
    ROLLOUT,
    ROLLOUT_WEIGHTS,
    SCORE,
    SCORE_REFERENCE,
    TRAIN,
    TRAINER_PARAMS,
    State,
)
from hybridengine.memory.sleeper import Sleeper
from hybridengine.placement import colocated
from hybridengine.placement.parts import EngineOptions
from hybridengine.platform.cpu.mapped import MappedOffload
from hybridengine.platform.cuda.memory import PinnedStore
from hybridengine.platform.offload import FlatOffload
from hybridengine.platform.storages import distinct
from hybridengine.platform.stores import Store
from hybridengine.sync.plan.spec import ParamSpec
from hybridengine.tracing import PhaseTimer
from hybridengine.types import Prompt, Sample, SamplingParams, Trajectory

MAX_MODEL_LEN, BLOCK = 96, 32
#: Two whole blocks of the KV cache and a bit: an entry that outlives an update shows as cached tokens.
LONG = Prompt(index=0, token_ids=[5 + j % 40 for j in range(2 * BLOCK + 3)])
#: Leaves room for one token, so that it finishes while ``LONG`` is still running.
ALMOST = Prompt(index=1, token_ids=[6 + j % 40 for j in range(MAX_MODEL_LEN - 1)])
SAMPLES = [
    Sample(
        prompt_ids=[3 + (7 * i + j) % 90 for j in range(2 + i)],
        response_ids=[4 + (5 * i + 3 * j) % 90 for j in range(6)],
        loss_mask=[True] * 6,
        advantages=[0.5 - i % 2] * 6,
    )
    for i in range(6)
]
Bits = dict[str, dict[str, Tensor]]


class Flaky:
    """A store whose transfers fail once ``left`` of them are done; None: they do not."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.left: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _transfer(self, call: Callable[..., None], *args: Any) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise torch.OutOfMemoryError("injected")
        call(*args)

    def put(self, offset: int, source: Tensor) -> None:
        self._transfer(self.inner.put, offset, source)

    def get(self, offset: int, target: Tensor) -> None:
        self._transfer(self.inner.get, offset, target)


class Engines:
    """The real FSDP engine, the real rollout engine and the transfer between them. Started once.

    ``aliased``: training weights stay, and the rollout engine runs on them where it can.
    """

    def __init__(
        self,
        world: World,
        engine: str,
        path: Path,
        offload_dir: Path,
        engine_kwargs: dict[str, Any],
        *,
        aliased: bool = False,
    ) -> None:
        self.world, self.offload_dir, self.aliased = world, offload_dir, aliased
        self.on_gpu = world.platform.separate_memory
        self.config = Config(
            model=ModelConfig(path=str(path)),
            data=DataConfig(train="unused"),
            train=TrainConfig(lr=1e-3, max_tokens_per_micro_batch=24),
            rollout=RolloutConfig(engine=engine, kv_cache_gib=0.0625, max_num_seqs=8, engine_kwargs=engine_kwargs),
            memory=MemoryConfig(offload_dir=None if self.on_gpu else str(offload_dir), offload_weights=not aliased),
        )
        options = EngineOptions(
            model_path=path, max_model_len=MAX_MODEL_LEN, total_steps=1_000_000, eos_token_ids=[], with_entropy=False,
            reference=True,
        )  # fmt: skip
        built = colocated.build_engines(self.config, world, options, log_rank0=lambda text: None)
        self.train: Any = built.train
        self.rollout: Any = built.rollout
        self.transfer = built.transfer
        self.check_aliases()
        shapes = self.train.policy.shapes
        self.layout = self.rollout.layout({name: ParamSpec(name, shape, "float32") for name, shape in shapes.items()})
        self.buffers = bits(self.model_buffers())
        self.plain = plain_model(path).to(world.device)
        self.cached_tokens: list[int] = []
        self.caches = engine == "vllm"
        if self.caches:
            llm_engine = self.rollout.llm.llm_engine
            step = llm_engine.step

            def recorded_step() -> Any:
                outputs = step()
                self.cached_tokens += [output.num_cached_tokens for output in outputs if output.finished]
                return outputs

            llm_engine.step = recorded_step

    def check_aliases(self) -> None:
        """What the rollout engine neither fuses nor pads is the trainer's own memory; or nothing is."""
        local, live = self.train.local_tensors(), self.rollout.live_tensors()
        alike = {name for name in live if name in local and live[name].shape == local[name].shape}
        shared = {name for name in alike if live[name].data_ptr() == local[name].data_ptr()}
        assert alike and shared == (alike if self.aliased else set()), shared
        own = sum(live[name].nbytes for name in live.keys() - shared)
        assert self.rollout.nbytes("weights") == own
        assert (self.transfer.bytes_aliased > 0) == self.aliased

    def model_buffers(self) -> dict[str, Tensor]:
        owners = {"policy": self.train.policy.model, "rollout": self.rollout.model}
        return {f"{side} {name}": t for side, model in owners.items() for name, t in model.named_buffers()}

    def held(self) -> Bits:
        """What the trainer holds, by owner; the memory itself."""
        policy, moments = self.train.policy, {}
        if self.train.version:
            moments = {f"{k} {n}": t for k, ts in self.train.optimizer.moments().items() for n, t in ts.items()}
        grads = {name: s.grad.to_local() for name, s in policy.shards.items() if s.grad is not None}
        return {
            TRAINER_PARAMS: policy.local_tensors(),
            GRADS: grads,
            OPTIMIZER: moments,
            REFERENCE: self.train.reference.local_tensors(),
        }


class Run:
    """One sequence of phases under one setting of the memory options.

    Attributes:
        expected: owner -> what it must hold when it is on the device.
        syncs: policy version -> how often it was synced.
        fresh: nothing has been generated since the caches were emptied.
        lost: the rollout weights were given up since the last transfer.
    """

    def __init__(self, engines: Engines, memory: MemoryConfig, sleep_level: int, *, gradients_leave: bool) -> None:
        self.engines = e = engines
        e.config.rollout.sleep_level = 2
        e.rollout.sleep()  # as at the start of a run: memory, and no weights in it
        e.rollout.wake()
        e.config.rollout.sleep_level = sleep_level
        e.config.memory = memory
        built = colocated.Engines(train=e.train, rollout=e.rollout, transfer=e.transfer)
        self.sharding = colocated.time_share(e.config, e.world, built, PhaseTimer(), log_rank0=lambda text: None)
        self.phases = self.sharding.phases
        self.residency = self.phases.residency
        pieces = len(distinct(self.offloads()[TRAINER_PARAMS]._tensors()))
        assert pieces == 1 or e.aliased, "many small pieces instead of one"
        self.stores: list[Flaky] = []
        for mover in self.offloads().values():
            if isinstance(mover, MappedOffload) or e.on_gpu:
                self.stores.append(Flaky(mover.store or PinnedStore(e.world.device)))
                mover.store = self.stores[-1]
        if gradients_leave:
            self.residency.rest[GRADS] = State.HOST
        self.expected = copies(e.held())
        self.syncs: dict[int, int] = {}
        self.fresh = self.lost = True
        self.failures = self.refusals = 0
        self._logprobs: dict[int, list[list[float]]] = {}
        sync = self.sharding.weight_sync.run

        def counted_sync(version: int) -> None:
            sync(version)
            self.syncs[version] = self.syncs.get(version, 0) + 1
            self.lost, self.fresh = False, True

        self.sharding.weight_sync.run = counted_sync  # type: ignore[method-assign]

    def offloads(self) -> dict[str, FlatOffload | MappedOffload]:
        return {o: m for o, m in self.residency.movers.items() if isinstance(m, FlatOffload | MappedOffload)}

    # -- phases ------------------------------------------------------------------------------------

    def rollout(self, **params: Any) -> list[Trajectory]:
        engine, weight_sync = self.engines.rollout, self.sharding.weight_sync
        before, stale = weight_sync.count, self.lost or engine.weights_version != self.version
        self.sharding.enter_rollout_mode()
        with self.phases("rollout", ROLLOUT):
            assert weight_sync.count - before == stale, "synced when, and only when, it has not got them"
            self.check_rollout_weights()
            self.engines.cached_tokens.clear()
            found = generate(engine, [LONG], SamplingParams(max_tokens=4, **params), seed=1, step=self.version)
            assert self.engines.cached_tokens or not self.engines.caches, "no request was recorded"
            for cached in self.engines.cached_tokens:
                assert (cached == 0) == self.fresh, (cached, self.fresh)
            self.fresh = False
        self.check_answer(found)
        return found

    def validate(self) -> None:
        with self.phases("validation"):
            self.rollout(temperature=0.0)

    def score(self) -> None:
        with self.training_phase("old_logprobs", SCORE):
            found = self.engines.train.logprobs(SAMPLES)
        self.check_same(found, self._logprobs.setdefault(self.version, found))

    def reference(self) -> None:
        with self.training_phase("reference", SCORE_REFERENCE):
            found = self.engines.train.logprobs(SAMPLES, reference=True)
        self.check_same(found, self._logprobs.setdefault(-1, found))

    def train(self) -> None:
        def fetch() -> None:
            self.phases.prefetch(OPTIMIZER, during="forward_backward")

        with self.training_phase("forward_backward", TRAIN):
            self.engines.train.forward_backward(SAMPLES, loss, before_last_backward=fetch)
            self.expected = copies(self.engines.held(), instead=self.expected, only=(GRADS,))

    def optimize(self) -> None:
        with self.training_phase("optimizer", OPTIMIZE):
            self.engines.train.optimizer_step()
            self.expected = copies(self.engines.held(), instead=self.expected, only=(TRAINER_PARAMS, GRADS, OPTIMIZER))

    def checkpoint(self) -> None:
        with self.training_phase("checkpoint", OPTIMIZE):
            pass

    def sleep_in_flight(self) -> None:
        """Refused, by engine and residency, without an effect on the requests that are running."""
        refused: list[str] = []

        def try_to_sleep(_: Trajectory) -> None:
            if refused:
                return
            try:
                self.engines.rollout.sleep()
            except RuntimeError as error:
                refused.append(str(error))
            for owner in (KV_CACHE, ROLLOUT_WEIGHTS) if self.sleep_level == 2 else (KV_CACHE,):
                try:
                    self.residency.move(owner, State.DROPPED)
                except RuntimeError as error:
                    refused.append(str(error))

        self.rollout()
        params = SamplingParams(max_tokens=6)
        found = generate(self.engines.rollout, [LONG, ALMOST], params, seed=1, step=0, on_finished=try_to_sleep)
        assert refused and all("requests are running" in text for text in refused), refused
        self.check_answer(found)
        # What was given up counts as lost, though the engine kept it: better one transfer too many than none.
        self.lost = self.sleep_level == 2
        self.rollout()

    def wake_what_is_awake(self) -> None:
        self.rollout()
        for tags in (("weights",), ("kv_cache",), ("weights", "kv_cache")):
            self.engines.rollout.wake(tags)
        self.rollout()

    def wake_fails(self) -> None:
        """No room half-way through a wake; the same rollout then goes through."""
        wake = Sleeper.wake

        def no_room(sleeper: Sleeper) -> None:
            if sleeper.awake or not sleeper.storages:
                return wake(sleeper)
            storage, nbytes = sleeper.storages[0]
            storage.resize_(nbytes)
            raise MemoryError("injected")

        Sleeper.wake = no_room  # type: ignore[method-assign]
        try:
            self.rollout()
        except MemoryError:
            self.failures += 1
        finally:
            Sleeper.wake = wake  # type: ignore[method-assign]
        self.rollout()

    def memory_is_short(self) -> None:
        """The KV cache wakes where one sequence would not fit; with room for two the same rollout goes through."""
        blocks = self.engines.rollout.kv_blocks
        least, refused = blocks.minimum * blocks.block_bytes, False
        with patch.object(kv_plan, "available_host_memory", lambda: kv_plan.RESERVE + least - 1):
            try:
                self.rollout()
            except torch.OutOfMemoryError as error:
                if "one sequence" not in str(error):
                    raise
                refused = True
        with patch.object(kv_plan, "available_host_memory", lambda: kv_plan.RESERVE + 2 * least):
            self.rollout()
        assert not refused or blocks.usable == 2 * blocks.minimum
        assert self.sharding.metrics().get("memory/kv_cache_usable", 1.0) == blocks.usable / blocks.total
        self.refusals += refused

    def deep_sleep(self, first: str, second: str) -> None:
        """Drop both and wake them in either order; the weights are blank until the next transfer."""
        for owner in (KV_CACHE, ROLLOUT_WEIGHTS):
            self.residency.move(owner, State.DROPPED)
        for owner in (first, second):
            self.residency.move(owner, State.DEVICE)
        self.lost = self.fresh = True

    @contextmanager
    def training_phase(self, name: str, needs: Any) -> Iterator[None]:
        if self.sleep_level:
            self.fresh = True
        if self.sleep_level == 2:
            self.lost = True
        with self.phases(name, needs):
            yield

    # -- checks ------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self.engines.train.version

    @property
    def sleep_level(self) -> int:
        return self.engines.config.rollout.sleep_level

    def check(self) -> None:
        """Whatever is on the device holds its bits; buffers always do."""
        held = self.engines.held()
        for owner, tensors in self.expected.items():
            if owner in self.residency.movers and self.residency[owner] is State.DEVICE:
                assert equal(held[owner], tensors), owner
        assert equal(self.engines.model_buffers(), self.engines.buffers)

    def check_rollout_weights(self) -> None:
        """Every box of the engine's live tensors is the trainer's, bit by bit."""
        live = self.engines.rollout.live_tensors()
        for piece in self.engines.layout:
            tensor = live[piece.tensor]
            box = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
            found = tensor.as_strided(piece.sizes, piece.strides, tensor.storage_offset() + piece.start)
            assert same_bits(found, self.expected[TRAINER_PARAMS][piece.param][box]), piece.param

    @torch.no_grad()
    def check_answer(self, found: list[Trajectory]) -> None:
        """Log-probabilities are those of plain transformers with the newest weights, and say so."""
        for name, parameter in self.engines.plain.named_parameters():
            parameter.copy_(self.expected[TRAINER_PARAMS][name])
        for trajectory in found:
            assert set(trajectory.versions) == {self.version}
            ids = torch.tensor([trajectory.prompt.token_ids + trajectory.token_ids], device=self.engines.world.device)
            logits = self.engines.plain(ids).logits[0, len(trajectory.prompt.token_ids) - 1 : -1].double()
            chosen = logits.log_softmax(-1).gather(-1, ids[0, len(trajectory.prompt.token_ids) :, None])[:, 0]
            difference = (chosen.cpu() - torch.tensor(trajectory.logprobs, dtype=torch.float64)).abs().max().item()
            assert difference < (1e-4 if self.engines.on_gpu else 2e-5), difference

    def check_same(self, found: list[list[float]], before: list[list[float]]) -> None:
        """Scores of one version: the same every time, on a GPU up to the order of its sums."""
        exact = not self.engines.on_gpu
        for mine, theirs in zip(found, before, strict=True):
            assert mine == theirs if exact else max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) < 1e-5

    def finish(self) -> None:
        """Everything back and compared; host memory was taken once per owner."""
        for owner in self.residency.movers:
            self.residency.move(owner, State.DEVICE)
        self.check()
        self.engines.check_aliases()
        for owner, mover in self.offloads().items():
            if mover.store is not None:
                assert mover.store.allocations <= (1 if owner != GRADS else 2), owner
            mover.close()


def loss(logprobs: Tensor, entropy: Tensor | None, micro: MicroBatch) -> LossResult:
    return LossResult(-(logprobs * micro.advantages).sum() / 36, {})


def plain_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def copies(held: Bits, *, instead: Bits | None = None, only: tuple[str, ...] | None = None) -> Bits:
    """Copies of what is held, of all owners or of ``only`` these, beside the copies there are of the others."""
    return {
        owner: bits(tensors) if only is None or owner in only else (instead or {})[owner]
        for owner, tensors in held.items()
    }


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(
        one.detach().reshape(-1).view(torch.uint8), other.detach().reshape(-1).view(torch.uint8)
    )


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(same_bits(one[name], other[name]) for name in one)
