"""The package's shape: which package imports which, how large its parts are, what a new algorithm touches."""

from __future__ import annotations

from tests import structure


def test_packages_import_downwards_only() -> None:
    assert structure.back_arrows() == []
    assert structure.cycles() == []


def test_an_arrow_upwards_would_be_found(monkeypatch) -> None:
    """The order turned around: everything that imports something is against it."""
    monkeypatch.setattr(structure, "ORDER", structure.ORDER[::-1])
    assert any(line.startswith("loop imports report") for line in structure.back_arrows())


def test_files_and_functions_are_short() -> None:
    assert [place for lines, place in structure.sizes() if lines > 400] == []
    assert [place for lines, place in structure.functions() if lines > 90] == []


def test_the_kind_of_device_is_asked_by_the_platform() -> None:
    """Outside of it, by the doctor and the bill alone, which describe machines that they are not on."""
    others = {place.split(":")[0] for place in structure.device_checks()}
    assert {place for place in others if not place.startswith("hybridengine/tools/")} == set()


def test_an_algorithm_is_a_file_a_line_and_a_yaml() -> None:
    """config/equivalents.py tells other programs' names for it, where they have one."""
    assert structure.files_of_algorithm("cispo") == [
        "conf/algorithm/cispo.yaml", "hybridengine/algorithms/cispo.py", "hybridengine/algorithms/registry.py",
        "hybridengine/config/equivalents.py",
    ]  # fmt: skip
