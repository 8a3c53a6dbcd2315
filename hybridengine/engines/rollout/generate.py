"""Generate responses for a list of prompts with any rollout engine, through its stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from hybridengine.engines.rollout.base import RolloutEngine, check_fits
from hybridengine.engines.rollout.streaming import empty_trajectory
from hybridengine.types import Prompt, SamplingParams, Trajectory


def generate(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    seed: int,
    step: int,
    on_finished: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """``params.n`` samples per prompt, ordered by (prompt, sample). Same answer on every rank of the replica.

    The sample's seed is a function of (seed, step, prompt.index, sample index) only, so the result does not depend on
    which replica serves it. All ranks of a tensor-parallel group must call this with the same prompts.

    Args:
        on_finished: called as each sample completes. An error in it is raised once generation is complete:
            tensor-parallel peers must not be left waiting for this rank in the middle.

    Raises:
        StaleWeightsError: no complete weights.
        ValueError: a prompt leaves no room in the context for a single token, by name.
        EngineLostError: an engine in processes of its own died.
    """
    engine.check_servable()
    check_fits(prompts, engine.max_model_len)
    trajectories = [empty_trajectory(prompt, k) for prompt in prompts for k in range(params.n)]
    stream = engine.stream(params, seed=seed, interruptible=False)
    waiting = deque(trajectories)
    error: Exception | None = None
    try:
        while waiting or stream.running:
            while waiting and stream.running < stream.slots:
                stream.submit(waiting.popleft(), step=step)
            for trajectory in stream.step():
                if on_finished is not None and error is None:
                    try:
                        on_finished(trajectory)
                    except Exception as caught:  # noqa: BLE001  raised below
                        error = caught
    except BaseException:
        stream.interrupt()
        raise
    if error is not None:
        raise error
    return trajectories
