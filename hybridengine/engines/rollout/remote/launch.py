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

#: rollout.engine -> (host class, whether every tensor-parallel rank is a process that we start)
HOSTS = {
    "vllm": ("hybridengine.engines.rollout.vllm.engine.host:VLLMHost", True),
    "sglang": ("hybridengine.engines.rollout.sglang.host:SGLangHost", False),
}

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
    """The processes of this rank's replica, ready to be called. Arguments as for SeparateEngine.

    Raises:
        as EngineProcesses, and ValueError where the engine's environment is missing.
    """
    host, one_each = HOSTS[rollout.engine]

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
            is_cuda=world.is_cuda,
            timeout_seconds=ANSWER_SECONDS,
            trainer_pid=os.getpid(),
        )

    count = rollout.tp if one_each else 1
    return EngineProcesses(
        interpreter(rollout), start, count, environment(rollout, world), answer_seconds=ANSWER_SECONDS
    )


def interpreter(rollout: RolloutConfig) -> Path:
    """The Python of the engine's environment: this one for vLLM, that of ``.venv-sglang`` beside it for SGLang.

    ``HYBRIDENGINE_SGLANG_PYTHON`` names another.

    Raises:
        ValueError: there is none.
    """
    if rollout.engine != "sglang":
        return Path(sys.executable)
    named = os.environ.get("HYBRIDENGINE_SGLANG_PYTHON")
    found = Path(named) if named else Path(sys.prefix).parent / ".venv-sglang" / "bin" / "python"
    if not found.is_file():
        where = "HYBRIDENGINE_SGLANG_PYTHON names it" if named else "run `make install-sglang`"
        raise ValueError(f"rollout.engine=sglang: no interpreter at {found}; {where}")
    return found


def environment(rollout: RolloutConfig, world: World) -> dict[str, str]:
    """Variables for the processes of this rank's replica, on top of the trainer's own."""
    threads = str(max(1, (os.cpu_count() or 1) // world.local_size))
    found = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    if rollout.engine == "sglang":
        found["PYTHONWARNINGS"] = "ignore"  # its imports fill the log with what nobody can act on
        if not world.is_cuda and "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ:
            # Replicas share no core that they need not.
            cores = sorted(os.sched_getaffinity(0))
            ranks = range(world.local_rank, world.local_rank + rollout.tp)
            found["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in ranks)
    if world.is_cuda:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        devices = range(world.local_rank, world.local_rank + rollout.tp)
        found["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i] if visible != [""] else str(i) for i in devices)
    return found
