"""RolloutEngine ``transformers``: plain Hugging Face forward passes, one replica per rank.

The reference for the other engines, and the fast one for models so small that an inference engine's work per
decode step outweighs the model's. A group's prompt is read once; finished rows leave the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridengine.config import RolloutConfig
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.base import StaleWeightsError, check_fits, check_tags, generation_eos
from hybridengine.engines.rollout.seeds import sample_seed
from hybridengine.engines.rollout.sleeper import Sleeper
from hybridengine.reshard.boxes import contiguous_strides
from hybridengine.reshard.spec import ParamSpec, TensorSlice
from hybridengine.types import Prompt, SamplingParams, Trajectory

#: Finished rows are cut out of the batch once they are this share of it.
COMPACT_AT = 0.25


@dataclass(slots=True)
class _Rows:
    """Sequences decoded together; B shrinks as rows are compacted away.

    ids: row -> position in the answer. uniforms: float64 [B, max_tokens], the sample's random numbers.
    valid: bool [B, S] which cache positions hold real tokens. position: int64 [B], next position id.
    limits: int64 [B], tokens at most.
    """

    ids: list[int]
    uniforms: Tensor | None
    valid: Tensor
    position: Tensor
    limits: Tensor
    done: list[bool]

    def keep(self, index: Tensor) -> None:
        self.ids = [self.ids[i] for i in index.tolist()]
        self.uniforms = None if self.uniforms is None else self.uniforms[index]
        self.valid, self.position, self.limits = self.valid[index], self.position[index], self.limits[index]
        self.done = [False] * len(self.ids)


class TransformersEngine:
    """See RolloutEngine; arguments as for the vLLM engine. Starts empty: weights come from the trainer only."""

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

        if rollout.engine_kwargs:
            raise ValueError(f"rollout.engine_kwargs={rollout.engine_kwargs}: the transformers engine takes none")
        self.config, self.world, self.max_model_len = rollout, world, max_model_len
        self.replica, self.num_replicas = world.rank, world.size
        self.weights_version = -1
        self._servable = False
        self._stop = torch.tensor(sorted({*eos_token_ids, *generation_eos(Path(model_path))}), device=world.device)
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        with torch.device(world.device):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=getattr(torch, rollout.dtype),
                attn_implementation="sdpa",
                trust_remote_code=trust_remote_code,
            )
        self.model: Any = model.eval().requires_grad_(False)
        self._weights = Sleeper(self.live_tensors().values())
        self._loaded: set[str] = set()

    # -- generation --------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        seed: int,
        step: int,
        on_finished: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """n samples per prompt; see RolloutEngine.generate."""
        if not self._servable:
            raise StaleWeightsError(
                f"the rollout engine holds no complete policy version (last: {self.weights_version}); sync first"
            )
        check_fits(prompts, self.max_model_len)
        found: list[Trajectory] = []
        at_once = max(1, self.config.max_num_seqs // params.n)
        for start in range(0, len(prompts), at_once):
            found += self._generate(prompts[start : start + at_once], params, seed, step, on_finished)
        return found

    def _generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        seed: int,
        step: int,
        on_finished: Callable[[Trajectory], None] | None,
    ) -> list[Trajectory]:
        trajectories = [
            Trajectory(prompt=p, sample_index=k, token_ids=[], logprobs=[], versions=[], truncated=False)
            for p in prompts
            for k in range(params.n)
        ]
        logits, cache, rows = self._prefill(prompts, params, trajectories, seed, step)
        for t in range(params.max_tokens):
            uniform = None if rows.uniforms is None else rows.uniforms[:, t]
            token, logprob = sample(logits, uniform, params)
            stopped = torch.isin(token, self._stop)
            finished = stopped | (rows.limits <= t + 1)
            steps = zip(rows.ids, rows.done, token.tolist(), logprob.tolist(), finished.tolist(), stopped.tolist(), strict=True)
            rows.done = [
                done or self._append(trajectories[which], *values, on_finished) for which, done, *values in steps
            ]
            if all(rows.done):
                break
            if sum(rows.done) >= COMPACT_AT * len(rows.done):
                index = torch.tensor([i for i, done in enumerate(rows.done) if not done], device=token.device)
                rows.keep(index)
                cache.batch_select_indices(index)
                token = token[index]
            logits = self._decode(token, cache, rows)
        return trajectories

    def _append(
        self,
        trajectory: Trajectory,
        token: int,
        logprob: float,
        finished: bool,
        stopped: bool,
        on_finished: Callable[[Trajectory], None] | None,
    ) -> bool:
        """One token more; returns whether it was the last."""
        trajectory.token_ids.append(token)
        trajectory.logprobs.append(logprob)
        trajectory.versions.append(self.weights_version)
        trajectory.truncated = not stopped
        if finished and on_finished is not None:
            on_finished(trajectory)
        return finished

    def _prefill(
        self, prompts: Sequence[Prompt], params: SamplingParams, trajectories: list[Trajectory], seed: int, step: int
    ) -> tuple[Tensor, Any, _Rows]:
        """Read each prompt once, left-padded, then repeat its cache for its n samples."""
        from transformers import DynamicCache

        device = self.world.device
        lengths = torch.tensor([len(p.token_ids) for p in prompts], device=device)
        width = int(lengths.max())
        input_ids = torch.tensor([[0] * (width - len(p.token_ids)) + p.token_ids for p in prompts], device=device)
        columns = torch.arange(width, device=device)
        valid = columns.unsqueeze(0) >= (width - lengths).unsqueeze(1)
        position_ids = (columns.unsqueeze(0) - (width - lengths).unsqueeze(1)).clamp(min=0)
        # Padding looks at itself: a row that sees nothing would be NaN, and NaN values survive a zero weight.
        mask = valid.unsqueeze(1) & (columns.unsqueeze(1) >= columns) | torch.eye(
            width, dtype=torch.bool, device=device
        )
        cache = DynamicCache(config=self.model.config)
        hidden = self.model.get_decoder()(
            input_ids=input_ids,
            attention_mask=mask.unsqueeze(1),
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        logits = self.model.get_output_embeddings()(hidden).float()
        n = params.n
        cache.batch_repeat_interleave(n)
        limits = [min(params.max_tokens, self.max_model_len - len(t.prompt.token_ids)) for t in trajectories]
        uniforms = None
        if params.temperature > 0:
            uniforms = torch.stack(
                [
                    torch.rand(
                        params.max_tokens,
                        dtype=torch.float64,
                        generator=torch.Generator().manual_seed(
                            sample_seed(seed, step, t.prompt.index, t.sample_index)
                        ),
                    )
                    for t in trajectories
                ]
            ).to(device)
        rows = _Rows(
            ids=list(range(len(trajectories))),
            uniforms=uniforms,
            valid=valid.repeat_interleave(n, 0),
            position=lengths.repeat_interleave(n),
            limits=torch.tensor(limits, device=device),
            done=[False] * len(trajectories),
        )
        return logits.repeat_interleave(n, 0), cache, rows

    def _decode(self, token: Tensor, cache: Any, rows: _Rows) -> Tensor:
        """One more token per row; float32 logits [B, V]."""
        rows.valid = torch.cat([rows.valid, torch.ones_like(rows.valid[:, :1])], dim=1)
        hidden = self.model.get_decoder()(
            input_ids=token.unsqueeze(1),
            attention_mask=rows.valid[:, None, None, :],
            position_ids=rows.position.unsqueeze(1),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        rows.position = rows.position + 1
        return self.model.get_output_embeddings()(hidden).float()

    # -- weights -----------------------------------------------------------------------------------

    def live_tensors(self) -> dict[str, Tensor]:
        """Canonical name -> the tensor that the model runs on; tied weights appear once."""
        return {name: parameter.data for name, parameter in self.model.named_parameters()}

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
        """Unservable from here until :meth:`finish_update`."""
        self._servable = False
        self._loaded.clear()

    def load_weight(self, name: str, full: Tensor) -> None:
        """Deliver one canonical parameter in full. Raises ValueError for an unknown name or another shape."""
        target = self.live_tensors().get(name)
        if target is None or target.shape != full.shape:
            have = "none of that name" if target is None else f"shape {tuple(target.shape)}"
            raise ValueError(f"parameter {name!r} of shape {tuple(full.shape)}: the model has {have}")
        target.copy_(full)
        self._loaded.add(name)

    def finish_update(self, version: int) -> None:
        """Servable again. Raises RuntimeError when weights came one by one and some are missing, by name."""
        missing = [name for name in self.live_tensors() if name not in self._loaded] if self._loaded else []
        if missing:
            raise RuntimeError(f"{len(missing)} parameters got no data in this sync, first: {missing[0]}")
        self.weights_version = version
        self._servable = True

    # -- memory ------------------------------------------------------------------------------------

    def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Free the weights at sleep level 2 (the cache lives only inside generate)."""
        check_tags(tags)
        if "weights" in tags and self.config.sleep_level == 2 and self._weights.awake:
            self._weights.sleep()
            self._servable = False
            self.weights_version = -1

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take the memory back; waking what is awake does nothing."""
        check_tags(tags)
        if "weights" in tags:
            self._weights.wake()

    def close(self) -> None:
        """Let go of the model."""
        self._servable = False
        self.model = None


def sample(logits: Tensor, uniform: Tensor | None, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities under the distribution they were drawn from.

    Args:
        logits: float32 [B, V].
        uniform: float64 [B] in [0, 1), or None for greedy.

    Temperature first, then top-k, then top-p, as vLLM does; by inversion of the cumulative distribution, so
    that a row's outcome depends on its own logits and random number only.
    """
    if uniform is None or params.temperature == 0:
        token = logits.argmax(-1)
        return token, logits.gather(-1, token.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
    logits = logits if params.temperature == 1 else logits / params.temperature
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
