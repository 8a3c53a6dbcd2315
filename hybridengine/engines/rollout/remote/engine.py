"""RemoteEngine: a RolloutEngine in processes of its own (vLLM with ``rollout.process=separate``, SGLang always)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from hybridengine.config import RolloutConfig
from hybridengine.distributed.errors import agree
from hybridengine.distributed.layout import RolloutLayout
from hybridengine.distributed.world import World, replica_group
from hybridengine.engines.rollout.base import (
    EngineLostError,
    EngineProcessControl,
    RestartsExhaustedError,
    check_awake,
    check_idle,
    check_tags,
    check_weights_awake,
    stop_tokens,
)
from hybridengine.engines.rollout.remote.launch import start_processes
from hybridengine.engines.rollout.remote.messages import Job, Output, Request
from hybridengine.engines.rollout.remote.processes import EngineProcesses
from hybridengine.engines.rollout.remote.shared_weights import SharedWeightsHandle, WeightImporter
from hybridengine.engines.rollout.remote.stream import RemoteStream
from hybridengine.engines.rollout.weight_state import WeightState
from hybridengine.memory.kv_plan import BlockCache
from hybridengine.sync.plan.spec import ParamSpec, TensorSlice
from hybridengine.sync.plan.views import write_slices
from hybridengine.types import SamplingParams

log = logging.getLogger(__name__)

T = TypeVar("T")


class RemoteEngine:
    """The proxy of one replica, on every rank of its tensor-parallel group. See RolloutEngine.

    The group's first rank starts the processes and talks to them; the others get its answers, errors included, over a
    gloo group. Every rank maps the weights of its own worker (:mod:`shared_weights`) and writes them itself. Versions,
    staleness and what is awake are kept here, not in the processes. Also implements EngineProcessControl.

    Raises:
        ValueError: the tensor-parallel size does not divide the world, or the engine's environment is not there.
        EngineLostError: the engine died while it started.
    """

    def __init__(
        self,
        model_path: Path | str,
        rollout: RolloutConfig,
        *,
        world: World,
        max_model_len: int,
        seed: int = 0,
        eos_token_ids: Sequence[int] = (),
        trust_remote_code: bool = False,
    ) -> None:
        layout = RolloutLayout(world.size, rollout.tp)
        self.config, self.world, self.max_model_len = rollout, world, max_model_len
        self.replica, self.num_replicas = layout.replica_of(world.rank), layout.num_replicas
        self._starter = partial(
            start_processes, rollout, world, model_path=Path(model_path), max_model_len=max_model_len, seed=seed,
            stop=stop_tokens(Path(model_path), eos_token_ids), trust_remote_code=trust_remote_code,
        )  # fmt: skip
        self._tp_rank = layout.tp_rank_of(world.rank)
        self._group = replica_group(world, rollout.tp, backend="gloo", timeout=timedelta(days=7))
        self._engine: EngineProcesses | None = None
        self._weights: WeightImporter | None = None
        self._params: dict[str, ParamSpec] = {}
        self._slices: dict[str, list[TensorSlice]] = {}  # canonical parameter -> where it is in this worker's weights
        self._padding: set[str] = set()
        self._state = WeightState()
        self._nbytes: dict[str, int] = {}
        self._awake: set[str] = set()
        self._running = 0
        self.restarts = 0
        self.kv_blocks: BlockCache | None = None
        self.processes: EngineProcessControl | None = self
        self._launch()

    # -- the processes -----------------------------------------------------------------------------

    def _launch(self) -> None:
        """Start the processes and map this rank's worker's weights."""
        handles: list[SharedWeightsHandle]
        self._on_leader(self._start_processes)
        handles, described = self._on_leader(lambda: (self._ask("shared_weights"), self._ask("describe")[0]))
        handle = handles[self._tp_rank]
        self._weights = WeightImporter(handle)
        self._nbytes = {"weights": handle.nbytes, "kv_cache": described["kv_cache"]}
        self._awake = {"weights", "kv_cache"}
        self._state.lose()

    def _start_processes(self) -> None:
        self._engine = None
        self._engine = self._starter()

    def _on_leader(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the group's first rank; every rank returns its answer or raises its error."""
        answer: list[Any] = [None]
        if self._tp_rank == 0:
            try:
                answer = [(work(), None)]
            except Exception as error:  # noqa: BLE001  raised below, on every rank of the group
                answer = [(None, error)]
        if self._group is not None:
            dist.broadcast_object_list(answer, group=self._group, group_src=0)
        value, failure = answer[0]
        if failure is not None:
            raise failure
        return value

    def _ask(self, method: str, **arguments: Any) -> list[Any]:
        """First rank only: a call whose answer is a list with one element per worker, or one answer per process."""
        answers = self._living().call(method, **arguments)
        return [item for answer in answers for item in (answer if isinstance(answer, list) else [answer])]

    def _living(self) -> EngineProcesses:
        if self._engine is None:
            raise EngineLostError("the engine's processes could not be started")
        return self._engine

    def _order(self, method: str, **arguments: Any) -> list[Any]:
        return self._on_leader(lambda: self._ask(method, **arguments))

    @property
    def pids(self) -> list[int]:
        """Process ids of this replica's engine; on the first rank of the group."""
        return [] if self._engine is None else self._engine.pids

    @property
    def is_leader(self) -> bool:
        """Whether this rank talks to the processes."""
        return self._tp_rank == 0

    @property
    def lost(self) -> bool:
        """Whether the processes are known to be dead; the same on every rank of the group."""
        return self._on_leader(lambda: self._engine is None or self._engine.lost)

    def restart(self) -> None:
        """After a loss anywhere in the job: start dead processes again; every replica waits for a sync.

        Raises:
            RestartsExhaustedError: the processes died once more than ``rollout.max_restarts`` allows.
        """
        self._running = 0
        self._state.lose()
        while self.lost:
            if self.restarts == self.config.max_restarts:
                raise RestartsExhaustedError(
                    f"the rollout engine's processes died {self.restarts + 1} times, and rollout.max_restarts="
                    f"{self.config.max_restarts}"
                )
            self.restarts += 1
            self._let_go()
            try:
                self._launch()
                if self._params:
                    self.layout(self._params)
            except EngineLostError as error:
                self._warn(error)

    def revive(self, version: int) -> None:
        """Between two syncs: start dead processes again, on the weights that they ran on.

        What a dead process had lent is still mapped here, complete since the last sync. It is written into what the
        new one lends, and no trainer takes part.

        Args:
            version: policy version of the weights that are mapped; -1: they are none, and a sync has to come.

        Raises:
            RestartsExhaustedError: as :meth:`restart`.
            EngineLostError: the memory was a GPU's, which may not outlive the process that owned it.
        """
        if self.world.platform.separate_memory and version >= 0:
            raise EngineLostError("a dead engine's weights are lost with its GPU memory")
        kept = self.live_tensors()
        while True:
            self.restart()
            if version < 0:
                return
            try:
                self.begin_update()
                for name, tensor in self.live_tensors().items():
                    tensor.copy_(kept[name])
                return self.finish_update(version)
            except EngineLostError as error:  # again; restart counts
                self._warn(error)

    def _warn(self, error: EngineLostError) -> None:
        if self.is_leader:
            log.warning("replica %d: %s", self.replica, error)

    def _let_go(self) -> None:
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    # -- generation --------------------------------------------------------------------------------

    def stream(self, params: SamplingParams, *, seed: int, interruptible: bool = True) -> RemoteStream:
        """Generation in steps, see RolloutStream."""
        return RemoteStream(self, params, seed=seed)

    def advance(self, requests: list[Request], params: SamplingParams) -> list[Output]:
        """For the stream: take in ``requests``, run for a moment, return what is new."""
        self._running += len(requests)
        outputs = self._order("advance", job=Job(requests, params) if requests else None)
        self._running -= sum(output.reason is not None for output in outputs)
        return outputs

    def abort(self, names: Sequence[str]) -> list[Output]:
        """For the stream: end samples early; their tokens that were not reported."""
        outputs = self._order("abort", names=list(names)) if names else []
        self._running -= len(names)
        return outputs

    def check_servable(self) -> None:
        """Raise StaleWeightsError unless the engine is awake with complete weights."""
        self._state.check_servable()
        check_awake(self.awake)

    # -- weights -----------------------------------------------------------------------------------

    @property
    def weights_version(self) -> int:
        """Last complete policy version; -1 when there is none."""
        return self._state.version

    def live_tensors(self) -> dict[str, Tensor]:
        """Name -> tensor of this rank's worker that the model runs on, mapped here."""
        if self._weights is None:
            return {}
        return {name: tensor for name, tensor in self._weights.tensors.items() if name not in self._padding}

    def layout(self, params: Mapping[str, ParamSpec]) -> tuple[TensorSlice, ...]:
        """Which boxes of the canonical parameters this rank's worker holds, learnt from the engine's own loader."""
        self._params = dict(params)
        mine: tuple[TensorSlice, ...] = self._order("layout", params=self._params)[self._tp_rank]
        assert self._weights is not None
        self._padding = set(self._weights.tensors) - {piece.tensor for piece in mine}
        self._slices = {}
        for piece in mine:
            self._slices.setdefault(piece.param, []).append(piece)
        return mine

    def alias_tensor(self, name: str, tensor: Tensor) -> bool:
        """Returns False: the engine's processes do not map the trainer's memory."""
        return False

    def begin_update(self) -> None:
        """Unservable from here until :meth:`finish_update`.

        Raises:
            RuntimeError: the weights are asleep, or samples are running.
            EngineLostError: the engine died.
        """
        check_weights_awake(self._awake)
        self._order("begin_update")
        self._state.begin(self.live_tensors())

    def load_weight(self, name: str, full: Tensor) -> None:
        """Deliver one canonical parameter in full.

        Raises:
            ValueError: the model has no such parameter, or of another shape.
        """
        self._state.mark_delivered(name)
        if name not in self._params:
            raise ValueError(f"parameter {name!r}: the engine's model does not take it")
        if tuple(full.shape) != self._params[name].shape:
            raise ValueError(f"parameter {name!r} is {list(full.shape)}, must be {list(self._params[name].shape)}")
        write_slices(full, self._slices.get(name, ()), self.live_tensors())

    def finish_update(self, version: int) -> None:
        """Servable again, with caches of older weights gone.

        Raises:
            RuntimeError: a parameter got no data, by name; or a weight of the engine's is no longer where it was.
            EngineLostError: the engine died.
        """
        with nullcontext() if self._group is None else agree("finishing the weight update", self._group):
            self._state.check_complete(self._params, self.live_tensors())
            self.world.platform.synchronize()  # the engine's streams know nothing of ours
        self._order("finish_update", version=version)  # every rank of the group has written by now
        self._state.finish(version)

    def checksums(self) -> dict[str, int]:
        """Byte sum of each weight of this rank's worker, read by the engine from its own model."""
        return self._order("checksums")[self._tp_rank]

    # -- memory ------------------------------------------------------------------------------------

    @property
    def awake(self) -> frozenset[str]:
        return frozenset(self._awake)

    def nbytes(self, tag: str) -> int:
        """Bytes of ``tag`` in this rank's worker when awake."""
        check_tags([tag])
        return self._nbytes[tag]

    def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Free what ``tags`` name, as far as ``rollout.sleep_level`` goes. Does not raise for dead processes.

        Raises:
            RuntimeError: samples are running.
        """
        check_tags(tags)
        check_idle(self._running)
        level = self.config.sleep_level
        going = self._awake.intersection(tags) if level else set()
        if level == 1 or self.world.platform.separate_memory:
            going.discard("weights")  # host memory is where they are; a GPU's, once exported, can't leave
        if not going:
            return
        try:
            self._order("sleep", tags=sorted(going))
        except EngineLostError:
            self._let_go()  # the next call that needs the engine raises
        if "weights" in going:
            self._state.lose()
        self._awake -= going

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take the memory back; waking what is awake does nothing.

        Raises:
            EngineLostError: the engine died.
        """
        check_tags(tags)
        coming = set(tags) - self._awake
        if coming:
            self._order("wake", tags=sorted(coming))
            self._awake |= coming

    def close(self) -> None:
        """End the processes; the mapped memory is freed with its last tensor."""
        self._state.lose()
        self._awake = set()
        if self._engine is not None:
            self._engine.close()
        self._let_go()
