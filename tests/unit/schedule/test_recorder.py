"""RolloutRecorder: what it adds up, on a stream of which every step takes a known time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridengine.engines.rollout.streaming import empty_trajectory
from hybridengine.schedule.recorder import FILE, RolloutRecorder, read_windows
from hybridengine.types import Prompt, Trajectory


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Stream:
    """One token per step and sample, ``lengths`` by prompt; a step takes 1 s per running sample."""

    def __init__(self, clock: Clock, lengths: dict[int, int]) -> None:
        self._clock, self._lengths = clock, lengths
        self._samples: list[Trajectory] = []

    @property
    def running(self) -> int:
        return len(self._samples)

    def submit(self, trajectory: Trajectory, *, step: int) -> None:
        self._samples.append(trajectory)

    def step(self) -> list[Trajectory]:
        self._clock.now += len(self._samples)
        for sample in self._samples:
            sample.token_ids.append(0)
        done = [s for s in self._samples if len(s.token_ids) == self._lengths[s.prompt.index]]
        self._samples = [s for s in self._samples if s not in done]
        return done

    def interrupt(self) -> list[Trajectory]:
        stopped, self._samples = self._samples, []
        return stopped


def samples(*prompts: int) -> list[Trajectory]:
    return [empty_trajectory(Prompt(index=i, token_ids=[0] * 10), 0) for i in prompts]


def test_window(tmp_path: Path) -> None:
    """Two samples of 10 prompt tokens, 1 and 3 response tokens; then a pause; then one that is interrupted.

    Step 1: 2 running, both new, 20 prompt tokens, 2 s. Steps 2 and 3: 1 running, context 11 and 12, 1 s each, and
    half a second of the caller's before step 3, which counts. Step 4, after a pause of 5 s: 1 running, new, 1 s.
    """
    clock = Clock()
    recorder = RolloutRecorder(tmp_path / FILE.format(0), clock=clock)
    stream = recorder.watch(Stream(clock, {0: 1, 1: 3, 2: 9}))
    first, second, third = samples(0, 1, 2)
    stream.submit(first, step=0)
    stream.submit(second, step=0)
    assert stream.step() == [first]
    assert stream.step() == []
    clock.now += 0.5
    assert stream.step() == [second]
    assert stream.running == 0
    clock.now += 5
    stream.submit(third, step=0)
    stream.step()
    assert stream.interrupt() == [third]
    recorder.flush(7)
    (window,) = read_windows(tmp_path)[0]
    assert window["version"] == 7
    assert (window["start"], window["end"]) == (100.0, 110.5)
    assert window["busy"] == [[100.0, 104.5], [109.5, 110.5]]
    assert window["prefill"] == {2: [1, 2.0, 20, 2, 20], 1: [1, 1.0, 10, 1, 10]}
    assert window["decode"] == {1: [2, 2.5, 23, 11**2 + 12**2, 11 * 1.0 + 12 * 1.5]}
    assert window["lengths"] == [[0, 0, 1], [1, 0, 3]]
    assert window["interrupted"] == 1


def test_resumed_sample_is_read_again_with_its_tokens(tmp_path: Path) -> None:
    clock = Clock()
    recorder = RolloutRecorder(tmp_path / FILE.format(0), clock=clock)
    stream = recorder.watch(Stream(clock, {0: 6}))
    (sample,) = samples(0)
    sample.token_ids = [0, 0, 0]
    stream.submit(sample, step=0)
    stream.step()
    recorder.flush(1)
    assert read_windows(tmp_path)[0][0]["prefill"][1][4] == 13


def test_windows_without_work_are_not_written_and_files_are_in_replica_order(tmp_path: Path) -> None:
    for replica in (10, 2):
        clock = Clock()
        recorder = RolloutRecorder(tmp_path / FILE.format(replica), clock=clock)
        recorder.flush(0)
        stream = recorder.watch(Stream(clock, {replica: 2}))
        stream.submit(samples(replica)[0], step=0)
        stream.step()
        recorder.flush(1)
        recorder.flush(2)
    windows = read_windows(tmp_path)
    assert [[w["version"] for w in found] for found in windows] == [[1], [1]]
    assert [len(found[0]["lengths"]) for found in windows] == [0, 0]
    assert json.loads((tmp_path / FILE.format(2)).read_text())["busy"]


@pytest.mark.parametrize("append", [True, False])
def test_resumption_goes_on_in_the_file(tmp_path: Path, append: bool) -> None:
    path = tmp_path / FILE.format(0)
    path.write_text('{"version": 0, "decode": {}, "prefill": {}}\n')
    RolloutRecorder(path, append=append)
    assert len(read_windows(tmp_path)[0]) == int(append)


def test_a_line_that_a_kill_cut_short_is_left_out_and_ended(tmp_path: Path) -> None:
    """At the end of the file, and in its middle after the run went on."""
    path, line = tmp_path / FILE.format(0), '{"version": 0, "decode": {}, "prefill": {}, "busy": []}'
    path.write_text(f"{line}\n{line[:30]}")
    assert len(read_windows(tmp_path)[0]) == 1
    for _ in range(2):
        RolloutRecorder(path, append=True)
        with path.open("a") as file:
            file.write(line + "\n")
    assert path.read_text().count("\n") == 4 and len(read_windows(tmp_path)[0]) == 3


def test_without_a_path_nothing_is_watched(tmp_path: Path) -> None:
    stream = Stream(Clock(), {})
    recorder = RolloutRecorder(None)
    assert recorder.watch(stream) is stream
    recorder.flush(3)
    assert read_windows(tmp_path) == []
