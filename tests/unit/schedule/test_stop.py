"""Stop strings: where a response ends, whatever the engine did."""

from __future__ import annotations

from typing import Any

import pytest

from hybridengine.config import RewardConfig
from hybridengine.schedule.stop import StoppingScorer, StopStrings
from hybridengine.types import Prompt, Trajectory


class Pieces:
    """A tokenizer whose token i is the i-th piece of text."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        text = "".join(self.pieces[i] for i in token_ids)
        return text.replace("<eos>", "") if skip_special_tokens else text


TOKENIZER = Pieces("so", " </ans", "wer>", " and on", "<eos>", "\n\n")


@pytest.mark.parametrize(
    ("stop", "tokens", "length"),
    [
        pytest.param(["</answer>"], [0, 1, 2, 3, 3], 3, id="over-two-tokens"),
        pytest.param(["</answer>"], [0, 1, 3, 2], None, id="not-in-one-piece"),
        pytest.param(["</answer>", "\n\n"], [0, 5, 1, 2], 2, id="the-first-of-several"),
        pytest.param(["</answer>"], [1, 2, 0, 1, 2], 2, id="the-first-of-two-places"),
        pytest.param(["</answer>"], [0, 1, 2], 3, id="at-the-end"),
        pytest.param(["<eos>"], [0, 4, 3], 2, id="a-special-token"),
        pytest.param([], [0, 1, 2], None, id="none"),
        pytest.param(["so"], [], None, id="empty-response"),
    ],
)
def test_length(stop: list[str], tokens: list[int], length: int | None) -> None:
    assert StopStrings(TOKENIZER, stop).length(tokens) == length


def test_a_response_is_cut_before_it_is_scored() -> None:
    scorer = StoppingScorer(RewardConfig(fn="exact_match"), TOKENIZER, ["</answer>"])
    trajectory = Trajectory(
        prompt=Prompt(index=0, token_ids=[0], answer="so </answer>"),
        sample_index=0,
        token_ids=[0, 1, 2, 3, 3],
        logprobs=[-0.1, -0.2, -0.3, -0.4, -0.5],
        versions=[7] * 5,
        truncated=True,
    )
    scorer.score([trajectory])
    assert trajectory.reward == 1.0
    assert (trajectory.token_ids, trajectory.logprobs, trajectory.versions) == ([0, 1, 2], [-0.1, -0.2, -0.3], [7] * 3)
    assert not trajectory.truncated
