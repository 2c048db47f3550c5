r"""Whether two formulas are equal, by math-verify (sympy), behind guards: it is slow, and a policy may write any text.

Refused before math-verify sees it: characters other than printable ASCII, more than MAX_FORMULA of them, deep nesting,
towers of powers of numbers such as `9^{9^{9^9}}`, huge factorials and literals. A refused formula equals only the same
string. The rest may still run for ever. TIME_LIMIT_S raises TimeoutError from inside. A call that hangs in C is ended
from outside: the pool kills its worker (`rewards/workers`), whose memory is bounded. Nothing here evaluates Python:
latex2sympy2 is a grammar (ANTLR), and math-verify's own search for expressions, which calls sympy's `parse_expr`, is
not used.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from grpo_megatron.rewards.time_limit import time_limit

MAX_FORMULA = 300  # characters
MAX_NESTING = 12
TIME_LIMIT_S = 2.0  # processor seconds per comparison

_TOWER = re.compile(r"\^\s?(?:[0-9]{5,}|\{[^{}A-Za-z]*(?:[0-9]{5,}|\^|!)|[0-9]+\s?\^)")
_POWER_OF_POWER = re.compile(r"\([^()]*\^[^()]*\)\s?\^\s?\{?[0-9]{3,}")
_FACTORIAL_POWER = re.compile(r"([0-9a-z]!)\s?\^")  # 3!^2: the grammar reads 3!^(2)
_FACTOR_BEFORE_BRACKET = re.compile(r"(?<![A-Za-z\\])([0-9a-zA-Z])\s?\(")  # n(n-1)!: no function n
_SMALL_FACTORIAL = re.compile(r"\((?!.{0,11}[0-9]{4})[0-9a-z+-]{1,12}\)\s?!(?!\s?!)")  # (n-1)!, (2n+1)!
_HUGE = re.compile(r"[0-9]{60,}|[0-9]{4,}\s?!|[)}!]\s?!\s?!?|(?:binom|choose)[^A-Za-z]*[0-9]{5,}")


def refuses(text: str) -> bool:
    """Whether a formula is not passed to sympy at all."""
    if len(text) > MAX_FORMULA or not (text.isascii() and text.isprintable()):
        return True
    depth = deepest = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    text = _SMALL_FACTORIAL.sub("n", text)
    return deepest > MAX_NESTING or any(huge.search(text) for huge in (_TOWER, _HUGE, _POWER_OF_POWER))


@functools.lru_cache(maxsize=4096)  # a prompt's samples share a few answers
def same_formula(answer: str, prediction: str) -> bool:
    """Whether math-verify finds two LaTeX formulas equivalent. Raises TimeoutError after TIME_LIMIT_S."""
    if refuses(answer) or refuses(prediction):
        return False
    import_math_verify()
    with time_limit(TIME_LIMIT_S, "a formula"):
        first, second = parsed(answer), parsed(prediction)
        return first is not None and second is not None and not _differ(first, second) and _verify(first, second)


def import_math_verify() -> None:
    """Takes a second or two, once per process."""
    _library()


@functools.cache
def _library() -> Any:
    import math_verify.grader
    import math_verify.parser

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they warn that their own time limit is off
    return math_verify


def is_near(exact: str, decimal: str) -> bool:
    """Whether `decimal` is `exact`, rounded: they differ by one unit in its last place at most. Raises TimeoutError."""
    places = len(decimal.partition(".")[2])
    if refuses(exact) or not places:
        return False
    import_math_verify()
    with time_limit(TIME_LIMIT_S, "a rounding"):
        try:
            return bool(abs(complex(parsed(exact).evalf(20)) - float(decimal)) <= 10.0**-places)
        except (TypeError, ValueError, AttributeError):  # no number, or outside the grammar
            return False


def parsed(text: str) -> Any:
    """The sympy object of a LaTeX formula; None for one outside the grammar."""
    import_math_verify()
    text = _FACTORIAL_POWER.sub(r"(\1)^", text)
    if "!" in text:
        text = _FACTOR_BEFORE_BRACKET.sub(r"\1\\cdot (", text)
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, normalize_latex

    config = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    try:
        return _library().parser.parse_latex_cached(normalize_latex(text, config=config))
    except Exception:  # noqa: BLE001 - a formula outside the grammar equals nothing
        return None


def _differ(answer: Any, prediction: Any) -> bool:
    """Whether two expressions clearly differ at one point: this settles most wrong predictions without `simplify`."""
    from sympy import Expr

    if not (isinstance(answer, Expr) and isinstance(prediction, Expr)):
        return False
    names = sorted({symbol.name for symbol in answer.free_symbols | prediction.free_symbols})
    point = {name: 0.618034 + 0.377 * index for index, name in enumerate(names)}
    try:
        first, second = (
            complex(expression.subs({symbol: point[symbol.name] for symbol in expression.free_symbols}).evalf(20))
            for expression in (answer, prediction)
        )
        return abs(first - second) > 1e-5 * max(1.0, abs(first), abs(second))  # False for nan
    except Exception:  # noqa: BLE001 - no number at this point; math-verify decides
        return False


def _verify(answer: Any, prediction: Any) -> bool:
    from sympy import Expr, factorial, gammasimp

    try:
        if isinstance(answer, Expr) and isinstance(prediction, Expr) and (answer - prediction).has(factorial):
            return bool(gammasimp((answer / prediction).rewrite("gamma")) == 1)
        return bool(_library().grader.sympy_expr_eq(answer, prediction, 6, 15))
    except Exception:  # noqa: BLE001 - sympy raises exceptions of many types at odd formulas
        return False
