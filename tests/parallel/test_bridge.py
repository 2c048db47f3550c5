"""How weights cross the bridge: decided by the devices of all ranks and the lag, with stand-ins for gloo and NCCL."""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from grpo_megatron.parallel.bridge import Bridge
from grpo_megatron.sync.weight_sync import crosses_directly


class FakeGroup:
    """A group of three ranks, of which `others_with_gpus` beside this one have a GPU. As torch's backends are called."""

    others_with_gpus = 0
    Options = SimpleNamespace

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.place, self.count, self.calls = rank, size, list[Any]()

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return self.count

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        tensors[0] += self.others_with_gpus
        return self

    def wait(self, *timeout: object) -> None:
        self.calls.append("wait")

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append(device.type)

    def _start_coalescing(self) -> None:
        self.calls.append("start")

    def _end_coalescing(self) -> Any:
        self.calls.append("end")
        return self

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self.calls.append(("send", peer))
        return self

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self.calls.append(("recv", peer))
        return self


def joined(monkeypatch: pytest.MonkeyPatch, device: str, others: int) -> Bridge:
    """The bridge of rank 1 of three, the last two of which sample."""
    monkeypatch.setattr(dist, "ProcessGroupGloo", FakeGroup)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeGroup, raising=False)  # torch for the CPU has none
    monkeypatch.setattr(FakeGroup, "others_with_gpus", others)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    timeout = datetime.timedelta(seconds=1)
    return Bridge(HashStore(), torch.device(device), timeout, 2)


@pytest.mark.parametrize(
    ("device", "others", "lag", "kind"),
    [
        *(("cuda", 2, lag, "direct") for lag in (0, 1)),
        *(("cpu", 0, lag, "direct") for lag in (0, 1)),
        *((*devices, 2, "staged") for devices in (("cuda", 2), ("cpu", 0))),
        *((*devices, lag, "staged") for devices in (("cuda", 1), ("cpu", 2)) for lag in (0, 1)),  # a role without GPUs
    ],
)
def test_devices_and_lag_decide_how_weights_cross(
    monkeypatch: pytest.MonkeyPatch, device: str, others: int, lag: int, kind: str
) -> None:
    bridge = joined(monkeypatch, device, others)
    assert crosses_directly(lag, is_mixed=bridge.is_mixed) == (kind == "direct")
    assert len(bridge._on_gpus) == 2 * ((device, others) == ("cuda", 2))


def test_weights_of_gpus_are_one_group_of_operations_and_nodes_have_a_group_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bridge = joined(monkeypatch, "cuda", 2)
    on_gpu, on_host = torch.empty(1, device="meta"), torch.empty(1)
    between, within = bridge._on_gpus
    bridge.post([(2, on_gpu)], [(0, on_gpu)])()
    assert between.calls == ["cuda", "start", ("recv", 0), ("send", 2), "end", "wait"] and within.calls == ["cuda"]
    bridge.post([(2, on_gpu)], [], within_node=True)()
    assert within.calls == ["cuda", "start", ("send", 2), "end", "wait"]
    bridge.post([(2, on_host)], [])()
    assert bridge.group.calls[-2:] == [("send", 2), "wait"] and len(between.calls) == 6
    bridge.post([], [], within_node=True)()  # a rank without a message in a round
    assert len(within.calls) == 5
