"""Whether two answers say the same."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

from mpmath import mp, mpf

from hybridengine.rewards.math.answers import Group, Matrix, Named, Relation, Scalar, Words
from hybridengine.rewards.math.grammar import Tree
from hybridengine.rewards.math.values import UnevaluableError, exact, functions, numeric, variables

#: Digits that two values must share, of the 60 that are worked out.
SHARED_DIGITS = 40
#: Significant digits that a decimal needs to stand for a number that it only comes near, such as 0.333333 for 1/3.
DECIMAL_DIGITS = 6
#: Sets of values that variables are given: positive ones, and then of either sign.
POSITIVE_TRIALS, SIGNED_TRIALS = 3, 2
#: Elements of a list that are paired with another list's.
LONGEST_LIST = 200


def equal(gold: object, answer: object) -> bool:
    """Whether ``answer`` says what ``gold`` says.

    A name in front (x = 5), and a unit, may be left out on one side; where both have one, they must agree. Lists and
    sets are equal in any order, pairs and intervals with the same brackets only.
    """
    if isinstance(gold, Named) and isinstance(answer, Relation):
        return _same_relation(_equation(gold), answer)
    if isinstance(gold, Relation) and isinstance(answer, Named):
        return _same_relation(gold, _equation(answer))
    if isinstance(gold, Named) or isinstance(answer, Named):
        names = [side.name for side in (gold, answer) if isinstance(side, Named)]
        if len(set(names)) > 1:
            return False
        return equal(*(side.value if isinstance(side, Named) else side for side in (gold, answer)))
    if isinstance(gold, Scalar) and isinstance(answer, Scalar):
        return (not gold.unit or not answer.unit or gold.unit == answer.unit) and same_value(gold.tree, answer.tree)
    if isinstance(gold, Words) and isinstance(answer, Words):
        return gold.text == answer.text
    if isinstance(gold, Group) and isinstance(answer, Group):
        return _same_group(gold, answer)
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        shapes = [[len(row) for row in side.rows] + [side.brackets] for side in (gold, answer)]
        pairs = zip((c for row in gold.rows for c in row), (c for row in answer.rows for c in row), strict=False)
        return shapes[0] == shapes[1] and all(equal(a, b) for a, b in pairs)
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return _same_relation(gold, answer)
    return False


def _same_group(gold: Group, answer: Group) -> bool:
    if gold.kind != answer.kind or len(gold.items) != len(answer.items) or len(gold.items) > LONGEST_LIST:
        return False
    if gold.kind == "ratio":
        return _same_ratio(gold, answer)
    if gold.kind not in ("list", "union"):
        return all(equal(a, b) for a, b in zip(gold.items, answer.items, strict=True))
    rest = list(answer.items)
    for item in gold.items:
        found = next((i for i, other in enumerate(rest) if equal(item, other)), None)
        if found is None:
            return False
        del rest[found]
    return True


def _same_ratio(gold: Group, answer: Group) -> bool:
    """a : b equals c : d when ad = bc."""
    first = [side.items[0] for side in (gold, answer)]
    if not all(isinstance(item, Scalar) for item in (*first, *gold.items, *answer.items)):
        return False
    return all(
        same_value(("mul", a.tree, first[1].tree), ("mul", b.tree, first[0].tree))  # type: ignore[attr-defined]
        for a, b in zip(gold.items, answer.items, strict=True)
    )


def _equation(named: Named) -> Relation:
    """y = 2x + 3 as an equation like others."""
    return Relation("=", Scalar(("var", named.name)), named.value)


def _same_relation(gold: Relation, answer: Relation) -> bool:
    """The same sides; or, of expressions, the same difference up to a factor (a positive one for inequalities)."""
    if gold.operator != answer.operator:
        return False
    if equal(gold.left, answer.left) and equal(gold.right, answer.right):
        return True
    sides = (gold.left, gold.right, answer.left, answer.right)
    if not all(isinstance(side, Scalar) for side in sides):
        return False
    a, b, c, d = (side.tree for side in sides)  # type: ignore[attr-defined]
    return _proportional(("add", a, ("neg", b)), ("add", c, ("neg", d)), signed=gold.operator not in ("=", r"\ne"))


def _proportional(first: Tree, second: Tree, *, signed: bool) -> bool:
    """Whether second / first is one constant, not 0; ``signed``: a positive one."""
    names = sorted(variables(first) | variables(second))
    if variables(first) != variables(second):
        return False
    ratios = []
    for values in _trials(names, first, second):
        try:
            above, below = numeric(second, values)[0], numeric(first, values)[0]
        except UnevaluableError:
            continue
        if below == 0 or above == 0:
            continue
        with mp.workdps(60):
            ratios.append(above / below)
    if len(ratios) < 2:
        return False
    return all(_close(ratio, ratios[0], mpf(0)) for ratio in ratios) and (not signed or mp.re(ratios[0]) > 0)


# -- values --------------------------------------------------------------------------------------------


def same_value(gold: Tree, answer: Tree) -> bool:
    """Whether two expressions are equal, for all values of their variables."""
    if gold == answer:
        return True
    if _is_infinite(gold) or _is_infinite(answer):
        return _sign_of_infinity(gold) == _sign_of_infinity(answer)
    exactly = exact(gold), exact(answer)
    decimals = _decimal(gold), _decimal(answer)
    if exactly[0] is not None and exactly[1] is not None:
        if exactly[0] == exactly[1]:
            return True
        return any(
            _stands_for(decimal, other) for decimal, other in zip(decimals, reversed(exactly), strict=True) if decimal
        )
    return _same_numerically(gold, answer, decimals)


def _same_numerically(gold: Tree, answer: Tree, decimals: tuple[Any, Any]) -> bool:
    names = sorted(variables(gold) | variables(answer))
    compared = 0
    for values in _trials(names, gold, answer):
        try:
            (a, scale_a), (b, scale_b) = numeric(gold, values), numeric(answer, values)
        except UnevaluableError:
            continue
        if not _close(a, b, max(scale_a, scale_b)):
            if names or mp.im(a) != 0 or mp.im(b) != 0:
                return False
            pairs = zip(decimals, (b, a), strict=True)
            return any(_stands_for(decimal, mp.re(other)) for decimal, other in pairs if decimal)
        compared += 1
        if not names:
            break
    return compared >= (2 if names else 1)


def _close(a: Any, b: Any, scale: Any) -> bool:
    """Equal to SHARED_DIGITS digits; ``scale``: of the largest summand on the way, next to which both may be
    rounding."""
    with mp.workdps(60):
        difference, size = abs(a - b), max(abs(a), abs(b))
        return bool(difference <= size * mpf(10) ** -SHARED_DIGITS or size <= scale * mpf(10) ** -(SHARED_DIGITS + 10))


def _trials(names: list[str], *trees: Tree) -> list[dict[str, Any]]:
    """Values for the variables, always the same ones. Logarithms only see positive values: their branches differ."""
    if not names:
        return [{}]
    called = set().union(*(functions(tree) for tree in trees))
    signed = SIGNED_TRIALS if "ln" not in called else 0
    found = []
    for trial in range(POSITIVE_TRIALS + signed):
        values = {}
        for i, name in enumerate(names):
            value = mpf(random.Random(f"{name}/{trial}").randint(10**15, 4 * 10**15)) / 10**15
            # The first signed trial is all negative, in the second every other one is.
            negative = trial >= POSITIVE_TRIALS and (trial == POSITIVE_TRIALS or i % 2 == 1)
            values[name] = -value if negative else value
        found.append(values)
    return found


def _decimal(tree: Tree) -> tuple[Fraction, int] | None:
    """Value and digits after the point of a decimal with enough digits to stand for another number, else None."""
    sign = 1
    if tree[0] == "neg":
        sign, tree = -1, tree[1]
    if tree[0] != "num" or not tree[2]:
        return None
    significant = len(str(abs(tree[1] * 10 ** tree[2]).numerator)) if tree[1] else 0
    return (sign * tree[1], tree[2]) if significant >= DECIMAL_DIGITS else None


def _stands_for(decimal: tuple[Fraction, int], other: Any) -> bool:
    """Whether ``decimal`` is what ``other``, which is no decimal itself, becomes when it is rounded or cut there."""
    value, places = decimal
    if isinstance(other, Fraction):
        rest = other.denominator
        for prime in (2, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return False
        beyond = (abs(other) - abs(value)) * 10**places
    else:
        with mp.workdps(60):
            beyond = (abs(other) - mpf(abs(value).numerator) / value.denominator) * mpf(10) ** places
    return (other < 0) == (value < 0) and bool(-0.5 <= beyond < 1)


def _is_infinite(tree: Tree) -> bool:
    return _sign_of_infinity(tree) != 0


def _sign_of_infinity(tree: Tree) -> int:
    if tree == ("const", "inf"):
        return 1
    if tree[0] == "neg":
        return -_sign_of_infinity(tree[1])
    return 0
