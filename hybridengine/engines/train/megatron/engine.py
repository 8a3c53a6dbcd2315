"""MegatronEngine: the ``megatron`` training engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridengine.config import TrainConfig
from hybridengine.distributed.errors import agree
from hybridengine.distributed.world import World
from hybridengine.engines.train.balancing import LoadBalance
from hybridengine.engines.train.base import LossFn, check_temperature, pad_id_of, policy_or_reference
from hybridengine.engines.train.batching import agreed_micro_batches, scatter_logprobs
from hybridengine.engines.train.export import classifier_keys, export_model
from hybridengine.engines.train.losses import LossSum
from hybridengine.engines.train.megatron.batches import PaddedMicroBatch, pad_micro_batches
from hybridengine.engines.train.megatron.checkpoint import Block, BlockLoadPlanner, BlockSavePlanner, blocks_of
from hybridengine.engines.train.megatron.cpu import prepare
from hybridengine.engines.train.megatron.degrees import layout_of
from hybridengine.engines.train.megatron.families import check_model, mapped_decoder
from hybridengine.engines.train.megatron.kernels import choose
from hybridengine.engines.train.megatron.optimizer import DistributedAdamW
from hybridengine.engines.train.megatron.topology import Topology, start_groups
from hybridengine.engines.train.megatron.weights import full_parameters
from hybridengine.engines.train.optim import learning_rate
from hybridengine.engines.train.storage import load_sharded, save_sharded
from hybridengine.memory.residency import GRADS, OPTIMIZER, REFERENCE, TRAINER_PARAMS
from hybridengine.platform.base import Mover
from hybridengine.sync.plan.naming import as_causal
from hybridengine.sync.plan.spec import ShardMap, TensorSlice
from hybridengine.types import Sample

if TYPE_CHECKING:
    from hybridengine.engines.train.megatron.policy import ShardedChunks


class MegatronEngine:
    """The policy (and, when asked for, its frozen reference) in a tensor x pipeline x data parallel layout.

    See TrainEngine. Ranks that share ``replica`` hold one model between them and are given the same samples.

    Args:
        model_path: Hugging Face directory with safetensors.
        train: the ``train`` section of the configuration.
        temperature: sampling temperature whose distribution is scored.
        total_steps: optimizer steps of the whole run, for the learning-rate schedule.
        with_entropy: compute entropies for the loss (an entropy bonus or metric).
        reference: also load the frozen reference model from ``model_path``.
        head: "policy", or "value" or "reward" for a model that gives values.

    Attributes:
        version: policy version, the number of optimizer steps behind the weights.
        replica, num_replicas: data-parallel coordinate and size.
    """

    def __init__(
        self,
        model_path: Path | str,
        train: TrainConfig,
        *,
        world: World,
        temperature: float = 1.0,
        total_steps: int,
        with_entropy: bool = False,
        reference: bool = False,
        trust_remote_code: bool = False,
        head: str = "policy",
    ) -> None:
        from transformers import AutoConfig

        self.path, self.config, self.world, self.total_steps = Path(model_path), train, world, total_steps
        self.head = head
        learning_rate(0, total_steps, train)  # an unknown schedule is refused now, not after the first rollout
        check_temperature(temperature)
        with agree("preparing megatron"):
            self.hf_config = AutoConfig.from_pretrained(self.path, trust_remote_code=trust_remote_code)
            if head != "policy":
                self.hf_config = as_causal(self.hf_config)
            self.decoder = mapped_decoder(self.hf_config)
            self.layout = layout_of(train, self.decoder, world.size)
            check_model(self.hf_config, self.layout, train)
            self.balance = LoadBalance.of(train, self.hf_config, world.device)
            kernels = choose(train, world.platform)
            prepare()
            if head != "policy":
                self.decoder = replace(self.decoder, tied=False)  # no output projection to share
        self.topology = Topology(self.layout, train.vpp, world.rank)
        start_groups(self.topology)
        from hybridengine.engines.train.megatron.policy import ShardedChunks

        build = partial(
            ShardedChunks, self.path, self.hf_config, self.decoder, self.topology, train, kernels,
            device=world.device, temperature=temperature, head=head,
        )  # fmt: skip
        self.policy = build(with_entropy=with_entropy, balance=self.balance)
        self.policy.make_trainable()
        self.optimizer = DistributedAdamW(self.policy.chunks, train)
        self.reference = build(frozen=True) if reference else None
        self._local = {name: param.detach() for name, param in self.policy.tensors.items()}
        self._gradients_pending = False
        self._pad_id = pad_id_of(self.hf_config)

    @property
    def version(self) -> int:
        return self.optimizer.steps

    @property
    def replica(self) -> int:
        return self.topology.replica

    @property
    def num_replicas(self) -> int:
        return self.layout.dp

    # -- scoring and training ----------------------------------------------------------------------

    @property
    def packings(self) -> tuple[bool, ...]:
        return (self.config.packing,)

    def logprobs(
        self, samples: Sequence[Sample], *, reference: bool = False, packing: bool | None = None
    ) -> list[list[float]]:
        """Per response token log-probabilities of this replica's samples at the sampling temperature.

        Raises:
            ValueError: ``reference`` without a reference model; a sample above the token budget.
        """
        policy = policy_or_reference(self.policy, self.reference, reference=reference)
        return self._score(policy, samples)

    def values(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Of a value model: per response token of this replica's samples, the value of the state before it.

        Raises:
            ValueError: a sample above the token budget.
        """
        return self._score(self.policy, samples)

    @torch.no_grad()
    def _score(self, policy: ShardedChunks, samples: Sequence[Sample]) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in samples]

        def collect(scores: Tensor, batch: PaddedMicroBatch) -> Tensor:
            scatter_logprobs(scores[0], batch.micro, samples, found)
            return scores.new_zeros(())

        policy.run(self._micro_batches(samples), collect, backward=False)
        return policy.broadcast_from_last_stage(found)

    def forward_backward(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn,
        *,
        collect_logprobs: bool = False,
        before_last_backward: Callable[[], None] = lambda: None,
    ) -> tuple[dict[str, float], list[list[float]] | None]:
        """The gradient over this replica's samples, cut into micro-batches whose number is agreed.

        Args:
            before_last_backward: called once, when this rank has no more than one backward pass to come.

        Returns:
            the loss metrics summed over micro-batches (on one rank of the replica; zeros on its others), and, when
            asked, the log-probabilities the forward pass saw, per sample.

        Raises:
            what ``loss_fn`` raised on this rank, PeerError where another rank's raised.
            RuntimeError: the last gradient has not been used by :meth:`optimizer_step`. Megatron's buffers are summed
                over replicas in place, at the end of every call; they can't take up another one.
        """
        if self._gradients_pending:
            raise RuntimeError("the megatron engine takes one forward_backward per optimizer_step; this is the second")
        found: list[list[float]] = [[] for _ in samples]
        losses = LossSum(loss_fn)

        def loss(scores: Tensor, batch: PaddedMicroBatch) -> Tensor:
            logprobs, entropy = scores[0], scores[1] if len(scores) > 1 else None
            if collect_logprobs:
                scatter_logprobs(logprobs.detach(), batch.micro, samples, found)
            return losses.add(logprobs, entropy, batch.micro)

        batches = self._micro_batches(samples)
        if self.balance is not None:
            with self.balance.counting():
                counted = [batch.without_targets() for batch in batches]
                self.policy.run(counted, lambda scores, batch: scores.new_zeros(()), backward=False)
        self.policy.zero_gradients()
        self.policy.run(batches, loss, backward=True, before_last_backward=before_last_backward)
        numbers = losses.finish()
        self._gradients_pending = True
        numbers, found = self.policy.broadcast_from_last_stage((numbers, found))
        if not self.topology.is_leader:
            numbers = dict.fromkeys(numbers, 0.0)
        return numbers, found if collect_logprobs else None

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, advance the schedule, version += 1.

        Returns:
            ``grad_norm`` before clipping and ``lr`` of this step, and how balanced its experts were.

        Raises:
            FloatingPointError: the gradient norm is not finite; on all ranks, nothing was updated.
        """
        lr = learning_rate(self.version, self.total_steps, self.config)
        self._gradients_pending = False
        norm = self.optimizer.step(lr, self.config.max_grad_norm)
        return {"grad_norm": norm, "lr": lr} | (self.balance.metrics() if self.balance is not None else {})

    def _micro_batches(self, samples: Sequence[Sample]) -> list[PaddedMicroBatch]:
        interleaved = self.config.vpp > 1
        micro_batches = agreed_micro_batches(
            samples,
            budget=self.config.max_tokens_per_micro_batch,
            packing=self.config.packing,
            pad_id=self._pad_id,
            device=self.world.device,
            # Megatron's interleaved schedule works on as many micro-batches at a time as there are stages.
            multiple=self.layout.pp if interleaved else 1,
        )
        multiple = self.layout.tp if self.config.sequence_parallel else 1
        return pad_micro_batches(micro_batches, multiple=multiple, alike=interleaved, pad_id=self._pad_id)

    # -- layout ------------------------------------------------------------------------------------

    def shard_map(self) -> ShardMap:
        """Which slices of which canonical parameters every rank holds."""
        return self.policy.shard_map

    def local_tensors(self) -> dict[str, Tensor]:
        """Tensor name of the shard map -> this rank's tensor (the memory itself)."""
        return self._local

    def memory_holders(self) -> list[Tensor]:
        """Every further tensor object on the parameters' memory: a mover of that memory must re-point them too."""
        held: list[Tensor] = [*self.policy.tensors.values()]
        for buffer in self.policy.buffers:
            held += [buffer.param_data, *(bucket.param_data for bucket in buffer.buckets)]
        for chunk in self.policy.chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                for shards in group.cached_param_buffer_shard_list:
                    held += shards or []
        return held + self.optimizer.parameter_views()

    keeps_gradients = True

    def movers(self, offload_dir: Path | str | None, *, keep_in_place: bool) -> dict[str, Mover]:
        """How its memory moves: parameters, gradient buffers, master weights with moments, the reference."""
        move = self.world.platform.mover
        found: dict[str, Mover] = {
            TRAINER_PARAMS: move(lambda: [*self._local.values(), *self.memory_holders()], offload_dir),
            GRADS: move(lambda: [buffer.grad_data for buffer in self.policy.buffers], offload_dir),
            OPTIMIZER: move(self.optimizer.existing, offload_dir),
        }
        if self.reference is not None:
            frozen = self.reference
            found[REFERENCE] = move(lambda: list(frozen.tensors.values()), offload_dir)
        return found

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: each canonical parameter in full, one at a time, same order on all ranks."""
        return full_parameters(self.policy.shard_map, self._local, self.world.rank, self.world.device)

    # -- persistence -------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write weights, optimizer state and version as a sharded checkpoint into ``path``. Collective.

        Raises:
            RuntimeError: a rank could not write; on all ranks.
        """
        save_sharded(path, {"version": self.version}, BlockSavePlanner(self._blocks(saving=True)))

    def load(self, path: Path) -> None:
        """Read what :meth:`save` wrote at this or another layout, or, of models without experts, the fsdp engine.
        Collective.

        Raises:
            ValueError: not a complete checkpoint of this model; on all ranks.
        """
        state: dict[str, Any] = {"version": self.version}
        load_sharded(path, state, BlockLoadPlanner(self._blocks(saving=False)))
        self.optimizer.publish()
        self.optimizer.set_steps(int(state["version"]))

    def _blocks(self, *, saving: bool) -> Iterator[Block]:
        """This rank's master weights and moments in checkpoint coordinates.

        A tied head on a stage of its own is a copy of the embedding: it is read, but not written.
        """
        shapes = {name: spec.shape for name, spec in self.policy.shard_map.params.items()}
        slices: dict[str, list[TensorSlice]] = {}
        for item in self.policy.shard_map.ranks[self.world.rank]:
            slices.setdefault(item.tensor, []).append(item)
        names = {id(param): name for name, param in self.policy.tensors.items()}
        for owned in self.optimizer.ranges():
            name = names[id(owned.param)]
            if saving and self.decoder.tied and name == "output_layer.weight":
                continue
            entries = {"model": owned.master} | {
                f"optimizer.{key}": value for key, value in self.optimizer.moments(owned.master).items()
            }
            for prefix, flat in entries.items():
                yield from blocks_of(
                    slices.get(name, []), owned.param.shape, owned.start, flat.detach(), prefix, shapes
                )

    def export(self, path: Path) -> None:
        """Write a Hugging Face directory (float32 safetensors, config, tokenizer) to ``path``. Collective."""
        export_model(
            path,
            self.shard_map(),
            self._local,
            config=self.hf_config,
            source=self.path,
            device=self.world.device,
            changes=classifier_keys(self.hf_config.architectures) if self.head != "policy" else None,
        )
