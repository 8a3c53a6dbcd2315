"""Which interpreter, environment and host an engine's processes get, and their start."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hybridengine.config import RolloutConfig
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.remote.messages import Start
from hybridengine.engines.rollout.remote.processes import EngineProcesses
from hybridengine.engines.rollout.traits import traits_of

#: An engine that takes longer for anything but generating counts as dead.
ANSWER_SECONDS = 600.0


def start_processes(
    rollout: RolloutConfig,
    world: World,
    *,
    model_path: Path,
    max_model_len: int,
    seed: int,
    stop: Sequence[int],
    trust_remote_code: bool,
) -> EngineProcesses:
    """The processes of this rank's replica, ready to be called. Arguments as for RemoteEngine.

    Raises:
        as EngineProcesses, and ValueError where the engine's environment is missing.
    """
    traits = traits_of(rollout.engine)
    host = traits.own_processes
    assert host is not None, traits

    def start(rank: int, scratch: Path) -> Start:
        return Start(
            host=host,
            model_path=model_path.absolute(),
            rollout=rollout,
            rank=rank,
            scratch=scratch,
            max_model_len=max_model_len,
            seed=seed,
            stop=stop,
            trust_remote_code=trust_remote_code,
            platform=world.platform.name,
            timeout_seconds=ANSWER_SECONDS,
            trainer_pid=os.getpid(),
        )

    count = rollout.tp if traits.process_per_rank else 1
    return EngineProcesses(
        traits.python() or Path(sys.executable),
        start,
        count,
        environment(rollout, world),
        answer_seconds=ANSWER_SECONDS,
    )


def environment(rollout: RolloutConfig, world: World) -> dict[str, str]:
    """Variables for the processes of this rank's replica, on top of the trainer's own."""
    threads = str(max(1, (os.cpu_count() or 1) // world.local_size))
    found = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    if traits_of(rollout.engine).interpreter is not None:
        found["PYTHONWARNINGS"] = "ignore"  # its imports fill the log with what nobody can act on
        if not world.platform.separate_memory and "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ:
            # Replicas share no core that they need not.
            cores = sorted(os.sched_getaffinity(0))
            ranks = range(world.local_rank, world.local_rank + rollout.tp)
            found["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in ranks)
    if world.platform.separate_memory:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        devices = range(world.local_rank, world.local_rank + rollout.tp)
        found["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i] if visible != [""] else str(i) for i in devices)
    return found
