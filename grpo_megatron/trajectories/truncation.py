"""Cuts the text of an observation to a number of tokens, before it is rendered: the template's own tokens stay whole."""

from __future__ import annotations

from typing import Any, Literal

from grpo_megatron.environments.environment import ChatMessage

Side = Literal["left", "middle", "right"]
OMISSION = "..."


def cut_contents(messages: list[ChatMessage], tokenizer: Any, max_tokens: int, side: Side) -> list[ChatMessage]:
    """The messages, with every text content of more than `max_tokens` tokens cut on `side` and `...` in its place."""
    return [
        {**message, "content": shorten(message["content"], tokenizer, max_tokens, side)}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def shorten(text: str, tokenizer: Any, max_tokens: int, side: Side) -> str:
    """`text` if it has at most `max_tokens` tokens; else its first (right), last (left) or outer (middle) tokens.

    The cut is between characters of the text: at the borders of tokens.
    """
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if len(offsets) <= max_tokens:
        return text
    head = {"right": max_tokens, "middle": (max_tokens + 1) // 2, "left": 0}[side]
    tail = max_tokens - head
    beginning = text[: offsets[head - 1][1]] if head else ""
    end = text[offsets[-tail][0] :] if tail else ""
    return f"{beginning}{OMISSION}{end}"
