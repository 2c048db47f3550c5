"""Exchange: runs one rank's plan on tensors. A stream of full-shaped tensors, filled where this rank's engine reads them.

Engines cut their own shard out of a whole tensor. They are handed tensors of the whole shape, so that nothing of an
engine's fused layout needs to be known here; memory outside this rank's part is allocated and never written. A tensor that
is a whole parameter, or a contiguous part of one, is handed over as it is.

    round          k        k+1      k+2
    over network            ...      posted
    within nodes   waited   posted
    loaded         yielded

Every rank posts all its messages, also after a local failure: its peers then finish, and learn of the failure when the
ranks agree at the end. Nothing on the host is exchanged between the rounds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from grpo_megatron.sync.plan import NETWORK, NODE, Part
from grpo_megatron.sync.rank_plan import Copy, Message, RankPlan, Round
from grpo_megatron.sync.rounds import DEPTH
from grpo_megatron.sync.transport import Envelope, Transport
from grpo_megatron.types import WeightBucket

T = TypeVar("T")
Read = Callable[[str], Tensor]  # name of a parameter -> this rank's shard


class Exchange:
    """One sync. Its message buffers are allocated when it is made, so that no rank runs out of memory between messages."""

    def __init__(
        self, plan: RankPlan, read: Read, transport: Transport, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._plan, self._read_parameter, self._transport = plan, read, transport
        self._dtype, self._device = dtype, device
        self._buffers = {key: self._allocate(*key) for key in DEPTH}
        self._tensors: dict[int, Tensor] = {}  # begun, not yet complete
        self._cache: dict[str, Tensor] = {}
        self._problem: Exception | None = None

    def stream(self) -> Iterator[WeightBucket]:
        """The buckets. After a local failure nothing more is yielded, and the failure is raised when all messages are through."""
        rounds = self._plan.rounds
        over_network = self._post(NETWORK, 0)
        within_node: Callable[[], None] | None = None
        for number in range(len(rounds) + 1):
            following = None
            if number < len(rounds):
                over_network()
                following = self._post(NODE, number)
                if number + 1 < len(rounds):
                    over_network = self._post(NETWORK, number + 1)
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
        sends = list(self._envelopes(current.sends[phase], self._buffer(phase, False, number)))
        receives = list(self._envelopes(current.receives[phase], self._buffer(phase, True, number)))
        for (_, buffer), message in zip(sends, current.sends[phase].values(), strict=True):
            self._attempt(functools.partial(self._pack, buffer, message, number))
        self._cache.clear()
        return self._transport.post(sends, receives)

    def _pack(self, buffer: Tensor, message: Message, number: int) -> None:
        for index, slot in self._slots(message, buffer):
            part = self._plan.plan.parts[index]
            slot.copy_(self._held(part) if self._plan.holds(part) else self._received(NETWORK, number)[index])

    def _envelopes(self, messages: dict[int, Message], buffer: Tensor) -> Iterator[Envelope]:
        end = 0
        for message in messages.values():
            start, end = end, end + sum(self._numel(index) for index in message.parts)
            yield message.peer, buffer[start:end]

    def _slots(self, message: Message, buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(part number, its place in a message's buffer, in the part's shape)"""
        end = 0
        for index in message.parts:
            start, end = end, end + self._numel(index)
            yield index, buffer[start:end].view(self._shape(self._plan.plan.parts[index]))

    def _received(self, phase: int, number: int) -> dict[int, Tensor]:
        messages = self._plan.rounds[number].receives[phase]
        envelopes = self._envelopes(messages, self._buffer(phase, True, number))
        return {
            index: slot
            for (_, buffer), message in zip(envelopes, messages.values(), strict=True)
            for index, slot in self._slots(message, buffer)
        }

    # -- tensors -------------------------------------------------------------------------------------------------------

    def _finish(self, number: int) -> WeightBucket:
        """Write what a round has brought, and hand over the tensors that are complete."""
        for phase in (NETWORK, NODE):
            for index, slot in self._received(phase, number).items():
                part = self._plan.plan.parts[index]
                self._target(part.tensor).narrow(self._axis(part.tensor), part.start, part.stop - part.start).copy_(
                    slot
                )
        names = [(self._plan.tensor(tensor).name, tensor) for tensor in self._plan.rounds[number].complete]
        bucket = [(name, self._target(tensor)) for name, tensor in names]
        for _, tensor in names:
            del self._tensors[tensor]
        return bucket

    def _target(self, tensor: int) -> Tensor:
        """The full-shaped tensor, begun with what this rank holds itself."""
        if tensor not in self._tensors:
            self._tensors[tensor] = self._begin(tensor)
        return self._tensors[tensor]

    def _begin(self, tensor: int) -> Tensor:
        whole, own = self._plan.tensor(tensor), self._plan.own.get(tensor, [])
        if len(own) == 1 and (own[0].start, own[0].stop) == (0, whole.length):
            view = self._local(own[0])
            if view.is_contiguous():
                return view
        out = torch.empty(whole.shape, dtype=self._dtype, device=self._device)
        for copy in own:
            out.narrow(whole.axis, copy.start, copy.stop - copy.start).copy_(self._local(copy))
        return out

    def _held(self, part: Part) -> Tensor:
        return self._local(self._plan.local(part))

    def _local(self, copy: Copy) -> Tensor:
        name = self._plan.parameter(copy.tensor).name
        if name not in self._cache:
            self._cache[name] = self._read_parameter(name)
        return self._cache[name].narrow(self._axis(copy.tensor), copy.local_start, copy.stop - copy.start)

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def _axis(self, tensor: int) -> int:
        return self._plan.tensor(tensor).axis

    def _numel(self, index: int) -> int:
        return self._plan.plan.numel(self._plan.plan.parts[index])

    def _shape(self, part: Part) -> tuple[int, ...]:
        whole = self._plan.tensor(part.tensor)
        return (*whole.shape[: whole.axis], part.stop - part.start, *whole.shape[whole.axis + 1 :])

    def _allocate(self, phase: int, is_receiver: bool) -> list[Tensor]:
        def elements(current: Round) -> int:
            messages = (current.receives if is_receiver else current.sends)[phase].values()
            return sum(self._numel(index) for message in messages for index in message.parts)

        size = max(map(elements, self._plan.rounds))
        return [torch.empty(size, dtype=self._dtype, device=self._device) for _ in range(DEPTH[phase, is_receiver])]

    def _buffer(self, phase: int, is_receiver: bool, number: int) -> Tensor:
        return self._buffers[phase, is_receiver][number % DEPTH[phase, is_receiver]]

    def _attempt(self, call: Callable[[], T]) -> T | None:
        """The value of a local step, or None after a failure, which is kept for the end."""
        try:
            return call()
        except Exception as error:
            self._problem = self._problem or error
            return None
