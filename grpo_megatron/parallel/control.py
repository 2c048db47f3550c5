"""The control plane on the host: how ranks find each other, and collectives that scale to thousands of ranks.

A rank talks only to the ranks at distances 1, 2, 4, ...: it has at most 2 ceil(log2 n) connections (23 at 4,096 ranks,
instead of 4,095) and sends ceil(log2 n) messages per operation. The algorithms are those of Bruck et al., "Efficient
algorithms for all-to-all communications in multiport message-passing systems" (IEEE TPDS 8(11), 1997), for any n. Each
is a generator of messages: `over` runs one on a process group, a test runs those of thousands of ranks in one process.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import pickle
import socket
import struct
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo, rendezvous_handler_registry
from torch.distributed.rendezvous import rendezvous

T = TypeVar("T")

SIZE = struct.Struct("=q")  # bytes of a message's content
HEAD_BYTES = 16384  # gloo's thread has to get a core for each message, 1 to 3 ms on busy ones: most need one message
INLINE_BYTES = HEAD_BYTES - SIZE.size


class RankError(RuntimeError):
    """A failure on at least one rank. Raised on every rank with the messages of all ranks."""

    tells_what_to_do = True  # the command line prints it without a traceback


class LostRank(RankError):
    """A rank that has died, or its lost connection. No collective can succeed any more."""

    is_loss = True  # not a fault of the program


class Hop(NamedTuple):
    """One round of one rank. None: it sends, or receives, nothing. The content is pickled."""

    to: int | None
    source: int | None
    content: Any = None


class Parcel(NamedTuple):
    """A message of rank `source` to the ranks `destinations`."""

    destinations: tuple[int, ...]
    source: int
    content: Any


Hops = Generator[Hop, Any, T]


def gather_all(rank: int, size: int, value: T) -> Hops[list[T]]:
    """Returns the values of all ranks, in rank order, on every rank. Each round doubles the values that a rank has."""
    values = [value]  # of the ranks from this one on, in order
    distance = 1
    while distance < size:
        values += yield Hop((rank - distance) % size, (rank + distance) % size, values[: size - distance])
        distance *= 2
    return values[size - rank :] + values[: size - rank]


def gather_first(rank: int, size: int, value: T) -> Hops[list[T]]:
    """Returns the values of all ranks, in rank order, on rank 0, by a binomial tree; an empty list on the others."""
    values = [value]
    distance = 1
    while distance < size:
        if rank & distance:
            yield Hop(rank - distance, None, values)
            return []
        if rank + distance < size:
            values += yield Hop(None, rank + distance)
        distance *= 2
    return values


def share_first(rank: int, size: int, value: T) -> Hops[T]:
    """Returns the value of rank 0 on every rank, by the same tree."""
    distance = rank & -rank
    if rank:
        value = yield Hop(None, rank - distance)
    else:
        distance = 1 << (size - 1).bit_length()
    while distance > 1:
        distance //= 2
        if rank + distance < size:
            yield Hop(rank + distance, None, value)
    return value


def route(rank: int, size: int, parcels: Sequence[Parcel]) -> Hops[list[Parcel]]:
    """Returns the parcels for this rank, by source, and those of one source in their order.

    A parcel at distance d makes one hop for each bit of d: at most log2 n hops, half of that on average. Departure from
    Bruck: a parcel may have several destinations, and one copy serves all that lie ahead.
    """
    waiting = list(parcels)
    distance = 1
    while distance < size:
        ahead, staying = [], []
        for parcel in waiting:
            far = tuple([d for d in parcel.destinations if (d - rank) % size & distance])
            if not far:
                staying.append(parcel)
            elif len(far) == len(parcel.destinations):
                ahead.append(parcel)
            else:
                near = tuple([d for d in parcel.destinations if d not in far])
                ahead.append(parcel._replace(destinations=far))
                staying.append(parcel._replace(destinations=near))
        waiting = staying + (yield Hop((rank + distance) % size, (rank - distance) % size, ahead))
        distance *= 2
    assert all(parcel.destinations == (rank,) for parcel in waiting), "a parcel is on a rank that it is not for"
    return sorted(waiting, key=lambda parcel: parcel.source)


def relay_path(holder: int) -> list[int]:
    """Lists the ranks from `holder` to rank 0: a hop clears the lowest bit that is set, so there are at most log2 n."""
    ranks = [holder]
    while ranks[-1]:
        ranks.append(ranks[-1] & (ranks[-1] - 1))
    return ranks


def relay(rank: int, holder: int, make: Callable[[], bytes]) -> Hops[bytes | None]:
    """Returns `make()` of rank `holder` on rank 0, which never has the parts of two ranks at once; None on all others.

    Ranks that are not on the path return at once.
    """
    ranks = relay_path(holder)
    if rank not in ranks:
        return None
    place = ranks.index(rank)
    content: bytes = make() if rank == holder else (yield Hop(None, ranks[place - 1]))
    if rank != 0:
        yield Hop(ranks[place + 1], None, content)
        return None
    return content


def over(rounds: Hops[T], group: Any, first: int = 0) -> T:
    """Collective: runs this rank's rounds. `group` has the ranks of the world; rank 0 of the rounds is its rank
    `first`.
    """
    received: Any = None
    while True:
        try:
            message = rounds.send(received)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        received = _swap(message, group, first)


def _swap(message: Hop, group: Any, first: int) -> Any:
    works = []
    if message.to is not None:
        content = pickle.dumps(message.content, protocol=pickle.HIGHEST_PROTOCOL)
        works = [dist.isend(part, first + message.to, group) for part in parts_of_message(content)]
    received = None
    if message.source is not None:
        source = first + message.source
        received = pickle.loads(received_message(lambda part: dist.recv(part, source, group)).numpy().data)
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()
    return received


def parts_of_message(content: bytes) -> list[Tensor]:
    """Splits a message: HEAD_BYTES with the size and the beginning of the content, then the rest, if any."""
    begin, rest = content[:INLINE_BYTES], content[INLINE_BYTES:]
    head = (SIZE.pack(len(content)) + begin).ljust(HEAD_BYTES, b"\0")
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (head, rest) if part]


def received_message(receive: Callable[[Tensor], object]) -> Tensor:
    """Receives content, uint8 [bytes]. `receive` fills a tensor with one part."""
    head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
    receive(head)
    size, inline = SIZE.unpack_from(head.numpy().data)[0], head[SIZE.size :]
    if size <= INLINE_BYTES:
        return inline[:size]
    content = torch.empty(size, dtype=torch.uint8)
    content[:INLINE_BYTES] = inline
    receive(content[INLINE_BYTES:])
    return content


# -- the store through which torch.distributed exchanges addresses -----------------------------------------------------
# A TCPStore has no authentication, and torchrun's agent unpickles what it finds in one: a process that reaches its port can
# run code as the user. Therefore:
# one machine    a file in a private folder, or the memory of a world of one; the sockets of gloo, NCCL and vLLM listen on
#                the loopback interface only
# srun           rank 0's TCPStore listens on the address of MASTER_ADDR only, with keys that begin with GRPO_MEGATRON_RUN_ID
# torchrun       the agent's own TCPStore, on all interfaces, which this program cannot change

STORE_FILE = "GRPO_MEGATRON_STORE_FILE"  # set by our launcher for its ranks
RUN_ID = "GRPO_MEGATRON_RUN_ID"  # set by slurm/ranks.sh
INCARNATION = "GRPO_MEGATRON_INCARNATION"  # of the rollout ranks: how often they have been replaced (cli/keeper.py)
JOINED_FILE = "GRPO_MEGATRON_JOINED_FILE"  # which an incarnation makes when it has connected to the ranks that train
LOOPBACK = "127.0.0.1"
LISTEN_QUEUE = 2048  # connections that wait to be accepted: all ranks connect at the same time
LAZY_CONNECTIONS = "TORCH_GLOO_LAZY_INIT"  # gloo connects two ranks at their first message, not all ranks at the start
BACKEND = "grpo_megatron"  # the name of LocalRendezvous in torchrun's registry

_reserved: list[socket.socket] = []  # kept open as long as this process lives


def reserved_port() -> int:
    """Reserves a loopback port that no other process can take. Nothing listens on it.

    vLLM names its shared memory after MASTER_PORT, so it must differ between the runs of a machine.
    """
    holder = socket.socket()
    holder.bind((LOOPBACK, 0))
    _reserved.append(holder)
    return int(holder.getsockname()[1])


class LocalRendezvous(RendezvousHandler):
    """The rendezvous of one torchrun agent with itself: a store in its memory, instead of the c10d rendezvous."""

    def __init__(self, run_id: str) -> None:
        self.run_id, self.port, self.store = run_id, reserved_port(), HashStore()

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self.store, 0, 1, RendezvousStoreInfo(LOOPBACK, self.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def register_local_rendezvous() -> None:
    """Lets torchrun's agent find `LocalRendezvous` under the name BACKEND."""
    rendezvous_handler_registry.register(BACKEND, lambda parameters: LocalRendezvous(parameters.run_id))


def join_default_group(backend: str, timeout: datetime.timedelta, num_rollout_ranks: int = 0) -> Store | None:
    """Collective: `torch.distributed.init_process_group` over the store of this world. Without RANK, a world of one.

    With `num_rollout_ranks` the last so many ranks have a default group of their own, and so have the others:
    Megatron-Core and vLLM take it for the world. Returns then the store of all ranks, for their bridge.
    """
    env = os.environ
    if "RANK" not in env:
        alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": reserved_port()}
        env.update({name: str(value) for name, value in alone.items()}, MASTER_ADDR=LOOPBACK)
    env.setdefault(LAZY_CONNECTIONS, "1")
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    if env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]:  # one machine: gloo, NCCL and vLLM listen on loopback only
        os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo", VLLM_HOST_IP=LOOPBACK)
    store: Store
    if STORE_FILE in env:
        store = FileStore(env[STORE_FILE], world_size)
    elif world_size == 1:
        store = HashStore()
    elif "TORCHELASTIC_RUN_ID" in env:  # as init_process_group finds it
        store = next(rendezvous("env://", timeout=timeout))[0]
    else:
        store = PrefixStore(env.get(RUN_ID, ""), tcp_store(rank, world_size, timeout))
    if not num_rollout_ranks:
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
        return None
    training = world_size - num_rollout_ranks
    name, first, size = (
        ("train", 0, training)
        if rank < training
        else (f"rollout{env.get(INCARNATION, '')}", training, num_rollout_ranks)
    )
    role = PrefixStore(name, store)
    dist.init_process_group(backend, timeout=timeout, store=role, rank=rank - first, world_size=size)
    return PrefixStore("bridge", store)


def tcp_store(rank: int, world_size: int, timeout: datetime.timedelta) -> Store:
    """Opens the TCPStore at MASTER_ADDR:MASTER_PORT. Rank 0 serves it, on that address only; by default torch takes
    all.

    Where the first machine's own name is a loopback address (Debian's /etc/hosts), the others could not connect to it:
    the store then listens on all interfaces.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank != 0:
        return TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if ipaddress.ip_address(address[0]).is_loopback and os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        address = ("", port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    listener.listen(LISTEN_QUEUE)
    return TCPStore(
        host, port, world_size, is_master=True, timeout=timeout, master_listen_fd=listener.detach(), multi_tenant=True
    )
