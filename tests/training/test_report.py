"""StepReport: which tokens its own means count."""

from __future__ import annotations

from typing import Any

import torch

from grpo_megatron.config import ActorConfig, DataConfig
from grpo_megatron.device import Device
from grpo_megatron.observability.flops import ModelShape
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.training.report import StepReport
from grpo_megatron.types import GroupTable, Plan
from tests import tiny
from tests.sampling.fakes import LoneMesh


def test_the_mean_advantage_counts_the_tokens_of_the_loss() -> None:
    """As many tokens as a correction has left: rejected ones, and those outside the loss, are in no mean."""
    logged: list[dict[str, float]] = []

    class Sinks:
        def log(self, step: int, metrics: dict[str, float]) -> None:
            logged.append(metrics)

    batch = tiny.make_batch([([1, 2], [3, 4, 5]), ([1], [6, 7])], [[[0, 1]]])
    batch.advantages = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 0.0]])
    batch.loss_mask = torch.tensor([[True, False, True], [False, True, False]])
    mesh: Any = LoneMesh()
    sinks: Any = Sinks()
    report = StepReport(
        DataConfig(),
        ActorConfig(),
        mesh,
        Device("cpu"),
        sinks,
        shape=ModelShape(8, 1, 1, 1, 8, 8, 8),
        peaks={"peak": None},
        multiple=4,
    )
    report.log(0, Metrics(), [], GroupTable([], [], [], [], [], [], []), Plan([], [], []), batch, epoch=0.0)
    assert logged[0]["critic/advantages/mean"] == (1 + 4 + 16) / 3
    assert logged[0]["perf/padding_ratio"] == 0.0  # 5 + 3 tokens
