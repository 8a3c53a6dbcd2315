r"""LaTeX or plain text of one mathematical expression -> a tree; what is not understood is refused, never guessed.

    expression := ['-'|'+'] term {('+'|'-'|'\pm') term}
    term       := factor {['*'|'/'|nothing] factor}
    factor     := power | mixed number
    power      := atom {'^' argument | '!' | '%' | '^\circ'}
    atom       := number | name ['_' argument] | '(' expression ')' | '|' expression '|'
                | '[' expression ']' | \frac{..}{..} | \sqrt[..]{..} | \binom{..}{..} | function argument

A tree is a tuple whose first item says what it is:

    ("num", Fraction, digits after the point or None), ("var", name), ("const", "pi" | "e" | "i" | "inf"),
    ("add", a, b), ("neg", a), ("mul", a, b), ("div", a, b), ("pow", a, b), ("pm", a, b), ("call", name, a, ...),
    ("deg", a), ("pct", a)

Numbers side by side are no product: 1 1/2 and 1\frac{1}{2} are 3/2, and "3 4" is refused. The grammar is LL(1) and
    takes
linear time.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

Tree = tuple[Any, ...]

#: Deepest nesting that is read.
MAX_DEPTH = 60
#: Longest text that is read, characters.
MAX_LENGTH = 3000

FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc",
    "sinh", "cosh", "tanh", "coth", "ln", "log", "lg", "exp", "max", "min", "gcd", "lcm", "floor", "ceil", "abs", "sgn",
}  # fmt: skip
INVERSES = {name: f"arc{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc")}
GREEK = {
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota", "kappa",
    "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "varphi", "chi", "psi", "omega", "Gamma",
    "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega", "ell", "hbar",
}  # fmt: skip
#: Commands around one name, which becomes part of it (or is nothing but a typeface).
DECORATIONS = {"overline", "vec", "hat", "bar", "tilde", "overrightarrow", "widehat", "dot", "mathbb", "mathcal"}
TYPEFACES = {"mathbf", "mathrm", "mathit", "mathsf", "boldsymbol", "bm", "operatorname", "text", "textbf", "textit"}
WORDS = FUNCTIONS | GREEK | {"pi", "sqrt", "inf", "infty", "infinity", "binom", "asin", "acos", "atan"}
#: Applied to an argument in parentheses, these letters are functions that nothing is known of.
UNKNOWN_FUNCTIONS = set("fghFGH")

TOKEN = re.compile(
    r"""\s*(?:
    (?P<repeating>\d*\.\d*\\overline\{\d+\})
  | (?P<based>(?=[A-F]*\d)[0-9A-F]+_(?:\{\d+\}|\d+))
  | (?P<number>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,4}(?!\d))?)
  | (?P<command>\\(?:[A-Za-z]+|[{}|]))
  | (?P<word>[A-Za-z]+)
  | (?P<prime>'+)
  | (?P<power>\*\*)
  | (?P<char>\S)
  )""",
    re.VERBOSE,
)


class ParseError(ValueError):
    """The text is not an expression that this grammar has."""


def parse_expression(text: str) -> Tree:
    """The tree of the whole text.

    Raises:
        ParseError: it is none, or longer or deeper than what is read.
    """
    if len(text) > MAX_LENGTH:
        raise ParseError(f"longer than {MAX_LENGTH} characters")
    parser = _Parser(_tokens(text))
    tree = parser.expression(0)
    if parser.peek() is not None:
        raise ParseError(f"unexpected {parser.peek()!r}")
    return tree


def _tokens(text: str) -> list[str]:
    """Numbers, commands with their backslash, known words, single letters and characters."""
    found: list[str] = []
    position, text = 0, text.strip()
    while position < len(text):
        match = TOKEN.match(text, position)
        assert match is not None
        position = match.end()
        kind, value = match.lastgroup, match.group(str(match.lastgroup))
        if kind == "word":
            found += [value] if value in WORDS else list(value)
        else:
            found.append("^" if kind == "power" else value)
    return found


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._position = tokens, 0
        self._in_bars = False

    # -- tokens ------------------------------------------------------------------------------------

    def peek(self, ahead: int = 0) -> str | None:
        position = self._position + ahead
        return self._tokens[position] if position < len(self._tokens) else None

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if token is None or (expected is not None and token != expected):
            raise ParseError(f"expected {expected or 'more'}, got {'the end' if token is None else repr(token)}")
        self._position += 1
        return token

    def accept(self, token: str) -> bool:
        if self.peek() == token:
            self._position += 1
            return True
        return False

    # -- rules -------------------------------------------------------------------------------------

    def expression(self, depth: int) -> Tree:
        if depth > MAX_DEPTH:
            raise ParseError(f"nested deeper than {MAX_DEPTH}")
        if self.accept("\\pm"):
            tree: Tree = ("pm", ("num", Fraction(0), None), self.term(depth))
        elif self.accept("-"):
            tree = ("neg", self.term(depth))
        else:
            self.accept("+")
            tree = self.term(depth)
        while (token := self.peek()) in ("+", "-", "\\pm"):
            self.take()
            right = self.term(depth)
            tree = ("pm", tree, right) if token == "\\pm" else ("add", tree, ("neg", right) if token == "-" else right)
        return tree

    def term(self, depth: int) -> Tree:
        tree = self.factor(depth)
        while (token := self.peek()) is not None:
            if token in ("*", "\\cdot", "\\times", "\\ast"):
                self.take()
                tree = ("mul", tree, self.signed_factor(depth))
            elif token in ("/", "\\div"):
                self.take()
                tree = ("div", tree, self.signed_factor(depth))
            elif self.starts_atom(token):
                tree = self.product(tree, depth)
            else:
                break
        return tree

    def product(self, left: Tree, depth: int) -> Tree:
        """Of two factors without a sign between them."""
        if (self.peek() or "").lstrip(".")[:1].isdigit():
            raise ParseError("a number after what it would multiply")
        return ("mul", left, self.factor(depth))

    def signed_factor(self, depth: int) -> Tree:
        return ("neg", self.factor(depth)) if self.accept("-") else self.factor(depth)

    def factor(self, depth: int) -> Tree:
        whole = self.power(depth)
        if whole[0] != "num" or whole[2] is not None or whole[1].denominator != 1:
            return whole
        if self.peek() == "\\frac":
            right = self.atom(depth)
            parts = right[1:] if right[0] == "div" else (right, right)
            if all(part[0] == "num" and part[2] is None for part in parts) and parts[0][1] < parts[1][1]:
                return self.postfix(_mixed(whole, parts[0][1], parts[1][1]), depth)
            return ("mul", whole, self.postfix(right, depth))
        digits = [self.peek(), self.peek(2)]
        if self.peek(1) == "/" and all(token is not None and token.isdigit() for token in digits):
            above, _, below = self.take(), self.take(), self.take()
            return self.postfix(_mixed(whole, int(above), int(below)), depth)
        return whole

    def power(self, depth: int) -> Tree:
        return self.postfix(self.atom(depth), depth)

    def postfix(self, tree: Tree, depth: int) -> Tree:
        while (token := self.peek()) is not None:
            if token == "^":
                self.take()
                if self.degree_sign():
                    tree = ("deg", tree)
                else:
                    tree = ("pow", tree, self.exponent(depth))
            elif token == "!":
                self.take()
                if self.peek() == "!":
                    raise ParseError("a double factorial")
                tree = ("call", "factorial", tree)
            elif token in ("%", "°"):
                self.take()
                tree = ("pct" if token == "%" else "deg", tree)
            else:
                break
        return tree

    def degree_sign(self) -> bool:
        for sign in (("\\circ",), ("{", "\\circ", "}")):
            if all(self.peek(i) == token for i, token in enumerate(sign)):
                self._position += len(sign)
                return True
        return False

    def exponent(self, depth: int) -> Tree:
        """2^{10}, 2^x, 2^10 as one writes it in plain text, 2^-3."""
        if self.accept("-"):
            return ("neg", self.exponent(depth + 1))
        return self.argument(depth, digits=False)

    def argument(self, depth: int, *, digits: bool) -> Tree:
        """What stands in braces, or one token; ``digits``: of a number only its first digit, as TeX reads it."""
        if self.accept("{"):
            tree = self.expression(depth + 1)
            self.take("}")
            return tree
        token = self.peek()
        if digits and token is not None and token.isdigit() and len(token) > 1:
            self._tokens[self._position] = token[1:]
            return ("num", Fraction(int(token[0])), None)
        return self.atom(depth + 1)

    # -- atoms -------------------------------------------------------------------------------------

    def starts_atom(self, token: str) -> bool:
        """Whether a factor can begin with ``token``. Inside an absolute value a bar ends it."""
        if token[0].isalnum() or token[0] == "." or token in ("(", "[", "{") or (token == "|" and not self._in_bars):
            return True
        name = token[1:]
        return token.startswith("\\") and (
            name in WORDS | DECORATIONS | TYPEFACES or name in ("frac", "lfloor", "lceil", "lvert", "ldots", "dots")
        )

    def atom(self, depth: int) -> Tree:
        if depth > MAX_DEPTH:
            raise ParseError(f"nested deeper than {MAX_DEPTH}")
        token = self.take()
        if "_" in token and len(token) > 1 and token[0].isalnum():
            return _numeral(token)
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return _number(token)
        for opening, closing, name in (
            ("(", ")", None), ("[", "]", None), ("{", "}", None), ("|", "|", "abs"), ("\\lvert", "\\rvert", "abs"),
            ("\\lfloor", "\\rfloor", "floor"), ("\\lceil", "\\rceil", "ceil"),
        ):  # fmt: skip
            if token == opening:
                outer, self._in_bars = self._in_bars, token == "|"
                inside = self.expression(depth + 1)
                self.take(closing)
                self._in_bars = outer
                return inside if name is None else ("call", name, inside)
        return self.command(token.lstrip("\\"), depth) if len(token) > 1 else self.name(token, depth)

    def command(self, name: str, depth: int) -> Tree:
        if name == "frac":
            above = self.argument(depth, digits=True)
            if above == ("var", "d") or (above[0] == "mul" and above[1] == ("var", "d")):
                raise ParseError("a derivative")
            return ("div", above, self.argument(depth, digits=True))
        if name == "sqrt":
            index: Tree | None = None
            if self.accept("["):
                index = self.expression(depth + 1)
                self.take("]")
            inside = self.argument(depth, digits=True)
            return ("call", "sqrt", inside) if index is None else ("pow", inside, ("div", _ONE, index))
        if name == "binom":
            return ("call", "binom", self.argument(depth, digits=True), self.argument(depth, digits=True))
        if name in ("infty", "inf", "infinity"):
            return ("const", "inf")
        if name == "pi":
            return ("const", "pi")
        if name in TYPEFACES:
            return self.typeface(depth, bold=name in ("mathbf", "boldsymbol", "bm"))
        if name in DECORATIONS:
            return ("var", f"{name}{{{self.raw_group()}}}")
        if name in ("ldots", "dots"):
            return ("var", "...")
        if name in GREEK:
            return self.name(name, depth)
        name = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}.get(name, name)
        if name in FUNCTIONS:
            return self.function(name, depth)
        raise ParseError(f"unknown command \\{name}")

    def typeface(self, depth: int, *, bold: bool) -> Tree:
        text = self.raw_group()
        if bold and text in ("e", "i"):  # unit vectors
            return ("var", text)
        if text in FUNCTIONS:
            return self.function(text, depth)
        if len(text) == 1 and text.isalpha():
            return self.name(text, depth)
        raise ParseError(f"text {text!r} inside an expression")

    def raw_group(self) -> str:
        """The tokens of a group in braces, joined; nested braces are refused."""
        if not self.accept("{"):
            return self.take()
        parts = []
        while (token := self.take()) != "}":
            if token == "{":
                raise ParseError("braces inside a name")
            parts.append(token)
        return "".join(parts)

    def name(self, name: str, depth: int) -> Tree:
        """A letter, with what belongs to it."""
        if not name.isalpha():
            raise ParseError(f"unexpected {name!r}")
        if self.peek() == "_":
            self.take()
            name += f"_{self.raw_group()}"
        while (self.peek() or "").startswith("'"):
            name += self.take()
        if name in UNKNOWN_FUNCTIONS and self.peek() == "(":
            return ("call", f"?{name}", *self.arguments(depth))
        if name in UNKNOWN_FUNCTIONS and self.peek() == "^" and "(" in self._tokens[self._position :]:
            raise ParseError(f"a power or inverse of {name}")
        if name in ("e", "i"):
            return ("const", name)
        return ("var", name)

    def function(self, name: str, depth: int) -> Tree:
        base = power = None
        while (token := self.peek()) in ("^", "_"):
            self.take()
            value = self.argument(depth, digits=True) if token == "_" else self.exponent(depth)
            base, power = (value, power) if token == "_" else (base, value)
        if base is not None and name != "log":
            raise ParseError(f"\\{name} with a subscript")
        if power == ("neg", _ONE) and name in INVERSES:
            name, power = INVERSES[name], None
        inside = self.arguments(depth) if self.peek() == "(" else [self.factors(depth)]
        if len(inside) > 1 and name not in ("max", "min", "gcd", "lcm"):
            raise ParseError(f"\\{name} of {len(inside)} arguments")
        tree: Tree = ("call", name, *inside)
        if name in ("log", "lg"):
            tree = ("call", "ln", *inside)
            base = ("num", Fraction(10), None) if name == "lg" else base
        if base is not None:
            tree = ("div", tree, ("call", "ln", base))
        return tree if power is None else ("pow", tree, power)

    def arguments(self, depth: int) -> list[Tree]:
        self.take("(")
        found = [self.expression(depth + 1)]
        while self.accept(","):
            found.append(self.expression(depth + 1))
        self.take(")")
        return found

    def factors(self, depth: int) -> Tree:
        """The argument of a function without parentheses: \\sin 2x, but in \\sin x \\cos x only x."""
        tree = self.postfix(self.atom(depth + 1), depth)
        while (token := self.peek()) is not None and self.starts_atom(token):
            if token == "(" or token.lstrip("\\") in FUNCTIONS:
                break
            tree = self.product(tree, depth)
        return tree


_ONE: Tree = ("num", Fraction(1), None)


def _mixed(whole: Tree, above: int | Fraction, below: int | Fraction) -> Tree:
    if below == 0:
        raise ParseError("a fraction over 0")
    return ("num", whole[1] + Fraction(above) / Fraction(below), None)


def _number(token: str) -> Tree:
    if "\\overline" not in token:
        point = -1 if "e" in token.lower() else token.find(".")
        return ("num", Fraction(token), None if point < 0 else len(token) - point - 1)
    head, repeating = token.rstrip("}").split("\\overline{")
    places = len(head.split(".")[1])
    start = Fraction(head + "0") if head.endswith(".") else Fraction(head)
    period = Fraction(int(repeating), 10**places * (10 ** len(repeating) - 1))
    return ("num", start + period, None)


def _numeral(token: str) -> Tree:
    """2516_8: a number written in another base than ten."""
    digits, _, base = token.partition("_")
    try:
        return ("num", Fraction(int(digits, int(base.strip("{}")))), None)
    except ValueError:
        raise ParseError(f"{token}: no numeral of that base") from None
