"""The quickstart's reward: is the integer in `<answer>N</answer>`, at the very end of the response, exact?"""

from __future__ import annotations

import re

from grpo_megatron.rewards.reward import Answers, answers, rewards

MAX_ANSWER = 256  # characters from the last <answer> on; bounds the regular expression and the integer
_ANSWER = re.compile(r"<answer>\s*(-?[0-9]+)\s*</answer>\s*")


def extract_answer(text: str) -> str | None:
    """The integer that the text ends with, in answer tags, without leading zeros; None when there is none."""
    start = text.rfind("<answer>")
    match = _ANSWER.fullmatch(text[start:]) if start >= max(0, len(text) - MAX_ANSWER) else None
    return None if match is None else str(int(match[1]))


answers.register("arithmetic")(Answers(extract_answer, int))


@rewards.register("arithmetic")
def arithmetic(completion: str, answer: str) -> dict[str, float]:
    """1 when the final integer equals `answer`, else 0.

    "format": 1 when the response ends with an integer in answer tags. "worked": 1 when it has a non-empty <think> part.
    Raises ValueError when `answer` is not an integer.
    """
    gold, value = int(answer), extract_answer(completion)
    think = completion.find("<think>")
    think_end = completion.find("</think>", think) if think >= 0 else -1
    worked = think_end >= 0 and bool(completion[think + len("<think>") : think_end].strip())
    correct = float(value is not None and int(value) == gold)
    return {"score": correct, "acc": correct, "format": float(value is not None), "worked": float(worked)}
