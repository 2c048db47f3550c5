"""RowCache: the keys and values of the rows that a model decodes together, written in place. PromptCache: those of prompts.

transformers' own dynamic cache copies all keys and values at every token. Here a row keeps its place, and has its own length.
The lengths that a step reads are rounded up to a multiple of `ALIGNMENT` and masked: then the kernels of torch on CPU compute
the same bits for a row, whatever the other rows are (measured with one thread; see transformers_model.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 32  # tokens


def aligned(length: int) -> int:
    """`length` rounded up."""
    return -(-length // ALIGNMENT) * ALIGNMENT


class PromptCache:
    """What a pass over whole prompts computes. transformers' attention calls `update` once per layer."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []  # keys and values [prompts, heads, tokens, dimensions]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Attention over the prompts themselves."""
        assert layer == len(self.layers)
        self.layers.append((keys, values))
        return keys, values

    def token_bytes(self) -> int:
        """Keys and values of one token, in all layers."""
        parts = [part for pair in self.layers for part in pair]
        return sum(part.shape[1] * part.shape[3] * part.element_size() for part in parts)


class RowCache:
    """Per layer keys and values [rows, heads, tokens, dimensions]. Memory beyond a row's length is finite, and masked."""

    def __init__(self) -> None:
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._rows = self._positions = torch.empty(0, dtype=torch.int64)
        self._count = self._length = 0

    @property
    def size(self) -> tuple[int, int]:
        """(rows, tokens) that there is memory for."""
        keys = self._layers[0][0] if self._layers else torch.empty(0, 0, 0, 0)
        return keys.shape[0], keys.shape[2]

    def reserve(self, rows: int, tokens: int, prompts: PromptCache) -> None:
        """Make room for rows of up to `tokens` tokens, of the kind of `prompts`. Keeps what is there."""
        old_rows, old_tokens = self.size
        if rows <= old_rows and tokens <= old_tokens:
            return
        rows, tokens = max(rows, old_rows), aligned(max(tokens, old_tokens))
        old, self._layers = self._layers, []
        for pair in prompts.layers:
            grown = [part.new_zeros(rows, part.shape[1], tokens, part.shape[3]) for part in pair]
            if old:
                for part, before in zip(grown, old.pop(0), strict=True):  # freed layer by layer
                    part[:old_rows, :, :old_tokens] = before
            self._layers.append((grown[0], grown[1]))

    def insert(self, first: int, prompts: PromptCache, sources: Sequence[int]) -> None:
        """Rows from `first` on become copies of the prompts with these indices."""
        index = torch.tensor(sources)
        for mine, given in zip(self._layers, prompts.layers, strict=True):
            for part, prompt in zip(mine, given, strict=True):
                part[first : first + len(sources), :, : prompt.shape[2]] = prompt[index]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy rows over others."""
        if sources:
            from_rows, to_rows = torch.tensor(sources), torch.tensor(targets)
            for pair in self._layers:
                for part in pair:
                    part[to_rows] = part[from_rows]

    def begin(self, positions: Tensor) -> Tensor:
        """Before a step of the first rows, whose new tokens stand at `positions` [n]. The step's mask [n, 1, 1, tokens]."""
        self._count = len(positions)
        self._rows, self._positions = torch.arange(self._count), positions
        self._length = aligned(int(positions.max()) + 1)
        is_hidden = torch.arange(self._length) > positions.unsqueeze(1)  # [n, tokens]
        dtype = self._layers[0][0].dtype
        mask = torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, float("-inf"))
        return mask[:, None, None]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store the keys and values [n, heads, 1, dimensions] of a step's tokens; returns those of the whole rows."""
        own_keys, own_values = self._layers[layer]
        own_keys[self._rows, :, self._positions] = keys[:, :, 0]
        own_values[self._rows, :, self._positions] = values[:, :, 0]
        return own_keys[: self._count, :, : self._length], own_values[: self._count, :, : self._length]
