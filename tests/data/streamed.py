"""Endless rows, as a user writes them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any


class Sums:
    """Sums of random numbers; the state is the generator's. Every row's `opened` counts how many were opened here."""

    opened = 0

    def __init__(self, seed: int) -> None:
        self.random, self.count = random.Random(seed), 0
        Sums.opened += 1

    def __iter__(self) -> Sums:
        return self

    def __next__(self) -> dict[str, Any]:
        self.count += 1
        a, b = self.random.randrange(10), self.random.randrange(10)
        return {"prompt": f"{a} + {b} =", "answer": str(a + b), "count": self.count, "opened": Sums.opened}

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "random": self.random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, numbers, gauss = state["random"]
        self.count = state["count"]
        self.random.setstate((version, tuple(numbers), gauss))


class Deaf(Sums):
    """Loads its own state, and not what JSON makes of its tuples."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.setstate(state["random"])


def plain(epoch: int) -> Iterator[dict[str, Any]]:
    """Five rows per pass, without a state."""
    for number in range(5):
        text = "1 + " * 20 if number == 3 else ""  # longer than the tests' limit
        yield {"prompt": f"{text}{number} + {epoch} =", "answer": str(number + epoch)}


def broken() -> Iterator[Any]:
    yield from ({"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(9))
    yield from ({"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(30))
    raise OSError("the source is gone")


def wrong() -> list[Any]:
    return [{"prompt": "1 + 1 =", "answer": "2"}, {"answer": "2"}]


def stateful() -> Any:
    rows = Sums(0)
    rows.state_dict = lambda: {"rows": {1, 2}}  # type: ignore[method-assign]
    return rows


def unpictured() -> Iterator[dict[str, Any]]:
    """Rows with an empty cell where images could be."""
    return ({"prompt": f"{n} + 1 =", "answer": str(n + 1), "images": []} for n in itertools.count())
