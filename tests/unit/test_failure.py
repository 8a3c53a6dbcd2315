"""How a run ends that can't go on: the message, where it goes, the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridengine import failure
from hybridengine.config.schema import ConfigError
from hybridengine.distributed.errors import PeerError
from hybridengine.rewards.base import RewardError
from hybridengine.schedule.base import RolloutLostError


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ConfigError("train.lr=-1: must be greater than 0"), 2, "hybridengine: train.lr=-1: must be greater than 0"),
        (RolloutLostError("gone"), 3, "hybridengine: gone"),
        (RuntimeError("bug"), 1, "RuntimeError: bug"),
    ],
    ids=["config", "lost", "bug"],
)
def test_message_and_status(
    error: Exception, status: int, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert failure.report(raised(error), 0) == status
    shown = capsys.readouterr().err
    assert text in shown and ("Traceback" in shown) == (status == 1)


def test_under_torchrun_the_message_is_in_its_error_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read by torch's own class, as torchrun does before it prints its last lines."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    assert failure.report(ConfigError("steps=0: must be greater than 0"), 0) == 2
    assert capsys.readouterr().err == ""
    found = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "0" / "error.json"))
    trailer = ChildFailedError("train", {0: found}).format_msg()
    assert "traceback : hybridengine: steps=0: must be greater than 0" in trailer and "exitcode  : 2" in trailer
    assert json.loads((tmp_path / "0" / "error.json").read_text())["message"]["extraInfo"]["timestamp"].isdigit()


@pytest.mark.parametrize(
    ("error", "rank", "seconds"),
    [
        (ConfigError("x"), 0, 0.0),
        (ConfigError("x"), 1, 5.0),
        (RuntimeError("x"), 1, 5.0),
        (PeerError("x"), 0, 8.0),
        (PeerError("x"), 1, 8.0),
    ],
    ids=["config-0", "config-1", "own-1", "peer-0", "peer-1"],
)
def test_the_rank_that_knows_most_reports_first(
    error: Exception, rank: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(failure.time, "sleep", waited.append)
    failure.report(error, rank)
    assert waited == [seconds]


def test_a_failing_reward_shows_the_users_frames_only(tmp_path: Path) -> None:
    from hybridengine.config import RewardConfig
    from hybridengine.rewards.load import load_rewards
    from hybridengine.types import Prompt, Trajectory

    (tmp_path / "mine.py").write_text(
        "def parse(text):\n    return {}[text]\n\n"
        "def score(prompt, response, answer, **kwargs):\n    return parse(response)\n"
    )
    (reward,) = load_rewards(RewardConfig(fn=f"{tmp_path / 'mine.py'}:score"))
    sample = Trajectory(
        prompt=Prompt(index=7, token_ids=[1]),
        sample_index=2,
        token_ids=[1],
        logprobs=[0.0],
        versions=[0],
        truncated=False,
    )
    with pytest.raises(RewardError) as caught:
        reward(sample, "x")
    text = failure.describe(caught.value)
    assert text.splitlines()[-1] == "hybridengine: reward score on prompt 7, sample 2: KeyError: 'x'"
    assert text.count('File "') == 2 and "in parse" in text and "in score" in text and "rewards/base.py" not in text
