"""Generated feedback on the quickstart's additions: what the examples of reward models learn from.

A worked answer has two steps, units and tens: `<think>8+3=11` and `1+7+1=9</think><answer>91</answer>`, joined by a comma.
Three of four bad answers are bare and wrong, one step: `<answer>92</answer>`. The others are worked, and the sum of one step is
off by one. What follows is computed from the wrong sum, so that only the wrong step itself is wrong. (A tiny model learns soon
to tell the bare ones, and slowly to check the sums.)

    pairs.jsonl, pairs_val.jsonl    {"prompt", "chosen", "rejected"}: the worked answer, and a bad one
    steps.jsonl, steps_val.jsonl    {"prompt", "completions", "labels"}: the steps of a good answer or, as often, of a bad one

The held-out files use sums that the others never have.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_megatron.data.arithmetic import bare_response, build_tokenizer, draw_problem, write_data

STEP_SEPARATOR = ","
BARE_SHARE = 0.75  # of the bad answers


def pair_rows(seed: int, count: int, *, held_out: bool) -> Iterator[dict[str, Any]]:
    """`count` rows {"prompt", "chosen", "rejected"}."""
    draw = random.Random(f"{seed}/pairs/{held_out}")
    for _ in range(count):
        prompt, a, b = draw_problem(draw, held_out)
        bad, _ = _bad_answer(a, b, draw)
        texts = [STEP_SEPARATOR.join(steps) for steps in (_worked_steps(a, b), bad)]
        yield {"prompt": prompt, "chosen": texts[0], "rejected": texts[1]}


def step_rows(seed: int, count: int, *, held_out: bool) -> Iterator[dict[str, Any]]:
    """`count` rows {"prompt", "completions", "labels"}."""
    draw = random.Random(f"{seed}/steps/{held_out}")
    for _ in range(count):
        prompt, a, b = draw_problem(draw, held_out)
        is_bad = draw.random() < 0.5
        steps, labels = _bad_answer(a, b, draw) if is_bad else (_worked_steps(a, b), [True, True])
        yield {"prompt": prompt, "completions": steps, "labels": labels}


def write_feedback(folder: Path, seed: int, num_train: int = 4096, num_val: int = 256) -> None:
    """Write the four files and tokenizer/ into the existing `folder`."""
    files = {
        "pairs.jsonl": pair_rows(seed, num_train, held_out=False),
        "pairs_val.jsonl": pair_rows(seed, num_val, held_out=True),
        "steps.jsonl": step_rows(seed, num_train, held_out=False),
        "steps_val.jsonl": step_rows(seed, num_val, held_out=True),
    }
    write_data(folder, files, build_tokenizer())


def _bad_answer(a: int, b: int, draw: random.Random) -> tuple[list[str], list[bool]]:
    """The steps, and which of them are right."""
    if draw.random() < BARE_SHARE:
        return [bare_response(a, b + draw.choice((-10, -1, 1, 10)))], [False]
    if draw.random() < 0.5:
        return _worked_steps(a, b, units_error=draw.choice((-1, 1))), [False, True]
    return _worked_steps(a, b, tens_error=draw.choice((-1, 1))), [True, False]


def _worked_steps(a: int, b: int, *, units_error: int = 0, tens_error: int = 0) -> list[str]:
    """The two steps. A sum that an error would make negative is one too large instead."""
    units = _off_by(a % 10 + b % 10, units_error)
    tens = _off_by(a // 10 + b // 10 + units // 10, tens_error)
    return [
        f"<think>{a % 10}+{b % 10}={units}",
        f"{a // 10}+{b // 10}+{units // 10}={tens}</think>{bare_response(10 * tens, units % 10)}",
    ]


def _off_by(total: int, error: int) -> int:
    return abs(total + error)
