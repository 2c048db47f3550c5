"""Generated feedback on the quickstart's additions: what the examples of reward models learn from.

A worked answer has two steps, units and tens: `<think>8+3=11` and `1+7+1=9</think><answer>91</answer>`, joined by a comma. In
a wrong step the sum is off by one. What follows is computed from the wrong sum, so that only the wrong step itself is wrong.

    pairs.jsonl, pairs_val.jsonl    {"prompt", "chosen", "rejected"}: a right answer, and one with a wrong step
    steps.jsonl, steps_val.jsonl    {"prompt", "completions", "labels"}: each step is wrong with probability 0.4

The held-out files use sums that the others never have.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_megatron.data.arithmetic import build_tokenizer, draw_problem, write_data

STEP_SEPARATOR = ","
WRONG_SHARE = 0.4


def pair_rows(seed: int, count: int, *, held_out: bool) -> Iterator[dict[str, Any]]:
    """`count` rows {"prompt", "chosen", "rejected"}."""
    draw = random.Random(f"{seed}/pairs/{held_out}")
    for _ in range(count):
        prompt, a, b = draw_problem(draw, held_out)
        wrong = draw.choice(((True, False), (False, True)))
        texts = [STEP_SEPARATOR.join(_steps(a, b, kinds, draw)) for kinds in ((False, False), wrong)]
        yield {"prompt": prompt, "chosen": texts[0], "rejected": texts[1]}


def step_rows(seed: int, count: int, *, held_out: bool) -> Iterator[dict[str, Any]]:
    """`count` rows {"prompt", "completions", "labels"}."""
    draw = random.Random(f"{seed}/steps/{held_out}")
    for _ in range(count):
        prompt, a, b = draw_problem(draw, held_out)
        wrong = (draw.random() < WRONG_SHARE, draw.random() < WRONG_SHARE)
        yield {
            "prompt": prompt,
            "completions": _steps(a, b, wrong, draw),
            "labels": [not is_wrong for is_wrong in wrong],
        }


def write_feedback(folder: Path, seed: int, num_train: int = 4096, num_val: int = 256) -> None:
    """Write the four files and tokenizer/ into the existing `folder`."""
    files = {
        "pairs.jsonl": pair_rows(seed, num_train, held_out=False),
        "pairs_val.jsonl": pair_rows(seed, num_val, held_out=True),
        "steps.jsonl": step_rows(seed, num_train, held_out=False),
        "steps_val.jsonl": step_rows(seed, num_val, held_out=True),
    }
    write_data(folder, files, build_tokenizer())


def _steps(a: int, b: int, wrong: tuple[bool, bool], draw: random.Random) -> list[str]:
    """The two steps, each off by one if `wrong`."""
    units = max(0, a % 10 + b % 10 + (draw.choice((-1, 1)) if wrong[0] else 0))
    if wrong[0] and units == a % 10 + b % 10:  # 0 + 0 - 1
        units += 1
    carry = units // 10
    tens = a // 10 + b // 10 + carry + (draw.choice((-1, 1)) if wrong[1] else 0)
    if tens < 0:  # 0 + 0 + 0 - 1
        tens = 1
    answer = 10 * tens + units % 10
    return [
        f"<think>{a % 10}+{b % 10}={units}",
        f"{a // 10}+{b // 10}+{carry}={tens}</think><answer>{answer}</answer>",
    ]
