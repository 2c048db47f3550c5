"""One rank's side of a sync plan: its messages round by round, and the parts it takes from its own parameters."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import NamedTuple

from grpo_megatron.sync.plan import NETWORK, NODE, SyncPart, SyncPlan
from grpo_megatron.sync.rounds import Rounds
from grpo_megatron.sync.tensors import Interval, Share, SyncParameter, SyncTensor


class Copy(NamedTuple):
    """`[start, stop)` of a tensor's axis, at `local_start` of the parameter that has it."""

    tensor: int
    start: int
    stop: int
    local_start: int


class Slot(NamedTuple):
    """Elements `[start, stop)` of a buffer: a part, in its shape. `origin`: where the sender of the part has it, in its own
    parameter or among what it has received over the network."""

    part: int
    start: int
    stop: int
    shape: tuple[int, ...]
    origin: Copy | Slot | None = None


@dataclass
class Message:
    """Parts that travel together, end to end in the order of their numbers. All messages of a phase share a buffer."""

    peer: int
    parts: list[int] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)

    @property
    def span(self) -> Interval:
        """Elements of the buffer."""
        return self.slots[0].start, self.slots[-1].stop


@dataclass
class Round:
    """What one rank sends and receives in a round, by phase and peer, and the tensors that are complete after it."""

    sends: dict[int, dict[int, Message]]
    receives: dict[int, dict[int, Message]]
    complete: list[int]

    def elements(self, phase: int, is_receiver: bool) -> int:
        """The size of a buffer for the messages of a phase."""
        messages = (self.receives if is_receiver else self.sends)[phase]
        return max((message.span[1] for message in messages.values()), default=0)

    def messages(self) -> int:
        return sum(len(side[phase]) for side in (self.sends, self.receives) for phase in (NETWORK, NODE))


class RankPlan:
    """`own[tensor]`: what this rank's engine reads and the rank itself holds. `held[part]`: where the rank has a part that
    it sends or witnesses. Elements are counted by `SyncPlan.numel`."""

    def __init__(self, plan: SyncPlan, rounds: Rounds, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self._lane = plan.lanes[rank]
        self.engine_rank = plan.grid.engine_rank(rank)
        self._stage, self._tp_rank = plan.grid.stage(rank), rank % plan.grid.tp
        self._holds = [rank in set(routes.holders) for routes in plan.routes]
        self._mine: dict[tuple[int, int], list[tuple[int, int, bool]]] = {}
        self.own: dict[int, list[Copy]] = {}
        self.rounds = [self._round(rounds, number) for number in range(rounds.count)]
        self._find_own()
        last = {
            plan.parts[index].tensor: number
            for number in range(rounds.count)
            for index in rounds.parts(self._lane, number)
        }
        for tensor in range(len(plan.tensors)):
            self.rounds[last[tensor]].complete.append(tensor)

    def holds(self, part: SyncPart) -> bool:
        return self._holds[part.kind]

    def local(self, part: SyncPart) -> Copy:
        """Where this rank, which holds the part, has it."""
        parameter, tensor = self.parameter(part.tensor), self.plan.tensors[part.tensor]
        index = part.tensor - self.plan.first[part.tensor]
        for piece in parameter.pieces[self._tp_rank]:
            if piece.tensor == index and piece.start <= part.start < piece.stop:
                return Copy(part.tensor, part.start, part.stop, piece.local_start + part.start - piece.start)
        raise AssertionError(f"rank {self.rank} does not hold {tensor.name} {part.span}")

    def parameter(self, tensor: int) -> SyncParameter:
        return self.plan.parameters[self.plan.owner[tensor]]

    def tensor(self, number: int) -> SyncTensor:
        return self.plan.tensors[number]

    def parameters(self) -> list[SyncParameter]:
        """The parameters that this rank has."""
        held = {self.plan.owner[part.tensor] for part in self.plan.parts if self.holds(part)}
        return [self.plan.parameters[index] for index in sorted(held)]

    def shares(self) -> list[Share]:
        """What this rank digests for the attestation, those of a parameter next to each other."""
        witnessed = [p for p in self.plan.parts if self.plan.witnesses[p.tensor, p.kind] == self.rank]
        shares: list[Share] = []
        for part in sorted(witnessed):
            share = self._share(part)
            if shares and _continues(share, shares[-1]):
                share = dataclasses.replace(shares.pop(), stop=share.stop)
            shares.append(share)
        return shares

    def sent(self) -> list[int]:
        """The parts that this rank sends from its own parameters, each once."""
        messages = (m for current in self.rounds for phase in current.sends.values() for m in phase.values())
        return sorted({part for m in messages for part in m.parts if self.holds(self.plan.parts[part])})

    def received(self) -> list[int]:
        """The parts that this rank receives."""
        messages = (m for current in self.rounds for phase in current.receives.values() for m in phase.values())
        return sorted(part for m in messages for part in m.parts)

    def _share(self, part: SyncPart) -> Share:
        name, tensor = self.parameter(part.tensor).name, self.plan.tensors[part.tensor]
        readers = self.plan.kinds[part.kind].readers
        return Share(name, tensor, part.start, part.stop, self.local(part).local_start, readers)

    def _round(self, rounds: Rounds, number: int) -> Round:
        sends: dict[int, dict[int, Message]] = {NETWORK: {}, NODE: {}}
        receives: dict[int, dict[int, Message]] = {NETWORK: {}, NODE: {}}
        for lane in range(rounds.num_lanes):
            if lane != self._lane and rounds.stage(lane, number) != self._stage:
                continue  # other lanes receive only what this rank holds
            for index in rounds.parts(lane, number):
                part = self.plan.parts[index]
                for phase, peer, is_sender in self._transfers(part.kind, part.turn):
                    if lane != (self.plan.lanes[peer] if is_sender else self._lane):
                        continue
                    side = (sends if is_sender else receives)[phase]
                    if peer not in side:
                        side[peer] = Message(peer)
                    side[peer].parts.append(index)
        for phase in (NETWORK, NODE):
            self._lay_out(receives[phase])
        forwarded = {slot.part: slot for message in receives[NETWORK].values() for slot in message.slots}
        for phase in (NETWORK, NODE):
            self._lay_out(sends[phase], forwarded)
        return Round(sends, receives, [])

    def _lay_out(self, messages: dict[int, Message], forwarded: dict[int, Slot] | None = None) -> None:
        """Give every part its place in the buffer of the phase. `forwarded`: for messages that this rank sends."""
        end = 0
        for message in messages.values():
            for number in message.parts:
                part = self.plan.parts[number]
                whole = self.plan.tensors[part.tensor]
                shape = (*whole.shape[: whole.axis], part.stop - part.start, *whole.shape[whole.axis + 1 :])
                origin: Copy | Slot | None = None
                if forwarded is not None:
                    origin = self.local(part) if self.holds(part) else forwarded[number]
                start, end = end, end + self.plan.numel(part)
                message.slots.append(Slot(number, start, end, shape, origin))

    def _transfers(self, kind: int, turn: int) -> list[tuple[int, int, bool]]:
        """(phase, peer, is this rank the sender) of this rank's transfers in a turn."""
        key = (kind, turn)
        if key not in self._mine:
            self._mine[key] = [
                (t.phase, t.target if t.source == self.rank else t.source, t.source == self.rank)
                for t in self.plan.routes[kind].transfers(turn)
                if self.rank in (t.source, t.target)
            ]
        return self._mine[key]

    def _find_own(self) -> None:
        for part in self.plan.parts:
            if self.holds(part) and self.engine_rank in self.plan.kinds[part.kind].readers:
                self.own.setdefault(part.tensor, []).append(self.local(part))
        self.own = {tensor: _merged(copies) for tensor, copies in self.own.items()}


def _continues(share: Share, last: Share) -> bool:
    return (share.tensor, share.engine_ranks, share.start) == (
        last.tensor,
        last.engine_ranks,
        last.stop,
    ) and share.local_start - last.local_start == share.start - last.start


def _merged(copies: list[Copy]) -> list[Copy]:
    """Neighbours become one, so that a tensor's own rows are copied at once."""
    out: list[Copy] = []
    for copy in sorted(copies, key=lambda c: c.start):
        if out and out[-1].stop == copy.start and copy.local_start - out[-1].local_start == copy.start - out[-1].start:
            out[-1] = Copy(copy.tensor, out[-1].start, copy.stop, out[-1].local_start)
        else:
            out.append(copy)
    return out
