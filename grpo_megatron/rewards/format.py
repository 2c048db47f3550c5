"""The format reward: does the response keep to a layout that a grader can read? The answer itself is not checked."""

from __future__ import annotations

from grpo_megatron.rewards.gsm8k import parse_number
from grpo_megatron.rewards.reward import rewards

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def is_tagged(text: str) -> bool:
    """`<think>...</think><answer>...</answer>`: each tag once, in this order, and only white space around the parts."""
    text = text.strip()
    if any(text.count(tag) != 1 for tag in TAGS):
        return False
    think_end, answer_start = text.find("</think>"), text.find("<answer>")
    between = text[think_end + len("</think>") : answer_start]
    return (
        text.startswith("<think>") and text.endswith("</answer>") and think_end < answer_start and not between.strip()
    )


def is_hash_marked(text: str) -> bool:
    """The last line is `#### N`, where N is one plain number, and no other line has a `####`."""
    head, mark, tail = text.strip().partition("####")
    starts_line = not head or head.rstrip(" ").endswith("\n")
    return bool(mark) and starts_line and "####" not in tail and "\n" not in tail and parse_number(tail) is not None


@rewards.register("format")
def format_reward(completion: str, answer: str) -> float:
    """1 when the response is tagged or hash-marked exactly once, else 0; `answer` is not used."""
    return float(is_tagged(completion) or is_hash_marked(completion))
