"""The tool `calculator`: exact arithmetic on integers and decimals, of bounded size.

An expression is parsed by `ast` and evaluated by this file: there are no names, attributes, or calls but those of FUNCTIONS.
Integers and decimals are exact fractions until they are printed, so 0.1 + 0.2 is 0.3. Results and intermediate results
have at most MOST_DIGITS digits. A power's size is known before it is computed, so 9**9**9 is refused at once.
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


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if base < 0:
            raise ToolError("a root of a negative number")
        return Fraction(float(base) ** float(exponent))
    size = max(len(str(abs(base.numerator))), len(str(base.denominator)))
    if base not in (0, 1, -1) and abs(exponent) * size > 4 * MOST_DIGITS:
        raise ToolError(f"the result has more than {MOST_DIGITS} digits")
    return Fraction(base ** int(exponent))


def _sqrt(value: Fraction) -> Fraction:
    roots = math.isqrt(abs(value.numerator)), math.isqrt(value.denominator)
    exact = Fraction(roots[0], roots[1])
    return exact if exact * exact == value else _power(value, Fraction(1, 2))


BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
FUNCTIONS: dict[str, Callable[..., Fraction]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "round": lambda value, digits=Fraction(0): Fraction(round(value, max(min(int(digits), MOST_DIGITS), -MOST_DIGITS))),
    "sqrt": _sqrt,
}


@tools.register("calculator")
def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, and abs, min, max, round, sqrt; such as "12.5 * (3 + 4)".
    """
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"the expression has {len(expression)} characters; at most {MAX_LENGTH}")
    try:
        return _text(_value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (OverflowError, RecursionError, MemoryError):  # MemoryError: too many parentheses
        raise ToolError("the expression or a number in it is too large") from None
    except SyntaxError as error:
        raise ToolError(f"not an arithmetic expression ({error.msg})") from None


def _value(node: ast.expr) -> Fraction:
    value = _compute(node)
    if max(abs(value.numerator), value.denominator) >= 10**MOST_DIGITS:
        raise ToolError(f"the result has more than {MOST_DIGITS} digits")
    return value


def _compute(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=bool() | str() | bytes() | complex() | None):
            pass
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.Constant(value=float(number)) if math.isfinite(number):
            return Fraction(repr(number))  # the shortest decimal that is this float: 0.1 is one tenth
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in BINARY:
            return BINARY[type(operation)](_value(left), _value(right))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in UNARY:
            return UNARY[type(sign)](_value(operand))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            try:
                return FUNCTIONS[name](*map(_value, arguments))
            except TypeError:
                raise ToolError(f"{name} cannot take {len(arguments)} numbers") from None
    known = ", ".join(FUNCTIONS)
    raise ToolError(f"{ast.unparse(node)[:40]!r} is not allowed; use numbers, + - * / // % ** ( ), and {known}")


def _text(value: Fraction) -> str:
    """An integer, an exact decimal of at most PRECISION places, or PRECISION significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    if 10**PRECISION % value.denominator == 0:
        digits = f"{abs(value.numerator) * (10**PRECISION // value.denominator):0{PRECISION + 1}d}"
        return f"{'-' * (value < 0)}{digits[:-PRECISION]}.{digits[-PRECISION:].rstrip('0')}"
    return f"{float(value):.{PRECISION}g}"
