"""Links between two and three ranks, which are threads of this process with a store in its memory."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from grpo_megatron.parallel.links import INTERFACE, Links, own_address
from grpo_megatron.parallel.neighbours import gather_all, over

LARGE = 20 << 20  # bytes; the kernel holds a few megabytes of a loopback connection


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Links]]]:
    monkeypatch.setenv(INTERFACE, "lo")
    made: list[Links] = []

    def make(size: int, store: Any = None, timeout_s: float = 60.0) -> list[Links]:
        store = dist.HashStore() if store is None else store
        made.extend(new := [Links(rank, store, timeout_s) for rank in range(size)])
        return new

    yield make
    for links in made:
        links.close()


def on_each(links: list[Links], function: Callable[[Links], Any]) -> list[Any]:
    """In one thread per rank."""
    with ThreadPoolExecutor(len(links)) as threads:
        return list(threads.map(function, links))


def test_messages_arrive_whole_and_in_order(world: Callable[..., list[Links]]) -> None:
    """All send at once more than the kernel holds: whoever waited for its receiver first would wait for ever."""
    links = world(3)

    def around(own: Links) -> list[Any]:
        return [over(gather_all(own.rank, 3, bytes([own.rank]) * size), own) for size in (1, 0, LARGE, 1000)]

    for found in on_each(links, around):
        assert found == [[bytes([rank]) * size for rank in range(3)] for size in (1, 0, LARGE, 1000)]


def test_a_connection_without_the_token_is_closed_unread(world: Callable[..., list[Links]]) -> None:
    first, second = world(2)
    stranger = socket.create_connection(first._listener.getsockname())
    stranger.sendall(struct.pack("=32sq", b"0" * 32, 1) + struct.pack("=q", 3) + b"bad")
    second.send(0, b"good")
    assert first.receive(1) == b"good"
    with stranger, pytest.raises(ConnectionResetError):  # closed before all was read
        stranger.recv(1)


def test_a_rank_that_ends_or_is_silent_is_named(world: Callable[..., list[Links]]) -> None:
    first, second = world(2, timeout_s=0.2)
    with pytest.raises(RuntimeError, match=r"timed out: rank 1 has not answered for 0.2 s"):
        first.receive(1)
    second.send(0, b"begin")
    first.receive(1)
    with pytest.raises(RuntimeError, match="timed out: rank 1"):
        first.receive(1)
    second.close()
    with pytest.raises(RuntimeError, match="rank 1 has closed the connection"):
        first.receive(1)
    with pytest.raises(RuntimeError, match="cannot connect to rank 1 at 127.0.0.1:"):
        first.send(1, b"late")


def test_a_second_world_on_one_store_has_connections_of_its_own(world: Callable[..., list[Links]]) -> None:
    store = dist.HashStore()
    world(2, store)
    first, second = world(2, store)
    second.send(0, b"new")
    assert first.receive(1) == b"new"


def test_the_address_is_that_of_the_interface_or_towards_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("lo", "lo,none", "", "none"):
        monkeypatch.setenv(INTERFACE, name)
        assert own_address() == "127.0.0.1"
    monkeypatch.setenv("WORLD_SIZE", "4")  # over two machines, the first of which knows its own name as loopback
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert own_address() == "127.0.0.1"
