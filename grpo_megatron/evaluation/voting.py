"""Voting: which samples of a problem have the same prediction. The grader is called only where it can matter.

Right predictions are one class, since each equals the answer. Wrong predictions are classes by their text without white
space. Texts that differ can still be equal (1/2 and 0.5), which would split their vote. Where a union of wrong
predictions could change the winner, the grader compares them pair by pair, for all problems in one call.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

from grpo_megatron.evaluation.estimates import RIGHT

Vote = tuple[bool, str | None]  # whether the sample is right, its prediction
Equal = Callable[[list[tuple[str, str]]], list[bool]]  # whether the predictions of each pair are equal
MAX_PAIRS = 200  # per problem; with more pairs, only equal texts share a class


def vote_classes(problems: Sequence[Sequence[Vote]], equal: Equal) -> list[list[int | None]]:
    """Each problem's samples as the votes of `estimates.majority`."""
    pairs: list[tuple[int, str, str]] = []
    for number, samples in enumerate(problems):
        pairs += [(number, one, other) for one, other in _deciding_pairs(samples)]
    verdicts = equal([(one, other) for _, one, other in pairs]) if pairs else []
    unions: dict[int, dict[str, str]] = {}
    for (number, one, other), is_equal in zip(pairs, verdicts, strict=True):
        if is_equal:
            union = unions.setdefault(number, {})
            union[_root(union, other)] = _root(union, one)
    return [_numbered(samples, unions.get(number, {})) for number, samples in enumerate(problems)]


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _deciding_pairs(samples: Sequence[Vote]) -> list[tuple[str, str]]:
    """Pairs of wrong predictions whose union could change the winner."""
    num_right = sum(1 for right, _ in samples if right)
    wrong = Counter(_without_spaces(text) for right, text in samples if not right and text is not None)
    most = max(wrong.values(), default=0)
    if len(wrong) < 2 or sum(wrong.values()) < num_right or num_right == 0 or most > num_right:
        return []
    pairs = list(itertools.combinations(sorted(wrong), 2))
    return pairs if len(pairs) <= MAX_PAIRS else []


def _root(union: dict[str, str], text: str) -> str:
    while union.get(text, text) != text:
        text = union[text]
    return text


def _numbered(samples: Sequence[Vote], union: dict[str, str]) -> list[int | None]:
    numbers: dict[str, int] = {}
    votes: list[int | None] = []
    for right, text in samples:
        if right:
            votes.append(RIGHT)
        elif text is None:
            votes.append(None)
        else:
            votes.append(numbers.setdefault(_root(union, _without_spaces(text)), len(numbers) + 1))
    return votes
