"""StopTexts: which token of a response completes one of several texts, exactly.

Token t completes a text when it is the first token for which decode(ids[: t + 1]) contains the text. Decoding all tokens
again after each token would be quadratic, so most tokens are ruled out by what they decode to alone: the last character of a
stop text is always part of the token that completes it. For the others the end of the response is decoded. A text found
there is confirmed in the whole response, because the beginning of a window may decode to something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CLEANED = (
    ".?!,'tmse "  # last characters of " .", " n't" and the like, where the clean-up of a tokenizer removes a space
)
_MARGIN = 8  # characters: what decodes differently at the beginning of a window (parts of a character, a space)


class StopTexts:
    """Texts that end a response. `token_ids` are those which are one token of the vocabulary, special tokens too.

    Special tokens are left out of the decoded text. One tokenizer and no other state: all ranks decide the same.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        assert texts and all(texts), f"an empty stop text is found everywhere: {texts!r}"
        self.texts = tuple(texts)
        self.token_ids = tuple(_single_tokens(self.texts, tokenizer))
        self._tokenizer = tokenizer
        self._last = {text[-1] for text in texts}
        if self._decode(_encode("x .", tokenizer)) != "x .":
            self._last.update(_CLEANED)
        self._may_end_in_bytes = any(not character.isascii() for character in self._last)
        self._longest = max(map(len, texts))
        self._lengths: dict[int, int] = {}  # token id -> characters; 0: it cannot complete a text

    def completed_by(self, response_ids: Sequence[int]) -> bool:
        """Whether the last token completes a text. To be called after each token, until it does."""
        token = response_ids[-1]
        if token not in self._lengths:
            text = self._decode([token, token])  # twice: a tokenizer may drop the space that begins the first token
            self._lengths[token] = len(text) if self._can_complete(text) else 0
        length = self._lengths[token]
        return length > 0 and self._is_near_end(response_ids, length) and self._is_in(self._decode(response_ids))

    def _can_complete(self, text: str) -> bool:
        return not self._last.isdisjoint(text) or (self._may_end_in_bytes and "\N{REPLACEMENT CHARACTER}" in text)

    def _is_near_end(self, response_ids: Sequence[int], last_length: int) -> bool:
        """Whether the last tokens contain a text. They decode to enough characters for each that the last can complete."""
        length = self._longest + last_length + _MARGIN
        size = self._longest + _MARGIN
        while len(text := self._decode(response_ids[-size:])) < length and size < len(response_ids):
            size *= 2
        return self._is_in(text)

    def _is_in(self, text: str) -> bool:
        return any(stop in text for stop in self.texts)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def _single_tokens(texts: Sequence[str], tokenizer: Any) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[text] for text in texts if text in vocabulary and _encode(text, tokenizer) == [vocabulary[text]]]


def _encode(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
