"""A sync builds on the last one only if that was complete, accepted, and of the same model."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_megatron.parallel.mesh import Grid, RankError
from grpo_megatron.sync.plan import EngineTensors, Shard, SyncParameter, SyncTensor
from grpo_megatron.sync.weight_sync import FullCodec, SyncHeader, SyncModel, WeightSync
from tests.sync.simulation import Meeting


class Asked(FullCodec):
    """Records whether each sync may build on the last one."""

    builds: list[bool]

    def source(self, parameters: Mapping[str, Tensor]) -> object:
        return [id(parameter) for parameter in parameters.values()]

    def begin(self, parameters: Mapping[str, Tensor], version: int, *, builds_on_last: bool) -> SyncHeader:
        self.builds = [*getattr(self, "builds", []), builds_on_last]
        return super().begin(parameters, version, builds_on_last=builds_on_last)


def test_a_sync_builds_on_an_accepted_one_of_the_same_model() -> None:
    tensor = SyncTensor("w", (2, 3), 0)
    model = SyncModel(
        [SyncParameter("p", (tensor,), (0,), None, ((Shard(0, 0, 2, 0),),))], {"p": (2, 3)}, {}, lambda p: p
    )
    meeting = Meeting(range(1)).mesh(0)
    mesh: Any = SimpleNamespace(
        **vars(meeting), bridge=None, rank=0, rollout_tp=1, tp_rank=0, cp_rank=0, dp_rank=0, tp=1, cp=1, dp=1
    )
    mesh.pp_rank, mesh.grid = 0, lambda: Grid(1)
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "bucket_megabytes": 1}
    sync = WeightSync(model, mesh, EngineTensors({"w": tensor}, {"w": ((0, 2),)}), codec=Asked, **options)
    policy, reference = {"p": torch.ones(2, 3)}, {"p": torch.zeros(2, 3)}
    for version, parameters in enumerate((policy, policy, reference, policy, policy)):
        [[(name, value)]] = sync.stream(parameters, version)
        assert name == "w" and torch.equal(value, parameters["p"])
        sync.accept(str(version))
    [_] = sync.stream(policy, 5)
    sync.stream(policy, 6)  # never begun
    [_] = sync.stream(policy, 7)  # the fifth was not accepted
    assert sync.codec.builds == [False, True, False, False, True, True, False]  # type: ignore[attr-defined]
    sync.accept("7")
    stopped = sync.stream(policy, 8)
    next(stopped)
    sync.accept("8")  # its stream has not ended
    [_] = sync.stream(policy, 9)
    assert sync.codec.builds[-2:] == [True, False]  # type: ignore[attr-defined]
    with pytest.raises(RankError, match=r"cannot send weights: p has shape \(3, 2\), expected \(2, 3\)"):
        list(sync.stream({"p": torch.ones(3, 2)}, 10))
    with pytest.raises(RankError, match="cannot send weights: p is missing"):
        list(sync.stream({}, 10))
