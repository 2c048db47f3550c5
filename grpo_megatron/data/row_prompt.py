"""RowPrompt: a Prompt whose text and tokens are made when they are first read.

Every rank knows all prompts of a step by uid, reward and answer. Only the ranks that draw a prompt's responses read its
tokens, so only they render and tokenise it, or read the ids that the survey has kept (token_cache.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from grpo_megatron.types import Prompt

RenderPrompt = Callable[[], str]
EncodePrompt = Callable[[str], tuple[int, ...]]
FindTokens = Callable[[], tuple[int, ...] | None]


class RowPrompt(Prompt):
    """Made by `of`. `find()` gives the token ids if they are kept; `render()` the text, `encode(text)` its token ids."""

    _find: FindTokens
    _render: RenderPrompt
    _encode: EncodePrompt

    @classmethod
    def of(cls, find: FindTokens, render: RenderPrompt, encode: EncodePrompt, **fields: Any) -> RowPrompt:
        """`fields` are those of Prompt, but `text` and `prompt_ids`."""
        prompt = cls.__new__(cls)
        extra: Mapping[str, object] = {}
        prompt.__dict__.update({"_find": find, "_render": render, "_encode": encode, "extra": extra, **fields})
        return prompt

    @cached_property
    def text(self) -> str:  # type: ignore[override]
        return self._render()

    @cached_property
    def prompt_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        found = self._find()
        return self._encode(self.text) if found is None else found

    def with_rate(self, rate: float, weight: float) -> RowPrompt:
        """A copy with `pass_rate` and `weight`, without making text and tokens."""
        prompt = copy.copy(self)
        prompt.__dict__.update(pass_rate=rate, weight=weight)
        return prompt
