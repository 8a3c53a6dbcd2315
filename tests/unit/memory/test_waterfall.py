"""Memory per phase: what the picture and the summary say is what was measured."""

from __future__ import annotations

import struct
from pathlib import Path

from matplotlib.figure import Figure

from hybridengine.memory.tracker import GIB, PhaseMemory
from hybridengine.memory.waterfall import as_rows, draw_waterfall
from hybridengine.report.plot import write_plot


def ran(name: str, peak: float, owners: dict[str, float], asleep: dict[str, float] | None = None) -> PhaseMemory:
    def nbytes(sizes: dict[str, float]) -> dict[str, int]:
        return {owner: int(size * GIB) for owner, size in sizes.items()}

    return PhaseMemory(name, used=GIB, peak=int(peak * GIB), owners=nbytes(owners), asleep=nbytes(asleep or {}))


PHASES = [
    ran("sync", 6, {"trainer_params": 2, "rollout_weights": 1}, {"optimizer": 4}),
    ran("optimizer", 7, {"trainer_params": 2, "optimizer": 4}),
    ran("optimizer", 8, {"trainer_params": 2, "optimizer": 4}),
    ran("optimizer/inner", 9, {}),
]


def test_bars_add_up_to_the_largest_peak_of_each_phase() -> None:
    ax = Figure().subplots()
    draw_waterfall(ax, PHASES, limit=10 * GIB)
    heights: dict[str, list[float]] = {
        bars.get_label(): [bar.get_height() for bar in bars]
        for bars in ax.containers
    }  # fmt: skip
    assert heights == {
        "trainer_params": [2, 2],
        "optimizer": [0, 4],
        "rollout_weights": [1, 0],
        "other, at the peak": [3, 2],
    }
    assert [label.get_text() for label in ax.get_xticklabels()] == ["sync", "optimizer"]
    assert [text.get_text() for text in ax.texts] == ["6", "8"]
    assert [line.get_ydata()[0] for line in ax.lines] == [10]


def test_a_limit_far_above_is_not_drawn() -> None:
    ax = Figure().subplots()
    draw_waterfall(ax, PHASES, limit=40 * GIB)
    assert not ax.lines


def test_rows_of_the_summary() -> None:
    assert as_rows(PHASES[:1]) == [
        {
            "phase": "sync",
            "used_gib": 1,
            "peak_gib": 6,
            "owners_gib": {"trainer_params": 2, "rollout_weights": 1},
            "elsewhere_gib": {"optimizer": 4},
        }
    ]


def test_the_report_has_room_for_it(tmp_path: Path) -> None:
    def height(name: str, memory: list[PhaseMemory]) -> int:
        write_plot(tmp_path / name, [{"step": 1, "time/step": 1.0}], [], title="run", memory=memory)
        return struct.unpack(">II", (tmp_path / name).read_bytes()[16:24])[1]

    assert height("with.png", PHASES) > height("without.png", [])
