"""Texts that a model wrote, for a terminal: characters that steer the terminal, or reorder its text, become visible."""

from __future__ import annotations

import re

# Control characters but the line end and the tab; marks that turn the direction of writing; halves of surrogate pairs.
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Steering characters as <U+001B>."""
    return STEERING.sub(lambda match: f"<U+{ord(match[0]):04X}>", text)


def visible_line(text: str) -> str:
    """The same in one line."""
    return " ".join(visible(text).split())
