"""One job through TRL's GRPOTrainer, timed from inside; writes one JSON file.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.peers.trl_grpo \\
        --job tiny --generation vllm --cache outputs/bench --out result.json

TRL gets the fastest configuration we know of for this machine, and only things a user could set, except for
the engine's arguments, which TRL has no option for (its name ``LLM`` in trl.generation is bound to one with
ours):

* data parallel (DDP) over the ranks, each rank's whole share as one micro-batch; no gradient checkpointing,
  no bf16 autocast, float32 weights; fused AdamW; no reference model (beta 0); no logging, no progress bar,
  no checkpoints;
* vLLM in float32 like the trainer (by itself it would run in 16 bits), compiled or eager, whichever is faster for
  the job. On vLLM's CPU build TRL's weight sync fails as it is: it writes with ``load_weights``, one parameter at
  a time, and the build has packed the linear weights and thrown the parameters away. ``--weights live`` is the
  smallest repair: no packing, and TRL's own sync. ``--weights packed`` is a stronger peer than TRL itself: the
  packed kernels stay, eager, and TRL's sync is replaced by vLLM's layerwise reload, which packs again (faster for
  SmolLM2, slower for the tiny model). With either, the log-probabilities of vLLM and of the trainer agree to
  1e-6 after an update;
* the importance-sampling correction is off by default here, as it is in our arm: it would cost TRL one more
  forward pass per step. ``--correction`` switches it on.

A step lasts from the end of the step before to its own end, so nothing between two steps goes uncounted.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()

from benchmarks.peers.job import JOBS, Job, prepare, trl_reward  # noqa: E402  after the clock has started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=JOBS, required=True)
    parser.add_argument("--generation", choices=("hf", "vllm"), required=True)
    parser.add_argument("--cache", type=Path, required=True, help="where job models are kept")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--steps", type=int, help="timed steps; default: the job's")
    parser.add_argument("--correction", action="store_true", help="importance-sampling correction, TRL's default")
    parser.add_argument("--weights", choices=("live", "packed"), default="live", help="vLLM's linear weights")
    arguments = parser.parse_args()
    job = JOBS[arguments.job]
    steps = arguments.steps or job.steps

    environment()
    if arguments.generation == "vllm":
        packed = arguments.weights == "packed"
        engine_arguments(eager=job.trl_eager or packed, packed=packed)
    trainer, clock = build(job, arguments, total_steps=job.warmup_steps + steps)
    engine_start = time.perf_counter() - STARTED
    trainer.train()

    lengths = clock.lengths
    if set(lengths) != {job.max_tokens}:
        sys.exit(f"trl_grpo: responses of {sorted(set(lengths))} tokens; the job needs exactly {job.max_tokens}")
    if int(os.environ["RANK"]) == 0:
        result = {
            "engine_start_seconds": engine_start,
            "step_seconds": clock.steps[job.warmup_steps :],
            "step_cpu_seconds": clock.cpu_steps[job.warmup_steps :],
            "phase_seconds": {name: seconds[job.warmup_steps :] for name, seconds in clock.phases.items()},
            "responses_per_step": job.world_size * len(lengths) // (job.warmup_steps + steps),
        }
        arguments.out.write_text(json.dumps(result))


def environment() -> None:
    """What vLLM reads from the environment; torchrun has already given each rank one thread."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def engine_arguments(*, eager: bool, packed: bool) -> None:
    """Give TRL's vLLM engine the arguments TRL has no option for."""
    import trl.generation.vllm_generation as generation
    import vllm._custom_ops as ops
    from vllm import LLM

    generation.LLM = functools.partial(LLM, dtype="float32", enforce_eager=eager)
    if packed:
        generation.VLLMGeneration.sync_weights = reload_weights
    else:
        ops._supports_onednn = False


def reload_weights(self: Any) -> None:
    """Stands in for VLLMGeneration.sync_weights: the same parameters through vLLM's layerwise reload."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    worker = self.llm.llm_engine.model_executor.driver_worker.worker
    worker.reload_weights(weights_iterator=self._iter_named_params(), is_checkpoint_format=True)
    for layer in worker.model_runner.model.modules():  # the reload passes over a head tied to the embedding
        if isinstance(layer, ParallelLMHead):
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    self.llm.reset_prefix_cache()


class Clock:
    """Wall and processor time of each step, and the share of the phases in it."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.cpu_steps: list[float] = []
        self.phases: dict[str, list[float]] = {}
        self.lengths: list[int] = []
        self._open: dict[str, float] = defaultdict(float)
        self._last = self._cpu_last = 0.0

    def start(self) -> None:
        self._last, self._cpu_last = time.perf_counter(), time.process_time()

    def end_step(self) -> None:
        now, cpu = time.perf_counter(), time.process_time()
        self.steps.append(now - self._last)
        self.cpu_steps.append(cpu - self._cpu_last)
        self._last, self._cpu_last = now, cpu
        for name in self.phases.keys() | self._open.keys():
            self.phases.setdefault(name, [0.0] * (len(self.steps) - 1)).append(self._open.get(name, 0.0))
        self._open.clear()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._open[name] += time.perf_counter() - began

        return call


def build(job: Job, arguments: argparse.Namespace, *, total_steps: int) -> tuple[Any, Clock]:
    """The trainer, with its clock attached; vLLM is up when this returns."""
    import datasets
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    model, data = prepare(job, arguments.cache)
    vllm = arguments.generation == "vllm"
    engine = (
        dict(
            use_vllm=True,
            vllm_mode="colocate",
            vllm_tensor_parallel_size=job.tp,
            vllm_gpu_memory_utilization=0.1,
            vllm_max_model_length=job.prompt_tokens + job.max_tokens,
            vllm_importance_sampling_correction=arguments.correction,
        )
        if vllm
        else {}
    )
    config = GRPOConfig(
        output_dir=str(arguments.out.parent / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=job.sequences // job.world_size,
        gradient_accumulation_steps=1,
        num_generations=job.samples,
        max_completion_length=job.max_tokens,
        temperature=1.0,
        beta=0.0,
        num_iterations=1,
        loss_type="dapo",  # token mean over the global batch
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        optim="adamw_torch_fused",
        max_steps=total_steps,
        seed=job.seed,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        **engine,
    )
    clock = Clock()

    class Ticks(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.end_step()

    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=trl_reward,
        args=config,
        train_dataset=datasets.load_dataset("json", data_files=str(data), split="train", cache_dir=str(data.parent)),
        callbacks=[Ticks()],
    )
    attach(trainer, clock, vllm=vllm)
    return trainer, clock


def attach(trainer: Any, clock: Clock, *, vllm: bool) -> None:
    """Time generation and weight sync, and keep the response lengths for the check at the end."""
    if vllm:
        trainer.vllm_generation.sync_weights = clock.timed("sync", trainer.vllm_generation.sync_weights)
        trainer.vllm_generation.generate = clock.timed("generation", trainer.vllm_generation.generate)
    single_turn = trainer._generate_single_turn
    if not vllm:
        single_turn = clock.timed("generation", single_turn)

    def generate(*args: Any, **kwargs: Any) -> Any:
        completion_ids, logprobs = single_turn(*args, **kwargs)
        clock.lengths.extend(len(ids) for ids in completion_ids)
        return completion_ids, logprobs

    trainer._generate_single_turn = generate


if __name__ == "__main__":
    main()
