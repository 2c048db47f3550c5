"""StepReport: which tokens its own means count, and the guard of the weights."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_megatron.config import Config
from grpo_megatron.device import Device
from grpo_megatron.models.families import architecture_of
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.report.step import StepReport
from grpo_megatron.training.guards import Guards, GuardStop
from grpo_megatron.types import GroupTable, Plan
from tests import tiny
from tests.fakes import LoneMesh


def step_report(logged: list[dict[str, float]], is_finite: bool = True, **sections: Any) -> tuple[StepReport, Guards]:
    """`logged` gets the metrics of each step. `is_finite`: of the policy's weights."""
    config = Config.model_validate({"model": {"path": "model"}, **sections})
    guards = Guards(config, LoneMesh(), lambda folder: None, contextlib.nullcontext)
    sinks: Any = SimpleNamespace(log=lambda step, metrics: logged.append(metrics))
    arch = architecture_of({**tiny.COMMON, "model_type": "llama"})
    facts = {"mesh": guards.mesh, "device": Device("cpu"), "arch": arch, "multiple": 4}
    policy: Any = SimpleNamespace(**facts, has_finite_weights=lambda: is_finite)
    report = StepReport(config, None, policy, sinks, guards)
    report.shown.gather = lambda *_: None  # type: ignore[method-assign]
    return report, guards


def test_the_mean_advantage_counts_the_tokens_of_the_loss() -> None:
    """As many tokens as a correction has left: rejected ones, and those outside the loss, are in no mean."""
    logged: list[dict[str, float]] = []
    batch = tiny.make_batch([([1, 2], [3, 4, 5]), ([1], [6, 7])], [[[0, 1]]])
    batch.advantages = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 0.0]])
    batch.loss_mask = torch.tensor([[True, False, True], [False, True, False]])
    report, _ = step_report(logged)
    report.log(0, Metrics(), [], GroupTable([], [], [], [], [], [], []), Plan([], [], []), batch, epoch=0.0)
    assert logged[0]["critic/advantages/mean"] == (1 + 4 + 16) / 3
    assert logged[0]["perf/padding_ratio"] == 0.0  # 5 + 3 tokens


@pytest.mark.parametrize(("is_finite", "action"), [(True, "stop"), (False, "warn"), (False, "stop")])
def test_a_step_that_makes_weights_not_finite_is_logged_before_it_ends_the_run(is_finite: bool, action: str) -> None:
    logged: list[dict[str, float]] = []
    report, guards = step_report(logged, is_finite, guards={"weights": action})
    table = GroupTable([0], [0], [1.0], [2], [3], [False], [0])
    guards.begin(7, table)
    batch = tiny.make_batch([([1, 2], [3, 4, 5])], [[[0]]])
    ends = not is_finite and action == "stop"
    with pytest.raises(GuardStop, match="guards.weights=stop: step 7 made") if ends else contextlib.nullcontext():
        report.log(7, Metrics(), [], table, Plan([], [], []), batch, epoch=0.0)
    counts = {name: value for name, value in logged[0].items() if name.startswith("guards/")}
    others = dict.fromkeys(("guards/rewards", "guards/logprobs", "guards/gradients"), 0.0)
    assert counts == {**others, "guards/weights": float(not is_finite)}
