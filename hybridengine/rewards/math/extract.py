r"""Which part of a response is its final answer.

The last \boxed{..} or \fbox{..}; where its brace is never closed, there is no answer. Without a box: what follows the
last "answer is", "answer:" or "####"; else the last formula, with those that "and" or a comma join to it; else the last
number, likewise.
"""

from __future__ import annotations

import re

#: What is looked at of a response without a box, from its end, characters.
TAIL = 4000
BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
BARE_BOX = re.compile(r"\\boxed\s+(-?[\w.,/]+)")
MARKER = re.compile(r"(?:\banswer\s*(?:is|:|=)|####)[ \t]*:?", re.IGNORECASE)
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
JOIN = re.compile(r"\s*(?:,\s*(?:and|or)?|and|or)\s*", re.IGNORECASE)
NUMBER = re.compile(
    r"(?<![\w.])[-−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s*/\s*\d+)?(?:\s*\\?%)?(?![\w])|(?<![\w.])-?\.\d+"
)
#: A word, and those that may stand in a formula of plain characters.
WORD = re.compile(r"[A-Za-z]{2,}")
NO_PROSE = {
    "and",
    "or",
    "sin",
    "cos",
    "tan",
    "log",
    "ln",
    "exp",
    "sqrt",
    "pi",
    "frac",
    "cdot",
    "times",
    "infty",
    "text",
}
SENTENCE_END = re.compile(r"[.!?](?:\s|$)|\n")


def final_answer(response: str) -> str | None:
    """The text of the final answer, None where there is none."""
    boxes = list(BOX.finditer(response))
    bare = list(BARE_BOX.finditer(response))
    if boxes or bare:
        if not boxes or (bare and bare[-1].start() > boxes[-1].start()):
            return bare[-1][1]
        return _inside(response, boxes[-1].end())
    tail = response[-TAIL:].strip()
    if markers := list(MARKER.finditer(tail)):
        return _stated(tail[markers[-1].end() :])
    return _last_formula(tail) or _last_number(tail)


def _inside(text: str, begin: int) -> str | None:
    """What stands in the braces that open at ``begin``; None when they don't close."""
    depth = position = 0
    for position in range(begin, len(text)):
        character = text[position]
        if character in "{}" and text[position - 1] != "\\":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[begin + 1 : position]
    return None


def _stated(text: str) -> str | None:
    """After "the answer is": a formula or number that comes first, else the words up to the sentence's end."""
    text = text.strip().lstrip("*: ")
    if formula := FORMULA.match(text):
        return _joined(FORMULA, text, formula)
    end = SENTENCE_END.search(text)
    sentence = (text[: end.start()] if end else text).strip(" *\"'")
    if formula := FORMULA.search(sentence):
        return _joined(FORMULA, sentence, formula)
    return sentence or None


def _last_formula(text: str) -> str | None:
    """The last formula and those joined to it; a text that is nothing but a formula of plain characters is one, too."""
    formulas = list(FORMULA.finditer(text))
    if not formulas:
        return None
    return ", ".join(_chain(formulas, text))


def _last_number(text: str) -> str | None:
    """What follows the last equals sign, a text without prose as a whole, or the last number and those joined to it."""
    end = SENTENCE_END.search(text)
    if end is None or end.end() == len(text):
        line = text.rstrip(".!? ")
        if not any(word.lower() not in NO_PROSE for word in WORD.findall(line)):
            return line.rsplit("=", 1)[-1].strip() or None
    numbers = list(NUMBER.finditer(text))
    return ", ".join(_chain(numbers, text)) if numbers else None


def _chain(matches: list[re.Match[str]], text: str) -> list[str]:
    """The last match, and those before it that only "and", "or" or a comma separates."""
    chosen = [matches[-1]]
    for match in reversed(matches[:-1]):
        if not JOIN.fullmatch(text[match.end() : chosen[0].start()]):
            break
        chosen.insert(0, match)
    return [next((group for group in match.groups() if group), match[0]) for match in chosen]


def _joined(pattern: re.Pattern[str], text: str, first: re.Match[str]) -> str:
    """The first match and those joined to it."""
    chosen = [first]
    for match in pattern.finditer(text, first.end()):
        if not JOIN.fullmatch(text[chosen[-1].end() : match.start()]):
            break
        chosen.append(match)
    return ", ".join(next((group for group in match.groups() if group), match[0]) for match in chosen)
