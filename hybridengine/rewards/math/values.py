"""What an expression tree is worth: exactly where it is rational, else to 60 digits, with values for its variables."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from mpmath import mp, mpc, mpf

from hybridengine.rewards.math.grammar import Tree

DIGITS = 60
#: Exact numbers are not followed beyond this size; two larger ones are told apart by their first digits.
MAX_BITS = 400_000
#: Exponents beyond 2 to this are not evaluated at all.
MAX_EXPONENT_BITS = 60


class UnevaluableError(ValueError):
    """The expression has no finite value at these values of its variables, or one too large to write down."""


# -- exactly -------------------------------------------------------------------------------------------


def exact(tree: Tree) -> Fraction | None:
    """The value of an expression of rational numbers; None where it is not rational, or not certainly."""
    try:
        return _exact(tree)
    except (ZeroDivisionError, OverflowError, RecursionError):
        return None


def _exact(tree: Tree) -> Fraction | None:
    kind = tree[0]
    if kind == "num":
        return Fraction(tree[1])
    if kind in ("var", "const", "pm", "deg") or (kind == "call" and tree[1] not in EXACT):
        return None
    if kind == "add":
        return _sum(tree)
    parts = [_exact(part) for part in tree[1:] if isinstance(part, tuple)]
    values = [part for part in parts if part is not None]
    if len(values) < len(parts):
        return None
    if kind == "pow":
        return _exact_power(*values)
    if kind == "call":
        return EXACT[tree[1]](*values)
    simple: dict[str, Callable[..., Fraction]] = {
        "neg": lambda a: -a, "mul": lambda a, b: a * b, "div": lambda a, b: a / b, "pct": lambda a: a / 100,
    }  # fmt: skip
    return simple[kind](*values)


def _sum(tree: Tree) -> Fraction | None:
    total = Fraction(0)
    for part in summands(tree):
        value = _exact(part)
        if value is None:
            return None
        total += value
    return total


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * bits > MAX_BITS:
        return None
    if exponent.denominator == 1:
        return base ** int(exponent)
    if base < 0:
        return None
    roots = [_root(n, exponent.denominator) for n in (base.numerator, base.denominator)]
    if None in roots:
        return None
    return Fraction(*[root for root in roots if root is not None]) ** exponent.numerator


def _root(n: int, degree: int) -> int | None:
    """The integer root, None when there is none."""
    if n < 2:
        return n
    if degree > n.bit_length():
        return None
    low, high = 1, 1 << (n.bit_length() // degree + 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if middle**degree < n else (low, middle)
    return low if low**degree == n else None


def _exact_factorial(n: Fraction) -> Fraction | None:
    return Fraction(math.factorial(int(n))) if n.denominator == 1 and 0 <= n <= 20_000 else None


def _exact_binomial(n: Fraction, k: Fraction) -> Fraction | None:
    if n.denominator != 1 or k.denominator != 1 or not 0 <= n <= 20_000 or k < 0:
        return None
    return Fraction(math.comb(int(n), int(k)))


def _exact_integers(function: Callable[..., int]) -> Callable[..., Fraction | None]:
    def value(*numbers: Fraction) -> Fraction | None:
        if any(number.denominator != 1 for number in numbers):
            return None
        return Fraction(function(*(int(number) for number in numbers)))

    return value


EXACT: dict[str, Callable[..., Fraction | None]] = {
    "abs": lambda a: abs(a),
    "sqrt": lambda a: _exact_power(a, Fraction(1, 2)),
    "floor": lambda a: Fraction(math.floor(a)),
    "ceil": lambda a: Fraction(math.ceil(a)),
    "max": lambda *a: max(a),
    "min": lambda *a: min(a),
    "sgn": lambda a: Fraction((a > 0) - (a < 0)),
    "gcd": _exact_integers(math.gcd),
    "lcm": _exact_integers(math.lcm),
    "factorial": _exact_factorial,
    "binom": _exact_binomial,
}


# -- to 60 digits --------------------------------------------------------------------------------------


def variables(tree: Tree) -> set[str]:
    """Names of the variables in ``tree``."""
    found, stack = set(), [tree]
    while stack:
        node = stack.pop()
        if node[0] == "var":
            found.add(node[1])
        stack += [part for part in node[1:] if isinstance(part, tuple)]
    return found


def functions(tree: Tree) -> set[str]:
    """Names of the functions called in ``tree``."""
    found, stack = set(), [tree]
    while stack:
        node = stack.pop()
        if node[0] == "call":
            found.add(node[1])
        stack += [part for part in node[1:] if isinstance(part, tuple)]
    return found


def summands(tree: Tree) -> list[Tree]:
    """The operands of a chain of additions, however long."""
    found = []
    while tree[0] == "add":
        found.append(tree[2])
        tree = tree[1]
    return [tree, *reversed(found)]


def numeric(tree: Tree, values: dict[str, Any]) -> tuple[Any, Any]:
    """The value at these values of the variables, and the largest summand on the way: (mpf or mpc, mpf).

    What is smaller than the largest summand by more than the digits that were kept is rounding, not value.

    Raises:
        UnevaluableError: none, or too large.
    """
    with mp.workdps(DIGITS):
        evaluation = _Evaluation(values)
        try:
            value = evaluation.of(tree)
        except (ZeroDivisionError, OverflowError, ValueError, RecursionError, TypeError) as error:
            raise UnevaluableError(str(error)) from None
        if not mp.isfinite(value):
            raise UnevaluableError("not finite")
        return value, evaluation.largest


class _Evaluation:
    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.largest = mpf(0)

    def of(self, tree: Tree) -> Any:
        kind = tree[0]
        if kind == "num":
            return mpf(tree[1].numerator) / tree[1].denominator
        if kind == "var":
            return self.values[tree[1]]
        if kind == "const":
            if tree[1] == "inf":
                raise UnevaluableError("infinite")
            return {"pi": mp.pi, "e": mp.e, "i": mpc(0, 1)}[tree[1]] * 1
        if kind == "add":
            parts = [self.of(part) for part in summands(tree)]
            self.largest = max(self.largest, *(abs(part) for part in parts))
            return mp.fsum(parts)
        if kind == "call" and tree[1].startswith("?"):
            return _unknown(tree[1], [self.of(part) for part in tree[2:]])
        operands = [self.of(part) for part in tree[1:] if isinstance(part, tuple)]
        if kind == "call":
            return CALLS[tree[1]](*operands)
        return OPERATORS[kind](*operands)


def _power(base: Any, exponent: Any) -> Any:
    if base == 0 and mp.re(exponent) < 0:
        raise ZeroDivisionError("0 to a negative power")
    magnitude = abs(exponent) * abs(mp.log(abs(base), 2)) if base != 0 else mpf(0)
    if magnitude > mpf(2) ** MAX_EXPONENT_BITS:
        raise UnevaluableError("too large")
    return mp.power(base, exponent)


def _moderate(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function whose argument has to be known to the last unit: not of numbers with more digits than are kept."""

    def value(x: Any) -> Any:
        if abs(x) > mpf(10) ** (DIGITS // 2):
            raise UnevaluableError("of a number too large")
        return function(x)

    return value


def _factorial(n: Any) -> Any:
    if abs(n) > mpf(2) ** (MAX_EXPONENT_BITS - 8):
        raise UnevaluableError("too large")
    return mp.gamma(n + 1)


def _real(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def value(x: Any) -> Any:
        if mp.im(x) != 0:
            raise UnevaluableError("of a complex number")
        return function(mp.re(x))

    return value


def _whole(function: Callable[[int, int], int]) -> Callable[..., Any]:
    def value(*numbers: Any) -> Any:
        raise UnevaluableError(f"{function.__name__} of numbers that are not whole")

    return value


def _unknown(name: str, operands: list[Any]) -> Any:
    """A function that nothing is known of: any fixed value for the same arguments."""
    drawn = random.Random(name + "/".join(mp.nstr(operand, 25) for operand in operands))
    return mpf(drawn.randint(10**30, 10**31)) / 10**30


OPERATORS: dict[str, Callable[..., Any]] = {
    "neg": lambda a: -a,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "pow": _power,
    "pct": lambda a: a / 100,
    "deg": lambda a: a * mp.pi / 180,
}

TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth")
CALLS: dict[str, Callable[..., Any]] = {
    **{name: _moderate(getattr(mp, name)) for name in TRIGONOMETRIC},
    **{f"arc{name}": getattr(mp, f"a{name}") for name in TRIGONOMETRIC[:6]},
    "ln": mp.log,
    "exp": lambda a: _power(mp.e * 1, a),
    "sqrt": mp.sqrt,
    "abs": abs,
    "sgn": mp.sign,
    "floor": _moderate(_real(mp.floor)),
    "ceil": _moderate(_real(mp.ceil)),
    "max": lambda *a: max(a),
    "min": lambda *a: min(a),
    "gcd": _whole(math.gcd),
    "lcm": _whole(math.lcm),
    "factorial": _factorial,
    "binom": lambda n, k: _factorial(n) / (_factorial(k) * _factorial(n - k)),
}
