"""What a sync moves: tensors, and who has and who needs which part of them. Plain numbers.

Both layouts cut a tensor along one dimension, its `axis`, and both along the same one. A part of a tensor is therefore an
interval of that dimension. Positions are in rows (axis 0) or columns (axis 1) of the whole Hugging Face tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # mesh.py imports torch
    pass

Interval = tuple[int, int]  # [start, stop) of a tensor's axis


@dataclass(frozen=True)
class SyncTensor:
    """A whole Hugging Face tensor of one or two dimensions."""

    name: str
    shape: tuple[int, ...]
    axis: int

    @property
    def length(self) -> int:
        return self.shape[self.axis]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def numel_of(self, span: Interval) -> int:
        """Elements of a part."""
        return self.numel // self.length * (span[1] - span[0])


@dataclass(frozen=True)
class Piece:
    """`[start, stop)` of a tensor, kept at `local_start` of a parameter, along the same dimension."""

    tensor: int  # index in SyncParameter.tensors
    start: int
    stop: int
    local_start: int


@dataclass(frozen=True)
class SyncParameter:
    """A parameter of the training model, and the tensors in it.

    `pieces[tp_rank]` is what a tensor-parallel rank holds, in the parameter's order; ranks with a copy of the same part
    each list it. `stage` and `ep_rank` (None: not an expert's) say on which ranks the parameter exists.
    """

    name: str
    tensors: tuple[SyncTensor, ...]
    stage: int
    ep_rank: int | None
    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def numel(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)


# Tensor name -> per tensor-parallel rank of the engine the part that it reads. An empty span: nothing.
EngineSpans = Mapping[str, tuple[Interval, ...]]


@dataclass(frozen=True)
class EngineTensors:
    """What an engine gets: every tensor of a complete weight stream, and the part of it that each engine rank reads.

    An engine that reads whole tensors has the span [0, length) on each rank.
    """

    tensors: Mapping[str, SyncTensor]
    spans: EngineSpans


@dataclass(frozen=True)
class Share:
    """A part of a tensor that one rank digests for all: `[start, stop)`, kept at `local_start` of its `parameter`.

    The shares of all ranks together are every position of every tensor once. `engine_ranks` read all of this part.
    """

    parameter: str
    tensor: SyncTensor
    start: int
    stop: int
    local_start: int
    engine_ranks: tuple[int, ...]


def shortened(problems: Sequence[str]) -> str:
    """A list in one line: a heading and at most 10 items."""
    if len(problems) > 11:
        problems = [*problems[:11], f"and {len(problems) - 11} more"]
    return ", ".join(problems)
