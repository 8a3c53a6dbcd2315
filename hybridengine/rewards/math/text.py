r"""LaTeX and plain text brought into one spelling, before anything is read from it."""

from __future__ import annotations

import re

#: Unicode that people and models write for a command, or for a plain character.
CHARACTERS = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "±": r"\pm ",
    "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∈": r"\in ",
    "∪": r"\cup ", "∅": r"\emptyset ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "θ": r"\theta ",
    "λ": r"\lambda ", "μ": r"\mu ", "σ": r"\sigma ", "φ": r"\phi ", "ω": r"\omega ", "½": r"\frac{1}{2}",
    "⅓": r"\frac{1}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅔": r"\frac{2}{3}",
    "’": "'", "′": "'", "“": '"', "”": '"', "\u00a0": " ", "≈": r"\approx ",
}  # fmt: skip
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")

SPACES = re.compile(r"(?<!\\)((?:\\\\)*)(?:\\(?:[,;:! ]|(?:quad|qquad|displaystyle|limits|thinspace)(?![A-Za-z]))|~)")
SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|middle)(?![A-Za-z])\s*")
#: Commands that mean the same.
SYNONYMS = {
    "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac", "dbinom": r"\binom", "tbinom": r"\binom", "leq": r"\le",
    "leqslant": r"\le", "geq": r"\ge", "geqslant": r"\ge", "neq": r"\ne", "varnothing": r"\emptyset", "lbrace": r"\{",
    "rbrace": r"\}", "vert": "|", "mid": "|", "degree": r"^\circ", "textrm": r"\text", "mbox": r"\text",
    "textnormal": r"\text", "rm": r"\text", "dots": r"\ldots", "cdots": r"\ldots", "dotsc": r"\ldots", 
    "lt": "<", "gt": ">",
}  # fmt: skip
COMMAND = re.compile(r"\\([A-Za-z]+)")
CHOOSE = re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}")
#: A whole answer in a pair of delimiters.
DELIMITED = [re.compile(pattern, re.DOTALL) for pattern in (
    r"\$\$([^$]+)\$\$", r"\$([^$]+)\$", r"\\\((.+)\\\)", r"\\\[(.+)\\\]",
)]  # fmt: skip
CONJUNCTION = re.compile(
    r"\\text\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\]),?\s*\b(?:and|or)\b\s*(?![A-Za-z])", re.IGNORECASE
)
GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")


def clean(text: str) -> str:
    r"""One spelling for what looks alike: no delimiters, no spacing, ``\frac`` for ``\dfrac``.

    >>> clean(r"$\left(1,\,\dfrac12\right)$.")
    '(1,\\frac12)'
    """
    text = text.strip()
    text = "".join(CHARACTERS.get(c, c) for c in text)
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda match: f"^{{{match[0].translate(SUPERSCRIPTS)}}}", text)
    text = re.sub(r"(?<=\d)(?:\\[,!; ]|\{,\}|,\\!)(?=\d{3}(?!\d))", ",", text)  # 1\,000 and 1{,}000
    text = SIZES.sub("", text)
    text = SPACES.sub(r"\1 ", text)
    text = COMMAND.sub(lambda match: SYNONYMS.get(match[1], match[0]), text)
    text = CHOOSE.sub(r"\\binom{\1}{\2}", text)
    text = re.sub(r"\s+", " ", text).strip().rstrip(".").strip()
    for pattern in DELIMITED:
        if match := pattern.fullmatch(text):
            text = match[1].strip().rstrip(".,").strip()
    text = text.replace(r"\%", "%")
    return CONJUNCTION.sub(",", text)


#: Brackets that keep what is inside them together. A bar is none: it opens and closes alike.
OPENING, CLOSING = ("(", "[", "{", r"\{", r"\lvert", r"\lfloor", r"\lceil", r"\langle"), (
    ")", "]", "}", r"\}", r"\rvert", r"\rfloor", r"\rceil", r"\rangle",
)  # fmt: skip
GROUPING_OPENING, GROUPING_CLOSING = ("(", "[", r"\{", r"\langle"), (")", "]", r"\}", r"\rangle")
PIECE = re.compile(r"\\(?:[A-Za-z]+|.)|.", re.DOTALL)


def split(text: str, separators: tuple[str, ...]) -> list[tuple[str, str]]:
    """Cut at separators outside all brackets: (the separator before a part, "" for the first; the part), ...

    A command is one separator: ``\\le`` is not found inside ``\\left``.
    """
    parts: list[tuple[str, str]] = []
    depth, begin, before = 0, 0, ""
    for match in PIECE.finditer(text):
        piece = match[0]
        if piece in OPENING:
            depth += 1
        elif piece in CLOSING:
            depth -= 1
        elif depth == 0 and piece in separators:
            parts.append((before, text[begin : match.start()].strip()))
            before, begin = piece, match.end()
    return [*parts, (before, text[begin:].strip())]


def enclosed(text: str) -> tuple[str, str, str] | None:
    """(opening bracket, inside, closing bracket) when one pair of brackets encloses the whole text, else None.

    The two need not match: [1, 2) is an interval.
    """
    depth = 0
    pieces = list(PIECE.finditer(text))
    if not pieces or pieces[0][0] not in OPENING or pieces[-1][0] not in CLOSING:
        return None
    for match in pieces[:-1]:
        depth += (match[0] in OPENING) - (match[0] in CLOSING)
        if depth == 0:
            return None
    if depth != 1:
        return None
    return pieces[0][0], text[pieces[0].end() : pieces[-1].start()].strip(), pieces[-1][0]


def depth_of(text: str) -> int | None:
    """How deep brackets are nested; None where one has no partner. [1, 2) counts as partners, but not {1, 2)."""
    depth = braces = deepest = 0
    for match in PIECE.finditer(text):
        piece = match[0]
        depth += (piece in OPENING) - (piece in CLOSING)
        braces += (piece == "{") - (piece == "}")
        deepest = max(deepest, depth)
        if depth < 0 or braces < 0:
            return None
    return deepest if depth == 0 and braces == 0 else None


def without_grouping(text: str) -> str:
    """1,234,567 as 1234567: groups of exactly three digits without a space after the comma, outside pairs and sets."""
    parts, depth, begin = [], 0, 0
    for match in [*PIECE.finditer(text), None]:
        piece = "" if match is None else match[0]
        opens, closes = piece in GROUPING_OPENING, piece in GROUPING_CLOSING
        if match is None or (opens and depth == 0) or (closes and depth == 1):
            end = len(text) if match is None else match.end()
            part = text[begin:end]
            parts.append(part if depth else GROUPED.sub(lambda found: found[0].replace(",", ""), part))
            begin = end
        depth += opens - closes
    return "".join(parts)
