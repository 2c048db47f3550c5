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
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from torch import Tensor

from grpo_megatron.sync.plan import NETWORK, NODE
from grpo_megatron.sync.pool import Pool
from grpo_megatron.sync.rank_plan import Message, RankPlan, Slot
from grpo_megatron.sync.rounds import AHEAD, DEPTH
from grpo_megatron.sync.shard import ReadParameter, Shard, part_of
from grpo_megatron.sync.transport import Transport
from grpo_megatron.types import WeightBucket

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
