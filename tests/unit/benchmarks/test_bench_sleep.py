"""bench_sleep: the copies it compares with move every byte, and the line it prints names the worst of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bench_sleep import REBUILT, parse, ratio, summary
from benchmarks.sleep_arms import FileCopy, MemoryCopy
from hybridengine.distributed.world import World
from hybridengine.memory.residency import GRADS, KV_CACHE, OPTIMIZER, ROLLOUT_WEIGHTS, TRAINER_PARAMS


def test_the_file_copy_moves_every_byte_in_calls_of_the_same_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.sleep_arms.CALL_BYTES", 10_000)
    copy = FileCopy([25_000, 3, 10_000], tmp_path)
    assert [size for _, size in copy.calls] == [10_000, 10_000, 5_000, 3, 10_000]
    content = bytes(i * 7 % 251 for i in range(35_003))
    copy.view[:] = content
    copy.out()
    copy.view[:] = bytes(35_003)
    copy.back()
    assert bytes(copy.view) == content
    copy.close()


def test_the_memory_copy_moves_every_byte() -> None:
    copy = MemoryCopy(100_000)
    copy.one.fill_(9)
    copy.out()
    assert bool((copy.other == 9).all())


def test_ratios_are_medians_of_the_same_rounds() -> None:
    assert ratio([2.0, 30.0, 8.0], [1.0, 10.0, 2.0]) == 3.0  # 2, 3, 4


def test_the_summary_names_the_worst() -> None:
    def moved(freed: float, offload: float, onload: float, nbytes: int = 1 << 30) -> dict:
        over = {"offload": offload, "onload": onload}
        return {
            "nbytes": nbytes, "freed": freed, "seconds": {"offload": [1.0]}, "names": ("offload", "onload"),
            "over": {"link": over, "memcpy": {name: 2 * value for name, value in over.items()}},
        }  # fmt: skip

    transitions = {
        OPTIMIZER: moved(0.99, 1.1, 1.2),
        GRADS: moved(1.0, 1.0, 1.3),
        TRAINER_PARAMS: moved(0.1, 0.9, 0.9, nbytes=1000),  # too small to say what was freed
        ROLLOUT_WEIGHTS: moved(0.98, 9.0, 9.0),  # nothing is copied: its ratio is no price of a copy
        KV_CACHE: {"nbytes": 0, "freed": None, "seconds": {}, "over": {}, "names": ("sleep", "wake")},
    }
    assert set(REBUILT) == {ROLLOUT_WEIGHTS, KV_CACHE}
    found = summary({"step_time_ratio": 1.0}, transitions, World())
    assert found["freed_fraction"] == 0.98
    assert found["time_over_link"] == 1.3 and found["time_over_memcpy"] == 2.6
    assert found["gigabytes_per_second"][OPTIMIZER]["offload"] == pytest.approx(1.0737, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--directory", "/nowhere"], "--directory /nowhere: no such directory; give one on a disk"),
        (["--directory", "/dev/shm"], "--directory /dev/shm: that is memory itself (tmpfs)"),
        (["--directory", "/proc"], "--directory /proc: files can't be made there ("),
        (["--rounds", "0"], "--rounds 0: must be 1 or more"),
        (["--prompt-tokens", "-1"], "--prompt-tokens -1: must be 1 or more"),
        (["--kv-cache-gib", "nan"], "--kv-cache-gib nan: must be greater than 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused_before_engines_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as left:
        parse(arguments)
    assert left.value.code == 2 and message in capsys.readouterr().err
