"""The table follows the code; the faults themselves are tried by ``make mutants``."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests import ROOT
from tests.mutants.table import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_has_its_place_and_its_tests(mutant: Mutant) -> None:
    text = (ROOT / "hybridengine" / mutant.file).read_text()
    assert text.count(mutant.old) == 1 and mutant.new != mutant.old
    ast.parse(text.replace(mutant.old, mutant.new))
    assert all((ROOT / "tests" / name).exists() for name in mutant.tests)


def test_names_are_different() -> None:
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1
