"""A step reward that needs no model: is the arithmetic of each line right? (process supervision, arXiv 2402.03300, 4.1.3)

A step is a line of the response; `</think>` ends one too, and so does the comma between two equations of the quickstart's
`8+3=11,1+7+1=9`. A step earns 1 when every equation in it holds, 0 when one does not (`rewards/equation.py`); a step
without an equation carries no reward. The last step is the final answer's and earns what the outcome reward gives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from grpo_megatron.rewards.equation import equations
from grpo_megatron.rewards.reward import MAX_STEPS, read_result, rewards

MAX_TEXT = 200_000  # characters that are cut into steps

_END = re.compile(r"\n|</think>|(?<=[0-9]),(?![0-9]{3}(?![0-9]))(?=[0-9]+[-+*/])")


def lines(text: str) -> Iterator[tuple[int, str]]:
    """(end, text) of every step that is not blank; `end` is the character behind its last one that is not blank."""
    start = 0
    for match in _END.finditer(text, 0, MAX_TEXT):
        piece = text[start : match.start()].rstrip()
        if piece.strip():
            yield start + len(piece), piece
        start = match.end()
    piece = text[start:].rstrip()
    if piece.strip():
        yield start + len(piece), piece


@rewards.register("arithmetic_steps", gives_steps=True)
def arithmetic_steps(completion: str, answer: str, outcome: str = "gsm8k", **kwargs: Any) -> dict[str, Any]:
    """The score of the reward `outcome` (called with the other kwargs), and "steps": 1 or 0 for each line that computes.

    "step_acc": the share of right steps; "checked_steps": their number. Raises ValueError for an unknown `outcome`.
    """
    score, scores, _ = read_result(rewards.get(outcome)(completion, answer, **kwargs))
    steps: list[tuple[int, float]] = []
    verdicts: list[bool] = []
    end = 0
    for end, text in lines(completion):
        holds = equations(text)
        if holds:
            verdicts.append(all(holds))
            steps.append((end, float(verdicts[-1])))
        if len(steps) >= MAX_STEPS - 1:
            break
    if end:
        end = len(completion.rstrip())
        steps = [*(step for step in steps if step[0] < end), (end, score)]
    share = {"step_acc": sum(verdicts) / len(verdicts)} if verdicts else {}
    return {**scores, **share, "score": score, "checked_steps": float(len(verdicts)), "steps": steps}
