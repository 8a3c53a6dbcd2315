"""FSDPEngine: the ``fsdp`` training engine. FSDP2 for the layout, AdamW on the local shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hybridengine.config import TrainConfig
from hybridengine.distributed.errors import agree
from hybridengine.distributed.world import World
from hybridengine.engines.train.base import LossFn, MicroBatch, pad_id_of, policy_or_reference
from hybridengine.engines.train.batching import agreed_micro_batches, scatter_logprobs
from hybridengine.engines.train.export import classifier_keys, export_model
from hybridengine.engines.train.fsdp.movers import fsdp_movers
from hybridengine.engines.train.fsdp.sharded import Placements, ShardedPolicy, shard_mesh
from hybridengine.engines.train.losses import LossSum
from hybridengine.engines.train.optim import ShardedAdamW, clip_grad_norm, is_decayed, learning_rate
from hybridengine.engines.train.storage import load_sharded, save_sharded
from hybridengine.platform.base import Mover
from hybridengine.sync.plan.layouts import fsdp_shard_map
from hybridengine.sync.plan.spec import ShardMap
from hybridengine.types import Sample


class FSDPEngine:
    """The policy (and, when asked for, its frozen reference) sharded over all ranks. See TrainEngine.

    Args:
        model_path: Hugging Face directory with safetensors.
        train: the ``train`` section of the configuration.
        temperature: sampling temperature whose distribution is scored.
        total_steps: optimizer steps of the whole run, for the learning-rate schedule.
        with_entropy: compute entropies for the loss (an entropy bonus or metric).
        reference: also load the frozen reference model from ``model_path``.
        head: "policy", or "value" or "reward" for a model that gives values (see ShardedPolicy).
        placements: shard dimension of each parameter; default 0.
        rank_order: ``rank_order[i]`` is the rank that holds shard i; default: rank i.
        max_model_len: context of the rollout engine, which decides the rotary factors of some models.

    Attributes:
        version: policy version, the number of optimizer steps behind the weights.
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
        placements: Placements | None = None,
        rank_order: Sequence[int] | None = None,
        trust_remote_code: bool = False,
        head: str = "policy",
        max_model_len: int | None = None,
    ) -> None:
        self.path, self.config, self.world, self.head = Path(model_path), train, world, head
        self.total_steps = total_steps
        self.rank_order = tuple(range(world.size) if rank_order is None else rank_order)
        learning_rate(0, total_steps, train)  # an unknown schedule is refused now, not after the first rollout
        mesh = shard_mesh(world, rank_order)
        self.group = mesh.get_group()
        with agree("loading the model"):
            self.policy = ShardedPolicy(
                self.path,
                train,
                mesh=mesh,
                device=world.device,
                temperature=temperature,
                with_entropy=with_entropy,
                placements=placements,
                trust_remote_code=trust_remote_code,
                head=head,
                max_model_len=max_model_len,
            )
        self.reference: ShardedPolicy | None = None
        if reference:
            with agree("loading the reference model"):
                self.reference = ShardedPolicy(
                    self.path,
                    train,
                    mesh=mesh,
                    device=world.device,
                    temperature=temperature,
                    frozen=True,
                    placements=placements,
                    trust_remote_code=trust_remote_code,
                    max_model_len=max_model_len,
                )
        self.optimizer = ShardedAdamW(
            self.policy.local_tensors(),
            [name for name, shape in self.policy.shapes.items() if is_decayed(name, shape)],
            train,
        )
        self._pad_id = pad_id_of(self.policy.model.config)

    @property
    def version(self) -> int:
        return self.optimizer.steps

    @property
    def replica(self) -> int:
        return self.world.rank

    @property
    def num_replicas(self) -> int:
        return self.world.size

    # -- scoring and training ----------------------------------------------------------------------

    def logprobs(
        self, samples: Sequence[Sample], *, reference: bool = False, packing: bool | None = None
    ) -> list[list[float]]:
        """Per response token log-probabilities of this rank's samples at the sampling temperature.

        ``packing``: other than configured.

        Raises:
            ValueError: ``reference`` without a reference model; a sample above the token budget.
        """
        return self._score(policy_or_reference(self.policy, self.reference, reference=reference), samples, packing)

    def values(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Of a value model: per response token of this rank's samples, the value of the state before it.

        Raises:
            ValueError: a sample above the token budget.
        """
        return self._score(self.policy, samples)

    @torch.no_grad()
    def _score(
        self, policy: ShardedPolicy, samples: Sequence[Sample], packing: bool | None = None
    ) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in samples]
        for micro in self._micro_batches(samples, packing):
            scores, _ = policy(micro)
            scatter_logprobs(scores, micro, samples, found)
        if not policy.keeps_gathered:
            policy.reshard()
        return found

    def forward_backward(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn,
        *,
        collect_logprobs: bool = False,
        before_last_backward: Callable[[], None] = lambda: None,
    ) -> tuple[dict[str, float], list[list[float]] | None]:
        """Accumulate gradients over this rank's samples, cut into micro-batches whose number is agreed.

        Args:
            before_last_backward: called once, when no more than one backward pass is to come.

        Returns:
            the loss metrics summed over micro-batches (this rank's share), and, when asked, the
            log-probabilities the forward pass saw, per sample.

        Raises:
            what ``loss_fn`` raised on this rank, PeerError where another rank's raised.
        """
        found: list[list[float]] | None = [[] for _ in samples] if collect_logprobs else None
        losses = LossSum(loss_fn)
        micro_batches = self._micro_batches(samples)
        if self.policy.balance is not None:
            with self.policy.balance.counting(), torch.no_grad():
                for micro in micro_batches:
                    self.policy(micro.without_targets())
        for index, micro in enumerate(micro_batches):
            self.policy.accumulate(last=index == len(micro_batches) - 1)
            logprobs, entropy = self.policy(micro)
            if found is not None:
                scatter_logprobs(logprobs.detach(), micro, samples, found)
            loss = losses.add(logprobs, entropy, micro)
            if index == len(micro_batches) - 1:
                before_last_backward()
            loss.backward()
        return losses.finish(), found

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, advance the schedule, zero gradients, version += 1.

        Returns:
            ``grad_norm`` before clipping and ``lr`` of this step, and how balanced its experts were.

        Raises:
            FloatingPointError: the gradient norm is not finite; on all ranks, nothing was updated.
        """
        for name, param in self.optimizer.params.items():
            grad = self.policy.shards[name].grad
            param.grad = None if grad is None else grad.to_local()  # type: ignore[attr-defined]
        lr = learning_rate(self.version, self.total_steps, self.config)
        try:
            norm = clip_grad_norm(self.optimizer.grads(), self.config.max_grad_norm, self.group)
            # The gathered weights are of the old version from here on.
            self.policy.reshard()
            self.optimizer.step(lr)
        finally:
            self.optimizer.zero_grad()
            for shard in self.policy.shards.values():
                shard.grad = None
        balance = self.policy.balance
        return {"grad_norm": norm, "lr": lr} | (balance.metrics() if balance is not None else {})

    @property
    def packings(self) -> tuple[bool, ...]:
        return (False, True) if self.policy.packs else (False,)

    def _micro_batches(self, samples: Sequence[Sample], packing: bool | None = None) -> list[MicroBatch]:
        return agreed_micro_batches(
            samples,
            budget=self.config.max_tokens_per_micro_batch,
            packing=self.config.packing and self.policy.packs if packing is None else packing,
            pad_id=self._pad_id,
            device=self.world.device,
        )

    # -- layout ------------------------------------------------------------------------------------

    def shard_map(self) -> ShardMap:
        """Which slices of which canonical parameters every rank holds."""
        policy = self.policy
        dtypes = {part.param: policy.checkpoint_dtype[t.name] for t in policy.stored for part in t.parts}
        params = {name: replace(spec, dtype=dtypes[name]) for name, spec in policy.canonical.items()}
        return fsdp_shard_map(
            params, self.world.size, dims=policy.shard_dims, order=self.rank_order, stored=policy.stored
        )

    def local_tensors(self) -> dict[str, Tensor]:
        """Tensor name of the shard map -> this rank's shard (the memory itself); empty where the rank holds no row."""
        return self.policy.local_tensors() | self.policy.buffers

    def memory_holders(self) -> list[Tensor]:
        """Every further tensor object on the shards' memory: a mover of that memory must re-point them too."""
        return [*self.policy.memory_holders(), *self.optimizer.params.values()]

    keeps_gradients = False

    def movers(self, offload_dir: Path | str | None, *, keep_in_place: bool) -> dict[str, Mover]:
        """See TrainEngine."""
        return fsdp_movers(self, offload_dir, keep_in_place=keep_in_place)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: each canonical parameter in full, one at a time, same order on all ranks."""
        return self.policy.full_parameters()

    # -- persistence -------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write weights, optimizer state and version as a sharded checkpoint into ``path``. Collective.

        Raises:
            RuntimeError: a rank could not write; on all ranks.
        """
        save_sharded(path, self._state())

    def load(self, path: Path) -> None:
        """Read what :meth:`save` wrote, at this or another world size. Collective.

        Raises:
            ValueError: not a complete checkpoint of this model; on all ranks.
        """
        state = self._state()
        load_sharded(path, state)
        self.policy.reshard()
        self.optimizer.set_steps(int(state["version"]))  # type: ignore[call-overload]

    def _state(self) -> dict[str, object]:
        moments = self.optimizer.moments()
        return {
            "version": self.version,
            "model": {name: shard.detach() for name, shard in self.policy.shards.items()} | self.policy.buffers,
            "optimizer": {
                key: {name: self.policy.like_shard(name, local) for name, local in tensors.items()}
                for key, tensors in moments.items()
            },
        }

    def export(self, path: Path) -> None:
        """Write a Hugging Face directory (float32 safetensors, config, tokenizer) to ``path``. Collective."""
        export_model(
            path,
            self.shard_map(),
            self.local_tensors(),
            config=self.policy.model.config,
            source=self.path,
            device=self.world.device,
            changes=classifier_keys(self.policy.model.config.architectures or []) if self.head != "policy" else None,
        )
