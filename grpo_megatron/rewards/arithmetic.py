"""The quickstart's reward: is the integer in `<answer>N</answer>`, at the very end of the response, exact?"""

from __future__ import annotations

import re

from grpo_megatron.rewards.reward import rewards

MAX_ANSWER = 256  # characters from the last <answer> on; bounds the regular expression and the integer
_ANSWER = re.compile(r"<answer>\s*(-?[0-9]+)\s*</answer>\s*")


@rewards.register("arithmetic")
def arithmetic(completion: str, answer: str) -> dict[str, float]:
    """1 when the final integer equals `answer`, else 0.

    "format": 1 when the response ends with an integer in answer tags. "worked": 1 when it has a non-empty <think> part.
    Raises ValueError when `answer` is not an integer.
    """
    gold = int(answer)
    start = completion.rfind("<answer>")
    match = _ANSWER.fullmatch(completion[start:]) if start >= max(0, len(completion) - MAX_ANSWER) else None
    think = completion.find("<think>")
    think_end = completion.find("</think>", think) if think >= 0 else -1
    worked = think_end >= 0 and bool(completion[think + len("<think>") : think_end].strip())
    correct = float(match is not None and int(match[1]) == gold)
    return {"score": correct, "acc": correct, "format": float(match is not None), "worked": float(worked)}
