"""Doctor: findings carry remedies and exit statuses tell; the tracker of a run's memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybridengine import native, native_cuda
from hybridengine.memory.tracker import GIB, MemoryTracker, host_memory
from hybridengine.tools import doctor


def test_this_installation_has_nothing_essential_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = {name: entry for name, entry in doctor.ENGINES.items() if entry[0] != "vllm"}  # half a minute to import
    monkeypatch.setattr(doctor, "ENGINES", engines)
    findings = doctor.check_installation()
    assert [item for item in findings if item.status == doctor.FAIL] == []
    assert {"torch", "devices", "/dev/shm", "memfd", "csrc build", "CUDA box copy", "open files"} <= {
        item.what for item in findings
    }
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


@pytest.mark.parametrize(
    ("python", "status", "told"),
    [
        (None, "warn", "make install-sglang"),
        ("false", "warn", "has no sglang"),
        ("echo 0.5.16", "ok", "sglang 0.5.16 in"),
    ],
    ids=["missing", "empty", "installed"],
)
def test_the_environment_of_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str | None, status: str, told: str
) -> None:
    """Looked for where rollout=sglang looks for it: beside this environment."""
    monkeypatch.delenv("HYBRIDENGINE_SGLANG_PYTHON", raising=False)
    monkeypatch.setattr("sys.prefix", str(tmp_path / ".venv"))
    if python is not None:
        binary = tmp_path / ".venv-sglang" / "bin" / "python"
        binary.parent.mkdir(parents=True)
        binary.write_text(f"#!/bin/sh\n{python}\n")
        binary.chmod(0o755)
    (finding,) = doctor.check_sglang()
    assert finding.status == status and told in f"{finding.detail} {finding.remedy}"
    assert bool(finding.remedy) == (status == doctor.WARN)


@pytest.mark.parametrize(
    ("cuda", "file", "found", "remedy"),
    [
        (False, None, "not built; no CUDA here, so it is not needed", ""),
        (
            True,
            None,
            "not built",
            "python -m hybridengine.native build-cuda (needs nvcc), or use sync.method=gather",
        ),
        (
            True,
            b"",
            "built, but ",
            "python -m hybridengine.native build-cuda (needs nvcc), or use sync.method=gather",
        ),
    ],
    ids=["no-cuda", "not-built", "not-loadable"],
)
def test_the_cuda_box_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture,
    cuda: bool, file: bytes | None, found: str, remedy: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    monkeypatch.setattr(native_cuda, "_LIBRARY", tmp_path / "boxes.so")
    native_cuda.load.cache_clear()
    if file is not None:
        (tmp_path / "boxes.so").write_bytes(file)
    _, finding = doctor.check_native()
    assert finding.what == "CUDA box copy" and finding.detail.startswith(found) and finding.remedy == remedy
    assert finding.status == (doctor.WARN if remedy else doctor.OK)
    native.main(["status"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["csrc build", "CUDA box copy"]
    line = lines[1]
    assert line.startswith(f"CUDA box copy: {found}") and line.endswith(remedy)


def test_a_box_copy_of_other_sources_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise RuntimeError("_boxes.so was built from other sources: run `python -m hybridengine.native build`")

    monkeypatch.setattr(native, "load", load)
    finding, _ = doctor.check_native()
    assert (finding.status, finding.detail) == (doctor.FAIL, "_boxes.so was built from other sources")
    assert finding.remedy == "python -m hybridengine.native build"


@pytest.mark.parametrize(
    ("main", "arguments", "example"),
    [
        (doctor.main, ["--help"], r"^ *python -m hybridengine\.doctor memory"),
        (doctor.main, ["--help"], r"\{memory,parity\}"),
        (doctor.main, ["memory", "--help"], r"^ *python -m hybridengine\.doctor memory .*--gpus 8"),
        (native.main, ["--help"], r"^ *python -m hybridengine\.native build-cuda"),
    ],
    ids=["doctor", "subcommand", "memory", "native"],
)
def test_help_keeps_its_lines(
    capsys: pytest.CaptureFixture, main: Callable[[list[str]], object], arguments: list[str], example: str
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 0
    assert re.search(example, capsys.readouterr().out, re.MULTILINE)


def test_another_command_is_told_what_there_is(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as left:
        doctor.main(["mem"])
    assert left.value.code == 2
    assert "invalid choice: 'mem' (choose from" in (told := capsys.readouterr().err) and "memory" in told


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
