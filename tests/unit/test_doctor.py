"""Doctor: findings carry remedies, exit statuses tell, and the memory bill is printed for machines that aren't here."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hybridengine import doctor
from hybridengine.memory.bill_table import QWEN2_5
from hybridengine.memory.tracker import GIB, MemoryTracker, host_memory
from hybridengine.memory.waterfall import write_waterfall


def test_this_installation_has_nothing_essential_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = {name: entry for name, entry in doctor.ENGINES.items() if entry[0] != "vllm"}  # half a minute to import
    monkeypatch.setattr(doctor, "ENGINES", engines)
    findings = doctor.check_installation()
    assert [item for item in findings if item.status == doctor.FAIL] == []
    assert {"torch", "devices", "/dev/shm", "memfd", "csrc build", "open files"} <= {item.what for item in findings}
    assert all(item.remedy for item in findings if item.status != doctor.OK)


def test_essential_failures_set_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def findings(status: str) -> list[doctor.Finding]:
        return [doctor.Finding("torch", status, "not installed", "install it")]

    for status, code in ((doctor.FAIL, 1), (doctor.WARN, 0), (doctor.OK, 0)):
        monkeypatch.setattr(doctor, "check_installation", lambda s=status: findings(s))
        assert doctor.main([]) == code
    assert "install it" in capsys.readouterr().out


def test_missing_and_old_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"torch": "2.4.1+cpu", "transformers": None, "vllm": None}
    monkeypatch.setattr(doctor, "installed_version", lambda name: found.get(name, "99.0"))
    status = {item.what: (item.status, item.detail) for item in doctor.check_packages()}
    assert status["torch"] == (doctor.FAIL, "2.4.1+cpu, needs at least 2.11")
    assert status["transformers"] == (doctor.FAIL, "not installed")
    assert status["vllm"] == (doctor.WARN, "not installed")


def test_engines_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_engine.py").write_text("raise OSError('libcudart.so.13: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    engines = {"a": ("broken_engine", True, "fix it"), "b": ("no_such_engine", False, "get it")}
    monkeypatch.setattr(doctor, "ENGINES", engines)
    broken, missing = doctor.check_engines()
    assert (broken.status, broken.remedy) == (doctor.FAIL, "fix it") and "libcudart.so.13" in broken.detail
    assert (missing.status, missing.detail) == (doctor.WARN, "no_such_engine is not installed")


def test_expandable_segments_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert [item.what for item in doctor.check_env()] == ["PYTORCH_ALLOC_CONF"]


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5["Qwen2.5-7B"]))
    return tmp_path


def report(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    code = doctor.memory_report(arguments, Console(file=out, width=200))
    return code, " ".join(out.getvalue().split())


def test_memory_of_a_machine_that_is_not_here(qwen: Path) -> None:
    node = ("--gpus", "8", "--gpu-gib", "80", "--host-gib", "1000", "--config", str(qwen / "config.json"))
    code, text = report("+experiment=qwen2_5_7b", *node)
    assert code == 0 and "fits" in text and "7.62 B parameters" in text and "forward_backward" in text
    code, text = report("+experiment=qwen2_5_7b", "train.activation_checkpointing=false", *node)
    assert code == 1 and "forward_backward needs" in text
    assert "with these it would: train.activation_checkpointing=true" in text


def test_memory_of_a_cpu_machine(qwen: Path) -> None:
    code, text = report(f"model.path={qwen}", "--gpus", "0", "--ranks", "2", "--host-gib", "24", "data.train=x")
    assert code == 1 and "on 2 CPU ranks" in text and "no combination of keys" in text


def test_the_bill_of_megatron(qwen: Path) -> None:
    """A layout that fits, and a degree that does not divide, which is refused with its key."""
    job = [
        f"model.path={qwen}", "data.train=x", "train=megatron", "train.dtype=bfloat16", "rollout.dtype=bfloat16",
        "train.activation_checkpointing=true", "--gpus", "4", "--gpu-gib", "80", "--host-gib", "500",
    ]  # fmt: skip
    code, text = report(*job, "train.tp=2", "train.pp=2")
    assert code == 0 and "fits" in text and "megatron: TP 2 × PP 2; optimizer in host memory" in text
    code, text = report(*job, "train.tp=3")
    assert code == 2 and "train.tp=3 train.pp=1: must divide the 4 rank(s)" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.path=/nowhere", "--gpus", "8", "--gpu-gib", "80"], "/nowhere: no config.json there"),
        (["train.lrr=1", "--config", "x"], "unknown key 'train.lrr'"),
    ],
    ids=["no-model", "unknown-key"],
)
def test_usage_errors(arguments: list[str], message: str) -> None:
    code, text = report(*arguments)
    assert code == 2 and message in text


# -- tracker -------------------------------------------------------------------------------------------------------


def test_tracker_sees_a_peak_that_is_over_when_the_phase_ends() -> None:
    held: dict[str, int] = {"optimizer": 5 * GIB, "grads": 0}
    tracker = MemoryTracker(torch.device("cpu"), lambda: (held, {"kv_cache": GIB}))
    before = host_memory().pss
    with tracker.phase("train"):
        with tracker.phase("inner"):
            torch.ones(60_000_000)  # 240 MB, gone at once
        with tracker.phase("quiet"):
            pass
    quiet = next(run for run in tracker.phases if run.name == "train/quiet")
    metrics = tracker.metrics()
    size = 240e6 / GIB
    for phase in ("train", "train/inner"):
        above = metrics[f"memory/{phase}/peak_gib"] - before / GIB
        assert 0.9 * size < above < 1.5 * size
    assert (quiet.peak - before) / GIB < 0.5 * size
    assert metrics["memory/owner/optimizer_gib"] == 5.0 and "memory/owner/grads_gib" not in metrics
    assert metrics["memory/peak_gib"] == metrics["memory/train/peak_gib"]
    assert tracker.metrics() == {} and tracker.failed is None


def test_tracker_remembers_the_innermost_phase_that_failed() -> None:
    tracker = MemoryTracker(torch.device("cpu"))
    with pytest.raises(MemoryError), tracker.phase("validation"), tracker.phase("rollout"):
        raise MemoryError
    assert tracker.failed == "validation/rollout"


def test_waterfall_is_drawn(tmp_path: Path) -> None:
    tracker = MemoryTracker(torch.device("cpu"), lambda: ({"optimizer": 1 << 20}, {}))
    for name in ("rollout", "sync", "forward_backward"):
        with tracker.phase(name):
            pass
    write_waterfall(tmp_path / "memory.png", tracker.phases, limit=GIB, title="run")
    assert (tmp_path / "memory.png").stat().st_size > 5000
