"""Where steps end: on tokens, whatever the tokens hold."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from grpo_megatron.data.scored import step_ends, step_labels

PIECES = ["<eos>", "a", "b", "\n", "\n\n", "c\n", "\nd", " ", "e\nf\ng"]


def decode(ids: Sequence[int]) -> str:
    return "".join(PIECES[i] for i in ids if i != 0)


@pytest.mark.parametrize(
    ("pieces", "ends"),
    [
        (["a", "\n", "b", "<eos>"], [1, 3]),
        (["a", "\n\n", "b"], [1, 2]),  # the first of two line ends is in the token that completes the step
        (["a", "\n", "\n", "b", "\n", "<eos>"], [1, 4]),  # a blank step is none, and nothing follows the last
        (["\n", "a", " ", "\n"], [3]),
        (["c\n", "a", "\nd", "<eos>"], [0, 2, 3]),  # a separator and the beginning of the next step in one token
        (["a", "e\nf\ng", "b"], [1, 2]),  # two steps end within one token
        (["<eos>"], [0]),  # a response without text has one step
        (["\n", " "], [1]),
        ([], []),
    ],
)
def test_steps_end_on_tokens(pieces: list[str], ends: list[int]) -> None:
    assert step_ends([PIECES.index(piece) for piece in pieces], decode, "\n") == ends


def test_a_longer_separator() -> None:
    ids = [PIECES.index(piece) for piece in ("a", "\n", "b", "\n", "\nd", "<eos>")]
    assert step_ends(ids, decode, "\n\n") == [4, 5]


def test_labels_need_a_step_each() -> None:
    ids = [PIECES.index(piece) for piece in ("a", "\n", "b", "<eos>")]
    assert step_labels(ids, [True, False], decode, "\n") == [(1, 1.0), (3, 0.0)]
    with pytest.raises(ValueError, match="tokens have 2 steps, and the row 3 labels"):
        step_labels(ids, [True, False, True], decode, "\n")
