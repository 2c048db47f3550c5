"""How the ranks of a run find each other: the store through which torch.distributed exchanges addresses.

A TCPStore has no authentication, and torchrun's agent unpickles what it finds in one: whoever reaches its port can run
code as the user. Therefore:

    one machine    a file in a private folder, or the memory of a world of one; nothing listens. The sockets of gloo, NCCL
                   and vLLM, which carry the tensors, listen on the loopback interface only.
    srun           rank 0's TCPStore listens on the address of MASTER_ADDR only. Its keys begin with GRPO_MEGATRON_RUN_ID,
                   a random number of the attempt (slurm/ranks.sh).
    torchrun       the agent's own TCPStore, on all interfaces; it is torchrun's, and this program cannot change it

`LocalRendezvous` takes the place of the c10d rendezvous in our launcher (cli/ranks.py).
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import sys

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo, rendezvous_handler_registry

STORE_FILE = "GRPO_MEGATRON_STORE_FILE"  # set by our launcher for its ranks
RUN_ID = "GRPO_MEGATRON_RUN_ID"  # set by slurm/ranks.sh
LOOPBACK = "127.0.0.1"
LISTEN_QUEUE = 2048  # connections that wait to be accepted: all ranks connect at the same time
LAZY_CONNECTIONS = (
    "TORCH_GLOO_LAZY_INIT"  # gloo then connects two ranks at their first message, not all ranks at the start
)
BACKEND = "grpo_megatron"  # the name of LocalRendezvous in torchrun's registry

_reserved: list[socket.socket] = []  # kept open as long as this process lives


def reserved_port() -> int:
    """A loopback port that no other process can take. Nothing listens on it.

    vLLM names its shared memory after MASTER_PORT, so it must differ between the runs of a machine.
    """
    holder = socket.socket()
    holder.bind((LOOPBACK, 0))
    _reserved.append(holder)
    return int(holder.getsockname()[1])


class LocalRendezvous(RendezvousHandler):
    """The rendezvous of one torchrun agent with itself: a store in its own memory."""

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


def _make_local_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    return LocalRendezvous(parameters.run_id)


def register_local_rendezvous() -> None:
    """Let torchrun's agent find `LocalRendezvous` under the name BACKEND."""
    rendezvous_handler_registry.register(BACKEND, _make_local_rendezvous)


def join_default_group(backend: str, timeout: datetime.timedelta) -> None:
    """Collective: `torch.distributed.init_process_group` over the store of this world. Without RANK, a world of one."""
    env = os.environ
    if "RANK" not in env:
        alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": reserved_port()}
        env.update({name: str(value) for name, value in alone.items()}, MASTER_ADDR=LOOPBACK)
    env.setdefault(LAZY_CONNECTIONS, "1")
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    if env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]:
        _stay_on_loopback()
    store: Store
    if STORE_FILE in env:
        store = FileStore(env[STORE_FILE], world_size)
    elif world_size == 1:
        store = HashStore()
    elif "TORCHELASTIC_RUN_ID" in env:
        dist.init_process_group(backend, timeout=timeout)
        return
    else:
        store = PrefixStore(env.get(RUN_ID, ""), tcp_store(rank, world_size, timeout))
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)


def _stay_on_loopback() -> None:
    """Have gloo, NCCL and vLLM listen on the loopback interface. All ranks must be on this machine."""
    if sys.platform == "linux":
        os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo", VLLM_HOST_IP=LOOPBACK)


def tcp_store(rank: int, world_size: int, timeout: datetime.timedelta) -> Store:
    """The TCPStore at MASTER_ADDR:MASTER_PORT. Rank 0 serves it, on that address only; by default torch takes all.

    Where the first machine knows its own name as a loopback address (Debian's /etc/hosts), the others could not connect
    to that address: the store then listens on all interfaces.
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
