r"""Whether two relations are one: `y = 2x + 1` and `x = \frac{y-1}{2}`; `x < 3`, `-x > -3` and `(-\infty, 3)`.

An equation is the numerator of (left - right): two equations are equal when their numerators differ by a factor that
is a number other than zero. An inequality is `expression > 0` or `>= 0`: the factor must be positive. In one variable,
an inequality also equals an interval or a union when its solution set does. Only texts with a relation sign reach this
file, and only after a comparison as trees has failed, so plain answers never need sympy.
"""

from __future__ import annotations

import functools
from typing import Any

from grpo_megatron.rewards.math.formula import TIME_LIMIT_S, parsed, refuses
from grpo_megatron.rewards.math.latex import tidy
from grpo_megatron.rewards.math.tree import Node, parse_tree, split_outside_brackets, tokens_outside_brackets
from grpo_megatron.rewards.time_limit import time_limit

_INEQUALITIES = ("<", ">", "\\le", "\\ge")
_SIGNS = ("=", *_INEQUALITIES)
MAX_SIGNS = 2  # -1 < x < 5


@functools.lru_cache(maxsize=4096)
def same_relation(answer: str, prediction: str) -> bool:
    """Whether two texts, LaTeX or plain, are one equation or one inequality. Raises TimeoutError as `same_formula`."""
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
    """left - right of a text with one sign. Raises ValueError for a side outside the grammar."""
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
    """The number c with one = c * other; None when there is none, or an expression without a variable."""
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
    one, other = _solutions(answer, first), _solutions(prediction, second)
    return one is not None and other is not None and bool(one == other)


def _bounds(text: str) -> list[tuple[Any, bool]]:
    """Each `expression > 0` of an inequality, with whether it is strict; [] for other texts."""
    signs, bounds = _signs(text), []
    sides = [_expression(side) for side in split_outside_brackets(text, set(_SIGNS))] if signs else []
    for sign, left, right in zip(signs, sides, sides[1:], strict=False):
        bounds.append((left - right if sign in (">", "\\ge") else right - left, sign in ("<", ">")))
    return bounds


def _solutions(text: str, bounds: list[tuple[Any, bool]]) -> Any:
    """The set of numbers that a text describes by inequalities in one variable, or as intervals; None for other texts."""
    from sympy import FiniteSet, Intersection, S, Symbol, solve_univariate_inequality

    if not bounds:
        return _set(parse_tree(text))
    names = {symbol.name for bound, _ in bounds for symbol in bound.free_symbols}
    if len(names) != 1:
        return None
    x = Symbol("x", real=True)
    found = S.Reals
    for bound, is_strict in bounds:
        expression = bound.subs(dict.fromkeys(bound.free_symbols, x))
        relation = expression > 0 if is_strict else expression >= 0
        if relation in (True, False):
            return None
        found = Intersection(found, solve_univariate_inequality(relation, x, relational=False))
    return None if isinstance(found, FiniteSet) else found


def _set(node: Node) -> Any:
    from sympy import Interval, Union

    if node.kind == "union":
        parts = [_set(part) for part in node.parts]
        return None if None in parts else Union(*parts)
    if node.kind not in ("()", "[]", "(]", "[)") or len(node.parts) != 2:
        return None
    low, high = (_expression(part.text) for part in node.parts)
    return Interval(low, high, left_open=node.kind[0] == "(", right_open=node.kind[1] == ")")
