"""Warn in the first steps when all rewards are equal, with an example: nothing can be learnt from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybridengine.types import Trajectory

#: Steps that are checked.
FIRST_STEPS = 3
EQUAL = 1e-9
SHOWN = 400


class FlatReward:
    """Remembers the rewards of the first steps.

    Args:
        decode: token ids to text.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._seen: dict[str, set[float]] = {}  # reward function -> different values so far, two at most

    def look(self, step: int, trajectories: Sequence[Trajectory]) -> str | None:
        """A message after the first step and after the third, when no reward has differed from any other so far."""
        if step > FIRST_STEPS or not trajectories:
            return None
        for trajectory in trajectories:
            self._add("", trajectory.reward)
            for name, value in trajectory.rewards.items():
                self._add(name, value)
        if len(self._seen.get("", ())) == 1 and step in (1, FIRST_STEPS):
            return self._message(step, trajectories)
        if step == FIRST_STEPS:
            names = [name for name, values in self._seen.items() if name and len(values) == 1]
            if names:
                what = ", ".join(f"{name} ({min(self._seen[name]):g})" for name in names)
                return (
                    f"the same for every response of the first {step} steps: {what}\n{self._example(trajectories[0])}"
                )
        return None

    def _add(self, name: str, value: float | None) -> None:
        values = self._seen.setdefault(name, set())
        if value is not None and len(values) < 2 and all(abs(value - other) > EQUAL for other in values):
            values.add(value)

    def _message(self, step: int, trajectories: Sequence[Trajectory]) -> str:
        value = min(self._seen[""])
        steps = "of step 1" if step == 1 else f"of the first {step} steps"
        nothing = (
            "nothing is learnt from equal rewards" if step == 1 else "NOTHING HAS BEEN LEARNT: all rewards are equal"
        )
        return f"reward {value:g} for every response {steps}; {nothing}. For example:\n{self._example(trajectories[0])}"

    def _example(self, trajectory: Trajectory) -> str:
        returned = ", ".join(f"{name}={value:g}" for name, value in trajectory.rewards.items()) or "nothing"
        lines = {
            "prompt": trajectory.prompt.text, "response": self._decode(trajectory.token_ids),
            "answer": repr(trajectory.prompt.answer), "returned": returned,
        }  # fmt: skip
        return "\n".join(f"  {name:<9}{_shortened(text)}" for name, text in lines.items())


def _shortened(text: str) -> str:
    line = text.strip().replace("\n", "⏎")
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}… ({len(line)} characters)"
