"""Shard: this rank's own parameters, cut by the plan, and the full-shaped tensors that its engine is handed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from grpo_megatron.sync.plan import SyncPart
from grpo_megatron.sync.pool import Pool
from grpo_megatron.sync.rank_plan import Copy, RankPlan
from grpo_megatron.sync.tensors import SyncTensor

ReadParameter = Callable[[str], Tensor]  # name of a parameter -> this rank's shard


class Shard:
    """What `read` gives is kept until `forget`: it may have been computed (FP8), and parts of one parameter are neighbours."""

    def __init__(self, plan: RankPlan, read: ReadParameter, pool: Pool) -> None:
        self._plan, self._read, self._pool = plan, read, pool
        self._cache: dict[str, Tensor] = {}

    def forget(self) -> None:
        self._cache.clear()

    def local(self, copy: Copy) -> Tensor:
        """A view of what this rank holds."""
        name = self._plan.parameter(copy.tensor).name
        if name not in self._cache:
            self._cache[name] = self._read(name)
        return self._cache[name].narrow(self._plan.tensor(copy.tensor).axis, copy.local_start, copy.stop - copy.start)

    def part(self, number: int) -> Tensor:
        """A part that this rank holds, as one dimension. Forgets other parameters."""
        copy = self._plan.local(self._plan.plan.parts[number])
        if self._plan.parameter(copy.tensor).name not in self._cache:
            self.forget()
        return self.local(copy).to(self._pool.dtype).reshape(-1)

    def begin(self, tensor: int) -> Tensor:
        """The full-shaped tensor, with what this rank's engine reads and the rank holds itself.

        If that is all that the engine reads, and in one piece, the tensor is a window on the parameter. A tensor of which
        the engine reads nothing has the memory of one element.
        """
        whole, own = self._plan.tensor(tensor), self._plan.own.get(tensor, [])
        start, stop = self._plan.plan.spans[whole.name][self._plan.engine_rank]
        if start == stop:
            return self._pool.empty((1,) * len(whole.shape)).expand(whole.shape)
        if len(own) == 1 and (own[0].start, own[0].stop) == (start, stop):
            window = _window(self.local(own[0]), whole, own[0].start)
            if window is not None and window.dtype == self._pool.dtype:
                return window
        out = self._pool.empty(whole.shape)
        for copy in own:
            out.narrow(whole.axis, copy.start, copy.stop - copy.start).copy_(self.local(copy))
        return out


def part_of(tensor: Tensor, part: SyncPart, axis: int) -> Tensor:
    """A view of the part within a full-shaped tensor."""
    return tensor.narrow(axis, part.start, part.stop - part.start)


def _window(local: Tensor, whole: SyncTensor, start: int) -> Tensor | None:
    """The full-shaped tensor whose part from `start` is `local`, without a copy. Its other elements are undefined.

    None if that would leave the memory of `local`. Megatron's distributed optimizer keeps all parameters in one buffer, so
    that there is room on both sides of nearly all of them.
    """
    first = local.storage_offset() - start * local.stride(whole.axis)
    last = first + sum((size - 1) * stride for size, stride in zip(whole.shape, local.stride(), strict=True))
    if first < 0 or last >= local.untyped_storage().nbytes() // local.element_size():
        return None
    return local.as_strided(whole.shape, local.stride(), first)
