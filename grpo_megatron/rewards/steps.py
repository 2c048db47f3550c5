"""A step reward that needs no model: is the arithmetic of each line right? (process supervision, arXiv 2402.03300, 4.1.3)

A step is a line of the response. `</think>` also ends a step, and so does the comma between two equations of the
quickstart's `8+3=11,1+7+1=9`. A step earns 1 when every equation in it holds and 0 when one does not
(`rewards/equation.py`). A step without an equation carries no reward. The last step earns the outcome reward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from grpo_megatron.rewards.equation import equations
from grpo_megatron.rewards.reward import MAX_STEPS, parse_reward, rewards

MAX_TEXT = 200_000  # characters that are cut into steps

_STEP_END = re.compile(r"\n|</think>|(?<=[0-9]),(?![0-9]{3}(?![0-9]))(?=[0-9]+[-+*/])")


def split_steps(text: str) -> Iterator[tuple[int, str]]:
    """(end, text) of every step that is not blank. White space at the end of a step does not belong to it."""
    start = 0
    for match in _STEP_END.finditer(text, 0, MAX_TEXT):
        piece = text[start : match.start()].rstrip()
        if piece.strip():
            yield start + len(piece), piece
        start = match.end()
    piece = text[start:].rstrip()
    if piece.strip():
        yield start + len(piece), piece


@rewards.register("arithmetic_steps", gives_steps=True, takes_columns=False)
def arithmetic_steps_reward(completion: str, answer: str, outcome: str = "gsm8k", **kwargs: Any) -> dict[str, Any]:
    """The reward of the function `outcome` (called with the other kwargs), and "steps": 1 or 0 per line with equations.

    "step_acc": the share of right steps. "checked_steps": their number. Raises ValueError for an unknown `outcome`.
    """
    result = parse_reward(rewards.get(outcome)(completion, answer, **kwargs))
    reward, metrics = result.reward, dict(result.metrics)
    steps: list[tuple[int, float]] = []
    end = 0
    for end, text in split_steps(completion):
        holds = equations(text)
        if holds:
            steps.append((end, float(all(holds))))
        if len(steps) >= MAX_STEPS - 1:
            break
    if steps:
        metrics = {**metrics, "step_acc": sum(value for _, value in steps) / len(steps)}
    metrics["checked_steps"] = float(len(steps))
    if end:
        end = len(completion.rstrip())
        steps = [*(step for step in steps if step[0] < end), (end, reward)]
    return {**result.texts, **metrics, "score": reward, "steps": steps}
