"""PatchExchange: sends patches along the routes of the plan, in its rounds. A relay passes on what it has received, unread.

    counts      one message per peer and phase: how many elements have changed in each part of the sync
    (the ranks agree that all counts have arrived; the sizes of all following messages are then known)
    round 0     patches over the network
    round 1     patches over the network, those of round 0 within the nodes
    ...
    (the ranks agree that every message was the expected one; only then may a patch be applied)

All ranks send all their messages, also after a local problem. Operations per rank: those of a full sync, and at most
4 (world size - 1) for the counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from grpo_megatron.sync.delta import Patch, join_patches, patch_bytes, split_patches
from grpo_megatron.sync.plan import NETWORK, NODE
from grpo_megatron.sync.rank_plan import RankPlan
from grpo_megatron.sync.stamp import STAMP_BYTES, Stamp, stamp_problem, stamped
from grpo_megatron.sync.transport import Envelope, Transport

Agree = Callable[[str | None], None]


class PatchExchange:
    """One sync. `stamp`: of its messages, without place and source. `own`: the patch of each part that this rank sends
    and holds itself."""

    def __init__(
        self,
        plan: RankPlan,
        transport: Transport,
        stamp: Stamp,
        own: Mapping[int, Patch],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._plan, self._transport, self._stamp = plan, transport, stamp
        self._dtype, self._device = dtype, device
        self._patches = dict(own)
        self._counts = {part: patch.count for part, patch in own.items()}
        self._problem: str | None = None
        self.bytes_received = 0

    def run(self, agree: Agree) -> dict[int, Patch]:
        """The patches of the parts that this rank receives, on the host. Raises what `agree` raises, on every rank."""
        own = set(self._patches)
        for phase in (NETWORK, NODE):
            self._post_counts(phase)()
        agree(self._problem)
        over_network = self._post(NETWORK, 0)
        for number in range(len(self._plan.rounds)):
            over_network()
            within_node = self._post(NODE, number)
            if number + 1 < len(self._plan.rounds):
                over_network = self._post(NETWORK, number + 1)
            within_node()
        agree(self._problem)
        return {part: patch for part, patch in self._patches.items() if part not in own}

    def _post_counts(self, phase: int) -> Callable[[], None]:
        sends, receives = self._parts_by_peer(phase, is_sender=True), self._parts_by_peer(phase, is_sender=False)
        bodies = [
            (peer, torch.tensor([self._counts[part] for part in parts]).view(torch.uint8))
            for peer, parts in sends.items()
        ]
        sizes = [(peer, 8 * len(parts)) for peer, parts in receives.items()]
        place = -1 - phase

        def read(peer: int, body: Tensor, is_right: bool) -> None:
            counts = body.view(torch.int64).tolist() if is_right else [0] * len(receives[peer])
            self._counts.update(zip(receives[peer], counts, strict=True))

        return self._post_messages(bodies, sizes, place, read)

    def _post(self, phase: int, number: int) -> Callable[[], None]:
        current = self._plan.rounds[number]
        bodies = [
            (peer, join_patches([self._patches[part] for part in message.parts]))
            for peer, message in current.sends[phase].items()
        ]
        itemsize = self._dtype.itemsize
        sizes = [
            (peer, sum(patch_bytes(*self._size(part), itemsize) for part in message.parts))
            for peer, message in current.receives[phase].items()
        ]

        def read(peer: int, body: Tensor, is_right: bool) -> None:
            parts = current.receives[phase][peer].parts
            self._patches.update(
                zip(parts, split_patches(body, list(map(self._size, parts)), self._dtype), strict=True)
            )

        return self._post_messages(bodies, sizes, 2 * number + phase, read)

    def _post_messages(
        self,
        bodies: list[Envelope],
        sizes: list[tuple[int, int]],
        place: int,
        read: Callable[[int, Tensor, bool], None],
    ) -> Callable[[], None]:
        """Returns the function that waits, checks every message and calls `read(peer, body, is the expected one)`."""

        def stamp(source: int) -> Stamp:
            return dataclasses.replace(self._stamp, place=place, source=source)

        sends = [(peer, stamped(body, stamp(self._plan.rank)).to(self._device)) for peer, body in bodies]
        receives = [
            (peer, torch.empty(STAMP_BYTES + size, dtype=torch.uint8, device=self._device)) for peer, size in sizes
        ]
        wait = self._transport.post(sends, receives)

        def finish() -> None:
            wait()
            for peer, buffer in receives:
                message = buffer.cpu()
                problem = stamp_problem(message, stamp(peer))
                self._problem = self._problem or problem
                read(peer, message[STAMP_BYTES:], problem is None)
                self.bytes_received += message.numel()

        return finish

    def _parts_by_peer(self, phase: int, *, is_sender: bool) -> dict[int, list[int]]:
        parts: dict[int, list[int]] = {}
        for current in self._plan.rounds:
            for peer, message in (current.sends if is_sender else current.receives)[phase].items():
                parts.setdefault(peer, []).extend(message.parts)
        return parts

    def _size(self, part: int) -> tuple[int, int]:
        """(elements, changed elements)"""
        return self._plan.plan.numel(self._plan.plan.parts[part]), self._counts[part]
