"""TextStream: the text of an answer while its tokens are drawn, each character once it is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what the first bytes of a character decode to


class TextStream:
    """Writes the text that each new token adds. What it has written in the end is the decoded answer.

    A token decodes to something else at the beginning of a text than within it. So the new tokens are decoded behind those
    that were written last, and only what exceeds the latter is written.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], write: Callable[[str], None]) -> None:
        self._decode, self._write = decode, write
        self._ids: Sequence[int] = ()
        self._first = self._end = 0  # of the tokens that were written last
        self._written = ""

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def add(self, ids: Sequence[int]) -> None:
        """`ids` are all tokens so far, of which the last is new."""
        self._ids = ids
        text, before = self._decode(ids[self._first :]), self._decode(ids[self._first : self._end])
        if len(text) > len(before) and not text.endswith(_INCOMPLETE):
            self._write_piece(text[len(before) :])
            self._first, self._end = self._end, len(ids)

    def finish(self, ids: Sequence[int] | None = None) -> str:
        """Write the rest, incomplete characters too. `ids`: the whole answer; None: the tokens so far. Returns its text."""
        whole = self._decode(self._ids if ids is None else ids)
        if not whole.startswith(self._written):  # a tokenizer that changes what it has decoded before
            self._write_piece("\n" + whole)
        elif len(whole) > len(self._written):
            self._write_piece(whole[len(self._written) :])
        return whole

    def _write_piece(self, piece: str) -> None:
        self._written += piece
        self._write(piece)
