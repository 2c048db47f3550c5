"""Tools that do what they should not, by the name of the tool. Workers import this file."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any, Literal


def double(number: int, *, factor: int = 2) -> int:
    """Multiply.

    Args:
        number: Any integer.
    """
    return number * factor


async def later(numbers: list[int], unit: Literal["m", "km"] = "m", note: str | None = None) -> dict[str, Any]:
    """Return the arguments, in a coroutine.

    Args:
        numbers: Integers.
        unit: Of length.
        note: Anything,
            over two lines.
    """
    await asyncio.sleep(0)
    return {"numbers": numbers, "unit": unit, "note": note}


def act(name: str) -> Any:
    """Do something hostile.

    Args:
        name: Of the act.
    """
    match name:
        case "raise":
            raise KeyError("x")
        case "sys.exit":
            raise SystemExit(3)
        case "no json":
            return object()
        case "circular":
            value: list[Any] = []
            value.append(value)
            return value
        case "surrogate":
            return "\ud800"
        case "print":
            print("hello")
            return "done"
        case "hang":
            time.sleep(1000)
        case "exit":
            os._exit(2)
        case "memory":
            return bytearray(1 << 40)
        case "huge":
            return "x" * (1 << 24)
    return None


def unhinted(number) -> int:  # type: ignore[no-untyped-def]
    """No hint.

    Args:
        number: Any.
    """
    return int(number)


def undocumented(number: int) -> int:
    return number


def any_number(*numbers: int) -> int:
    """Any number of numbers.

    Args:
        numbers: Them.
    """
    return sum(numbers)
