"""The bill in advance: bytes of every owner in every phase on the fullest rank, from a config.json alone.

Pure arithmetic. A symbol each: P parameters, N ranks, t tensor-parallel size, b bytes of train.dtype, H hidden,
I MLP width, V vocabulary, L layers, T tokens of a micro-batch, Q and K rows of the query and key projections.

    training           see bill_fsdp and bill_megatron
    rollout weights    the rows and columns of rank r of t, embeddings padded to 64 · t
    KV cache           CUDA: what is left of gpu_memory_utilization; CPU: rollout.kv_cache_gib
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hybridengine.algorithms.registry import algorithm_class
from hybridengine.config import Config
from hybridengine.engines.rollout.traits import runs_in_own_processes, traits_of
from hybridengine.memory.residency import (
    CRITIC,
    GRADS,
    GRAPHS,
    KV_CACHE,
    OPTIMIZER,
    REFERENCE,
    REWARD_MODEL,
    ROLLOUT_WEIGHTS,
    TRAINER_PARAMS,
)
from hybridengine.sync.plan.naming import as_causal, decoder_of
from hybridengine.sync.plan.naming.decoder import Decoder
from hybridengine.tools.bill_critic import CriticBill, critic_model, reward_model_bytes
from hybridengine.tools.bill_fsdp import FSDPTraining
from hybridengine.tools.bill_megatron import MegatronTraining
from hybridengine.tools.machine import Machine, Offload
from hybridengine.tools.sizes import (
    ACTIVATIONS,
    BYTES,
    CONTEXT,
    GIB,
    STAGING,
    hf_config,
    kv_bytes_per_token,
    rollout_numel,
)

#: Not this program's tensors: CUDA context, cuBLAS workspace, NCCL buffers. Measured values lie between 1 and 2 GiB.
CONTEXT_BYTES = int(1.5 * GIB)
#: CUDA graphs of vLLM's decode batch sizes, with their private pools.
GRAPH_BYTES = GIB
#: A Python process with torch, transformers and (in host memory) its own buffers.
PROCESS_BYTES = 2 * GIB
#: What vLLM's profiling run takes for a prefill batch before it sizes the KV cache, per token of the batch.
PREFILL_TOKENS = 8192
#: Tokens of a block of vLLM's KV cache on CPU; one block more than those in use is taken as a placeholder.
CPU_BLOCK_TOKENS = 128

START, TRAIN_PEAK, OPTIMIZE, SYNC, ROLLOUT = "start", "forward_backward", "optimizer", "sync", "rollout"


@dataclass(slots=True)
class Bill:
    """Bytes per rank.

    Attributes:
        phases: phase -> owner -> bytes on the fullest rank's device (host memory on a CPU machine).
        limit: what one rank may use.
        host: CUDA: bytes of the node's host memory at most, all ranks together; host_limit what it has.
        kv_missing: bytes that the KV cache lacks for one sequence of full length.
        kv_floor: CPU: the least ``rollout.kv_cache_gib`` for one such sequence.
        problems: why it does not fit or cannot run, one sentence each; empty when it fits.
        notes: facts worth reading beside the numbers.
    """

    phases: dict[str, dict[str, int]]
    limit: int
    host: int
    host_limit: int
    kv_missing: int = 0
    kv_floor: float = 0.0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def peaks(self) -> dict[str, int]:
        return {phase: sum(owners.values()) for phase, owners in self.phases.items()}

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    @property
    def shortfall(self) -> int:
        """Bytes missing over all phases, rank and host; 0 when it fits."""
        device = sum(max(0, peak - self.limit) for peak in self.peaks.values())
        return device + max(0, self.host - self.host_limit) + self.kv_missing

    @property
    def fits(self) -> bool:
        return not self.problems


def make_bill(model: Mapping[str, Any], config: Config, machine: Machine, offload: Offload) -> Bill:
    """What a run of ``config`` with the model of this config.json needs on ``machine``.

    Raises:
        ValueError: an architecture without a parameter table, or degrees of train=megatron that do not divide.
    """
    d = decoder_of(hf_config(model))
    critic = None
    if algorithm_class(config.algorithm).needs_critic:
        value_model = critic_model(config, model)
        engine = config.critic.engine or config.train.engine
        changed = replace(config, train=replace(config.train, engine=engine))
        headless = replace(decoder_of(as_causal(hf_config(value_model))), tied=True)
        critic = make_training(headless, value_model, changed, machine, offload)
    return _Sums(d, make_training(d, model, config, machine, offload), config, machine, offload, critic).bill()


def make_training(d: Decoder, model: Mapping[str, Any], config: Config, machine: Machine, offload: Offload) -> Training:
    """The training engine of ``config`` with a model of these sizes."""
    if config.train.engine != "megatron":
        return FSDPTraining(d, config, ranks=machine.ranks)
    return MegatronTraining(
        d,
        config,
        top_k=int(model.get("num_experts_per_tok") or 1),
        ranks=machine.ranks,
        is_cuda=machine.has_gpus,
        offload_optimizer=offload.offload_optimizer,
        offload_weights=offload.offload_weights,
    )


class Training(Protocol):
    """What a training engine holds, in bytes on its fullest rank.

    Attributes:
        weights, optimizer, reference: at rest.
        resting_gradients: of buffers that stay on the device between steps.
        frozen_waits_on_host: CUDA: the reference is in host memory while it is not used.
    """

    weights: int
    optimizer: int
    reference: int
    resting_gradients: int
    frozen_waits_on_host: bool

    def forward_backward(self) -> dict[str, int]:
        """By owner, at the worst moment; without the optimizer."""
        ...

    def optimizer_step(self) -> dict[str, int]: ...

    def describe(self) -> tuple[str, str]:
        """The model's size, and how it is cut."""
        ...


class _Sums:
    def __init__(
        self,
        d: Decoder,
        training: Training,
        config: Config,
        machine: Machine,
        offload: Offload,
        critic: Training | None = None,
    ) -> None:
        self.critic = None if critic is None else CriticBill(critic, leaves=offload.offload_weights)
        self.reward_model = reward_model_bytes(config, machine.ranks)
        self.d, self.training, self.config, self.machine, self.offload = d, training, config, machine, offload
        self.longest = config.data.max_prompt_tokens + config.rollout.max_tokens
        self.max_len = config.rollout.max_model_len or self.longest
        self.has_reference = config.algorithm.kl_coef > 0
        self.processes = 2 if runs_in_own_processes(config.rollout) else 1  # per rank

    # -- the start ---------------------------------------------------------------------------------

    def start(self) -> dict[str, int]:
        """The larger of two moments: the rollout engine alone, awake for the first time; then the trainer, built in
        full beside the engine as it sleeps."""
        engine = self.awake(sleep_level=0) | self._always(reference=False)
        if self.machine.has_gpus:
            engine[ACTIVATIONS] = self.prefill()  # of vLLM's profiling run
        trainer = {TRAINER_PARAMS: self.training.weights, GRADS: self.training.resting_gradients}
        trainer |= self.awake() | self._always() | ({CRITIC: self.critic.start} if self.critic else {})
        trainer[REWARD_MODEL] = self.reward_model
        return max(engine, trainer, key=lambda owners: sum(owners.values()))

    # -- training ----------------------------------------------------------------------------------

    def forward_backward(self) -> dict[str, int]:
        # Offloaded, the optimizer comes for the first step of a rollout and stays for the others.
        updates = self.config.algorithm.epochs * self.config.algorithm.mini_batches
        optimizer = 0 if self.offload.offload_optimizer and updates == 1 else self.training.optimizer
        return self.training.forward_backward() | {OPTIMIZER: optimizer} | self._always()

    def optimizer_step(self) -> dict[str, int]:
        return self.training.optimizer_step() | {OPTIMIZER: self.training.optimizer} | self._always()

    # -- rollout -----------------------------------------------------------------------------------

    def rollout_weights(self) -> int:
        size = rollout_numel(self.d, self.config.rollout.tp) * BYTES[self.config.rollout.dtype]
        packs = self.machine.platform in traits_of(self.config.rollout.engine).packed_copy_on
        return 2 * size if packs else size  # vLLM's CPU kernels read a packed copy beside the plain weights

    def prefill(self) -> int:
        """vLLM's activations for the largest prefill batch: hidden states and the MLP's gate and up."""
        r, d = self.config.rollout, self.d
        tokens = max(PREFILL_TOKENS, self.max_len)
        width = 4 * d.hidden + 2 * max(d.intermediate, d.q_rows + 2 * d.kv_rows) // r.tp
        logits = r.max_num_seqs * d.vocab * 4 * 2
        return tokens * width * BYTES[r.dtype] + logits

    def sync(self) -> dict[str, int]:
        owners = self._resident(aliased=True) | {ROLLOUT_WEIGHTS: self.rollout_weights()}
        return owners | {STAGING: self.config.sync.bucket_mib * 2**20} | self._always()

    def rollout(self) -> dict[str, int]:
        r, owners = self.config.rollout, self._resident(aliased=False)
        owners[ROLLOUT_WEIGHTS] = self.rollout_weights()
        if self.machine.has_gpus:
            owners[GRAPHS] = 0 if r.enforce_eager else GRAPH_BYTES
            owners[ACTIVATIONS] = self.prefill()
            owners[KV_CACHE] = max(self.kv_room(), self.kv_minimum())
        else:
            owners[KV_CACHE] = self.kv_wanted() if traits_of(r.engine).kv_cache_grows else int(r.kv_cache_gib * GIB)
        return owners | self._always()

    def kv_room(self) -> int:
        """CUDA: the engine's share of the GPU less what it needs beside the cache; SGLang's is of weights and cache."""
        share = int(self.config.rollout.gpu_memory_utilization * self.machine.device_gib * GIB)
        return (
            share
            - self.rollout_weights()
            - (self.prefill() if traits_of(self.config.rollout.engine).share_includes_activations else 0)
        )

    def kv_minimum(self) -> int:
        """One sequence of the longest length."""
        return self.max_len * kv_bytes_per_token(self.d, tp=self.config.rollout.tp, dtype=self.config.rollout.dtype)

    def kv_floor(self) -> float:
        """CPU: the least ``rollout.kv_cache_gib`` that an engine starts with, rounded up to hundredths."""
        if traits_of(self.config.rollout.engine).kv_cache_grows:
            return 0.0
        tokens = CPU_BLOCK_TOKENS * (1 + -(-self.max_len // CPU_BLOCK_TOKENS))
        return math.ceil(100 * tokens * self.kv_minimum() / self.max_len / GIB) / 100

    def kv_wanted(self) -> int:
        """All sequences that one replica decodes together, at full length."""
        replicas = max(1, self.machine.ranks // self.config.rollout.tp)
        samples = -(-self.config.data.prompts_per_step // replicas) * self.config.rollout.samples_per_prompt
        return min(self.config.rollout.max_num_seqs, samples) * self.kv_minimum()

    # -- what stays --------------------------------------------------------------------------------

    def _resident(self, *, aliased: bool) -> dict[str, int]:
        """Training state on the device outside of training. During a sync the training weights always are."""
        weights_stay = aliased or not self.offload.offload_weights
        return {
            TRAINER_PARAMS: self.training.weights if weights_stay else 0,
            GRADS: self.training.resting_gradients,
            OPTIMIZER: 0 if self.offload.offload_optimizer else self.training.optimizer,
        }

    def _always(self, *, reference: bool = True) -> dict[str, int]:
        # Host memory is the device on a CPU machine.
        stays = self.has_reference and not (self.machine.has_gpus and self.training.frozen_waits_on_host)
        found = {CONTEXT: self.processes * (CONTEXT_BYTES if self.machine.has_gpus else PROCESS_BYTES)}
        if self.machine.has_gpus and self.machine.ranks > 1:
            found[STAGING] = self.config.sync.bucket_mib * 2**20  # peers have it mapped
        found |= {CRITIC: self.critic.resting} if self.critic else {}
        found |= {} if self.offload.offload_weights else {REWARD_MODEL: self.reward_model}
        return found | ({REFERENCE: self.training.reference} if stays and reference else {})

    def awake(self, *, sleep_level: int | None = None) -> dict[str, int]:
        """Rollout memory that stays through training when the engine does not sleep, or not deeply."""
        level = self.config.rollout.sleep_level if sleep_level is None else sleep_level
        mapped = self.processes > 1 or not self.machine.has_gpus  # weights that another process maps stay, and a CPU's
        kept = {ROLLOUT_WEIGHTS: self.rollout_weights()} if level == 0 or level == 1 and mapped else {}
        if level == 0:
            rollout = self.rollout()
            kept |= {owner: rollout[owner] for owner in (KV_CACHE, GRAPHS) if owner in rollout}
        elif self.machine.has_gpus and not self.config.rollout.enforce_eager:
            kept[GRAPHS] = GRAPH_BYTES  # captured graphs survive vLLM's sleep
        return kept

    def host(self) -> int:
        """Host memory of the node at most: processes, offloaded state, a reference, weights at sleep level 1."""
        per_rank = self.processes * PROCESS_BYTES
        per_rank += self.training.optimizer if self.offload.offload_optimizer else 0
        per_rank += self.training.weights if self.offload.offload_weights else 0
        per_rank += self.training.reference if self.has_reference and self.training.frozen_waits_on_host else 0
        per_rank += self.critic.waiting if self.critic else 0
        per_rank += self.reward_model if self.offload.offload_weights else 0
        leaves = self.config.rollout.sleep_level == 1 and self.processes == 1
        per_rank += self.rollout_weights() if leaves else 0
        return per_rank * self.machine.ranks

    # -- the whole ---------------------------------------------------------------------------------

    def phases(self) -> dict[str, dict[str, int]]:
        awake = self.awake()
        found = {
            START: self.start(),
            TRAIN_PEAK: self.forward_backward() | awake,
            OPTIMIZE: self.optimizer_step() | awake,
            **(
                {CRITIC: self._resident(aliased=False) | self._always() | awake | self.critic.training()}
                if self.critic
                else {}
            ),
            SYNC: self.sync() | {k: v for k, v in awake.items() if k != ROLLOUT_WEIGHTS},
            ROLLOUT: self.rollout(),
        }
        return {phase: {owner: size for owner, size in owners.items() if size} for phase, owners in found.items()}

    def bill(self) -> Bill:
        m = self.machine
        limit = int((m.device_gib if m.has_gpus else m.host_gib / m.ranks) * GIB)
        bill = Bill(self.phases(), limit, self.host(), int(m.host_gib * GIB), kv_floor=self.kv_floor())
        for phase, peak in bill.peaks.items():
            if peak > limit:
                bill.problems.append(f"{phase} needs {peak / GIB:.1f} GiB of {limit / GIB:.1f} GiB per rank")
        if not m.has_gpus:
            bill.host = 0  # the ranks' memory is the host's, counted above
        if bill.host > bill.host_limit:
            bill.problems.append(f"host memory: {bill.host / GIB:.0f} GiB of {m.host_gib:.0f} GiB")
        if m.has_gpus and self.kv_room() < self.kv_minimum():
            share = self.config.rollout.gpu_memory_utilization
            bill.kv_missing = self.kv_minimum() - self.kv_room()
            bill.problems.append(
                f"KV cache: rollout.gpu_memory_utilization={share} leaves {max(0, self.kv_room()) / GIB:.1f} GiB, "
                f"one sequence of {self.max_len} tokens needs {self.kv_minimum() / GIB:.2f} GiB"
            )
        if not m.has_gpus and self.config.rollout.kv_cache_gib < self.kv_floor():
            bill.kv_missing = int((self.kv_floor() - self.config.rollout.kv_cache_gib) * GIB)
            bill.problems.append(
                f"KV cache: rollout.kv_cache_gib={self.config.rollout.kv_cache_gib}, one sequence of {self.max_len} "
                f"tokens needs {self.kv_floor():.2f}"
            )
        self._notes(bill)
        return bill

    def _notes(self, bill: Bill) -> None:
        size, cut = self.training.describe()
        bill.notes.append(size)
        room = bill.phases[ROLLOUT].get(KV_CACHE, 0)
        if room and self.kv_wanted():
            together = int(room // self.kv_minimum())
            bill.notes.append(f"the KV cache holds {together} sequences of {self.max_len} tokens per replica")
        bill.notes.append(
            f"{cut}; "
            f"optimizer {'in host memory' if self.offload.offload_optimizer else 'on the device'} and training "
            f"weights {'in host memory' if self.offload.offload_weights else 'on the device'} during rollouts"
        )
