"""The decorator of rank programs."""

from __future__ import annotations

import os

from tests.worlds import ranks


@ranks(2)
def two(factor: int) -> int:
    return factor * int(os.environ["RANK"])


@ranks()
def any_number() -> str:
    return os.environ["WORLD_SIZE"]


def test_a_call_runs_the_program_on_every_rank() -> None:
    assert two(factor=3) == [0, 3]
    assert any_number(3) == ["3", "3", "3"]
