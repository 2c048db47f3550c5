"""Links: TCP connections from rank to rank for small host-side messages, each made at its first message.

The thread that waits for a message reads the socket itself. With gloo a thread of its own reads, and it has to get a core
first: where all cores compute, a message took 1 to 3 ms, here 0.02 to 0.1 ms (measured, 2 ranks on 2 cores, Linux 6.18).

A connection carries messages one way. Its receiver listens on one address of its machine, and puts address and a random
token into the store of the world. Content is unpickled, so a connection that does not begin with the token is closed unread.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import os
import secrets
import select
import socket
import struct
import time
from typing import Any

INTERFACE = "GLOO_SOCKET_IFNAME"  # also for gloo; the first one of several
MAX_WAITING = 128  # a rank has at most log2(world size) senders, and all of them connect at the same time
HELLO = struct.Struct("=32sq")  # token, rank of the sender
HELLO_S = 10.0  # a connection that says nothing for so long is closed
SIZE = struct.Struct("=q")  # bytes of the message that follows
SIOCGIFADDR = 0x8915

_open: list[Links] = []


class Links:
    """Of one rank. `store` is the world's. An operation that waits longer than `timeout_s` fails.

    All methods raise RuntimeError when a rank has died, cannot be reached or does not answer in time.
    """

    def __init__(self, rank: int, store: Any, timeout_s: float) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self._store, self._token = store, secrets.token_hex(16).encode()
        self._incoming: dict[int, socket.socket] = {}
        self._outgoing: dict[int, socket.socket] = {}
        self._rest: dict[int, memoryview] = {}  # receiver -> what the kernel has not taken yet
        address = own_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=MAX_WAITING)
        self._listener.setblocking(False)
        # A store can outlive a world: the number says which of this rank's worlds the entry belongs to.
        self._world = int(store.add(f"links/{rank}/worlds", 1))
        port = self._listener.getsockname()[1]
        store.set(self._key(rank), f"{address} {port} {self._token.decode()}")
        _open.append(self)

    def send(self, to: int, content: bytes) -> None:
        """Begin to send. Does not wait for the receiver; `receive` and `flush` send what is left."""
        if to not in self._outgoing:
            self._outgoing[to] = self._connect(to)
        assert to not in self._rest, "flush comes before the next message"
        self._rest[to] = memoryview(SIZE.pack(len(content)) + content)
        self._push(to)

    def receive(self, source: int) -> bytearray:
        """The next message of rank `source`."""
        deadline = time.monotonic() + self.timeout_s
        while source not in self._incoming:
            self._wait(source, self._listener, deadline)
            self._accept()
        size = SIZE.unpack(self._exactly(source, SIZE.size, deadline))[0]
        return self._exactly(source, size, deadline)

    def flush(self) -> None:
        """Wait until the kernel has taken all that was sent."""
        deadline = time.monotonic() + self.timeout_s
        while self._rest:
            self._wait(next(iter(self._rest)), None, deadline)

    def close(self) -> None:
        """Idempotent."""
        for connection in (self._listener, *self._incoming.values(), *self._outgoing.values()):
            connection.close()

    def _key(self, rank: int) -> str:
        return f"links/{rank}/{self._world}"

    def _connect(self, to: int) -> socket.socket:
        address, port, token = self._store.get(self._key(to)).decode().split()
        try:
            connection = socket.create_connection((address, int(port)), self.timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.sendall(HELLO.pack(token.encode(), self.rank))
        except OSError as error:
            raise RuntimeError(f"cannot connect to rank {to} at {address}:{port} ({error})") from error
        connection.setblocking(False)
        return connection

    def _accept(self) -> None:
        """Take one connection, unless it is not from a rank of this world."""
        try:
            connection = self._listener.accept()[0]
        except OSError:  # it has gone again
            return
        connection.settimeout(HELLO_S)
        hello = b""
        with contextlib.suppress(OSError):
            hello = connection.recv(HELLO.size, socket.MSG_WAITALL)
        if len(hello) != HELLO.size or not hmac.compare_digest(hello[: len(self._token)], self._token):
            connection.close()
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setblocking(False)
        self._incoming[HELLO.unpack(hello)[1]] = connection

    def _exactly(self, source: int, size: int, deadline: float) -> bytearray:
        content = bytearray(size)
        view, connection = memoryview(content), self._incoming[source]
        while view:
            try:
                taken = connection.recv_into(view)
            except BlockingIOError:
                self._wait(source, connection, deadline)
                continue
            except OSError as error:
                raise RuntimeError(f"the connection from rank {source} is lost: {error}") from error
            if not taken:
                raise RuntimeError(f"rank {source} has closed the connection")
            view = view[taken:]
        return content

    def _wait(self, other: int, readable: socket.socket | None, deadline: float) -> None:
        """Wait until there is something to read, or until a part of what is left has been sent. `other`: for the error."""
        poll = select.poll()
        if readable is not None:
            poll.register(readable, select.POLLIN)
        for to in self._rest:
            poll.register(self._outgoing[to], select.POLLOUT)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise RuntimeError(f"timed out: rank {other} has not answered for {self.timeout_s:g} s")
        for to in list(self._rest):
            self._push(to)

    def _push(self, to: int) -> None:
        """Give the kernel what it takes."""
        with contextlib.suppress(BlockingIOError):
            try:
                self._rest[to] = self._rest[to][self._outgoing[to].send(self._rest[to]) :]
            except (ConnectionError, TimeoutError) as error:
                raise RuntimeError(f"the connection to rank {to} is lost: {error}") from error
        if not self._rest[to]:
            del self._rest[to]


def close_links() -> None:
    """Close those of all worlds that this process has joined."""
    while _open:
        _open.pop().close()


def own_address() -> str:
    """The address of this machine on which the other ranks reach it: of the interface INTERFACE, or towards MASTER_ADDR."""
    name = os.environ.get(INTERFACE, "").split(",")[0]
    if name:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
    address = _address_towards(os.environ["MASTER_ADDR"])
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if ipaddress.ip_address(address).is_loopback and not is_one_machine:  # Debian's /etc/hosts: the machine's own name
        return _address_towards(socket.gethostname())
    return address


def _address_towards(host: str) -> str:
    """The address from which this machine sends to `host`. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
