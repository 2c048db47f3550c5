"""Exchange: runs one rank's plan on tensors. A stream of full-shaped tensors, filled where this rank's engine reads them.

Engines cut their own shard out of a whole tensor. They are handed tensors of the whole shape, so that nothing of an
engine's fused layout needs to be known here; what is outside this rank's part is undefined. A part that this rank has
itself, in one piece, is not copied: the tensor is a window on the parameter.

    round          k        k+1      k+2      k+3
    over network                     posted   posted
    within nodes   waited   posted
    loaded         yielded

Every rank posts all its messages, also after a local failure: its peers then finish, and learn of the failure when the
ranks agree at the end. Nothing on the host is exchanged between the rounds.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_megatron.parallel.mesh import RankError
from grpo_megatron.sync.plan import NETWORK, NODE, SyncPart
from grpo_megatron.sync.rounds import AHEAD, DEPTH, Copy, Message, RankPlan, Slot
from grpo_megatron.sync.tensors import SyncTensor
from grpo_megatron.types import WeightBucket

# -- Pool: memory on the host that is used again as soon as no tensor refers to it -------------------------------------
# torch has such an allocator for GPUs, not for the CPU: there every large tensor gets fresh pages from the system, and
# touching them first takes four times as long as copying into memory in use (measured).

SMALLEST = 1 << 16  # bytes; malloc keeps smaller memory itself


class Pool:
    """Made once for all syncs. It keeps what was in use at one time: about the message buffers and the tensors of a round."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._free: dict[int, list[bytearray]] = {}  # by size, which is that of few kinds of tensors

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Like `torch.empty`. The memory returns to the pool with the last view of the tensor."""
        size = math.prod(shape) * self.dtype.itemsize
        if self.device.type != "cpu" or size < SMALLEST:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else bytearray(size)
        lease = memoryview(memory)  # the tensor's storage holds it
        weakref.finalize(lease, free.append, memory).atexit = False
        return torch.frombuffer(lease, dtype=self.dtype).view(shape)


# -- Shard: this rank's own parameters, cut by the plan, and the full-shaped tensors that its engine is handed ---------

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


# -- Transport: how the messages of one phase travel. Point-to-point operations of torch.distributed -------------------

Envelope = tuple[int, Tensor]  # (peer, contiguous one-dimensional buffer)


class Transport(Protocol):
    """What moves the messages of one phase of a round."""

    def post(self, sends: list[Envelope], receives: list[Envelope]) -> Callable[[], None]:
        """Start all of them at once. The function that is returned waits until the buffers may be read and reused."""


class PointToPoint:
    """Messages in one group of operations per phase: NCCL runs them as one kernel, gloo side by side.

    All ranks post the phases of a sync in the same order, so messages between two ranks need no tag.
    """

    def post(self, sends: list[Envelope], receives: list[Envelope]) -> Callable[[], None]:
        operations = [dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in receives]
        operations += [dist.P2POp(dist.isend, buffer, peer) for peer, buffer in sends]
        if not operations:
            return lambda: None
        works = dist.batch_isend_irecv(operations)
        peers = [peer for peer, _ in (*receives, *sends)]
        names = peers if len(works) == len(peers) else [sorted(set(peers))] * len(works)  # NCCL: one work for the group

        def wait() -> None:
            for work, peer in zip(works, names, strict=True):
                try:
                    work.wait()
                except RuntimeError as error:
                    raise RankError(f"the weight sync lost its connection to rank {peer}: {error}") from error

        return wait


T = TypeVar("T")


class Exchange:
    """One sync. Its message buffers are allocated when it is made, so that no rank runs out of memory between messages."""

    def __init__(self, plan: RankPlan, read: ReadParameter, transport: Transport, pool: Pool) -> None:
        self._plan, self._transport, self._pool = plan, transport, pool
        self._shard = Shard(plan, read, pool)
        self._buffers = {key: self._allocate(*key) for key in DEPTH}
        self._tensors: dict[int, Tensor] = {}  # begun, not yet complete
        self._problem: Exception | None = None

    def stream(self) -> Iterator[WeightBucket]:
        """The buckets. After a local failure nothing more is yielded, and the failure is raised when all messages are through."""
        rounds = self._plan.rounds
        over_network = deque(self._post(NETWORK, number) for number in range(min(AHEAD, len(rounds))))
        within_node: Callable[[], None] | None = None
        for number in range(len(rounds) + 1):
            following = None
            if number < len(rounds):
                over_network.popleft()()
                following = self._post(NODE, number)
                if number + AHEAD < len(rounds):
                    over_network.append(self._post(NETWORK, number + AHEAD))
            if within_node is not None:
                within_node()
                bucket = self._attempt(functools.partial(self._finish, number - 1)) or []
                if bucket and self._problem is None:
                    yield bucket
                del bucket
            within_node = following
        if self._problem is not None:
            raise self._problem

    # -- messages ------------------------------------------------------------------------------------------------------

    def _post(self, phase: int, number: int) -> Callable[[], None]:
        current = self._plan.rounds[number]
        buffer = self._buffer(phase, False, number)
        sends = []
        for message in current.sends[phase].values():
            packed = self._attempt(functools.partial(self._packed, message, buffer, number))
            sends.append((message.peer, buffer[slice(*message.span)] if packed is None else packed))
        self._shard.forget()
        buffer = self._buffer(phase, True, number)
        receives = [(m.peer, buffer[slice(*m.span)]) for m in current.receives[phase].values()]
        return self._transport.post(sends, receives)

    def _packed(self, message: Message, buffer: Tensor, number: int) -> Tensor:
        """The contents of a message, one-dimensional. A single part that is contiguous where it is needs no buffer."""
        if len(message.slots) == 1:
            view = self._origin(message.slots[0], number)
            if view.is_contiguous():
                return view.view(-1)
        for slot in message.slots:
            _view(buffer, slot).copy_(self._origin(slot, number))
        return buffer[slice(*message.span)]

    def _origin(self, slot: Slot, number: int) -> Tensor:
        """A part that this rank holds, or has received over the network."""
        if isinstance(slot.origin, Slot):
            return _view(self._buffer(NETWORK, True, number), slot.origin)
        assert slot.origin is not None, "only what is sent has an origin"
        return self._shard.local(slot.origin)

    # -- tensors -------------------------------------------------------------------------------------------------------

    def _finish(self, number: int) -> WeightBucket:
        """Write what a round has brought, and hand over the tensors that are complete."""
        current = self._plan.rounds[number]
        for phase in (NETWORK, NODE):
            buffer = self._buffer(phase, True, number)
            for message in current.receives[phase].values():
                for slot in message.slots:
                    self._write(slot, buffer)
        return [(self._plan.tensor(tensor).name, self._completed(tensor)) for tensor in current.complete]

    def _write(self, slot: Slot, buffer: Tensor) -> None:
        part = self._plan.plan.parts[slot.part]
        if part.tensor not in self._tensors:
            self._tensors[part.tensor] = self._shard.begin(part.tensor)
        axis = self._plan.tensor(part.tensor).axis
        part_of(self._tensors[part.tensor], part, axis).copy_(_view(buffer, slot))

    def _completed(self, tensor: int) -> Tensor:
        return self._tensors.pop(tensor) if tensor in self._tensors else self._shard.begin(tensor)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _allocate(self, phase: int, is_receiver: bool) -> list[Tensor]:
        size = max(current.elements(phase, is_receiver) for current in self._plan.rounds)
        return [self._pool.empty((size,)) for _ in range(DEPTH[phase, is_receiver])]

    def _buffer(self, phase: int, is_receiver: bool, number: int) -> Tensor:
        return self._buffers[phase, is_receiver][number % DEPTH[phase, is_receiver]]

    def _attempt(self, call: Callable[[], T]) -> T | None:
        """The value of a local step, or None after a failure, which is kept for the end."""
        try:
            return call()
        except Exception as error:
            self._problem = self._problem or error
            return None


def _view(buffer: Tensor, slot: Slot) -> Tensor:
    return buffer[slot.start : slot.stop].view(slot.shape)
