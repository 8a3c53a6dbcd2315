"""Checkpointer: atomic, sharded checkpoints of a run, and exact resume from them.

::

    <directory>/latest                 name of the newest complete checkpoint
    <directory>/step_00000012/         complete: it got this name by a rename, after everything was on disk
        meta.json                      step, world size, policy version, time, checksums, configuration snapshot
        extra.pt                       what the trainer handed over (dataloader state and so on)
        rng_<rank>.pt                  Python, NumPy and torch generators of each rank
        engine/                        weights and optimizer state (torch.distributed.checkpoint)
        critic/                        likewise, of the critic of a run that has one (beside.py)
    <directory>/best.json              step, metric and value of the checkpoint that is kept beside the newest
    <directory>/step_00000013.tmp/     being written, or left by a crash; removed by the next save

What a kill can leave, at any moment: a ``.tmp`` directory (ignored), or an old ``latest`` beside a newer
complete directory (the older is resumed from, which is correct, only earlier), or, while a step is saved
for the second time, ``step_N.replaced`` without ``step_N`` (put back by the next start). Older checkpoints
are deleted only once the new one and its ``latest`` are on disk.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hybridengine import platform
from hybridengine.checkpoint.checksums import check_checksums, checksums, files_of
from hybridengine.checkpoint.policy import BEST
from hybridengine.distributed.errors import agree

_NAME = re.compile(r"step_(\d+)$")


class Checkpointable(Protocol):
    """What a checkpoint needs of a training engine."""

    @property
    def version(self) -> int: ...

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...


class Checkpointer:
    """Saves to and resumes from ``directory``. All methods but :meth:`latest` are collective.

    Args:
        directory: shared by all ranks.
        keep: newest checkpoints kept; 0 keeps all.
        config: snapshot stored with each checkpoint, JSON-serialisable.
    """

    def __init__(self, directory: Path | str, keep: int = 2, *, config: Mapping[str, Any] | None = None) -> None:
        if keep < 0:
            raise ValueError(f"checkpoint.keep is {keep}; it must be 0 (all) or a number of checkpoints")
        self.directory, self.keep, self.config = Path(directory), keep, config

    # -- saving ------------------------------------------------------------------------------------

    def save(self, step: int, engine: Checkpointable, extra: Mapping[str, Any]) -> Path:
        """Write the state after ``step`` and make it the latest.

        Args:
            extra: plain containers, numbers, strings and tensors; :meth:`load` returns it. Rank 0's is kept.

        Returns:
            the checkpoint's directory.

        Raises:
            OSError or the engine's error; on all ranks together. The previous checkpoint is then still the latest.
        """
        final = self.path(step)
        staging = final.with_name(final.name + ".tmp")
        with agree(f"preparing checkpoint {final}"):
            if _rank() == 0:
                self._clean()
                (staging / "engine").mkdir(parents=True)
        engine.save(staging / "engine")
        with agree(f"writing checkpoint {final}"):
            _save(_rng_state(), staging / f"rng_{_rank()}.pt")
            if _rank() == 0:
                _save(dict(extra), staging / "extra.pt")
                # Now rather than on resume: what cannot be read back without running code is refused.
                torch.load(staging / "extra.pt", weights_only=True)
        sums = self._checksums(staging)
        with agree(f"completing checkpoint {final}"):
            if _rank() == 0:
                meta = {
                    "step": step,
                    "world_size": _world_size(),
                    "version": engine.version,
                    "saved_at_ns": time.time_ns(),
                    "checksums": sums,
                    "config": self.config,
                }
                _write(staging / "meta.json", json.dumps(meta, indent=2))
                self._publish(staging, final)
                self._prune(final)
        return final

    def _checksums(self, staging: Path) -> dict[str, list[int]]:
        """Of all files, each rank reading its share."""
        with agree(f"reading {staging} for its checksums"):
            mine = checksums(staging, files_of(staging)[_rank() :: _world_size()])
        found: list[dict[str, list[int]]] = [mine] * _world_size()
        if dist.is_initialized():
            dist.all_gather_object(found, mine)
        return {name: value for share in found for name, value in sorted(share.items())}

    def path(self, step: int) -> Path:
        """Where the checkpoint after ``step`` is, once it is complete."""
        return self.directory / f"step_{step:08d}"

    def _publish(self, staging: Path, final: Path) -> None:
        _sync(staging / "engine")
        _sync(staging)
        replaced = final.with_name(final.name + ".replaced")
        if final.exists():
            os.rename(final, replaced)
        os.rename(staging, final)
        _sync(self.directory)
        _write(self.directory / "latest.tmp", final.name)
        os.rename(self.directory / "latest.tmp", self.directory / "latest")
        _sync(self.directory)
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self, newest: Path) -> None:
        if self.keep == 0:
            return
        # By time of saving, not by step: a run that was restarted from an earlier step has the newer truth.
        by_age = sorted(self._complete(), key=lambda path: (path == newest, _saved_at(path)))
        best = self.best()
        for path in by_age[: -self.keep]:
            if path == best:
                continue
            # Renamed first: a kill in the middle of the removal must not leave half a checkpoint under a good name.
            doomed = path.with_name(path.name + ".tmp")
            os.rename(path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _clean(self) -> None:
        """Remove or repair what a crash left behind."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.glob("step_*.replaced"):
            original = path.with_suffix("")
            if original.exists():
                shutil.rmtree(path)
            else:
                os.rename(path, original)
        for path in self.directory.glob("step_*.tmp"):
            shutil.rmtree(path)

    def mark_best(self, path: Path, step: int, metric: str, value: float) -> None:
        """Keep the checkpoint ``path`` until a better one is marked. Collective."""
        with agree(f"marking checkpoint {path} as the best"):
            if _rank() == 0:
                before = self.best()
                record = {"step": step, "metric": metric, "value": value, "checkpoint": path.name}
                _write(self.directory / "best.json.tmp", json.dumps(record))
                os.rename(self.directory / "best.json.tmp", self.directory / BEST)
                if before is not None and before != path:
                    self._prune(path)

    def best(self) -> Path | None:
        """The checkpoint that :meth:`mark_best` marked last."""
        record = _json(self.directory / BEST)
        return self.directory / str(record["checkpoint"]) if record is not None and "checkpoint" in record else None

    # -- resuming ----------------------------------------------------------------------------------

    def latest(self) -> Path | None:
        """Directory of the newest complete checkpoint, or None. Files that a full disk left empty count as missing."""
        pointer = self.directory / "latest"
        name = pointer.read_text().strip() if pointer.exists() else ""
        if name and _is_complete(self.directory / name):
            return self.directory / name
        return max(self._complete(), key=_saved_at, default=None)

    def load(self, engine: Checkpointable, which: str = "auto") -> dict[str, Any] | None:
        """Bring ``engine`` and the random generators to a saved state.

        Args:
            which: ``"auto"`` (the latest of the directory, if there is one), ``"never"``, or a checkpoint's directory.

        Returns:
            the ``extra`` of :meth:`save`, or None when nothing was loaded.

        Raises:
            ValueError: naming the directory that is missing, incomplete, damaged or of another model; on all ranks.
        """
        if which == "never":
            self._forget_best()
            return None
        with agree("finding the checkpoint to resume from"):
            if which == "auto" and _rank() == 0:
                self._clean()
        found: list[Any] = [self.latest() if which == "auto" and _rank() == 0 else None]
        if dist.is_initialized():
            dist.broadcast_object_list(found, src=0)
        path = found[0] if which == "auto" else Path(which)
        if path is None:
            self._forget_best()
            return None
        with agree(f"reading checkpoint {path}"):
            meta, extra, rng = self._read(path)
        engine.load(path / "engine")
        _set_rng_state(rng)
        if engine.version != meta["version"]:
            raise ValueError(f"checkpoint {path} is damaged: meta.json has policy version {meta['version']}, the "
                             f"engine's state is of version {engine.version}")  # fmt: skip
        return extra

    def _forget_best(self) -> None:
        """Remove the mark of the best checkpoint, which is another run's, at a fresh start."""
        if _rank() == 0:
            (self.directory / BEST).unlink(missing_ok=True)

    def _read(self, path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        if not path.is_dir():
            others = ", ".join(sorted(p.name for p in self._complete())) or "none"
            raise ValueError(f"checkpoint {path} does not exist; complete ones in {self.directory}: {others}")
        try:
            meta = json.loads((path / "meta.json").read_text())
            sums = meta.get("checksums") or {}  # older checkpoints have none
            check_checksums(path, {name: sums[name] for name in sorted(sums)[_rank() :: _world_size()]})
            extra = torch.load(path / "extra.pt", weights_only=True)
            # At a larger world size the generators of the saved ranks are used again.
            rng = torch.load(path / f"rng_{_rank() % meta['world_size']}.pt", weights_only=True)
        except Exception as error:
            before = [other for other in sorted(self._complete(), key=_saved_at) if other != path]
            instead = f"; checkpoint.resume={before[-1]} goes on from the one before" if before else ""
            raise ValueError(
                f"checkpoint {path} is incomplete or damaged: {type(error).__name__}: {error}{instead}"
            ) from error
        return meta, extra, rng

    def _complete(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        return [p for p in self.directory.iterdir() if _NAME.match(p.name) and _is_complete(p)]


def _is_complete(path: Path) -> bool:
    return "saved_at_ns" in (_json(path / "meta.json") or {})


def _saved_at(path: Path) -> int:
    return int(json.loads((path / "meta.json").read_text())["saved_at_ns"])


def _json(path: Path) -> dict[str, Any] | None:
    """None where there is no such file, or no object in it."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _rng_state() -> dict[str, Any]:
    import numpy as np

    numpy_state: Any = np.random.get_state(legacy=False)
    return {
        "python": random.getstate(),
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype("int64")),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "cuda": _platform().rng_state(),  # None on a CPU
    }


def _set_rng_state(state: Mapping[str, Any]) -> None:
    import numpy as np

    random.setstate(state["python"])
    saved = state["numpy"]
    np.random.set_state(
        ("MT19937", saved["key"].numpy().astype("uint32"), saved["pos"], saved["has_gauss"], saved["gauss"])
    )
    torch.set_rng_state(state["torch"])
    _platform().set_rng_state(state["cuda"])


def _platform() -> platform.Platform:
    return platform.of(platform.local_device(int(os.environ.get("LOCAL_RANK", "0"))))


def _save(value: Any, path: Path) -> None:
    torch.save(value, path)
    _sync(path)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    _sync(path)


def _sync(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
