"""Shard: this rank's parameters, cut by the plan; and the tensors that its engine is given after a delta."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from grpo_megatron.sync.base import Base
from grpo_megatron.sync.plan import SyncPart
from grpo_megatron.sync.rank_plan import Copy, RankPlan
from grpo_megatron.types import WeightBucket


class Shard:
    """`read` gives a parameter by name. The last one is kept, because parts of one parameter are neighbours."""

    def __init__(self, plan: RankPlan, read: Callable[[str], Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._plan, self._read, self._dtype, self._device = plan, read, dtype, device
        self._last: tuple[str, Tensor] | None = None

    def part(self, number: int) -> Tensor:
        """A part that this rank holds, as one dimension."""
        return self._local(self._plan.local(self._plan.plan.parts[number])).to(self._dtype).reshape(-1)

    def tensors(self, base: Base, received: dict[int, list[int]]) -> Iterator[WeightBucket]:
        """Full-shaped tensors in the order of the plan, filled where this rank's engine reads them.

        What the rank holds itself comes from its parameters, the rest from `base`. `received[tensor]`: numbers of parts.
        """
        for current in self._plan.rounds:
            bucket = [
                (self._plan.tensor(tensor).name, self._tensor(tensor, base, received.get(tensor, [])))
                for tensor in current.complete
            ]
            if bucket:
                yield bucket

    def _tensor(self, tensor: int, base: Base, received: list[int]) -> Tensor:
        whole, own = self._plan.tensor(tensor), self._plan.own.get(tensor, [])
        if len(own) == 1 and (own[0].start, own[0].stop) == (0, whole.length):
            view = self._local(own[0])
            if view.is_contiguous() and view.dtype == self._dtype:
                return view
        out = torch.empty(whole.shape, dtype=self._dtype, device=self._device)
        for copy in own:
            out.narrow(whole.axis, copy.start, copy.stop - copy.start).copy_(self._local(copy))
        for number in received:
            target = part_of(out, self._plan.plan.parts[number], whole.axis)
            target.copy_(base.read(number).view(target.shape), non_blocking=True)
        return out

    def _local(self, copy: Copy) -> Tensor:
        name = self._plan.parameter(copy.tensor).name
        if self._last is None or self._last[0] != name:
            self._last = name, self._read(name)
        return self._last[1].narrow(self._plan.tensor(copy.tensor).axis, copy.local_start, copy.stop - copy.start)


def part_of(tensor: Tensor, part: SyncPart, axis: int) -> Tensor:
    """A view of the part within a full-shaped tensor."""
    return tensor.narrow(axis, part.start, part.stop - part.start)
