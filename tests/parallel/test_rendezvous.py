"""Where the stores of torch.distributed listen: nowhere in a world of one, on MASTER_ADDR alone under srun."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from grpo_megatron.parallel import control
from tests.listeners import listeners
from tests.worlds import free_port

TIMEOUT = datetime.timedelta(seconds=60)


@pytest.fixture
def environment() -> Iterator[None]:
    """Changes of os.environ end with the test."""
    with mock.patch.dict(os.environ):
        for name in ("RANK", control.STORE_FILE, control.RUN_ID, "TORCHELASTIC_RUN_ID"):
            os.environ.pop(name, None)
        yield


def under_srun(**changes: str) -> None:
    """The variables of the only rank that a test starts; the store does not wait for the others."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **changes}


@pytest.mark.usefixtures("environment")
def test_a_world_of_one_listens_on_loopback_only() -> None:
    before = listeners(os.getpid())
    control.join_default_group("gloo", TIMEOUT)
    try:
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [1, 1] and os.environ["WORLD_SIZE"] == "1"
        assert {address for address, _ in listeners(os.getpid()) - before} == {"127.0.0.1"}  # gloo's
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(("ranks_here", "address"), [("2", "127.0.0.1"), ("1", "0.0.0.0")])
def test_rank_0_under_srun_listens_on_master_addr(ranks_here: str, address: str) -> None:
    """With ranks on another machine, a loopback MASTER_ADDR can only be this machine's own name for itself."""
    under_srun(LOCAL_WORLD_SIZE=ranks_here)
    port, before = int(os.environ["MASTER_PORT"]), listeners(os.getpid())
    store = control.tcp_store(0, 1, TIMEOUT)
    assert listeners(os.getpid()) - before == {(address, port)}
    store.set("key", "value")
    assert dist.TCPStore("127.0.0.1", port, timeout=TIMEOUT).get("key") == b"value"


def test_ports_are_reserved() -> None:
    assert control.reserved_port() != control.reserved_port()
