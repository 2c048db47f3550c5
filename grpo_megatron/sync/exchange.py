"""Exchange: runs one rank's plan on tensors. A stream of full-shaped tensors, filled where this rank's engine reads them.

Engines cut their own shard out of a whole tensor. They are handed tensors of the whole shape, so that nothing of an
engine's fused layout needs to be known here; what is outside this rank's part is undefined. A part that this rank has
itself, in one piece, is not copied: the tensor is a window on the parameter.

Every rank posts all its messages, also after a local failure: its peers then finish, and learn of the failure when the
ranks agree at the end. Nothing on the host is exchanged between the rounds.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_megatron.parallel.mesh import RankError
from grpo_megatron.sync.digest import Share
from grpo_megatron.sync.plan import (
    AHEAD,
    DEPTH,
    NETWORK,
    NODE,
    PHASES,
    Interval,
    Rounds,
    SyncParameter,
    SyncPart,
    SyncPlan,
    SyncTensor,
)
from grpo_megatron.sync.stacks import copy_all, empty_stack
from grpo_megatron.types import WeightBucket

# -- One rank's side of a plan: its messages round by round, and the parts it takes from its own parameters ------------


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


class Message(NamedTuple):
    """Parts that travel together, end to end in the order of their numbers. All messages of a phase share a buffer."""

    peer: int
    slots: list[Slot]

    @property
    def parts(self) -> list[int]:
        return [slot.part for slot in self.slots]

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
        return sum(len(side[phase]) for side in (self.sends, self.receives) for phase in PHASES)


class RankPlan:
    """`own[tensor]`: what this rank's engine reads and the rank itself holds. `sent`: the parts that the rank sends from its
    own parameters, each once; `received`: those that it receives. `stacked[tensor]`: its stack, place in it, and their number."""

    def __init__(
        self, plan: SyncPlan, rounds: Rounds, rank: int, units: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        """`units`: the stacks that this rank's engine loads (`EngineTensors.units`). None: each tensor by itself."""
        self.plan, self.rank = plan, rank
        self._lane = plan.lanes[rank]
        self.engine_rank = plan.grid.engine_rank(rank)
        self._tp_rank = rank % plan.grid.tp
        self._holds = [rank in routes.holders for routes in plan.routes]
        self._sends = {kind.stages[0] for kind, holds in zip(plan.kinds, self._holds, strict=True) if holds}  # stages
        self._mine: dict[tuple[int, int], list[tuple[int, int, bool]]] = {}
        self.own = self._own()
        self.rounds = [self._round(rounds, number) for number in range(rounds.count)]
        last = {
            plan.parts[index].tensor: number
            for number in range(rounds.count)
            for index in rounds.parts(self._lane, number)
        }
        for tensor in range(len(plan.tensors)):
            self.rounds[last[tensor]].complete.append(tensor)
        sent = {part for current in self.rounds for part in _parts(current.sends) if self.holds(plan.parts[part])}
        self.sent = sorted(sent)
        self.received = sorted(part for current in self.rounds for part in _parts(current.receives))
        self.elements_received = sum(plan.numel(plan.parts[part]) for part in self.received)
        numbers = {tensor.name: number for number, tensor in enumerate(plan.tensors)}
        self.stacked = {
            numbers[name]: (stack, place, len(names))
            for stack, names in (units or {}).items()
            for place, name in enumerate(names)
            if len(names) > 1
        }

    def holds(self, part: SyncPart) -> bool:
        return self._holds[part.kind]

    def local(self, part: SyncPart) -> Copy:
        """Where this rank, which holds the part, has it."""
        index = part.tensor - self.plan.first[part.tensor]
        for piece in self.parameter(part.tensor).pieces[self._tp_rank]:
            if piece.tensor == index and piece.start <= part.start < piece.stop:
                return Copy(part.tensor, part.start, part.stop, piece.local_start + part.start - piece.start)
        raise AssertionError(f"rank {self.rank} does not hold {part} of {self.tensor(part.tensor).name}")

    def parameter(self, tensor: int) -> SyncParameter:
        return self.plan.parameters[self.plan.owner[tensor]]

    def tensor(self, number: int) -> SyncTensor:
        return self.plan.tensors[number]

    def parameters(self) -> list[SyncParameter]:
        """The parameters that this rank has."""
        held = {self.plan.owner[part.tensor] for part in self.plan.parts if self.holds(part)}
        return [self.plan.parameters[index] for index in sorted(held)]

    def peers(self) -> tuple[list[int], list[int]]:
        """The ranks that this rank sends to, and those that it receives from, in any round."""
        sides = [[current.sends for current in self.rounds], [current.receives for current in self.rounds]]
        to, origins = ({p for phases in side for by_peer in phases.values() for p in by_peer} for side in sides)
        return sorted(to), sorted(origins)

    def shares(self) -> list[Share]:
        """What this rank digests for the attestation, those of a parameter next to each other."""
        witnessed = sorted(p for p in self.plan.parts if self.plan.witnesses[p.tensor, p.kind] == self.rank)
        return _merged(
            Share(
                self.parameter(part.tensor).name,
                self.tensor(part.tensor),
                *self.local(part)[1:],
                self.plan.kinds[part.kind].readers,
            )
            for part in witnessed
        )

    def _round(self, rounds: Rounds, number: int) -> Round:
        sent: dict[int, dict[int, list[int]]] = {phase: {} for phase in PHASES}  # phase -> peer -> parts
        received: dict[int, dict[int, list[int]]] = {phase: {} for phase in PHASES}
        for lane in range(rounds.num_lanes):
            if lane != self._lane and rounds.stage(lane, number) not in self._sends:
                continue  # other lanes receive only what this rank holds
            for index in rounds.parts(lane, number):
                part = self.plan.parts[index]
                for phase, peer, is_sender in self._transfers(part.kind, part.turn):
                    if lane == (self.plan.lanes[peer] if is_sender else self._lane):
                        (sent if is_sender else received)[phase].setdefault(peer, []).append(index)
        receives = {phase: self._laid_out(received[phase]) for phase in PHASES}
        forwarded = {slot.part: slot for message in receives[NETWORK].values() for slot in message.slots}
        return Round({phase: self._laid_out(sent[phase], forwarded) for phase in PHASES}, receives, [])

    def _laid_out(self, by_peer: dict[int, list[int]], forwarded: dict[int, Slot] | None = None) -> dict[int, Message]:
        """Messages whose parts have their places in the buffer of the phase. `forwarded`: of messages that this rank sends."""
        out, end = {}, 0
        for peer, numbers in by_peer.items():
            out[peer] = Message(peer, [])
            for number in numbers:
                part = self.plan.parts[number]
                whole = self.tensor(part.tensor)
                shape = (*whole.shape[: whole.axis], part.stop - part.start, *whole.shape[whole.axis + 1 :])
                origin: Copy | Slot | None = None
                if forwarded is not None:
                    origin = self.local(part) if self.holds(part) else forwarded[number]
                start, end = end, end + self.plan.numel(part)
                out[peer].slots.append(Slot(number, start, end, shape, origin))
        return out

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

    def _own(self) -> dict[int, list[Copy]]:
        own: dict[int, list[Copy]] = {}
        for part in sorted(self.plan.parts):
            if self.holds(part) and self.engine_rank in self.plan.kinds[part.kind].readers:
                own.setdefault(part.tensor, []).append(self.local(part))
        return {tensor: _merged(copies) for tensor, copies in own.items()}


_Piece = TypeVar("_Piece", Copy, Share)


def _merged(pieces: Iterable[_Piece]) -> list[_Piece]:
    """Neighbours become one, so that a tensor's own rows are copied, or digested, at once."""
    out: list[_Piece] = []
    for piece in pieces:
        if out:
            last = out[-1]
            follows = last._replace(
                start=last.stop, stop=piece.stop, local_start=last.local_start + last.stop - last.start
            )
            if piece == follows:
                piece = out.pop()._replace(stop=piece.stop)
        out.append(piece)
    return out


def _parts(messages: dict[int, dict[int, Message]]) -> list[int]:
    return [part for by_peer in messages.values() for message in by_peer.values() for part in message.parts]


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
        self._stacks: dict[
            str, list[Tensor]
        ] = {}  # of each stack of which some tensors have begun and others have not: all tensors
        self._left: dict[str, int] = {}  # of a stack: how many have not begun
        self.copies: list[tuple[Tensor, Tensor]] = []  # (target, source), made by `copy`

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

    def copy(self) -> None:
        """Make the copies that `begin` and the owner of this shard have noted."""
        copy_all(self.copies)
        self.copies.clear()

    def begin(self, tensor: int) -> Tensor:
        """The full-shaped tensor. What this rank's engine reads and the rank holds itself is in it after `copy`.

        If that is all that the engine reads, and in one piece, the tensor is a window on the parameter. A tensor of which
        the engine reads nothing has the memory of one element. One that is stacked is a view of its stack.
        """
        whole, own = self._plan.tensor(tensor), self._plan.own.get(tensor, [])
        start, stop = self._plan.plan.spans[whole.name][self._plan.engine_rank]
        if start == stop:
            return self._pool.empty((1,) * len(whole.shape)).expand(whole.shape)
        is_stacked = tensor in self._plan.stacked
        if not is_stacked and len(own) == 1 and (own[0].start, own[0].stop) == (start, stop):
            window = _window(self.local(own[0]), whole, own[0].start)
            if window is not None and window.dtype == self._pool.dtype:
                return window
        out = self._in_stack(tensor, (start, stop)) if is_stacked else self._pool.empty(whole.shape)
        for copy in own:
            self.copies.append((out.narrow(whole.axis, copy.start, copy.stop - copy.start), self.local(copy)))
        return out

    def _in_stack(self, tensor: int, span: Interval) -> Tensor:
        name, place, count = self._plan.stacked[tensor]
        if name not in self._stacks:
            self._stacks[name] = list(empty_stack(count, self._plan.tensor(tensor), span, self._pool.empty))
            self._left[name] = count
        self._left[name] -= 1
        out = self._stacks[name][place]
        if not self._left[name]:
            del self._stacks[name]  # its memory is that of its tensors
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


# -- How messages travel -----------------------------------------------------------------------------------------------

Envelope = tuple[int, Tensor]  # (peer, contiguous one-dimensional buffer)
Wait = Callable[[], None]
# Starts all messages of a phase of a round, sent and received, at once. `Wait` returns when the buffers may be read and reused.
Post = Callable[[list[Envelope], list[Envelope]], Wait]


def point_to_point(sends: list[Envelope], receives: list[Envelope]) -> Wait:
    """A `Post`: one group of operations of torch.distributed. NCCL runs them as one kernel, gloo side by side.

    All phases use the world's group. With NCCL this is one communicator with one stream: the messages of two phases or
    rounds never overlap each other, only what the engine loads meanwhile.
    All ranks post the phases of a sync in the same order, so messages between two ranks need no tag.
    """
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


def in_rounds(count: int, post: Callable[[int, int], Wait], ahead: int = AHEAD) -> Iterator[int]:
    """Call `post(phase, number)` for all rounds, and yield the number of each round when its messages have arrived.

    round          k        k+1      k+2      k+3
    over network                     posted   posted
    within nodes   waited   posted
    loaded         yielded

    The first `ahead` rounds over the network are posted before this returns.
    """
    over_network = deque(post(NETWORK, number) for number in range(min(ahead, count)))
    return _waited_for(count, post, over_network, ahead)


def _waited_for(count: int, post: Callable[[int, int], Wait], over_network: deque[Wait], ahead: int) -> Iterator[int]:
    within_node: Wait | None = None
    for number in range(count + 1):
        following = None
        if number < count:
            over_network.popleft()()
            following = post(NODE, number)
            if number + ahead < count:
                over_network.append(post(NETWORK, number + ahead))
        if within_node is not None:
            within_node()
            yield number - 1
        within_node = following


class Exchange:
    """One sync. Its message buffers are allocated when it is made, so that no rank runs out of memory between messages.

    `stage`: where all that comes over the network is received, from now on: `stream` is then called at a later time.
    """

    def __init__(
        self, plan: RankPlan, read: ReadParameter, post: Post, pool: Pool, *, stage: Pool | None = None
    ) -> None:
        self._plan, self._post, self._shard = plan, post, Shard(plan, read, pool)
        count = len(plan.rounds)
        self._depth = DEPTH if stage is None else {**DEPTH, (NETWORK, True): count}
        self._buffers = {}
        for key, depth in self._depth.items():
            size = max(current.elements(*key) for current in plan.rounds)
            self._buffers[key] = [(stage or pool).empty((size,)) for _ in range(depth)]
        self._tensors: dict[int, Tensor] = {}  # begun, not yet complete
        self._problem: Exception | None = None
        self._rounds = None if stage is None else in_rounds(count, self._post_round, ahead=count)

    def stream(self) -> Iterator[WeightBucket]:
        """The buckets. After a local failure nothing more is yielded, and the failure is raised when all messages are through."""
        for number in self._rounds or in_rounds(len(self._plan.rounds), self._post_round):
            bucket: WeightBucket = []
            with self._kept_problem():
                bucket = self._finish(number)
            if bucket and self._problem is None:
                yield bucket
            del bucket
        if self._problem is not None:
            raise self._problem

    def _post_round(self, phase: int, number: int) -> Wait:
        current = self._plan.rounds[number]
        buffer = self._buffer(phase, False, number)
        sends = []
        for message in current.sends[phase].values():
            packed = buffer[slice(*message.span)]
            with self._kept_problem():
                packed = self._packed(message, buffer, number)
            sends.append((message.peer, packed))
        self._shard.forget()
        buffer = self._buffer(phase, True, number)
        return self._post(sends, [(m.peer, buffer[slice(*m.span)]) for m in current.receives[phase].values()])

    def _packed(self, message: Message, buffer: Tensor, number: int) -> Tensor:
        """The contents of a message, one-dimensional. A single part that is contiguous where it is needs no buffer."""
        if len(message.slots) == 1:
            view = self._origin(message.slots[0], number)
            if view.is_contiguous():
                return view.view(-1)
        copy_all([(_view(buffer, slot), self._origin(slot, number)) for slot in message.slots])
        return buffer[slice(*message.span)]

    def _origin(self, slot: Slot, number: int) -> Tensor:
        """A part that this rank holds, or has received over the network."""
        if isinstance(slot.origin, Slot):
            return _view(self._buffer(NETWORK, True, number), slot.origin)
        assert slot.origin is not None, "only what is sent has an origin"
        return self._shard.local(slot.origin)

    def _finish(self, number: int) -> WeightBucket:
        """Write what a round has brought, and hand over the tensors that are complete."""
        current = self._plan.rounds[number]
        for phase in PHASES:
            buffer = self._buffer(phase, True, number)
            for message in current.receives[phase].values():
                for slot in message.slots:
                    part = self._plan.plan.parts[slot.part]
                    if part.tensor not in self._tensors:
                        self._tensors[part.tensor] = self._shard.begin(part.tensor)
                    axis = self._plan.tensor(part.tensor).axis
                    target = part_of(self._tensors[part.tensor], part, axis)
                    self._shard.copies.append((target, _view(buffer, slot)))
        bucket = [(self._plan.tensor(tensor).name, self._completed(tensor)) for tensor in current.complete]
        self._shard.copy()
        return bucket

    def _completed(self, tensor: int) -> Tensor:
        return self._tensors.pop(tensor) if tensor in self._tensors else self._shard.begin(tensor)

    def _buffer(self, phase: int, is_receiver: bool, number: int) -> Tensor:
        return self._buffers[phase, is_receiver][number % self._depth[phase, is_receiver]]

    @contextlib.contextmanager
    def _kept_problem(self) -> Iterator[None]:
        """A local failure is kept for the end."""
        try:
            yield
        except Exception as error:
            self._problem = self._problem or error


def snapshot(plan: RankPlan, read: ReadParameter, pool: Pool) -> list[Envelope]:
    """Copies of all that this rank sends over the network, in the order of the rounds: training may then go on."""
    shard, envelopes = Shard(plan, read, pool), []
    for current in plan.rounds:
        buffer = pool.empty((current.elements(NETWORK, False),))
        for message in current.sends[NETWORK].values():
            assert all(isinstance(slot.origin, Copy) for slot in message.slots), "a rank that trains passes nothing on"
            copy_all([(_view(buffer, slot), shard.local(slot.origin)) for slot in message.slots])  # type: ignore[arg-type]
            envelopes.append((message.peer, buffer[slice(*message.span)]))
        shard.forget()
    return envelopes


def _view(buffer: Tensor, slot: Slot) -> Tensor:
    return buffer[slot.start : slot.stop].view(slot.shape)
