"""Rewards for the layout of a response: `format` (all or nothing) and `tag_count` (a quarter per tag).

The layout is that of DeepSeek-R1 (arXiv 2501.12948, table 1): `<think> ... </think><answer> ... </answer>`. Some chat
templates write the first `<think>` themselves, at the end of the prompt. `opened_thought` finds it; the caller puts it
before the response, so that both rewards see the whole turn.
"""

from __future__ import annotations

import re
from typing import Literal

from grpo_megatron.rewards.gsm8k import parse_number
from grpo_megatron.rewards.reward import rewards

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
PROMPT_END = 64  # characters of a prompt that are searched
# an open <think>, or an empty thought: Qwen3's template with enable_thinking=false
_OPENED = re.compile(r"<think>\s*(?:</think>\s*)?\Z")


def opened_thought(prompt: str) -> str:
    """The end of the prompt, from the `<think>` on with which it opens the response; "" where it opens none."""
    match = _OPENED.search(prompt, max(0, len(prompt) - PROMPT_END))
    return match[0] if match else ""


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


LAYOUTS = {"tagged": is_tagged, "hashes": is_hash_marked, "any": lambda text: is_tagged(text) or is_hash_marked(text)}


@rewards.register("format")
def format_reward(completion: str, answer: str, *, layout: Literal["tagged", "hashes", "any"] = "any") -> float:
    """1 when the response has the layout, else 0; `answer` is not used.

    "tagged": think and answer tags. "hashes": `#### N` at the end. Raises ValueError for another layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not one of {', '.join(LAYOUTS)}")
    return float(LAYOUTS[layout](completion))


@rewards.register("tag_count")
def tag_count_reward(completion: str, answer: str) -> float:
    """A quarter for each of the four think and answer tags that is there exactly once: 0 to 1. `answer` is not used."""
    return sum(completion.count(tag) == 1 for tag in TAGS) / len(TAGS)
