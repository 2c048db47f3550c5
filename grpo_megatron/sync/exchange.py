"""Exchange: one sync's messages on one rank, and the full-shaped tensors that its engine is given.

Engines cut their shard out of a complete tensor. They get tensors of the complete shape, so that nothing of an engine's
fused layout is needed here. Only the span that the rank reads is defined. A span that the rank has itself, in one interval,
is not copied: the tensor is a window on the parameter.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_megatron.parallel.mesh import RankError
from grpo_megatron.sync.digest import DigestSlice, copy_all, empty_group
from grpo_megatron.sync.plan import (
    AHEAD,
    DEPTH,
    NETWORK,
    NODE,
    PHASES,
    RELAY,
    Interval,
    Rounds,
    Shard,
    Slice,
    SyncParameter,
    SyncPlan,
    SyncTensor,
)
from grpo_megatron.types import WeightBucket

# -- One rank's messages of a plan -------------------------------------------------------------------------------------


class BufferSlice(NamedTuple):
    """Elements `[start, stop)` of a message buffer, which are a slice in its shape.

    `origin`: where its sender has it, in a parameter or among what it has received over the network.
    """

    number: int  # of the slice
    start: int
    stop: int
    shape: tuple[int, ...]
    origin: Shard | BufferSlice | None = None

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.stop].view(self.shape)


class Message(NamedTuple):
    """Slices that travel together, one after the other. All messages of a phase share a buffer."""

    peer: int
    slices: list[BufferSlice]

    @property
    def numbers(self) -> list[int]:
        return [slice_.number for slice_ in self.slices]

    @property
    def span(self) -> Interval:
        """Elements of the buffer."""
        return self.slices[0].start, self.slices[-1].stop


@dataclass
class Round:
    """One rank's messages in a round, by phase, and the tensors then complete. RELAY is received in phase NETWORK."""

    sends: dict[int, list[Message]]
    receives: dict[int, list[Message]]
    complete: list[int]

    def elements(self, phase: int, is_receiver: bool) -> int:
        """Return the size of a buffer for the messages of a phase."""
        messages = (self.receives if is_receiver else self.sends)[phase]
        return max((message.span[1] for message in messages), default=0)

    def num_messages(self) -> int:
        return sum(len(messages) for side in (self.sends, self.receives) for messages in side.values())


class RankPlan:
    """One rank's view of a plan.

    `local[tensor]`: shards that the rank has itself and its engine reads. `sent`: numbers of the slices that it sends from
    its parameters, each once. `received`: of those that it receives. `grouped[tensor]`: its group, place in it, and size.
    """

    def __init__(
        self, plan: SyncPlan, rounds: Rounds, rank: int, units: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        """`units`: the groups that this rank's engine loads (`EngineTensors.units`). None: each tensor by itself."""
        self.plan, self.rank = plan, rank
        self._offset = plan.offsets[rank]
        self.engine_rank = plan.grid.engine_rank(rank)
        self._tp_rank = rank % plan.grid.tp
        self._has = [rank in routes.holders for routes in plan.routes]  # by kind
        self._sends = {kind.stages[0] for kind, has in zip(plan.kinds, self._has, strict=True) if has}  # stages
        self._transfers_of: dict[tuple[int, int], list[tuple[int, int, bool]]] = {}
        self.local = self._local()
        self.rounds = [self._round(rounds, number) for number in range(rounds.count)]
        if self.engine_rank >= 0:
            numbers = ((n, index) for n in range(rounds.count) for index in rounds.slices_of(self._offset, n))
            last = {plan.slices[index].tensor: number for number, index in numbers}
            for tensor in range(len(plan.tensors)):
                self.rounds[last[tensor]].complete.append(tensor)
        sent = {n for current in self.rounds for n in _numbers(current.sends) if self._has[plan.slices[n].kind]}
        self.sent = sorted(sent)
        self.has_relays = any(current.sends[RELAY] for current in self.rounds)
        self.received = sorted(number for current in self.rounds for number in _numbers(current.receives))
        self.elements_received = sum(plan.numel(plan.slices[number]) for number in self.received)
        self.number_of = {tensor.name: number for number, tensor in enumerate(plan.tensors)}
        self.grouped = {
            self.number_of[name]: (group, place, len(names))
            for group, names in (units or {}).items()
            for place, name in enumerate(names)
            if len(names) > 1
        }

    def shard(self, slice_: Slice) -> Shard:
        """Return where this rank, which has the slice, has it."""
        index = slice_.tensor - self.plan.first[slice_.tensor]
        for shard in self.parameter(slice_.tensor).shards[self._tp_rank]:
            if shard.tensor == index and shard.start <= slice_.start < shard.stop:
                return Shard(*slice_[:3], shard.local_start + slice_.start - shard.start)
        raise AssertionError(f"rank {self.rank} does not have {slice_} of {self.tensor(slice_.tensor).name}")

    def parameter(self, tensor: int) -> SyncParameter:
        return self.plan.parameters[self.plan.owner[tensor]]

    def tensor(self, number: int) -> SyncTensor:
        return self.plan.tensors[number]

    def parameters(self) -> list[SyncParameter]:
        """Return the parameters that this rank has."""
        owners = {self.plan.owner[slice_.tensor] for slice_ in self.plan.slices if self._has[slice_.kind]}
        return [self.plan.parameters[index] for index in sorted(owners)]

    def peers(self) -> tuple[set[int], set[int]]:
        """Return the ranks that this rank sends to, and those that it receives from, in any round."""
        sides = ((current.sends for current in self.rounds), (current.receives for current in self.rounds))
        to, origins = ({m.peer for phases in side for messages in phases.values() for m in messages} for side in sides)
        return to, origins

    def digest_slices(self) -> list[DigestSlice]:
        """Return what this rank digests for the attestation: all that it has, the slices of a parameter next to each other.

        Complete shards, because digests of column slices are four times slower on CPU (measured).
        """
        all_holders = [routes.holders for routes in self.plan.routes]
        copies = [
            (r.index(self.rank), len(r)) if has else (0, 0) for r, has in zip(all_holders, self._has, strict=True)
        ]
        return _merged(
            DigestSlice(
                self.parameter(slice_.tensor).name,
                self.tensor(slice_.tensor),
                *self.shard(slice_)[1:],
                self.plan.kinds[slice_.kind].readers,
                *copies[slice_.kind],
            )
            for slice_ in sorted(self.plan.slices)
            if self._has[slice_.kind]
        )

    def _round(self, rounds: Rounds, number: int) -> Round:
        # phase -> peer -> numbers of slices
        sent: dict[int, dict[int, list[int]]] = {phase: {} for phase in (*PHASES, RELAY)}
        received: dict[int, dict[int, list[int]]] = {phase: {} for phase in PHASES}
        for offset in range(rounds.num_offsets):
            if offset != self._offset and rounds.stage(offset, number) not in self._sends:
                continue  # ranks with another offset receive only what this rank has
            for index in rounds.slices_of(offset, number):
                slice_ = self.plan.slices[index]
                for phase, peer, is_sender in self._transfers(slice_.kind, slice_.rotation):
                    if offset == (self.plan.offsets[peer] if is_sender else self._offset):
                        of_phase = sent[phase] if is_sender else received[NODE if phase == NODE else NETWORK]
                        of_phase.setdefault(peer, []).append(index)
        receives = {phase: self._laid_out(received[phase]) for phase in PHASES}
        relayed = {slice_.number: slice_ for message in receives[NETWORK] for slice_ in message.slices}
        return Round({phase: self._laid_out(by_peer, relayed) for phase, by_peer in sent.items()}, receives, [])

    def _laid_out(self, by_peer: dict[int, list[int]], relayed: dict[int, BufferSlice] | None = None) -> list[Message]:
        """Messages whose slices have their places in the buffer of the phase. `relayed`: of messages that this rank sends."""
        messages, end = [], 0
        for peer, numbers in by_peer.items():
            messages.append(Message(peer, []))
            for number in numbers:
                slice_ = self.plan.slices[number]
                tensor = self.tensor(slice_.tensor)
                shape = (*tensor.shape[: tensor.axis], slice_.stop - slice_.start, *tensor.shape[tensor.axis + 1 :])
                origin: Shard | BufferSlice | None = None
                if relayed is not None:
                    origin = self.shard(slice_) if self._has[slice_.kind] else relayed[number]
                start, end = end, end + self.plan.numel(slice_)
                messages[-1].slices.append(BufferSlice(number, start, end, shape, origin))
        return messages

    def _transfers(self, kind: int, rotation: int) -> list[tuple[int, int, bool]]:
        """(phase, peer, is this rank the sender) of this rank's transfers."""
        key = (kind, rotation)
        if key not in self._transfers_of:
            self._transfers_of[key] = [
                (t.phase, t.target if t.source == self.rank else t.source, t.source == self.rank)
                for t in self.plan.routes[kind].transfers(rotation)
                if self.rank in (t.source, t.target)
            ]
        return self._transfers_of[key]

    def _local(self) -> dict[int, list[Shard]]:
        shards: dict[int, list[Shard]] = {}
        for slice_ in sorted(self.plan.slices):
            if self._has[slice_.kind] and self.engine_rank in self.plan.kinds[slice_.kind].readers:
                shards.setdefault(slice_.tensor, []).append(self.shard(slice_))
        return {tensor: _merged(of_tensor) for tensor, of_tensor in shards.items()}


_Cut = TypeVar("_Cut", Shard, DigestSlice)


def _merged(cuts: Iterable[_Cut]) -> list[_Cut]:
    """Join neighbours, so that a tensor's local rows are copied, or digested, at once."""
    out: list[_Cut] = []
    for cut in cuts:
        if out:
            last = out[-1]
            length = last.stop - last.start
            if cut == last._replace(start=last.stop, stop=cut.stop, local_start=last.local_start + length):
                cut = out.pop()._replace(stop=cut.stop)
        out.append(cut)
    return out


def _numbers(messages: dict[int, list[Message]]) -> list[int]:
    return [number for of_phase in messages.values() for message in of_phase for number in message.numbers]


# -- How messages travel -----------------------------------------------------------------------------------------------

SMALLEST = 1 << 16  # bytes; malloc keeps smaller memory itself


BLOCK_BYTES = 1 << 26  # torch rounds pinned memory up to a power of two: blocks of that size waste little


class Pool:
    """Memory on the host that is used again as soon as no tensor refers to it. Made once for all syncs.

    torch has such an allocator for GPUs and pinned memory, not for the CPU: there every large tensor gets fresh pages from
    the system, and touching them first takes four times as long as copying into memory in use (measured).
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, is_pinned: bool = False) -> None:
        """`is_pinned`: the host memory that `empty_all` allocates is pinned, for a GPU."""
        self.dtype, self.device, self._is_pinned = dtype, device, is_pinned
        self._free: dict[int, list[bytearray]] = {}  # by size, which is that of few kinds of tensors

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Allocate like `torch.empty`. The memory returns to the pool with the last view of the tensor."""
        size = math.prod(shape) * self.dtype.itemsize
        if self.device.type != "cpu" or size < SMALLEST:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else bytearray(size)
        lease = memoryview(memory)  # the tensor's storage refers to it
        weakref.finalize(lease, free.append, memory).atexit = False
        return torch.frombuffer(lease, dtype=self.dtype).view(shape)

    def empty_all(self, sizes: Iterable[int]) -> list[Tensor]:
        """Allocate one-dimensional tensors of these sizes. Pinned ones share blocks."""
        if not self._is_pinned:
            return [self.empty((size,)) for size in sizes]
        tensors: list[Tensor] = []
        block, used = torch.empty(0, dtype=self.dtype), 0
        for size in sizes:
            if used + size > block.numel():
                length = max(size, BLOCK_BYTES // self.dtype.itemsize)
                block, used = torch.empty(length, dtype=self.dtype, pin_memory=True), 0
            tensors.append(block[used : used + size])
            used += size
        return tensors


Envelope = tuple[int, Tensor]  # (peer, contiguous one-dimensional buffer)
Wait = Callable[[], None]  # returns when the buffers may be read and reused
Post = Callable[[list[Envelope], list[Envelope]], Wait]  # starts messages, sent and received, all at once


class Transport(NamedTuple):
    """`buffers`: memory of messages. `within`: of messages within a node; None: `post`.

    `is_staged`: from when an exchange is made its rounds are on their way, in buffers of their own on the host. What is sent
    is a copy, so that the weights may change meanwhile. A thread receives and relays.
    """

    post: Post
    buffers: Pool
    is_staged: bool = False
    within: Post | None = None

    def start(self, phase: int, sends: list[Envelope], receives: list[Envelope]) -> Wait:
        """Start the messages of a phase."""
        return (self.post if phase != NODE else self.within or self.post)(sends, receives)


def point_to_point(sends: list[Envelope], receives: list[Envelope]) -> Wait:
    """Start messages as one group of operations of torch.distributed. NCCL runs them as one kernel, gloo side by side.

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


def in_rounds(
    count: int, post: Callable[[int, int], Wait], ahead: int = AHEAD, has_relays: bool = False
) -> Iterator[int]:
    """Call `post(phase, number)` for all rounds, and yield the number of each round when its messages have arrived.

    round          k        k+1      k+2      k+3
    over network                     posted   posted
    within nodes   waited   posted
    loaded         yielded

    The first `ahead` rounds over the network are posted before this returns. With `has_relays`, `post(NETWORK, k + AHEAD)`
    is called after round k has arrived, which it relays, also beyond the last round.
    """
    over_network = deque(post(NETWORK, number) for number in range(min(ahead, count)))

    def arrivals() -> Iterator[int]:
        within_node: Wait | None = None
        for number in range(count + 1):
            following = None
            if number < count:
                over_network.popleft()()
                following = post(NODE, number)
                if number + ahead < count or has_relays:
                    over_network.append(post(NETWORK, number + ahead))
            if within_node is not None:
                within_node()
                yield number - 1
            within_node = following
        for relayed in over_network:
            relayed()

    return arrivals()


def in_background(rounds: Iterator[int]) -> Iterator[int]:
    """Let a thread run `rounds`, and yield what it has yielded. Its error is raised here."""
    arrived: queue.Queue[int | BaseException | None] = queue.Queue()

    def run() -> None:
        try:
            for number in rounds:
                arrived.put(number)
            arrived.put(None)
        except BaseException as error:  # noqa: BLE001 - the other thread raises it
            arrived.put(error)

    def result() -> int | None:
        if isinstance(number := arrived.get(), BaseException):
            raise number
        return number

    threading.Thread(target=run, name="weights", daemon=True).start()
    return iter(result, None)  # type: ignore[arg-type]


# -- One sync ----------------------------------------------------------------------------------------------------------

ReadParameter = Callable[[str], Tensor]  # name of a parameter -> this rank's shard


class LocalWeights:
    """This rank's parameters, cut by the plan, and the full-shaped tensors that its engine is given.

    What `read` returns is cached until `forget`: it may have been computed (FP8), and slices of a parameter are neighbours.
    """

    def __init__(self, plan: RankPlan, read: ReadParameter, pool: Pool) -> None:
        self._plan, self._read, self._pool = plan, read, pool
        self._cache: dict[str, Tensor] = {}
        self._groups: dict[
            str, list[Tensor]
        ] = {}  # all tensors of each group that some have begun, and others have not
        self._left: dict[str, int] = {}  # of a group: how many have not begun
        self.copies: list[tuple[Tensor, Tensor]] = []  # (target, source), made by `copy`

    def forget(self) -> None:
        self._cache.clear()

    def view(self, shard: Shard) -> Tensor:
        """Return a view of what this rank has."""
        name = self._plan.parameter(shard.tensor).name
        if name not in self._cache:
            self._cache[name] = self._read(name)
        axis = self._plan.tensor(shard.tensor).axis
        return self._cache[name].narrow(axis, shard.local_start, shard.stop - shard.start)

    def flat(self, number: int) -> Tensor:
        """Return a slice that this rank has, as one dimension. Forgets other parameters."""
        shard = self._plan.shard(self._plan.plan.slices[number])
        if self._plan.parameter(shard.tensor).name not in self._cache:
            self.forget()
        return self.view(shard).to(self._pool.dtype).reshape(-1)

    def copy(self) -> None:
        """Make the copies that `begin` and the exchange have noted."""
        copy_all(self.copies)
        self.copies.clear()

    def begin(self, tensor: int) -> Tensor:
        """Return the full-shaped tensor. What this rank has itself, and its engine reads, is in it after `copy`.

        If that is all that the engine reads, and in one interval, the tensor is a window on the parameter. A tensor of which
        the engine reads nothing has the memory of one element. One of a group is a view of the group.
        """
        complete, local = self._plan.tensor(tensor), self._plan.local.get(tensor, [])
        start, stop = self._plan.plan.spans[complete.name][self._plan.engine_rank]
        if start == stop:
            return self._pool.empty((1,) * len(complete.shape)).expand(complete.shape)
        is_grouped = tensor in self._plan.grouped
        if not is_grouped and len(local) == 1 and (local[0].start, local[0].stop) == (start, stop):
            window = _window(self.view(local[0]), complete, start)
            if window is not None and window.dtype == self._pool.dtype:
                return window
        out = self._in_group(tensor, (start, stop)) if is_grouped else self._pool.empty(complete.shape)
        for shard in local:
            self.copies.append((out.narrow(complete.axis, shard.start, shard.stop - shard.start), self.view(shard)))
        return out

    def _in_group(self, tensor: int, span: Interval) -> Tensor:
        name, place, count = self._plan.grouped[tensor]
        if name not in self._groups:
            self._groups[name] = list(empty_group(count, self._plan.tensor(tensor), span, self._pool.empty))
            self._left[name] = count
        self._left[name] -= 1
        out = self._groups[name][place]
        if not self._left[name]:
            del self._groups[name]  # its memory is that of its tensors
        return out


def _window(local: Tensor, tensor: SyncTensor, start: int) -> Tensor | None:
    """The full-shaped tensor whose slice from `start` is `local`, without a copy. Its other elements are undefined.

    None if that would leave the memory of `local`. Megatron's distributed optimizer keeps all parameters in one buffer, so
    that there is room on both sides of nearly all of them.
    """
    first = local.storage_offset() - start * local.stride(tensor.axis)
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, local.stride(), strict=True))
    if first < 0 or last >= local.untyped_storage().nbytes() // local.element_size():
        return None
    return local.as_strided(tensor.shape, local.stride(), first)


class Exchange:
    """One sync. Its message buffers are allocated when it is made, so that no rank runs out of memory between messages.

    Every rank posts all its messages, also after a local failure: its peers then finish, and learn of the failure when the
    ranks agree at the end. Nothing on the host is exchanged between the rounds.
    """

    def __init__(self, plan: RankPlan, read: ReadParameter, transport: Transport, pool: Pool) -> None:
        self._plan, self._transport, self._local = plan, transport, LocalWeights(plan, read, pool)
        self._count = count = len(plan.rounds)
        self._buffers: dict[tuple[int, bool], list[Tensor]] = {}
        for (phase, is_receiver), depth in DEPTH.items():
            sizes = [current.elements(phase, is_receiver) for current in plan.rounds]
            if not (transport.is_staged and (is_receiver or phase == NETWORK)):
                sizes = [max(sizes)] * depth
            self._buffers[phase, is_receiver] = transport.buffers.empty_all(sizes)
        self._tensors: dict[int, Tensor] = {}  # begun, not yet complete
        self._problem: Exception | None = None
        self._rounds: Iterator[int] | None = None
        if transport.is_staged:
            receives = plan.engine_rank >= 0
            rounds = self._in_rounds(AHEAD if receives else count)
            self._rounds = in_background(rounds) if receives else rounds

    def stream(self) -> Iterator[WeightBucket]:
        """Yield the buckets. After a local failure no more come, and it is raised when all messages are through."""
        for number in self._rounds or self._in_rounds():
            bucket: WeightBucket = []
            with self._kept_problem():
                bucket = self._finish(number)
            if bucket and self._problem is None:
                yield bucket
            del bucket
        if self._problem is not None:
            raise self._problem

    def _in_rounds(self, ahead: int = AHEAD) -> Iterator[int]:
        return in_rounds(self._count, self._post_round, ahead, self._plan.has_relays)

    def _post_round(self, phase: int, number: int) -> Wait:
        sends = [*self._sends(phase, number), *(self._sends(RELAY, number - AHEAD) if phase == NETWORK else ())]
        self._local.forget()
        if number >= self._count:
            return self._transport.start(phase, sends, [])
        buffer, receives = self._buffer(phase, True, number), self._plan.rounds[number].receives[phase]
        return self._transport.start(phase, sends, [(m.peer, buffer[slice(*m.span)]) for m in receives])

    def _sends(self, phase: int, number: int) -> Iterator[Envelope]:
        """Yield what a round sends in a phase; nothing outside the rounds."""
        for message in self._plan.rounds[number].sends[phase] if 0 <= number < self._count else ():
            buffer = self._buffer(phase, False, number)
            packed = buffer[slice(*message.span)]
            with self._kept_problem():
                packed = self._packed(message, buffer, phase, number)
            yield message.peer, packed

    def _packed(self, message: Message, buffer: Tensor, phase: int, number: int) -> Tensor:
        """The contents of a message, one-dimensional. A single slice that is contiguous where it is needs no buffer."""
        if len(message.slices) == 1 and not (self._transport.is_staged and phase == NETWORK):
            view = self._origin(message.slices[0], number)
            if view.is_contiguous():
                return view.view(-1)
        copy_all([(slice_.view(buffer), self._origin(slice_, number)) for slice_ in message.slices])
        return buffer[slice(*message.span)]

    def _origin(self, slice_: BufferSlice, number: int) -> Tensor:
        """A slice that this rank has, or has received over the network."""
        if isinstance(slice_.origin, BufferSlice):
            return slice_.origin.view(self._buffer(NETWORK, True, number))
        assert slice_.origin is not None, "only what is sent has an origin"
        return self._local.view(slice_.origin)

    def _finish(self, number: int) -> WeightBucket:
        """Write what a round has brought, and return the tensors that are complete."""
        current, plan = self._plan.rounds[number], self._plan
        for phase in PHASES:
            buffer = self._buffer(phase, True, number)
            for slice_ in (slice_ for message in current.receives[phase] for slice_ in message.slices):
                tensor, start, stop = plan.plan.slices[slice_.number][:3]
                if tensor not in self._tensors:
                    self._tensors[tensor] = self._local.begin(tensor)
                target = self._tensors[tensor].narrow(plan.tensor(tensor).axis, start, stop - start)
                self._local.copies.append((target, slice_.view(buffer)))
        complete = [(t, self._tensors.pop(t) if t in self._tensors else self._local.begin(t)) for t in current.complete]
        bucket = [(plan.tensor(number).name, tensor) for number, tensor in complete]
        self._local.copy()
        return bucket

    def _buffer(self, phase: int, is_receiver: bool, number: int) -> Tensor:
        buffers = self._buffers[phase, is_receiver]
        return buffers[number % len(buffers)]

    @contextlib.contextmanager
    def _kept_problem(self) -> Iterator[None]:
        """Keep a local failure for the end."""
        try:
            yield
        except Exception as error:
            self._problem = self._problem or error
