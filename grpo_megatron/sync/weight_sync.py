"""WeightSync: a model's weights to the engines of a run. A transport moves messages, and a codec decides what is in them.

Transports: collective, where all ranks train and have an engine in turn; bridge, between two roles (parallel/bridge.py).
Codecs: FullCodec, PatchCodec (changes since the last sync), and AdapterCodec of models/lora/sync.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_megatron.parallel.bridge import Bridge
from grpo_megatron.parallel.mesh import Grid, Mesh, RankError
from grpo_megatron.sync.digest import DigestSlice, Expected, expected_digests, slice_digest
from grpo_megatron.sync.exchange import (
    Envelope,
    Exchange,
    LocalWeights,
    Pool,
    RankPlan,
    ReadParameter,
    Transport,
    Wait,
    point_to_point,
)
from grpo_megatron.sync.patches import (
    Header,
    Patch,
    PatchExchange,
    ReceivedSlices,
    apply_patch,
    encode_patch,
    history_digest,
    host_copies,
)
from grpo_megatron.sync.plan import (
    EngineSpans,
    EngineTensors,
    Interval,
    SyncParameter,
    SyncTensor,
    Traffic,
    plan_rounds,
)
from grpo_megatron.types import WeightBucket

ReadValues = Callable[[Tensor], Tensor]  # a parameter -> the values that the model multiplies by
Parameters = Mapping[str, Tensor]  # this rank's, by name; none on a rank that only has an engine


@dataclass(frozen=True)
class SyncModel:
    """A training model as a sync reads it.

    `shapes`: of this rank's parameters, by name. `constants`: float32 buffers of each stage, as (name, tensor).
    """

    parameters: list[SyncParameter]
    shapes: Mapping[str, tuple[int, ...]]
    constants: Mapping[int, list[tuple[str, SyncTensor]]]
    read: ReadValues


@dataclass(frozen=True)
class SyncHeader:
    """The way in which a version is sent. Across the bridge it travels apart, ahead of the weights.

    `density`: changed / compared elements over all ranks; None: they were not compared.
    """

    version: int
    is_full: bool = True  # all weights, not patches or adapters alone
    has_adapters: bool = False
    density: float | None = None
    constants: Sequence[WeightBucket] = ()


@dataclass(frozen=True)
class SyncRank:
    """One rank's means to sync. `budget`: elements of all buffers of a rank together."""

    mesh: Mesh
    grid: Grid  # of all ranks of the run
    transport: Transport
    pool: Pool  # of the tensors that an engine is given
    budget: int

    def plan(
        self, parameters: list[SyncParameter], spans: EngineSpans, units: Mapping[str, list[str]] | None
    ) -> tuple[RankPlan, Traffic]:
        """Return this rank's plan, and the traffic of all ranks. Collective. Raises RankError."""
        plan, rounds, traffic = plan_rounds(parameters, spans, self.grid, self.budget)
        if len(set(self.mesh.all_gather(plan.digest))) > 1:
            raise RankError("the ranks have planned different weight syncs: their configs or their versions differ")
        return RankPlan(plan, rounds, self.mesh.run_rank, units), traffic

    def exchange(self, plan: RankPlan, read: ReadParameter) -> Exchange:
        """Allocate one sync of a plan."""
        return Exchange(plan, read, self.transport, self.pool)

    @contextlib.contextmanager
    def agreed(self, task: str, remedy: str = "") -> Iterator[None]:
        """Collective: an error inside raises RankError on every rank. It must not keep the other ranks' blocks from ending."""
        problem = None
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            problem = f"{task}: {error}{remedy}"
        self.mesh.agree(problem)


class FullCodec:
    """All weights in every sync. Other codecs send less where they can. Every rank makes the same calls."""

    def __init__(self, rank: SyncRank, plan: RankPlan, read: ReadValues) -> None:
        self.plans = [plan]  # all whose messages are sent
        self._rank, self._plan, self._read = rank, plan, read
        self._full_bytes = plan.elements_received * rank.pool.dtype.itemsize
        self.bytes_received = self._full_bytes  # in the last sync
        self._arriving: Exchange | None = None

    def source(self, parameters: Parameters) -> object:
        """Return a value that is equal for two syncs if the second may build on the first."""
        return None

    def begin(self, parameters: Parameters, version: int, *, builds_on_last: bool) -> SyncHeader:
        """Decide how to send, on the ranks that have the weights. Collective over them. Raises RankError."""
        return SyncHeader(version)

    def stream(self, header: SyncHeader, parameters: Parameters) -> Iterator[WeightBucket]:
        """Yield the weights. Collective. Raises RankError."""
        exchange, self._arriving = self._arriving, None
        if exchange is None:
            with self._rank.agreed("cannot send weights"):
                exchange = self._rank.exchange(self._plan, reader(parameters, self._read))
        assert exchange is not None
        yield from exchange.stream()

    def expect(self) -> None:
        """Receive the next version from now on, if its messages are staged and known ahead of its header."""
        if self._rank.transport.is_staged:
            self._arriving = self._rank.exchange(self._plan, reader({}, self._read))

    def accept(self, weights_digest: str) -> None:
        """Note that the engine computes with what was streamed last."""


@dataclass(frozen=True)
class DeltaLimits:
    """When a sync is full although it need not be: every so many syncs, and above this share of changed elements."""

    full_every: int
    max_density: float


class PatchCodec(FullCodec):
    """Full syncs, and between them patches of what has changed since.

    A sync is full if it is the first (also after a resume: nothing of this is in a checkpoint), if it does not build on the
    last one (which failed, or was of another model), and by `limits`. All ranks with weights agree on this from one sum.

    Each rank keeps two copies on the host: of the slices that its engine reads and other ranks send, which patches build on,
    and of the slices that it sends itself: at most one training shard per rank.
    """

    def __init__(self, rank: SyncRank, plan: RankPlan, read: ReadValues, *, limits: DeltaLimits) -> None:
        super().__init__(rank, plan, read)
        self._limits = limits
        task = "no memory on the host for what rollout.sync=delta keeps there"
        with rank.agreed(task, "; set rollout.sync=full"):
            self._sent = host_copies(plan, plan.sent, rank.pool)
            self._received = ReceivedSlices(plan, rank.pool)
        self._sequence, self._history = 0, 0
        self._age = 0  # syncs since the last full one
        self._patches: dict[int, Patch] = {}

    def source(self, parameters: Parameters) -> object:
        """See FullCodec."""
        return [id(parameter) for parameter in parameters.values()]

    def begin(self, parameters: Parameters, version: int, *, builds_on_last: bool) -> SyncHeader:
        """See FullCodec."""
        may_compare = builds_on_last and self._age + 1 < self._limits.full_every
        self._patches = {}
        with self._rank.agreed("cannot compare weights"):
            for number, values in self._sent_slices(parameters) if may_compare else ():
                copy = self._sent[number]
                self._patches[number] = encode_patch(values, copy.to(values.device))
                apply_patch(self._patches[number], copy)
        changed = sum(patch.count for patch in self._patches.values())
        numbers = [changed, sum(copy.numel() for copy in self._sent.values()), int(not may_compare)]
        changed, compared, votes = self._rank.mesh.total(numbers)
        density = None if votes else changed / max(compared, 1)
        return SyncHeader(version, density is None or density > self._limits.max_density, density=density)

    def stream(self, header: SyncHeader, parameters: Parameters) -> Iterator[WeightBucket]:
        """See FullCodec. A patch that is not the expected one is refused before anything is applied, on all ranks."""
        self._sequence += 1
        if header.is_full:
            with self._rank.agreed("cannot send weights"):
                for number, values in self._sent_slices(parameters):
                    self._sent[number].copy_(values)
            self.bytes_received = self._full_bytes
            yield from self._received.recorded(super().stream(header, parameters))
        else:
            beginning = Header(self._history, header.version, self._sequence, place=0, source=self._plan.rank)
            parts = self._plan, self._rank.transport, beginning, self._patches
            exchange = PatchExchange(*parts, self._rank.pool.dtype)
            for number, patch in exchange.run(self._rank.mesh.agree).items():
                apply_patch(patch, self._received.copies[number])
            self.bytes_received = exchange.bytes_received
            yield from self._received.stream(reader(parameters, self._read))
        builds_on = None if header.is_full else self._history
        facts = self._plan.plan.digest, builds_on, self._sequence, header.version, header.density
        self._history = history_digest(facts)
        self._age = 0 if header.is_full else self._age + 1

    def _sent_slices(self, parameters: Parameters) -> Iterator[tuple[int, Tensor]]:
        """The slices that this rank sends from its parameters, by number, each as one dimension."""
        local = LocalWeights(self._plan, reader(parameters, self._read), self._rank.pool)
        return ((number, local.flat(number)) for number in self._sent)

    def expect(self) -> None:
        """See FullCodec. Patches are short, and only the header says whether there are any."""

    def accept(self, weights_digest: str) -> None:
        """See FullCodec."""
        self._history = history_digest((self._history, weights_digest))


def crosses_directly(lag: int, *, is_mixed: bool = False) -> bool:
    """Returns True if weights cross the bridge from the parameters into the buffers of a load: no copy is on the host.

    With a lag of 0 or 1 the rollout ranks have nothing to generate before they have these weights, so that both roles stand
    still for the transfer alone. With a larger one copies travel while both roles work. `is_mixed`: some ranks have no GPU.
    """
    return lag <= 1 and not is_mixed


class BridgePost:
    """The `Post` of a staged transport. A rank that trains goes on while its messages, which are copies, are on their way."""

    def __init__(self, bridge: Bridge, lag: int) -> None:
        self._bridge, self._lag = bridge, lag
        self._sent: deque[list[Wait]] = deque()  # of each version

    def begin(self) -> None:
        """Begin a version on a rank that trains.

        The version of `lag` steps before has generated the samples that the trainer has: it has arrived.
        """
        while len(self._sent) > self._lag:
            for wait in self._sent.popleft():
                wait()
        self._sent.append([])

    def __call__(self, sends: list[Envelope], receives: list[Envelope]) -> Wait:
        wait = self._bridge.post(sends, receives)
        if self._bridge.samples_only:
            return wait
        self._sent[-1].append(wait)
        return lambda: None


class WeightSync:
    """From the training layout to the engines of any rollout layout.

    Planned once, for every model of the layout. Collective: built on every rank at the same point. Raises RankError.
    """

    def __init__(
        self,
        model: SyncModel,
        mesh: Mesh,
        tensors: EngineTensors,
        *,
        dtype: torch.dtype,
        device: torch.device,
        bucket_megabytes: int,
        codec: Callable[[SyncRank, RankPlan, ReadValues], FullCodec] = FullCodec,
        grid: Grid | None = None,
        lag: int = 0,
    ) -> None:
        """`tensors`: what each rank of an engine reads. `bucket_megabytes`: MiB of all buffers of a rank together.

        `grid`: of all ranks of the run, and `lag`: of `rollout.lag`, where the mesh is that of a role. Without a grid the
        weights stay within the role: an export of the ranks that train.
        """
        self.mesh, self.tensors, self.dtype, self._model, self._device = mesh, tensors, dtype, model, device
        pool = Pool(dtype, device)
        bridge = None if grid is None else mesh.bridge
        self._crosses = bridge is not None
        self.is_direct = bridge is not None and crosses_directly(lag, is_mixed=bridge.is_mixed)
        self._staged: BridgePost | None = None
        self.announce: Callable[[SyncHeader], object] = lambda header: None  # ahead of weights that cross
        transport = Transport(point_to_point, pool)
        if bridge is not None and self.is_direct:
            transport = Transport(bridge.post, pool, within=functools.partial(bridge.post, within_node=True))
        elif bridge is not None:
            self._staged = BridgePost(bridge, lag)
            on_host = Pool(dtype, torch.device("cpu"), is_pinned=device.type != "cpu")
            transport = Transport(self._staged, on_host, is_staged=True)
        self._grid = grid or mesh.grid()
        rank = SyncRank(mesh, self._grid, transport, pool, (bucket_megabytes << 20) // dtype.itemsize)
        units = tensors.units(mesh.rank % mesh.rollout_tp)
        self.plan, self.traffic = rank.plan(model.parameters, tensors.spans, units)
        self._digest_slices = [*self.plan.digest_slices(), *self._constant_slices()]
        self._rank, self.codec = rank, codec(rank, self.plan, model.read)
        self.header = SyncHeader(-1)  # of the last sync
        self._source: object = None
        self._is_complete = self._is_accepted = False  # the last sync

    @property
    def bytes_received(self) -> int:
        """The bytes that this rank received in the last sync."""
        return self.codec.bytes_received

    def connect(self) -> None:
        """Send one element to every rank that a sync will send to. Collective.

        NCCL allocates the buffers of a connection at its first message, gigabytes where a rank has many peers
        (planning/phases.py). After this call they are no longer part of the free memory.
        """
        sides = zip(*(plan.peers() for plan in self.codec.plans), strict=True)
        targets, sources = (sorted(set().union(*peers)) for peers in sides)
        element = torch.zeros(1, dtype=self.dtype, device=self._device)
        receives = [(peer, torch.empty_like(element)) for peer in sources]
        point_to_point([(peer, element) for peer in targets], receives)()
        dist.all_reduce(element)  # as the digests do

    def stream(self, parameters: Parameters, version: int) -> Iterator[WeightBucket]:
        """Yield full-shaped tensors, of which this rank's span is filled (see `Exchange`). Collective. Raises RankError.

        The parameters must not change before the stream has ended: some of them are in it as they are. Across the bridge the
        weights are sent, and nothing is in the stream; `announce` sends the header.
        """
        with self._rank.agreed("cannot send weights"):
            for name in (parameter.name for parameter in self.plan.parameters()):
                shape = self._model.shapes[name]
                if name not in parameters:
                    raise ValueError(f"{name} is missing")
                if tuple(parameters[name].shape) != shape:
                    raise ValueError(f"{name} has shape {tuple(parameters[name].shape)}, expected {shape}")
        if self._staged is not None:
            self._staged.begin()
        source = self.codec.source(parameters)
        builds_on_last = self._is_accepted and source == self._source
        self._is_accepted = self._is_complete = False
        self.header = self.codec.begin(parameters, version, builds_on_last=builds_on_last)
        if self._crosses:
            constants = [[(n, value.cpu()) for n, value in bucket] for bucket in self._stream_constants(parameters)]
            self.header = replace(self.header, constants=constants)
            self.announce(self.header)
        yield from self.codec.stream(self.header, parameters)
        if not self._crosses:
            yield from self._stream_constants(parameters)
        self._source, self._is_complete = source, True

    def expect(self) -> None:
        """Receive the next version from now on, while the engine generates. On the ranks of the bridge that have one."""
        self.codec.expect()

    def received(self, header: SyncHeader) -> Iterator[WeightBucket]:
        """Yield the version with this header on the ranks that have engines, across the bridge. Collective over them."""
        self.header, self._is_complete = header, False
        yield from self.codec.stream(header, {})
        for bucket in header.constants:
            yield [(name, value.to(self._device)) for name, value in bucket]
        self._is_complete = True

    def accept(self, weights_digest: str) -> None:
        """Note that the engine has the weights of the last stream, with this digest, and computes with them."""
        self._is_accepted = self._is_complete
        self.codec.accept(weights_digest)

    def expected_digests(self, parameters: Parameters) -> Expected:
        """Compute the digests of the current weights, for each rank of the engine. Collective. Raises RankError."""
        with self._rank.agreed("cannot read weights"):
            read = reader(parameters, self._model.read)
            expected = expected_digests(self._digest_slices, read, self.tensors, dist.all_reduce, self._device)
        if expected.unequal and not expected.non_finite:  # on every rank; NaNs of equal weights may differ in bits
            raise RankError(self._unequal_copies(expected.unequal, read))
        return expected

    def _unequal_copies(self, names: Sequence[str], read: ReadParameter) -> str:
        """Say which ranks have which copy of the first of these tensors. Collective."""
        copies = []
        for slice_ in self._digest_slices:
            if slice_.tensor.name == names[0]:
                span = slice_.tensor.axis, slice_.local_start, slice_.stop - slice_.start
                digest = slice_digest(read(slice_.parameter).narrow(*span), slice_.tensor, slice_.start)
                copies.append((slice_.start, slice_.stop, int(digest)))
        ranks_with: dict[Interval, dict[int, list[int]]] = {}
        for rank, of_rank in enumerate(self.mesh.all_gather(copies)):
            for start, stop, value in of_rank:
                ranks_with.setdefault((start, stop), {}).setdefault(value, []).append(rank)
        sides = [" against ".join(str(ranks) for ranks in of.values()) for of in ranks_with.values() if len(of) > 1]
        return (
            f"the ranks' copies of {len(names)} weights have drifted apart, first those of {names[0]}: ranks"
            f" {'; '.join(sides)}; resume from the last checkpoint, and if it happens again, test these ranks' devices"
        )

    def _constant_slices(self) -> list[DigestSlice]:
        """The constants of this rank's stage, which all ranks of the stage have."""
        mesh, constants = self.mesh, self._model.constants.get(self.mesh.pp_rank, [])
        copy = (mesh.dp_rank * mesh.cp + mesh.cp_rank) * mesh.tp + mesh.tp_rank
        parts = tuple(range(self._grid.rollout_tp)), copy, mesh.dp * mesh.cp * mesh.tp
        return [DigestSlice(name, tensor, 0, tensor.length, 0, *parts) for name, tensor in constants]

    def _stream_constants(self, parameters: Parameters) -> Iterator[WeightBucket]:
        """Yield every constant on every rank, one bucket per stage. Collective over the pipeline's ranks."""
        for stage, constants in sorted(self._model.constants.items()):
            sizes = [tensor.numel for _, tensor in constants]
            flat = torch.empty(sum(sizes), dtype=torch.float32, device=self._device)
            if self.mesh.pp_rank == stage:
                flat.copy_(torch.cat([parameters[name].detach() for name, _ in constants]))
            if self.mesh.pp > 1:
                dist.broadcast(flat, self.mesh.stage_rank(stage), group=self.mesh.pp_group)
            yield [(tensor.name, values) for (_, tensor), values in zip(constants, flat.split(sizes), strict=True)]


def reader(parameters: Parameters, read: ReadValues) -> ReadParameter:
    """Return the function that reads a parameter by its name."""
    return lambda name: read(parameters[name])
