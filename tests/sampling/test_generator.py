"""Steps of the text -> tokens of the response."""

from __future__ import annotations

from typing import Any

from grpo_megatron.sampling.generator import Generator
from grpo_megatron.types import Prompt, Sample


class Letters:
    """Token n is the n-th of these pieces; token 4 is special and decodes to nothing."""

    PIECES = ("ab", "c", "\n", "defg", "")

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.PIECES[i] for i in ids)


def steps_of(ids: list[int], steps: list[tuple[int, float]]) -> list[tuple[int, float]]:
    nothing: Any = None
    sample = Sample(Prompt("u", (1,), "", "", "s", "r"), 0, 0, ids, [0.0] * len(ids), "stop", 0)
    return Generator(nothing, None, Letters(), nothing, 0)._step_tokens(sample, steps)


def test_a_step_ends_with_the_token_that_completes_it() -> None:
    ids = [0, 1, 2, 3, 4]  # "ab" "c" "\n" "defg" "": ends at 2, 3, 4, 8, 8
    assert steps_of(ids, [(3, 1.0), (8, 0.0)]) == [(1, 1.0), (3, 0.0)]
    assert steps_of(ids, [(1, 0.5)]) == [(0, 0.5)]  # in the middle of a token
    assert steps_of(ids, []) == []


def test_steps_within_one_token_are_one_step() -> None:
    assert steps_of([0, 1, 2, 3], [(5, 1.0), (6, 0.0), (8, 0.5)]) == [(3, 0.5)]
