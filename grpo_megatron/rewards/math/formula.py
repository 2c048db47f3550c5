r"""Equivalence of two formulas by math-verify (sympy), behind guards: it is slow, and a policy will write anything.

Refused without asking it (two different strings are then different): other characters than printable ASCII, more than
MAX_FORMULA of them, deep nesting, towers of powers of numbers such as `9^{9^{9^9}}`, huge factorials and literals.
What passes may still take for ever: TIME_LIMIT_S raises TimeoutError from inside; what hangs in C is killed with its
worker from outside (`rewards/pool.py`), which also bounds the memory. Nothing here evaluates Python: latex2sympy2 is
a grammar (ANTLR), and math-verify's own search for expressions, which calls sympy's `parse_expr`, is not used.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

MAX_FORMULA = 300  # characters
MAX_NESTING = 12
TIME_LIMIT_S = 2.0  # of the processor, for one comparison: a busy machine does not change verdicts

_TOWER = re.compile(r"\^\s?(?:[0-9]{5,}|\{[^{}A-Za-z]*(?:[0-9]{5,}|\^|!)|[0-9]+\s?\^)")
_POWER_OF_POWER = re.compile(r"\([^()]*\^[^()]*\)\s?\^\s?\{?[0-9]{3,}")
_HUGE = re.compile(r"[0-9]{60,}|[0-9]{4,}\s?!|[)}!]\s?!\s?!?|(?:binom|choose)[^A-Za-z]*[0-9]{5,}")


class _OutOfTime(BaseException):
    """Not an Exception: sympy and math-verify catch those all over the place."""


def refuses(text: str) -> bool:
    """Whether a formula is not given to sympy at all."""
    if len(text) > MAX_FORMULA or not (text.isascii() and text.isprintable()):
        return True
    depth = deepest = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    return deepest > MAX_NESTING or any(huge.search(text) for huge in (_TOWER, _HUGE, _POWER_OF_POWER))


@functools.lru_cache(maxsize=4096)  # a prompt's samples share a few answers
def same_formula(gold: str, answer: str) -> bool:
    """Whether math-verify finds two LaTeX formulas equivalent. Raises TimeoutError after TIME_LIMIT_S."""
    if refuses(gold) or refuses(answer):
        return False
    load()
    with _time_limit():
        first, second = _parsed(gold), _parsed(answer)
        return first is not None and second is not None and not _differ(first, second) and _verify(first, second)


def load() -> None:
    """Import math-verify: a second or two, once a process."""
    _library()


@functools.cache
def _library() -> Any:
    import math_verify.grader
    import math_verify.parser

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # it warns that its own time limit is off
    return math_verify


def _parsed(text: str) -> Any:
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, normalize_latex

    config = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    try:
        return _library().parser.parse_latex_cached(normalize_latex(text, config=config))
    except Exception:  # noqa: BLE001 - a formula that the grammar does not know is equal to nothing
        return None


def _differ(gold: Any, answer: Any) -> bool:
    """Whether two expressions have clearly different values somewhere: most wrong answers, without `simplify`."""
    from sympy import Expr

    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return False
    names = sorted({symbol.name for symbol in gold.free_symbols | answer.free_symbols})
    point = {name: 0.618034 + 0.377 * index for index, name in enumerate(names)}
    try:
        first, second = (
            complex(expression.subs({symbol: point[symbol.name] for symbol in expression.free_symbols}).evalf(20))
            for expression in (gold, answer)
        )
        return abs(first - second) > 1e-5 * max(1.0, abs(first), abs(second))  # False for nan
    except Exception:  # noqa: BLE001 - no number there; math-verify shall tell
        return False


def _verify(gold: Any, answer: Any) -> bool:
    try:
        return bool(_library().grader.sympy_expr_eq(gold, answer, 6, 15))
    except Exception:  # noqa: BLE001 - sympy raises all kinds of things at odd formulas
        return False


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """SIGVTALRM, where that is possible: on the main thread."""
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return

    def stop(*_: object) -> None:
        raise _OutOfTime

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, TIME_LIMIT_S, 0.5)  # again and again: sympy may lose one in a destructor
    try:
        yield
    except _OutOfTime:
        raise TimeoutError(f"no verdict on a formula after {TIME_LIMIT_S:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
