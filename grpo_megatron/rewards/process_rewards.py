"""A step reward that needs no model: is the arithmetic of each line right? (process supervision, arXiv 2402.03300, 4.1.3)

A step is a line of the response. `</think>` also ends a step, and so does the comma between two equations of the
quickstart's `8+3=11,1+7+1=9`. A step earns 1 when every equation in it holds, else 0. A step without an equation carries
no reward. The last step earns the outcome reward.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from grpo_megatron.rewards.numeric import ArithmeticRules, compute_exactly
from grpo_megatron.rewards.reward import MAX_STEPS, parse_reward, rewards

MAX_LINE = 4000  # characters read of one line
MAX_DIGITS = 40
MAX_POWER = 64
MAX_VALUE = 1 << 2000

_ANNOTATION = re.compile(r"<<([^<>]{1,300})>>")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([0-9.,]{1,40})\}\s*\{([0-9.,]{1,40})\}")
_OPERATORS = (
    (re.compile(r"\\times|\\cdot|\u00d7|\u00b7|(?<=[0-9)%])\s?[xX]\s?(?=[0-9($.])"), "*"),
    (re.compile(r"\\div|\u00f7"), "/"),
    (re.compile(r"\u2212|\u2013"), "-"),
    (re.compile(r"\\?\$|\\left|\\right|\\[,!;]|\u20ac|\u00a3"), ""),
    (re.compile(r"(?<![0-9)])\*\*(?=\$?[0-9])|(?<=[0-9%])\*\*(?!\s?[0-9(])"), ""),  # bold
    (re.compile(r"\\%"), "%"),
)
_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_ARITHMETIC_TOKEN = re.compile(rf"\s*({_DECIMAL}|\*\*|[-+*/^()=%])")
_ARITHMETIC_RUN = re.compile(rf"(?:{_DECIMAL}|\*\*|[-+*/^()=%]|\s)+")


def equations(text: str) -> list[bool]:
    """Checks each equation of a line exactly, in order; [] for a line without equations.

    An equation is a chain `48/2=24` or `2*3 = 6 = 12/2` of sides without variables, of which one has an operator. GSM8K's
    annotations `<<48/2=24>>` are equations, too. Numbers may have `$`, `%` (a hundredth) and thousands commas; operators
    are + - * / x ^ and LaTeX's \\times \\cdot \\div \\frac. A side may round its neighbour when it has two decimals or more,
    or when the exact value is no finite decimal: `10/3=3.3` and `200/3=66` hold, `7/2=3` and `1/3=0.34` do not.
    """
    text = text[:MAX_LINE]
    verdicts = []
    for annotation in _ANNOTATION.findall(text):
        verdicts += _chain(_without_latex(annotation), "", "")
    text = _without_latex(_ANNOTATION.sub("", text))
    for run in _ARITHMETIC_RUN.finditer(text):
        if "=" in run[0]:
            start = run.end() - len(run[0].lstrip())
            verdicts += _chain(run[0], text[max(0, start - 20) : start], text[run.end() : run.end() + 3])
    return verdicts


def _without_latex(text: str) -> str:
    text = _FRACTION.sub(r"(\1)/(\2)", text)
    for pattern, plain in _OPERATORS:
        text = pattern.sub(plain, text)
    return text


def _chain(run: str, before: str, after: str) -> list[bool]:
    """Checks one run of numbers and operators; returns [] when it is no equation."""
    sides = [side.strip() for side in run.split("=")]
    if _continues_left(sides[0], before):
        sides = sides[1:]
    if sides and (not sides[-1] or _continues_right(run.rstrip(), after)):
        sides = sides[:-1]
    values = [value_of(side) for side in sides]
    verdicts: list[bool] = []
    for left, right, first, second in zip(sides, sides[1:], values, values[1:], strict=False):
        if first is None or second is None or not (_is_compound(left) or _is_compound(right)):
            continue
        verdicts.append(_equal(left, right, first, second))
    return [all(verdicts)] if verdicts else []


def _equal(left: str, right: str, first: Fraction, second: Fraction) -> bool:
    if first == second or _is_rounded(right, second, first) or _is_rounded(left, first, second):
        return True
    if not right.endswith("%"):
        return False
    return _equal(left, right[:-1].rstrip(), first, second * 100)  # 3 / 4 * 100 = 75%


def _continues_left(side: str, before: str) -> bool:
    """Tells whether the left side begins before the run: `x + 5`, `apples * 2`, `of 20 + 1`, `-` behind a word."""
    word = before.rstrip()
    behind_letter = bool(before) and before == word and word[-1:].isalpha()
    if word[-1:].isalnum() and not _is_compound(side):
        return True  # Week 2 = 35 + 35
    behind_operand = bool(word) and (word[-1].isalnum() or word[-1] in ")}]%")
    if side[:1] and side[:1] in "+-*/^%)" and behind_operand:
        return True
    return behind_letter or bool(re.search(r"(?:\bof|\bthan|\bx|%|/|[a-z]\))$", word))


def _continues_right(run: str, after: str) -> bool:
    """Tells whether the last side ends after the run: `6 + x`, `5x`, `3(a`."""
    return run[-1:] in "+-*/^(" or (bool(re.match(r"[A-Za-z](?![A-Za-z])|\\[a-z]", after)) and not run.endswith(" "))


def _is_compound(side: str) -> bool:
    return bool(re.search(r"[0-9)%]\s*(?:[-+*/^])|[0-9)]\s*\(", side))


def _is_rounded(text: str, value: Fraction, exact: Fraction) -> bool:
    """Tells whether the side `text`, of this value, may stand for `exact`: rounded to nearest, or cut."""
    number = text.strip("() ")
    if not re.fullmatch(rf"-?{_DECIMAL}", number):
        return False
    places = len(number.partition(".")[2])
    is_endless = 10**MAX_DIGITS % exact.denominator != 0
    unit, error = Fraction(1, 10**places), abs(value) - abs(exact)
    return (places >= 2 or is_endless) and value * exact >= 0 and (abs(error) * 2 <= unit or -unit < error < 0)


def _small_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_POWER:
        raise ValueError("the exponent is not a small integer")
    return Fraction(base ** int(exponent))


def value_of(text: str) -> Fraction | None:
    """Computes an arithmetic expression; None when it is malformed, divides by zero, or is too large."""
    numbers = [Fraction(1, 100)]  # the expression for Python's parser has their places
    expression: list[str] = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _ARITHMETIC_TOKEN.match(text, position)
        if match is None or len(match[1]) > MAX_DIGITS or len(expression) > 400:
            return None
        position, token = match.end(), match[1]
        follows_value = bool(expression) and (expression[-1] == ")" or expression[-1].isdigit())
        if token == "%" and follows_value and expression[-1] != ")":
            numbers[-1] /= 100
        elif token == "%":
            expression += ["*", "0"]
        elif token == "(":
            expression += ["*", "("] if follows_value else ["("]
        elif token[-1].isdigit():
            expression.append(str(len(numbers)))
            numbers.append(Fraction(token.replace(",", "")))
        else:
            expression.append("**" if token == "^" else token)
    try:
        rules = ArithmeticRules(lambda place: numbers[int(place)], _small_power, MAX_VALUE)
        return compute_exactly(ast.parse(" ".join(expression), mode="eval").body, rules)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


MAX_TEXT = 200_000  # characters that are cut into steps

_STEP_END = re.compile(r"\n|</think>|(?<=[0-9]),(?![0-9]{3}(?![0-9]))(?=[0-9]+[-+*/])")


def split_steps(text: str) -> Iterator[tuple[int, str]]:
    """Yields (end, text) of every step that is not blank. White space at the end of a step does not belong to it."""
    start = 0
    borders = [match.span() for match in _STEP_END.finditer(text, 0, MAX_TEXT)]
    for end, after in [*borders, (len(text), len(text))]:
        if step := text[start:end].rstrip():
            yield start + len(step), step
        start = after


@rewards.register("arithmetic_steps", gives_steps=True, takes_columns=False)
def arithmetic_steps_reward(completion: str, answer: str, outcome: str = "gsm8k", **kwargs: Any) -> dict[str, Any]:
    """Returns the reward of the function `outcome`, called with the other kwargs, and "steps": 1 or 0 per line with equations.

    "step_acc": the share of right steps. "checked_steps": their number. Raises ValueError for an unknown `outcome`.
    """
    result = parse_reward(rewards.get(outcome)(completion, answer, **kwargs))
    reward, metrics = result.reward, dict(result.metrics)
    steps: list[tuple[int, float]] = []
    end = 0
    for end, text in split_steps(completion):
        if verdicts := equations(text):
            steps.append((end, float(all(verdicts))))
        if len(steps) >= MAX_STEPS - 1:
            break
    if steps:
        metrics = {**metrics, "step_acc": sum(value for _, value in steps) / len(steps)}
    metrics["checked_steps"] = float(len(steps))
    if end:
        end = len(completion.rstrip())
        steps = [*(step for step in steps if step[0] < end), (end, reward)]
    return {**result.texts, **metrics, "score": reward, "steps": steps}
