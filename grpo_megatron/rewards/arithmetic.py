"""The quickstart's reward: is the integer in `<answer>N</answer>`, at the very end of the response, exact?"""

from __future__ import annotations

import re

from grpo_megatron.rewards.reward import Extractor, extractors, rewards

MAX_TAIL = 256  # characters from the last <answer> on; bounds the regular expression and the integer
_TAGGED_INTEGER = re.compile(r"<answer>\s*(-?[0-9]+)\s*</answer>\s*")


def final_integer(text: str) -> str | None:
    """The integer in the answer tags that end the text, without leading zeros; None when there is none."""
    start = text.rfind("<answer>")
    if start < max(0, len(text) - MAX_TAIL):
        return None
    match = _TAGGED_INTEGER.fullmatch(text[start:])
    return None if match is None else str(int(match[1]))


extractors.register("arithmetic")(Extractor(final_integer, int))


@rewards.register("arithmetic")
def arithmetic_reward(completion: str, answer: str) -> dict[str, float]:
    """1 when the final integer equals `answer`, else 0.

    "format": 1 when the response ends with an integer in answer tags. "worked": 1 when its <think> part is not empty.
    Raises ValueError when `answer` is not an integer.
    """
    expected = int(answer)
    prediction = final_integer(completion)
    correct = float(prediction is not None and int(prediction) == expected)
    return {
        "score": correct,
        "acc": correct,
        "format": float(prediction is not None),
        "worked": float(bool(_thought(completion))),
    }


def _thought(text: str) -> str:
    """What stands in the first `<think>...</think>`, without outer white space."""
    start = text.find("<think>")
    end = text.find("</think>", start) if start >= 0 else -1
    return text[start + len("<think>") : end].strip() if end >= 0 else ""
