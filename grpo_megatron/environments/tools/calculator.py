"""The tool `calculator`: exact arithmetic on integers and decimals, so that 0.1 + 0.2 is 0.3.

An expression has no names, attributes, or calls but those of FUNCTIONS. Results and intermediate results have at most
MOST_DIGITS digits. A power's size is known before it is computed, so 9**9**9 is refused at once.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction

from grpo_megatron.environments.tool import ToolError, tools

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
BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}
UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def compute_exactly(node: ast.expr) -> Fraction:
    """Computes a parsed expression. Raises ValueError for what is no arithmetic, OverflowError above MOST_DIGITS.

    ZeroDivisionError, RecursionError and what the functions raise pass through.
    """
    match node:
        case ast.Constant(value=int() | float() as literal) if not isinstance(literal, bool):
            value = Fraction(repr(literal))  # the shortest decimal that is this float, so that 0.1 is one tenth
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            value = _power(compute_exactly(left), compute_exactly(right))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in BINARY:
            value = BINARY[type(operation)](compute_exactly(left), compute_exactly(right))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in UNARY:
            value = UNARY[type(sign)](compute_exactly(operand))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            try:
                value = FUNCTIONS[name](*[compute_exactly(argument) for argument in arguments])
            except TypeError:
                raise ValueError(f"{name} cannot take {len(arguments)} numbers") from None
        case _:
            raise ValueError(f"{ast.unparse(node)[:40]!r} is not allowed")
    if max(abs(value.numerator), value.denominator) >= 10**MOST_DIGITS:
        raise OverflowError("the result is too large")
    return value


@tools.register("calculator")
def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, and abs, min, max, round, sqrt; such as "12.5 * (3 + 4)".
    """
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"the expression has {len(expression)} characters; at most {MAX_LENGTH}")
    try:
        return _text(compute_exactly(ast.parse(expression.strip().replace("^", "**"), mode="eval").body))
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
