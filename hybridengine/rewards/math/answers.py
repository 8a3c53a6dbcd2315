r"""What an answer says: an expression with a unit, words, a pair, an interval, a list, a matrix, a relation.

:func:`parse_answer` splits the text at commas, relations and brackets; what is left are expressions (grammar.py). What
it does not understand it refuses: a gold answer that is read wrong would reward wrong responses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hybridengine.rewards.math.grammar import MAX_DEPTH, MAX_LENGTH, WORDS, ParseError, Tree, parse_expression
from hybridengine.rewards.math.text import clean, depth_of, enclosed, split, without_grouping
from hybridengine.rewards.math.values import variables

Answer = "Scalar | Words | Group | Matrix | Relation"


@dataclass(frozen=True, slots=True)
class Scalar:
    """An expression, and the unit it is given in ("" for none)."""

    tree: Tree
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """A name, or "no solution": lower case, single spaces."""

    text: str


@dataclass(frozen=True, slots=True)
class Group:
    """Several answers. ``kind``: ``list`` (order does not matter), ``union`` (neither here), ``ratio``, or the two
    brackets of a pair or interval such as ``()`` and ``[)``, in order."""

    kind: str
    items: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    rows: tuple[tuple[object, ...], ...]
    brackets: str = ""


@dataclass(frozen=True, slots=True)
class Relation:
    """``left operator right``: an equation that gives no name a value, or an inequality that is no interval."""

    operator: str
    left: object
    right: object


@dataclass(frozen=True, slots=True)
class Named:
    """x = 5, f(x) = 2x, x \\in [1, 2]: a value, and what it is the value of."""

    name: str
    value: object


UNITS = {
    "cm", "mm", "m", "km", "in", "ft", "yd", "mi", "inches", "inch", "feet", "foot", "miles", "mile", "meters", "meter",
    "centimeters", "kilometers", "kg", "g", "mg", "lb", "lbs", "pounds", "oz", "ounces", "grams", "s", "sec", "seconds",
    "second", "min", "minutes", "minute", "h", "hr", "hours", "hour", "days", "day", "weeks", "week", "months", "years",
    "year", "mph", "kmh", "dollars", "dollar", "cents", "cent", "degrees", "degree", "units", "unit", "percent",
    "square", "cubic", "sq", "cu", "liters", "gallons", "ml",
}  # fmt: skip
CURRENCY = re.compile(r"^(?:\\\$|\$|€|£|¥)\s*")
TRAILING_TEXT = re.compile(r"^(.*?[^\s^_{(,])\s*\\(?:text|mathrm)\s*\{([^{}]*)\}\s*(?:\^\s*\{?(\d+)\}?)?$", re.DOTALL)
TRAILING_WORDS = re.compile(r"^(.*?[\d)}%])\s*([A-Za-z][A-Za-z ./]*)(?:\^\s*\{?(\d+)\}?)?$", re.DOTALL)
WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|textsf)\s*\{([^{}]*)\}")
PHRASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9' .:,\-]*")
WORDS_ONLY = re.compile(r"[A-Za-z][A-Za-z' .\-]*")
ENVIRONMENT = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
RELATIONS = ("=", "<", ">", r"\le", r"\ge", r"\ne", r"\in", r"\approx")
FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
NAME = re.compile(
    r"(?:\\?[A-Za-z]+|\\mathbf\{[A-Za-z]\})(?:_\{?\w+\}?)?'*(?:\^\{?-1\}?)?(?:\([^()]*\))?|\\frac\{d\w?\}\{d\w\}"
)


def parse_answer(text: str, *, percent: str = "value") -> object:
    """What ``text`` says.

    Args:
        percent: ``value``: x% is x/100; ``unit``: it is x in another unit, which an answer may leave out.

    Raises:
        ParseError: nothing that is understood.
    """
    if len(text) > MAX_LENGTH:
        raise ParseError(f"longer than {MAX_LENGTH} characters")
    try:
        return _Reader(percent).answer(without_box(clean(text)))
    except RecursionError:
        raise ParseError("nested too deep") from None


def without_box(text: str) -> str:
    r"""The inside of a \boxed{..} that encloses the whole text, else the text."""
    for command in (r"\boxed", r"\fbox"):
        rest = text.removeprefix(command).strip()
        if rest != text and (found := enclosed(rest)) is not None and found[0] == "{":
            return clean(found[1])
    return text


@dataclass(frozen=True, slots=True)
class _Reader:
    percent: str

    def answer(self, text: str) -> object:
        if not text:
            raise ParseError("empty")
        if (depth := depth_of(text)) is None:
            raise ParseError("a bracket without its partner")
        if depth > MAX_DEPTH:
            raise ParseError(f"nested deeper than {MAX_DEPTH}")
        if (words := as_words(text)) is not None:
            return Words(words)
        if match := WRAPPED.fullmatch(text):
            text = match[1].strip()
            if re.search(r"[A-Za-z]{3}", text) and PHRASE.fullmatch(text):
                return Words(text.lower())
        return self.listed(without_grouping(text))

    def listed(self, text: str) -> object:
        parts = [part for _, part in split(text, (",", ";"))]
        if len(parts) == 1:
            return self.related(text)
        return Group("list", tuple(self.related(part) for part in parts))

    def related(self, text: str) -> object:
        parts = split(text, RELATIONS)
        if len(parts) == 1:
            return self.united(text)
        operators, sides = [operator for operator, _ in parts[1:]], [side for _, side in parts]
        if "" in sides:
            raise ParseError("a relation without a side")
        if set(operators) <= {"=", r"\approx"} or operators == [r"\in"]:
            if NAME.fullmatch(sides[0]):
                return Named(re.sub(r"[\s{}]", "", sides[0]), self.united(sides[-1]))
            values = [self.united(side) for side in sides]
            if _is_calculation(values):
                return values[-1]
            if len(sides) == 2:
                return Relation("=", *values)
            raise ParseError("a chain of equations")
        return self.inequality(operators, sides)

    def inequality(self, operators: list[str], sides: list[str]) -> object:
        """x < 3 and 1 \\le x < 3 are intervals of x; others stay relations."""
        if r"\in" in operators or "=" in operators:
            raise ParseError("a mixed relation")
        if len(sides) == 2 and operators[0] in FLIPPED:
            if NAME.fullmatch(sides[1]) and not NAME.fullmatch(sides[0]):
                operators, sides = [FLIPPED[operators[0]]], sides[::-1]
            if NAME.fullmatch(sides[0]):
                open_, bound = operators[0] in "<>", self.united(sides[1])
                if operators[0] in ("<", r"\le"):
                    interval = Group("()" if open_ else "(]", (_MINUS_INFINITY, bound))
                else:
                    interval = Group("()" if open_ else "[)", (bound, _INFINITY))
                return Named(sides[0], interval)
        if len(sides) == 3 and NAME.fullmatch(sides[1]):
            if set(operators) <= {">", r"\ge"}:
                operators, sides = [FLIPPED[operator] for operator in reversed(operators)], sides[::-1]
            if set(operators) <= {"<", r"\le"}:
                brackets = ("(" if operators[0] == "<" else "[") + (")" if operators[1] == "<" else "]")
                return Named(sides[1], Group(brackets, (self.united(sides[0]), self.united(sides[2]))))
        if len(sides) != 2:
            raise ParseError("a chain of inequalities")
        left, right, operator = self.united(sides[0]), self.united(sides[1]), operators[0]
        if operator in (">", r"\ge"):
            return Relation(FLIPPED[operator], right, left)
        return Relation(operator, left, right)

    def united(self, text: str) -> object:
        parts = [part for _, part in split(text, (r"\cup",))]
        if len(parts) > 1:
            return Group("union", tuple(self.single(part) for part in parts))
        return self.single(text)

    def single(self, text: str) -> object:
        if not text:
            raise ParseError("a part is empty")
        if match := ENVIRONMENT.fullmatch(text):
            return self.matrix(match[1], match[2])
        if text == r"\emptyset" or re.fullmatch(r"\\\{\s*\\\}", text):
            return Group("list", ())
        if (found := enclosed(text)) is not None:
            opening, inside, closing = found
            parts = [part for _, part in split(inside, (",", ";"))]
            if opening == r"\{" and closing == r"\}":
                return Group("list", tuple(self.related(part) for part in parts))
            if len(parts) > 1 and opening in ("(", "[", r"\langle") and closing in (")", "]", r"\rangle"):
                return Group(opening + closing, tuple(self.united(part) for part in parts))
            if (opening, closing) in (("(", ")"), ("{", "}")):
                if (words := as_words(inside)) is not None:
                    return Words(words)
                return self.related(inside)
        parts = [part for _, part in split(text, (":",))]
        if len(parts) > 1:
            return Group("ratio", tuple(self.scalar(part) for part in parts))
        if (words := as_words(text)) is not None:
            return Words(words)
        return self.scalar(text)

    def matrix(self, kind: str, inside: str) -> Matrix:
        rows = [row for _, row in split(inside, ("\\\\",)) if row]
        cells = tuple(tuple(self.united(cell) for _, cell in split(row, ("&",))) for row in rows)
        if len({len(row) for row in cells}) != 1:
            raise ParseError("a matrix with rows of different length")
        return Matrix(cells, "|" if kind in ("vmatrix", "Vmatrix") else "")

    def scalar(self, text: str) -> object:
        text, unit = self.without_unit(text)
        text = re.sub(r"\\(?:text|textbf|mathrm|mathbf|textit)\s*\{\s*\(?([A-Za-z])\)?\s*\}", r" \1 ", text)
        tree = parse_expression(text)
        if tree[0] in ("pct", "deg") and not unit:
            if tree[0] == "deg" or self.percent == "unit":
                return Scalar(tree[1], {"pct": "%", "deg": "degree"}[tree[0]])
        variants = plus_minus(tree)
        if len(variants) > 1:
            return Group("list", tuple(Scalar(variant, unit) for variant in variants))
        return Scalar(tree, unit)

    def without_unit(self, text: str) -> tuple[str, str]:
        r"""The number, and its unit: 12\text{ cm}^2, \$36, 5 minutes."""
        if match := CURRENCY.match(text):
            return text[match.end() :], "dollar"
        if match := TRAILING_TEXT.match(text):
            words = match[2].strip()
            if len(words) > 1 or words in UNITS:
                return match[1], _unit(words, match[3])
        if match := TRAILING_WORDS.match(text):
            words = [word.strip("./").lower() for word in match[2].split()]
            spaced = text[match.end(1)] == " "
            if all(len(word) > 1 and (word in UNITS or (spaced and len(word) > 2)) for word in words):
                if not set(words) & WORDS:
                    return match[1], _unit(match[2], match[3])
        return text, ""


_INFINITY = Scalar(("const", "inf"))
_MINUS_INFINITY = Scalar(("neg", ("const", "inf")))


def _is_calculation(values: list[object]) -> bool:
    """Whether sides of an equation are the same number, as in 2 + 2 = 4: then it says what that number is."""
    from hybridengine.rewards.math.equal import same_value

    trees = [value.tree for value in values if isinstance(value, Scalar)]
    if len(trees) < len(values) or any(variables(tree) for tree in trees):
        return False
    return all(same_value(trees[-1], tree) for tree in trees[:-1])


def _unit(words: str, power: str | None) -> str:
    """One spelling of a unit: lower case, singular, its power behind it; percent is left to the grammar."""
    words = re.sub(r"\s+", " ", words.strip(" .").lower())
    singular = " ".join(word if len(word) < 4 else re.sub(r"(?<=[a-z])s$", "", word) for word in words.split())
    return singular + (f"^{power}" if power else "")


def as_words(text: str) -> str | None:
    r"""The text of an answer that is a name or a phrase, lower case; None when it is mathematics.

    >>> as_words(r"\text{ no solution }"), as_words("Evelyn"), as_words("xy"), as_words(r"\text{(B)}")
    ('no solution', 'evelyn', None, None)
    """
    plain = re.sub(r"\s+", " ", WRAPPED.sub(r" \1 ", text)).strip(" .")
    inside = plain[1:-1].strip() if plain.startswith("(") and plain.endswith(")") else plain
    if not WORDS_ONLY.fullmatch(inside):
        return None
    runs = re.findall(r"[A-Za-z]+", inside)
    wrapped = plain != re.sub(r"\s+", " ", text).strip(" .")
    longest = max(len(run) for run in runs)
    if inside.lower() != "no" and (longest < (2 if wrapped else 3) or set(runs) & WORDS):
        return None
    return inside.lower()


def plus_minus(tree: Tree) -> list[Tree]:
    """The trees for + and for -, when there is a \\pm somewhere; all signs of one expression go together."""

    def with_sign(node: Tree, sign: str) -> Tree:
        if node[0] == "pm":
            right = with_sign(node[2], sign)
            return ("add", with_sign(node[1], sign), right if sign == "+" else ("neg", right))
        return tuple(with_sign(part, sign) if isinstance(part, tuple) else part for part in node)

    if not _has_plus_minus(tree):
        return [tree]
    return [with_sign(tree, "+"), with_sign(tree, "-")]


def _has_plus_minus(tree: Tree) -> bool:
    stack = [tree]
    while stack:
        node = stack.pop()
        if node[0] == "pm":
            return True
        stack += [part for part in node[1:] if isinstance(part, tuple)]
    return False
