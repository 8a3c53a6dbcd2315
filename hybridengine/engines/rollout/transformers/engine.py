"""RolloutEngine ``transformers``: plain Hugging Face forward passes, one replica per rank.

The reference for the other engines, and the fast one for models so small that an inference engine's work per
decode step outweighs the model's. A group's prompt is read once; finished rows leave the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridengine.config import RolloutConfig
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.aliases import AliasedParameters
from hybridengine.engines.rollout.base import (
    TAGS,
    EngineProcessControl,
    check_awake,
    check_idle,
    check_tags,
    check_weights_awake,
    stop_tokens,
)
from hybridengine.engines.rollout.seeds import sample_seed
from hybridengine.engines.rollout.streaming import tokens_left
from hybridengine.engines.rollout.transformers.stream import TransformersStream
from hybridengine.engines.rollout.weight_state import WeightState
from hybridengine.memory.kv_plan import BlockCache
from hybridengine.memory.sleeper import Sleeper
from hybridengine.models.buffers import persistent_buffers
from hybridengine.models.logits import LogitsRule
from hybridengine.models.rotary import fix_rotary
from hybridengine.sync.plan.boxes import contiguous_strides
from hybridengine.sync.plan.spec import ParamSpec, TensorSlice
from hybridengine.types import SamplingParams, Trajectory

#: Finished rows are cut out of the batch once they are this share of it.
COMPACT_AT = 0.25


@dataclass(slots=True)
class _Rows:
    """Sequences decoded together; B shrinks as rows are compacted away.

    ids: row -> position in the answer. uniforms: float64 [B, max_tokens], the sample's random numbers.
    valid: bool [B, width + max_tokens], which cache positions hold real tokens once they are written; None
    when all do. position: int64 [B], next position id. limits: int64 [B], tokens at most.
    """

    ids: list[int]
    uniforms: Tensor | None
    valid: Tensor | None
    position: Tensor
    limits: Tensor
    done: list[bool]

    def keep(self, index: Tensor) -> None:
        self.ids = [self.ids[i] for i in index.tolist()]
        self.uniforms = None if self.uniforms is None else self.uniforms[index]
        self.valid = None if self.valid is None else self.valid[index]
        self.position, self.limits = self.position[index], self.limits[index]
        self.done = [False] * len(self.ids)


class TransformersEngine:
    """See RolloutEngine; arguments as for the vLLM engine. Starts empty: weights come from the trainer only.

    Raises:
        ValueError: ``rollout.tp`` is not 1, engine arguments are given, or the model's attention is not plain
            full attention (a sliding window shorter than the context, soft-capped logits).
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
        from transformers import AutoConfig, AutoModelForCausalLM

        from hybridengine.engines.rollout.transformers.kv_cache import ATTENTION

        if rollout.engine_kwargs:
            raise ValueError(f"rollout.engine_kwargs={rollout.engine_kwargs}: the transformers engine takes none")
        if rollout.tp != 1:
            raise ValueError(f"rollout.tp={rollout.tp}: the transformers engine is one replica per rank, tp must be 1")
        self.config, self.world, self.max_model_len = rollout, world, max_model_len
        self.replica, self.num_replicas = world.rank, world.size
        self._stop = torch.tensor(stop_tokens(Path(model_path), eos_token_ids), device=world.device)
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        check_attention(config.get_text_config(decoder=True), max_model_len)
        with torch.device(world.device):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=getattr(torch, rollout.dtype),
                attn_implementation=ATTENTION,
                trust_remote_code=trust_remote_code,
            )
        fix_rotary(model, max_model_len)
        self._rule = LogitsRule.of(config.get_text_config(decoder=True))
        self.model: Any = model.eval().requires_grad_(False)
        world.platform.accelerate(self.model)
        self._num_layers = config.get_text_config(decoder=True).num_hidden_layers
        self._weights = Sleeper(self.live_tensors().values(), large_pages=True)
        self._aliases = AliasedParameters(self._weights)
        self._state = WeightState()
        self.running = 0  # samples being generated
        self.kv_blocks: BlockCache | None = None  # the cache lives only while samples are generated
        self.processes: EngineProcessControl | None = None

    # -- generation --------------------------------------------------------------------------------

    def check_servable(self) -> None:
        """Raise StaleWeightsError unless the engine is awake with complete weights."""
        self._state.check_servable()
        check_awake(self.awake)

    def stream(self, params: SamplingParams, *, seed: int, interruptible: bool = True) -> TransformersStream:
        """Generation in steps, see RolloutStream."""
        return TransformersStream(self, params, seed=seed)

    @torch.inference_mode()
    def decode(
        self, trajectories: list[Trajectory], params: SamplingParams, seed: int, steps: Sequence[int]
    ) -> Iterator[list[Trajectory]]:
        """Continue these trajectories, all decoded together; after each token, those that it finished.

        Args:
            steps: of each trajectory, for its random numbers.
        """
        self.check_servable()
        logits, cache, rows = self._prefill(trajectories, params, seed, steps)
        t = 0
        while True:
            uniform = None if rows.uniforms is None else rows.uniforms[:, t]
            token, logprob = sample(logits, uniform, params)
            stopped = torch.isin(token, self._stop)
            finished = stopped | (rows.limits <= t + 1)
            values = zip(token.tolist(), logprob.tolist(), finished.tolist(), stopped.tolist(), strict=True)
            ended = []
            for row, (number, value, is_last, stop) in enumerate(values):
                if not rows.done[row]:
                    trajectory = trajectories[rows.ids[row]]
                    trajectory.token_ids.append(number)
                    trajectory.logprobs.append(value)
                    trajectory.versions.append(self.weights_version)
                    trajectory.truncated = not stop
                    if is_last:
                        rows.done[row] = True
                        ended.append(trajectory)
            yield ended
            if all(rows.done):
                return
            if sum(rows.done) >= COMPACT_AT * len(rows.done):
                index = torch.tensor([i for i, done in enumerate(rows.done) if not done], device=token.device)
                rows.keep(index)
                cache.batch_select_indices(index)
                token = token[index]
            logits = self._decode(token, cache, rows)
            t += 1

    def _prefill(
        self, trajectories: list[Trajectory], params: SamplingParams, seed: int, steps: Sequence[int]
    ) -> tuple[Tensor, Any, _Rows]:
        """Read each prompt, with what a sample has already, once and left-padded; repeat its cache for its samples."""
        from hybridengine.engines.rollout.transformers.kv_cache import new_cache

        device = self.world.device
        prefixes = [(*t.prompt.token_ids, *t.token_ids) for t in trajectories]
        number = {prefix: i for i, prefix in enumerate(dict.fromkeys(prefixes))}
        lengths = torch.tensor([len(prefix) for prefix in number], device=device)
        width = int(lengths.max())
        input_ids = torch.tensor([[0] * (width - len(prefix)) + list(prefix) for prefix in number], device=device)
        columns = torch.arange(width, device=device)
        valid = columns.unsqueeze(0) >= (width - lengths).unsqueeze(1)
        position_ids = (columns.unsqueeze(0) - (width - lengths).unsqueeze(1)).clamp(min=0)
        # Padding looks at itself: a row that sees nothing would be NaN, and NaN values survive a zero weight.
        mask = valid.unsqueeze(1) & (columns.unsqueeze(1) >= columns) | torch.eye(
            width, dtype=torch.bool, device=device
        )
        cache = new_cache(self._num_layers)
        logits = self._forward(input_ids, mask.unsqueeze(1), position_ids, cache)
        row = torch.tensor([number[prefix] for prefix in prefixes], device=device)
        cache.batch_select_indices(row)
        limits = [tokens_left(t, params, self.max_model_len) for t in trajectories]
        written = torch.ones(len(trajectories), params.max_tokens, dtype=torch.bool, device=device)
        rows = _Rows(
            ids=list(range(len(trajectories))),
            uniforms=None if params.temperature == 0 else self._uniforms(trajectories, params.max_tokens, seed, steps),
            valid=None if bool(valid.all()) else torch.cat([valid[row], written], dim=1),
            position=lengths[row],
            limits=torch.tensor(limits, device=device),
            done=[False] * len(trajectories),
        )
        return logits[row], cache, rows

    def _uniforms(self, trajectories: list[Trajectory], max_tokens: int, seed: int, steps: Sequence[int]) -> Tensor:
        """Each sample's own random numbers from its next token on, float64 [B, max_tokens] in [0, 1)."""
        rows = []
        for trajectory, step in zip(trajectories, steps, strict=True):
            own = sample_seed(seed, step, trajectory.prompt.index, trajectory.sample_index)
            generator = torch.Generator().manual_seed(own)
            numbers = torch.rand(max_tokens, dtype=torch.float64, generator=generator)
            rows.append(numbers.roll(-len(trajectory.token_ids)))
        return torch.stack(rows).to(self.world.device)

    def _decode(self, token: Tensor, cache: Any, rows: _Rows) -> Tensor:
        """One more token per row; float32 logits [B, V]."""
        mask = None if rows.valid is None else rows.valid[:, None, None, : cache.get_seq_length() + 1]
        position_ids = rows.position.unsqueeze(1)
        rows.position = rows.position + 1
        return self._forward(token.unsqueeze(1), mask, position_ids, cache)

    def _forward(self, input_ids: Tensor, mask: Tensor | None, position_ids: Tensor, cache: Any) -> Tensor:
        """float32 logits [B, V] after the last column of input_ids [B, Q]."""
        hidden = self.model.get_decoder()(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        return self._rule.apply(self.model.get_output_embeddings()(hidden).float())

    # -- weights -----------------------------------------------------------------------------------

    @property
    def weights_version(self) -> int:
        """Last complete policy version; -1 when there is none."""
        return self._state.version

    def live_tensors(self) -> dict[str, Tensor]:
        """Canonical name -> the tensor that the model runs on, persistent buffers too; tied weights appear once."""
        parameters = {name: parameter.data for name, parameter in self.model.named_parameters()}
        return parameters | persistent_buffers(self.model)

    def layout(self, params: Mapping[str, ParamSpec]) -> tuple[TensorSlice, ...]:
        """Every canonical parameter, whole and contiguous.

        Raises:
            ValueError: the model's parameters are not the canonical ones, by name.
        """
        live = self.live_tensors()
        wrong = sorted(set(live) ^ set(params))
        if wrong:
            raise ValueError(f"the transformers engine and the checkpoint disagree on parameter {wrong[0]!r}")
        return tuple(
            TensorSlice(name, (0,) * len(spec.shape), spec.shape, name, 0, contiguous_strides(spec.shape))
            for name, spec in params.items()
        )

    def begin_update(self) -> None:
        """Unservable from here until :meth:`finish_update`.

        Raises:
            RuntimeError: the weights are asleep.
        """
        check_weights_awake(self.awake)
        self._state.begin(self._aliases.without(self.live_tensors()))

    def alias_tensor(self, name: str, tensor: Tensor) -> bool:
        """Run parameter ``name`` on the trainer's ``tensor`` if the two are alike; returns whether it does."""
        if name in persistent_buffers(self.model):
            return False
        return self._aliases.alias(name, self.model.get_parameter(name), tensor)

    def load_weight(self, name: str, full: Tensor) -> None:
        """Deliver one canonical parameter in full. Raises ValueError for an unknown name or another shape."""
        target = self.live_tensors().get(name)
        if target is None or target.shape != full.shape:
            have = "none of that name" if target is None else f"shape {tuple(target.shape)}"
            raise ValueError(f"parameter {name!r} of shape {tuple(full.shape)}: the model has {have}")
        self._state.mark_delivered(name)
        target.copy_(full)

    def finish_update(self, version: int) -> None:
        """Servable again.

        Raises:
            RuntimeError: a parameter got no data, by name.
        """
        live = self.live_tensors()
        self._state.check_complete(live, self._aliases.without(live))
        self._state.finish(version)

    # -- memory ------------------------------------------------------------------------------------

    @property
    def awake(self) -> frozenset[str]:
        return frozenset(TAGS if self._weights.awake else ("kv_cache",))

    def nbytes(self, tag: str) -> int:
        """Bytes of ``tag`` when awake; the cache lives only inside generate."""
        check_tags([tag])
        return self._weights.nbytes if tag == "weights" else 0

    def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Free the weights at sleep level 2 (the cache lives only inside generate).

        Raises:
            RuntimeError: requests are running.
        """
        check_tags(tags)
        check_idle(self.running)
        if "weights" in tags and self.config.sleep_level == 2 and self._weights.awake:
            self._weights.sleep()
            self._state.lose()

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take the memory back; waking what is awake does nothing."""
        check_tags(tags)
        if "weights" in tags:
            self._weights.wake()

    def close(self) -> None:
        """Release the model."""
        self._state.lose()
        self.model = None


def check_attention(config: Any, max_model_len: int) -> None:
    """Raise ValueError for attention that the engine's masks do not describe."""
    sliding = any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if sliding and (window is None or window < max_model_len):
        raise ValueError(
            f"the transformers engine needs full attention; this model has {sorted(set(config.layer_types))} "
            f"with a window of {window}, and rollout.max_model_len is {max_model_len}; use rollout.engine=vllm"
        )
    if getattr(config, "attn_logit_softcapping", None):
        raise ValueError("the transformers engine does not soft-cap attention logits; use rollout.engine=vllm")


def sample(logits: Tensor, uniform: Tensor | None, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities under the distribution they were drawn from.

    Args:
        logits: float32 [B, V].
        uniform: float64 [B] in [0, 1), or None for greedy.

    Temperature first, then min-p, then top-k, then top-p, as vLLM does; by inversion of the cumulative distribution, so
    that a row's outcome depends on its own logits and random number only.
    """
    if uniform is None or params.temperature == 0:
        token = logits.argmax(-1)
        return token, logits.gather(-1, token.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
    logits = logits if params.temperature == 1 else logits / params.temperature
    if params.min_p > 0:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(params.min_p), float("-inf"))
    if 0 < params.top_k < logits.shape[-1]:
        threshold = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    if params.top_p < 1:
        ordered, order = logits.sort(dim=-1)
        outside = ordered.softmax(-1).cumsum(-1) <= 1 - params.top_p
        outside[:, -1] = False
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), float("-inf"))
    logprobs = logits.log_softmax(-1)
    cumulative = logprobs.double().exp().cumsum(-1)
    drawn = torch.searchsorted(cumulative, (uniform * cumulative[:, -1]).unsqueeze(-1), right=True)
    token = drawn.clamp(max=logits.shape[-1] - 1).squeeze(-1)
    return token, logprobs.gather(-1, token.unsqueeze(-1)).squeeze(-1)
