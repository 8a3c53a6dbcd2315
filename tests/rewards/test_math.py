r"""The mathematical verifier: what equals what, what is refused, and that nothing takes long."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from hybridengine.rewards.math import check_golds, math_reward, read_gold
from hybridengine.rewards.math.equal import equal
from hybridengine.rewards.math.extract import final_answer

#: Each line holds spellings of one answer; no answer of another line equals any of them.
CLASSES: list[list[str]] = [
    ["42", "42.0", "+42", "$42$", r"\(42\)", r"\boxed{42}", "042"],
    ["-7", "−7", r"-\frac{14}{2}"],
    [r"\frac{3}{4}", r"\dfrac{3}{4}", r"\tfrac34", r"\frac34", "3/4", "0.75", ".75", "75\\%", r"-\frac{-3}{4}"],
    [r"2\sqrt{2}", r"\sqrt{8}", r"2\cdot\sqrt2", r"2^{3/2}", r"\frac{4}{\sqrt{2}}", "2√2"],
    ["2", r"\sqrt{4}", r"\sqrt[3]{8}", r"\log_2 4", "4/2"],
    [r"\sqrt{2}", r"2^{1/2}"],
    [r"\frac{1}{2004!}"],
    [r"\frac{1}{2006!}"],
    ["1728", "1,728", r"1{,}728", r"1\,728", "12^3"],
    ["1331"],
    ["1331 and 1728", "1728, 1331", r"1331\text{ and }1728", r"\{1331, 1728\}", r"1331 \text{ or } 1728"],
    ["(1331, 1728)", r"\left(1331,\,1728\right)"],
    ["(1728, 1331)"],
    ["[1331, 1728]"],
    ["[1331, 1728)"],
    [r"11\frac{1}{2}", "11 1/2", "11.5", r"\frac{23}{2}"],
    [r"\frac{11}{2}", r"5\frac12", "5.5", r"11\cdot\frac{1}{2}"],
    [r"10\%", "0.1", "0.10", r"\frac{1}{10}"],
    ["10", "1e1"],
    [r"10.5\%", "0.105"],
    ["10.5"],
    [r"0.\overline{3}", r"\frac13"],
    ["0.33"],
    [r"\pi", r"\pi\cdot 1", "pi"],
    ["3.14"],
    [r"3\pi", r"\pi\cdot 3"],
    [r"\frac{\pi}{4}", r"\arctan 1", r"\tan^{-1} 1"],
    [r"x^2+2x+1", "(x+1)^2", "(1+x)(x+1)", r"x^{2}+2\cdot x+1"],
    ["x^2+2x-1"],
    ["x^2-1", "(x-1)(x+1)"],
    [r"\sqrt{x^2}", "|x|", r"\lvert x \rvert"],
    ["x", r"\frac{2x}{2}"],
    ["X"],
    ["n"],
    ["N+1", "1+N"],
    ["n+1"],
    [r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}", r"\binom{n+1}{2}"],
    [r"\sin^2 x", r"1-\cos^2 x", r"(\sin x)^2"],
    [r"\sin 2x", r"2\sin x\cos x"],
    [r"\sin x^2", r"\sin(x^2)"],
    [r"\ln 2", r"\frac{\ln 4}{2}", r"\log 2"],
    [r"\log_{10} 2", r"\lg 2"],
    ["e^2", r"\exp(2)"],
    ["1+2i", "2i+1"],
    ["1-2i"],
    ["i"],
    [r"\infty", r"+\infty", "∞"],
    [r"-\infty"],
    [r"(-\infty, 3]", r"x \le 3", r"x\leq 3", r"3 \ge x", r"x \in (-\infty, 3]"],
    [r"(-\infty, 3)", "x < 3", "3 > x"],
    ["(1,2)", "1<x<2", "2 > x > 1"],
    ["[1,2)", r"1\le x<2"],
    ["1, 2", r"\{2,1\}", "1 and 2"],
    ["1, 2, 3"],
    [r"(-\infty,0)\cup(1,\infty)", r"(1,\infty)\cup(-\infty,0)", r"(-\infty, 0) ∪ (1, \infty)"],
    [r"\pm 3", "3, -3", r"\{-3, 3\}"],
    [r"3\pm\sqrt{2}", r"3-\sqrt2, 3+\sqrt2"],
    ["2:3", "4:6"],
    ["3:2"],
    ["1:2:3", "2:4:6"],
    [r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"],
    [r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"],
    [r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"],
    ["y=2x+3", "2x+3"],
    ["2x+3z"],
    ["x+y=3", "2x+2y=6", "x=3-y", "3=y+x"],
    ["x+y=4"],
    [r"x^2+y^2=4", r"\frac{x^2}{4}+\frac{y^2}{4}=1"],
    ["x+2y<3", "3 > x+2y", "2x+4y<6"],
    ["x+2y>3"],
    [r"x \ne 3"],
    [r"12\text{ cm}", "12 cm", r"12\,\mathrm{cm}"],
    [r"13\text{ m}"],
    [r"6\pi\text{ cm}^2", r"6\pi"],
    [r"\$36", "36 dollars", r"36\text{ dollars}"],
    [r"90^\circ", r"90^{\circ}", r"90\text{ degrees}", "90°"],
    [r"\frac{\pi}{2}", r"\arcsin 1"],
    [r"\frac12", "1/2", "0.5", r"\sin 30^\circ", "50%", "½"],
    ["100!"],
    [r"10^{100}"],
    ["10^{100}+1"],
    ["9^{9^9}"],
    ["9^{9^8}"],
    [r"\binom{10}{3}", r"{10\choose 3}", "120", r"\dbinom{10}{3}"],
    ["111_2", "7", r"111_{2}"],
    ["111"],
    ["2516_8"],
    ["4.5\\times 10^3", "4500", "4.5e3"],
    [r"\text{Evelyn}", "Evelyn", "evelyn"],
    [r"\text{no solution}", "no solution", r"\text{ No  solution }"],
    [r"\text{(B)}", "B", "(B)", r"\textbf{(B)}", r"\mathrm{B}"],
    ["C"],
    [r"\emptyset", r"\varnothing", r"\{\}"],
    [r"\mathbb{R}"],
    [r"a_n"],
    [r"a_{n+1}"],
    ["x'"],
    [r"\alpha\beta", r"\beta\alpha"],
    [r"f(2)"],
    ["2f"],
    [r"\overline{AB}"],
    [r"\lfloor 5.7\rfloor", "5"],
    [r"\text{June 5}"],
    ["1,2,\\ldots,n"],
]  # fmt: skip

GOLDS = [(i, text) for i, texts in enumerate(CLASSES) for text in texts]


@pytest.mark.parametrize("gold", [text for _, text in GOLDS])
def test_every_gold_equals_itself_boxed(gold: str) -> None:
    assert math_reward("", rf"so it is \boxed{{{gold}}}.", gold) == 1.0


@pytest.mark.parametrize("index", range(len(CLASSES)), ids=[texts[0] for texts in CLASSES])
def test_spellings_of_one_answer_are_equal(index: int) -> None:
    for gold, response in itertools.permutations(CLASSES[index], 2):
        assert math_reward("", rf"\boxed{{{response}}}", gold) == 1.0, (gold, response)


@pytest.mark.parametrize("index", range(len(CLASSES)), ids=[texts[0] for texts in CLASSES])
def test_every_gold_differs_from_every_other(index: int) -> None:
    """Over 50,000 pairs that are not mathematically equal."""
    wrong = [
        (gold, other)
        for gold in CLASSES[index]
        for i, other in GOLDS
        if i != index and equal(read_gold(gold), read_gold(other))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("response", "gold", "reward"),
    [
        pytest.param(r"\boxed{1} or rather \boxed{2}", "2", 1.0, id="the-last-box"),
        pytest.param(r"\boxed{1} or rather \boxed{2}", "1", 0.0, id="not-an-earlier-one"),
        pytest.param(r"so \boxed{42", "42", 0.0, id="unclosed-box"),
        pytest.param(r"\boxed{42} then \boxed{4", "42", 0.0, id="unclosed-last-box"),
        pytest.param(r"\boxed{\text{a }\{1,2\}}", "3", 0.0, id="escaped-braces"),
        pytest.param(r"\fbox{3}", "3", 1.0, id="fbox"),
        pytest.param(r"\boxed 3", "3", 1.0, id="box-without-braces"),
        pytest.param(r"$\boxed{\frac{1}{2}}$.", "0.5", 1.0, id="box-in-a-formula"),
        pytest.param("x = 3, hence \\boxed{4}, not 5", "4", 1.0, id="box-before-everything"),
        pytest.param(r"\boxed{2+2=4}", "4", 1.0, id="a-calculation"),
        pytest.param(r"\boxed{2+2=5}", "5", 0.0, id="a-wrong-calculation"),
        pytest.param(r"\boxed{x=2}", "2", 1.0, id="named"),
        pytest.param(r"\boxed{x=2}", "y=2", 0.0, id="named-otherwise"),
        pytest.param("The answer is 1,000.", "1000", 1.0, id="thousands"),
        pytest.param("$(x+1)^2$", "$x^2+2x+1$", 1.0, id="algebra"),
        pytest.param("The answer is $\\frac{3}{4}$ after 5 steps", "3/4", 1.0, id="stated-formula"),
        pytest.param("**Answer:** 12", "12", 1.0, id="stated-number"),
        pytest.param("The answer is (B).", "B", 1.0, id="choice"),
        pytest.param("step 1 ...\n#### 72", "72", 1.0, id="gsm8k"),
        pytest.param("I think it is 5", "5", 1.0, id="last-number"),
        pytest.param("it costs \\$5.50 in all.", "5.5", 1.0, id="price"),
        pytest.param("2 + 2 = 4", "4", 1.0, id="after-the-equals-sign"),
        pytest.param("1331 and 1728", "1728", 0.0, id="two-numbers-are-not-the-second"),
        pytest.param("The numbers are 1331 and 1728.", "1728", 0.0, id="nor-in-a-sentence"),
        pytest.param("The numbers are 1331 and 1728.", "1331, 1728", 1.0, id="both"),
        pytest.param("$x=1$ and $x=2$", "1, 2", 1.0, id="two-formulas"),
        pytest.param(r"\boxed{2}", r"2\sqrt{2}", 0.0, id="first-factor-only"),
        pytest.param(r"\boxed{0.333333}", "1/3", 1.0, id="six-digits-of-a-third"),
        pytest.param(r"\boxed{0.666667}", "2/3", 1.0, id="rounded"),
        pytest.param(r"\boxed{0.666666}", "2/3", 1.0, id="cut"),
        pytest.param(r"\boxed{0.666665}", "2/3", 0.0, id="neither"),
        pytest.param(r"\boxed{0.33}", "1/3", 0.0, id="two-digits-are-not-enough"),
        pytest.param(r"\boxed{3.14159}", r"\pi", 1.0, id="digits-of-pi"),
        pytest.param(r"\boxed{0.3333333}", "0.333333", 0.0, id="two-decimals-are-exact"),
        pytest.param(r"\boxed{12\text{ m}}", r"12\text{ cm}", 0.0, id="another-unit"),
        pytest.param(r"\boxed{12}", r"12\text{ cm}", 1.0, id="unit-left-out"),
        pytest.param(r"\boxed{7}", "8", 0.0, id="wrong"),
        pytest.param("no idea", "8", 0.0, id="no-answer"),
        pytest.param("", "8", 0.0, id="nothing"),
        pytest.param(r"\boxed{}", "8", 0.0, id="empty-box"),
        pytest.param(r"\boxed{1/0}", "8", 0.0, id="division-by-zero"),
    ],
)
def test_responses(response: str, gold: str, reward: float) -> None:
    assert math_reward("", response, gold) == reward


@pytest.mark.parametrize(
    ("percent", "equal"), [("value", {"50%": "0.5", "0.5%": "0.005"}), ("unit", {"50%": "50", "0.5%": "0.5"})]
)
def test_percent_signs_follow_one_rule(percent: str, equal: dict[str, str]) -> None:
    """For whole numbers and decimals, on either side."""
    for text, number in equal.items():
        for response, gold in ((text, number), (number, text), (text, text)):
            assert math_reward("", rf"\boxed{{{response}}}", gold, percent=percent) == 1.0
    other = {"value": "50", "unit": "0.005"}[percent]
    assert math_reward("", r"\boxed{50\%}", other, percent=percent) == 0.0


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        pytest.param(None, "which is None", id="none"),
        pytest.param({"a": 1}, "the answer is a dict", id="dict"),
        pytest.param("", "empty", id="empty"),
        pytest.param(r"\frac{1}{", "a bracket without its partner", id="cut"),
        pytest.param("2+", "expected more", id="dangling-operator"),
        pytest.param(r"\frac{dy}{dx}", "a derivative", id="derivative"),
        pytest.param(r"\int_0^1 x", r"unknown command \\int", id="integral"),
        pytest.param("3 4", "a number after what it would multiply", id="numbers-side-by-side"),
        pytest.param("1.2.3", "a number after", id="two-points"),
        pytest.param(r"\boxed{5", "never closed", id="unclosed-box"),
        pytest.param("n!!", "a double factorial", id="double-factorial"),
        pytest.param("x" * 4000, "longer than", id="too-long"),
        pytest.param("(" * 100 + "1" + ")" * 100, "nested", id="too-deep"),
        pytest.param("1+" * 1400 + "1", "can't be", id="equals-not-even-itself"),
    ],
)
def test_golds_that_are_refused(gold: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_gold(gold)
    assert check_golds([""], [""], [gold]) == [0.0]


def nested(form: str, depth: int) -> str:
    text = "1"
    for _ in range(depth):
        text = form.replace("#", text)
    return text


HARD = {
    "fractions": nested(r"\frac{1}{1+#}", 30),
    "many-fractions": nested(r"\frac{1}{1+#}", 300),
    "roots": nested(r"\sqrt{1+#}", 30),
    "parentheses": nested("(#)", 1000),
    "signs": "-" * 2000 + "1",
    "powers": "9^" * 500 + "9",
    "tower": "9^{9^{9^{9^9}}}",
    "factorials": nested("(#)!", 20),
    "factorial": "(10^{8})!",
    "sum": "1+" * 1400 + "1",
    "product": "(x+1)" * 500,
    "digits": "9" * 2900,
    "list": ",".join(["1"] * 1000),
    "sine": r"\sin(10^{10^{10}})",
    "exponentials": "e^{e^{e^{e^e}}}",
    "bars": "|" * 1000 + "x" + "|" * 1000,
    "dollars": "$" * 4000,
    "backslashes": "\\" * 3000,
    "words": "and " * 700,
    "huge-decimal": "1e9999",
    "polynomial": "(x+y+z)^{1000}",
}


@pytest.mark.parametrize("text", HARD.values(), ids=HARD)
def test_no_text_takes_long(text: str) -> None:
    """Each takes milliseconds; a second of processor time leaves room for a slow machine."""
    begin = time.process_time()
    math_reward("", rf"\boxed{{{text}}}", r"\frac{3}{7}")
    math_reward("", f"the answer is {text}", r"\frac{3}{7}")
    math_reward("", text, "x^2+3")
    assert time.process_time() - begin < 1.0


def test_long_response_is_read_in_linear_time() -> None:
    text = "we see that $x$ is \\boxed{3} and 3,000 of them " * 4000
    begin = time.process_time()
    assert final_answer(text + r"\boxed{7}") == "7"
    assert final_answer(text.replace("\\boxed{3}", "3") + "the answer is 7") == "7"
    assert time.process_time() - begin < 1.0


COMMON = [
    r"\frac{3}{4}", r"\frac{6}{8}", r"2\sqrt{2}", r"\sqrt{8}", r"\sqrt{2}", r"x^2+2x+1", r"(x+1)^2", r"x^2-1",
    r"(x-1)(x+1)", r"\frac{\pi}{4}", r"3\pi", r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}", r"1+2i", r"2i+1", r"1-2i",
    r"e^2", r"100", r"-7",
    r"(1,2]", r"[1,2)", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}",
]  # fmt: skip


def test_agrees_with_math_verify() -> None:
    """An independent reference, on answers that both read; what it reads otherwise is in CLASSES."""
    pytest.importorskip("math_verify")
    from hybridengine.rewards.math_verify import math_verify_reward

    for gold, response in itertools.combinations_with_replacement(COMMON, 2):
        boxed = rf"$\boxed{{{response}}}$"
        assert math_reward("", boxed, gold) == math_verify_reward("", boxed, gold), (gold, response)
