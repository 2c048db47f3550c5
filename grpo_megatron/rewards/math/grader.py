r"""Answers to competition mathematics: the one extractor and verifier of MATH (arXiv 2103.03874), OlympiadBench, AIME, AMC.

Departures from math-verify 0.9: a list `3, 5` is neither `3, 5, 5` nor the pair `(3,5)`; `(-\infty,3)` = `x < 3` in
both directions; `11_2` is not `11_3`, 5 cm is not 5 m, A is not a; anagrams are not equal; of several boxes in a text
the last one counts, not the one that happens to parse. Plain numbers, words and identical strings never reach sympy.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from grpo_megatron.processes.process import time_limit
from grpo_megatron.rewards.answers import MAX_BOX, box_start, last_boxed, tagged_answer
from grpo_megatron.rewards.math.structure import (
    MAX_ANSWER,
    Node,
    is_name,
    parse_tree,
    same_tree,
    split_outside_brackets,
    tidy,
    tokens_outside_brackets,
)
from grpo_megatron.rewards.math.value import TIME_LIMIT_S, import_math_verify, parsed, rational, refuses, split_unit
from grpo_megatron.rewards.reward import Extractor, extractors, rewards

# -- equations and inequalities ----------------------------------------------------------------------------------------

_INEQUALITIES = ("<", ">", "\\le", "\\ge")
_SIGNS = ("=", *_INEQUALITIES)
MAX_SIGNS = 2  # -1 < x < 5


@functools.lru_cache(maxsize=4096)
def same_relation(answer: str, prediction: str) -> bool:
    r"""Tells whether two texts, LaTeX or plain, are one equation or one inequality. Raises TimeoutError as `same_formula`.

    An equation is the numerator of (left - right): two are equal when their numerators differ by a number other than
    zero as a factor. An inequality is `expression > 0` or `>= 0`: the factor must be positive. In one variable, an
    inequality also equals an interval or a union when its solution set does. `y = 2x + 1` is `x = \frac{y-1}{2}`; `x <
    3` is `-x > -3`. Called only after a comparison as trees has failed, so plain answers never need sympy.
    """
    answer, prediction = tidy(answer), tidy(prediction)
    first, second = _signs(answer), _signs(prediction)
    if not (first or second) or max(len(first), len(second)) > MAX_SIGNS or refuses(answer) or refuses(prediction):
        return False
    with time_limit(TIME_LIMIT_S, "a relation"):
        try:
            if first == second == ["="]:
                return _same_equation(_difference(answer), _difference(prediction))
            if "=" in first + second:
                return False
            return _same_inequality(answer, prediction)
        except TimeoutError:
            raise
        except Exception:  # noqa: BLE001 - sympy raises exceptions of many types at odd formulas
            return False


def _signs(text: str) -> list[str]:
    return [token for token in tokens_outside_brackets(text) if token in _SIGNS]


def _difference(text: str) -> Any:
    """Returns left - right of a text with one sign. Raises ValueError for a side outside the grammar."""
    left, right = (_expression(side) for side in split_outside_brackets(text, set(_SIGNS)))
    return left - right


def _expression(text: str) -> Any:
    from sympy import Expr

    value = parsed(text.strip())
    if not isinstance(value, Expr):
        raise ValueError(f"{text!r} is no formula")
    return value


def _same_equation(first: Any, second: Any) -> bool:
    from sympy import fraction, together

    one, other = (fraction(together(side))[0].expand() for side in (first, second))
    factor = _factor(one, other)
    return factor is not None and bool(factor != 0)


def _factor(one: Any, other: Any) -> Any:
    """Returns the number c with one = c * other; None when there is none, or for an expression without a variable."""
    from sympy import simplify

    if one.free_symbols != other.free_symbols or not one.free_symbols or one == 0 or other == 0:
        return None
    ratio = simplify(one / other)
    return ratio if ratio.is_number and ratio.is_finite else None


def _same_inequality(answer: str, prediction: str) -> bool:
    first, second = _bounds(answer), _bounds(prediction)
    if len(first) == len(second) == 1:
        (one, is_strict), (other, is_strict_too) = first[0], second[0]
        factor = _factor(one.expand(), other.expand())
        if factor is not None:
            return is_strict == is_strict_too and bool(factor > 0)
    names = {tree.name for tree in (parse_tree(answer), parse_tree(prediction)) if tree.name}
    if len(names) > 1:  # y in [1,2] for 1 < x < 2
        return False
    one, other = _solutions(answer, first), _solutions(prediction, second)
    return one is not None and other is not None and bool(one == other)


def _bounds(text: str) -> list[tuple[Any, bool]]:
    """Returns each `expression > 0` of an inequality, and whether it is strict; [] for other texts."""
    signs, bounds = _signs(text), []
    sides = [_expression(side) for side in split_outside_brackets(text, set(_SIGNS))] if signs else []
    for sign, left, right in zip(signs, sides, sides[1:], strict=False):
        bounds.append((left - right if sign in (">", "\\ge") else right - left, sign in ("<", ">")))
    return bounds


def _solutions(text: str, bounds: list[tuple[Any, bool]]) -> Any:
    """Returns the numbers that a text describes by inequalities in one variable, or as intervals; None for others."""
    from sympy import FiniteSet, Intersection, S, Symbol, solve_univariate_inequality

    if not bounds:
        return _set(parse_tree(text))
    names = {symbol.name for bound, _ in bounds for symbol in bound.free_symbols}
    if len(names) != 1:
        return None
    x = Symbol("x", real=True)
    solutions = S.Reals
    for bound, is_strict in bounds:
        expression = bound.subs(dict.fromkeys(bound.free_symbols, x))
        relation = expression > 0 if is_strict else expression >= 0
        if relation in (True, False):
            return None
        solutions = Intersection(solutions, solve_univariate_inequality(relation, x, relational=False))
    return None if isinstance(solutions, FiniteSet) else solutions


# -- the value that an equation without variables states ---------------------------------------------------------------

_BOUND = re.compile(
    r"[-0-9]*\\(?:lim_\{?\s?(?P<lim>[a-zA-Z])\\to|(?:sum|prod)_\{?(?P<sum>[a-zA-Z])=|int.*d\s?(?P<int>[a-zA-Z])$)",
    re.DOTALL,
)
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+")
_DECIMALS = re.compile(r"(?<=[.])[0-9]+")
_UNCLEAR = re.compile(r"\\circ|degree|mod|\\log(?!_)|%|:|(?<!log)_|\\approx")  # signs that a number's value depends on


def _stated(text: str) -> str:
    r"""Returns the right side of an equation without a free variable; other texts as they are. Raises TimeoutError.

    `e^{i\pi} = -1` is -1, because that is true; `\lim_{x\to0} ... = 1` is 1, as it stands; `x + y = 1` is not 1. `x = 1`, and
    numbers as `2 + 3 = 5`, are read in structure.py. What can be seen to be false has no value: `2 + 2 = 5` is not 5.
    """
    sides = split_outside_brackets(tidy(text), {"="}) if "=" in text else []
    if len(sides) != 2 or not all(sides) or refuses(sides[0]) or refuses(sides[1]):
        return text
    left, right = sides
    if bound := _BOUND.match(left):
        variable = next(filter(None, bound.groups()))
        letters = "".join(_LETTER.findall(left.replace(f"d{variable}", "") + right))
        return right if set(letters) <= {variable, "e", "i"} and variable not in _LETTER.findall(right) else text
    one, other = _number(left), _number(right)
    return right if one is not None and other is not None and abs(one - other) < 1e-9 else text


def _is_false(text: str) -> bool:
    """Tells whether a side of an equation is a number that the last side is not, not even as a decimal that rounds it."""
    if "=" not in text or _UNCLEAR.search(text):
        return False
    *sides, last = (split_unit(side.strip()) for side in split_outside_brackets(tidy(text), {"="}))
    value = _number(last[0])
    if value is None:
        return False
    for side, unit in sides:
        number = _number(side) if unit in ("", last[1]) else None
        decimal = _DECIMALS.search(side if value.real % 1 and "." not in last[0] else last[0])
        slack = 10.0 ** -len(decimal[0]) if decimal else 0.0
        if number is not None and abs(number - value) > slack + 1e-9 * max(1.0, abs(value)):
            return True
    return False


def _number(text: str) -> complex | None:
    """Computes a formula in which no letter but e and i occurs; None for other texts. Raises TimeoutError."""
    value = rational(text)
    if value is not None:
        return complex(value)
    if refuses(text) or "," in text or is_name(text) or not set("".join(_LETTER.findall(text))) <= {"e", "i"}:
        return None
    import_math_verify()
    from sympy import E, I

    with time_limit(TIME_LIMIT_S, "an equation"):
        try:
            formula = _expression(text)
            constants = {symbol: E if symbol.name == "e" else I for symbol in formula.free_symbols}
            return complex(formula.subs(constants).evalf(20))
        except TimeoutError:
            raise
        except Exception:  # noqa: BLE001 - sympy raises exceptions of many types at odd formulas
            return None


def _set(node: Node) -> Any:
    from sympy import Interval, Union

    if node.kind == "union":
        parts = [_set(part) for part in node.parts]
        return None if None in parts else Union(*parts)
    if node.kind not in ("()", "[]", "(]", "[)") or len(node.parts) != 2:
        return None
    low, high = (_expression(part.text) for part in node.parts)
    return Interval(low, high, left_open=node.kind[0] == "(", right_open=node.kind[1] == ")")


# -- the answer in a sentence that stands in the box -------------------------------------------------------------------

MAX_SENTENCE = 200  # characters

_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
_DOUBT = re.compile(
    r"\b(?:not|no|never|neither|nor|or|either|if|unless|except|but|than|least|most|at|between|from|to|up|about|around|more"
    r"|less|over|under|above|below|maybe|perhaps|possibly|half|twice|double|triple|minus|negative|plus|squared|cubed"
    r"|percent|dozen|hundred|thousand|million|billion|false|wrong|incorrect|cannot|impossible|undefined)\b|n't",
    re.IGNORECASE,
)
_VERB = re.compile(r".*?(?:\b(?:is|are|equals?|be|becomes)\b:?|=|:)\s*(?P<value>[^=:]+)", re.DOTALL)
_FINAL = re.compile(r"(?P<before>.*)\bfinal answer(?:\s+is)?\s*:?(?P<value>[^:]{1,100})", re.DOTALL | re.IGNORECASE)
_DENIED = re.compile(r"(?:\b(?:not|no|never)|n't)(?:\s\w+){0,2}\s*$", re.IGNORECASE)  # before it
_LABEL = re.compile(r"(?i:(?:the )?(?:correct |right |final )?(?:answer|option|choice))\s+\(?(?P<value>[A-Z])\)?")
_NUMBER = re.compile(r"-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
_MATHEMATICS = re.compile(r"[-+*/^_=<>\\()\[\]{}|]")


def sentence_value(text: str) -> str | None:
    """Returns the value that a sentence states; None for a text that is no sentence, or states none or several.

    Three forms are read. After a verb at the end: `... is VALUE`, `... x = VALUE`. Two words or more with one number and no
    other mathematics. After any text, one `Final answer: VALUE`. A sentence that denies, compares, doubts or offers a choice
    has no value (`not 5`, `at least 5`, `5 or 6`): a policy that lists its guesses must not be paid for one of them.
    """
    plain = " ".join(re.sub(r"\\?\$", " ", _TEXT.sub(r" \1 ", text)).split()).rstrip(" .!")
    final = _FINAL.fullmatch(plain)
    if final and len(plain.lower().split("final answer")) == 2:
        is_clear = not _DENIED.search(final["before"]) and not _DOUBT.search(final["value"])
        return final["value"].strip() if is_clear else None
    if len(text) > MAX_SENTENCE:
        return None
    label = _LABEL.fullmatch(plain)
    if label:
        return label["value"]
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", plain)
    if not words or _DOUBT.search(plain):
        return None
    return _after_verb(plain) or (_only_number(plain) if len(words) > 1 else None)


def _after_verb(plain: str) -> str | None:
    match = _VERB.fullmatch(plain)
    if match is None or _NUMBER.search(plain[: match.start("value")]):
        return None
    return match["value"].strip()


def _only_number(plain: str) -> str | None:
    numbers = _NUMBER.findall(plain)
    if len(numbers) != 1 or _MATHEMATICS.search(plain.replace(numbers[0], "", 1)):
        return None
    return str(numbers[0])


_FINAL_LINE = re.compile(
    r"(?:the )?(?:final answer(?: is)?\s*:?|answer(?: is)?\s*:)\s*(?P<value>[^:\s].*)", re.IGNORECASE
)
_EMPHASIS = re.compile(  # a pair of single marks: `_2` and `*` of a formula stay
    r"\*\*|__|`|^\s*(?:#+|>)\s*|(?<![\w)}])(?P<mark>[*_])(?=[^\s*_{])(?P<inner>.+?)(?<=\S)(?P=mark)(?![\w({])"
)


def boxed_prediction(text: str) -> str | None:
    r"""Returns the prediction of a text, as it is written there. Several boxes in a row are a list. None without one.

    The last `\boxed{...}` (answers.py) counts, or a later `<answer>...</answer>`. Without both the last line counts if it
    is a final answer: `**Final Answer:** 73`, `Answer: $73$`, or a heading with the answer below it.
    """
    tag = text.rfind("<answer>")
    if tag < 0 and box_start(text) < 0:
        return _final_line(text[-MAX_SENTENCE:])
    if tag < 0 or box_start(text) > tag:
        return last_boxed(text)
    return tagged_answer(text[tag : tag + MAX_BOX])


def _final_line(text: str) -> str | None:
    lines = [_EMPHASIS.sub(r"\g<inner>", line).strip() for line in text.strip().splitlines() if line.strip(" *_`#=-\t")]
    match = next((found for end in (1, 2) if (found := _FINAL_LINE.fullmatch(" ".join(lines[-end:])))), None)
    if match is None or _DOUBT.search(match["value"]):
        return None
    return match["value"].removesuffix(".").strip(" $").removesuffix(".") or None


def equivalent(answer: str, prediction: str) -> bool:
    """Tells whether two texts, LaTeX or plain, are the same answer. Raises TimeoutError when sympy takes too long."""
    if answer.strip() == prediction.strip():
        return True
    if len(answer) > MAX_ANSWER or len(prediction) > MAX_ANSWER:
        return "".join(answer.split()) == "".join(prediction.split())
    for text in (prediction, sentence_value(prediction)):
        if text is None or _is_false(text):
            continue
        if same_tree(parse_tree(answer), parse_tree(text)) or same_relation(answer, text):
            return True
    first, second = _stated(answer), _stated(prediction)
    return (first, second) != (answer, prediction) and same_tree(parse_tree(first), parse_tree(second))


def is_right(answer: str, completion: str) -> bool:
    """Tells whether the prediction of `completion` is `answer`. Raises TimeoutError.

    Where several boxes make a list, the last one alone may also be right: some references of MATH have only that one.
    """
    prediction = boxed_prediction(completion)
    if prediction is None:
        return False
    if equivalent(answer, prediction):
        return True
    last = last_boxed(completion, joined=False)
    if last is None or last == prediction or not prediction.endswith(last):
        return False
    return equivalent(answer, last)


def latex_answer(answer: str) -> str:
    """Reads the reference answer, boxed or bare. Raises ValueError when it is empty."""
    if content := _without_box(answer):
        return content
    raise ValueError("the reference answer is empty")


def _without_box(answer: str) -> str:
    return (last_boxed(answer) if box_start(answer) >= 0 else answer.strip()) or ""


def vote_key(prediction: str) -> str:
    """Returns the exact number, else the tidy string: predictions with one key are one vote in maj@k."""
    text = tidy(prediction[:MAX_ANSWER])
    node = parse_tree(text)
    value = rational(node.text) if node.kind == "value" else None
    return str(value) if value is not None else text


extractors.register("math")(Extractor(boxed_prediction, latex_answer, vote_key))


@rewards.register("math", preload=import_math_verify)
def math_reward(completion: str, answer: str) -> dict[str, float]:
    """Returns 1 when the prediction is the answer, else 0. "extracted": 1 when there is a prediction to compare.

    0 also where they take too long to compare: a sample that fails would be left out of its group's mean.
    """
    try:
        correct = float(is_right(_without_box(answer), completion))
    except TimeoutError:
        correct = 0.0
    return {"score": correct, "acc": correct, "extracted": float(bool(boxed_prediction(completion)))}
