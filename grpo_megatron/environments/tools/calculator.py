"""The tool `calculator`: exact arithmetic on integers and decimals (rewards/numeric.py), so that 0.1 + 0.2 is 0.3.

An expression has no names, attributes, or calls but those of FUNCTIONS. Results and intermediate results have at most
MOST_DIGITS digits. A power's size is known before it is computed, so 9**9**9 is refused at once.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from fractions import Fraction

from grpo_megatron.environments.tool import ToolError, tools
from grpo_megatron.rewards.numeric import ArithmeticRules, compute_exactly

MAX_LENGTH = 1000  # characters of an expression
MOST_DIGITS = 100  # of a numerator or denominator
PRECISION = 12  # significant digits of a result that is no integer and no short decimal
TOO_LARGE = f"the result has more than {MOST_DIGITS} digits"


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if base < 0:
            raise ToolError("a root of a negative number")
        return Fraction(float(base) ** float(exponent))
    size = max(len(str(abs(base.numerator))), len(str(base.denominator)))
    if base not in (0, 1, -1) and abs(exponent) * size > 4 * MOST_DIGITS:
        raise ToolError(TOO_LARGE)
    return Fraction(base ** int(exponent))


def _sqrt(value: Fraction) -> Fraction:
    roots = math.isqrt(abs(value.numerator)), math.isqrt(value.denominator)
    exact = Fraction(roots[0], roots[1])
    return exact if exact * exact == value else _power(value, Fraction(1, 2))


def _round(value: Fraction, digits: Fraction = Fraction(0)) -> Fraction:
    return Fraction(round(value, max(min(int(digits), MOST_DIGITS), -MOST_DIGITS)))


FUNCTIONS: dict[str, Callable[..., Fraction]] = {"abs": abs, "min": min, "max": max, "round": _round, "sqrt": _sqrt}
# repr: the shortest decimal that is this float, so that 0.1 is one tenth
RULES = ArithmeticRules(lambda literal: Fraction(repr(literal)), _power, 10**MOST_DIGITS, FUNCTIONS)


@tools.register("calculator")
def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, and abs, min, max, round, sqrt; such as "12.5 * (3 + 4)".
    """
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"the expression has {len(expression)} characters; at most {MAX_LENGTH}")
    try:
        return _text(compute_exactly(ast.parse(expression.strip().replace("^", "**"), mode="eval").body, RULES))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (OverflowError, RecursionError, MemoryError):  # MemoryError: too many parentheses
        raise ToolError(f"the expression or a number in it is too large, or {TOO_LARGE}") from None
    except SyntaxError as error:
        raise ToolError(f"not an arithmetic expression ({error.msg})") from None
    except ValueError as error:
        raise ToolError(f"{error}; use numbers, + - * / // % ** ( ), and {', '.join(FUNCTIONS)}") from None


def _text(value: Fraction) -> str:
    """Writes an integer, an exact decimal of at most PRECISION places, or PRECISION significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    if 10**PRECISION % value.denominator == 0:
        digits = f"{abs(value.numerator) * (10**PRECISION // value.denominator):0{PRECISION + 1}d}"
        return f"{'-' * (value < 0)}{digits[:-PRECISION]}.{digits[-PRECISION:].rstrip('0')}"
    return f"{float(value):.{PRECISION}g}"
