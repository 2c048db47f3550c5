"""The one evaluator of written arithmetic, on exact fractions of bounded size: for step rewards and the tool `calculator`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True)
class ArithmeticRules:
    """Meaning and bounds of an expression. `limit`: every numerator and denominator, also of parts, stays below it."""

    number: Callable[[int | float], Fraction]  # reads a literal of the expression
    power: Callable[[Fraction, Fraction], Fraction]
    limit: int
    functions: Mapping[str, Callable[..., Fraction]] = field(default_factory=dict)


BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}
UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def compute_exactly(node: ast.expr, rules: ArithmeticRules) -> Fraction:
    """Computes a parsed expression. Raises ValueError for what is no arithmetic, OverflowError above `rules.limit`.

    ZeroDivisionError, RecursionError and what the functions of `rules` raise pass through.
    """
    match node:
        case ast.Constant(value=int() | float() as literal) if not isinstance(literal, bool):
            value = rules.number(literal)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            value = rules.power(compute_exactly(left, rules), compute_exactly(right, rules))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in BINARY:
            value = BINARY[type(operation)](compute_exactly(left, rules), compute_exactly(right, rules))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in UNARY:
            value = UNARY[type(sign)](compute_exactly(operand, rules))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in rules.functions:
            try:
                value = rules.functions[name](*[compute_exactly(argument, rules) for argument in arguments])
            except TypeError:
                raise ValueError(f"{name} cannot take {len(arguments)} numbers") from None
        case _:
            raise ValueError(f"{ast.unparse(node)[:40]!r} is not allowed")
    if max(abs(value.numerator), value.denominator) >= rules.limit:
        raise OverflowError("the result is too large")
    return value
