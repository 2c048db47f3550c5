"""Voting: which samples of a problem gave the same answer. The grader decides, and is asked only where it matters.

Right answers are one class, since each equals the gold. Wrong answers are classes by their text, spaces apart; texts
that differ can still be equal (1/2 and 0.5), which would split their vote. Only where a union of wrong answers could
change the winner is the grader asked whether they are equal, pair by pair, for all problems in one call.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

from grpo_megatron.evaluation.scores import RIGHT

Answer = tuple[bool, str | None]  # right, extracted
Equal = Callable[[list[tuple[str, str]]], list[bool]]  # of pairs of answers
MAX_PAIRS = 200  # of one problem: beyond that, texts decide


def classes(answers: Sequence[Sequence[Answer]], equal: Equal) -> list[list[int | None]]:
    """Each problem's samples as votes for `scores.majority`."""
    asked: list[tuple[int, str, str]] = []
    for problem, samples in enumerate(answers):
        asked += [(problem, a, b) for a, b in _open_pairs(samples)]
    verdicts = equal([(a, b) for _, a, b in asked]) if asked else []
    unions: dict[int, dict[str, str]] = {}
    for (problem, a, b), same in zip(asked, verdicts, strict=True):
        if same:
            union = unions.setdefault(problem, {})
            union[_root(union, b)] = _root(union, a)
    return [_votes(samples, unions.get(problem, {})) for problem, samples in enumerate(answers)]


def plain(text: str) -> str:
    return "".join(text.split())


def _open_pairs(samples: Sequence[Answer]) -> list[tuple[str, str]]:
    """Pairs of wrong answers whose union could change who wins."""
    right = sum(1 for ok, _ in samples if ok)
    wrong = Counter(plain(text) for ok, text in samples if not ok and text is not None)
    most = max(wrong.values(), default=0)
    if len(wrong) < 2 or sum(wrong.values()) < right or (right == 0) or most > right:
        return []
    pairs = list(itertools.combinations(sorted(wrong), 2))
    return pairs if len(pairs) <= MAX_PAIRS else []


def _root(union: dict[str, str], text: str) -> str:
    while union.get(text, text) != text:
        text = union[text]
    return text


def _votes(samples: Sequence[Answer], union: dict[str, str]) -> list[int | None]:
    numbers: dict[str, int] = {}
    votes: list[int | None] = []
    for ok, text in samples:
        if ok:
            votes.append(RIGHT)
        elif text is None:
            votes.append(None)
        else:
            votes.append(numbers.setdefault(_root(union, plain(text)), len(numbers) + 1))
    return votes
