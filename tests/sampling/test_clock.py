"""The clock of two roles: which weights sample which step, against the rules written out. Steps that were sampled ahead."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grpo_megatron.report.metrics import Metrics
from grpo_megatron.sampling.collector import Clock, pack_groups
from grpo_megatron.training.roles import SampledStep, StepsAhead
from tests.fakes import LoneMesh, ScriptedCollector

STEPS = 9


@pytest.mark.parametrize("lag", range(5))
@pytest.mark.parametrize(("first", "old_lag"), [(0, 0), (3, 0), (3, 1), (3, 4), (7, 3), (9, 2)])
def test_each_step_is_drawn_once_by_the_weights_of_lag_steps_before(lag: int, first: int, old_lag: int) -> None:
    """A run of 9 steps goes on after `first` of them, of which `old_lag` more had been sampled."""
    drawn = min(STEPS, first + old_lag)
    clock = Clock(lag, first, drawn, STEPS)
    seen, trained = [], first
    for version in range(first, STEPS + 1):
        steps = clock.steps(version)
        seen += steps
        assert all(clock.version(step) == version == max(first, step - lag) for step in steps)
        if trained < STEPS and version > first:
            assert drawn > trained or trained in seen  # the step before `version` could be trained on
            trained += 1
    assert seen == [*range(drawn, STEPS)]


def test_without_a_lag_each_step_is_drawn_by_its_own_weights() -> None:
    assert [Clock().version(step) for step in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("resume_at", [None, 5])
def test_a_colocated_run_trains_first_on_the_steps_of_its_checkpoint(resume_at: int | None) -> None:
    """Steps 4 and 5 were sampled ahead, and 6 was not. A checkpoint between them holds what is left."""

    def build(state: dict[str, Any]) -> StepsAhead:
        made = StepsAhead(ScriptedCollector([(0.0, 1.0)], LoneMesh()), LoneMesh())
        made.load_state(json.loads(json.dumps(state)))
        return made

    drawing, ahead = ScriptedCollector([(0.0, 1.0)], LoneMesh()), []
    for step, validation in ((4, (2, {"val/a": 0.2})), (5, None)):
        groups = pack_groups(drawing.groups(step, 3, None), LoneMesh())
        numbers = {"timing_s/gen": 2.0, "train/num_gen_batches": step}
        versions = [group["version"] for group in groups]
        ahead.append(vars(SampledStep(versions, numbers, step / 10, validation)) | {"groups": groups})
    collector = build({**drawing.state(), "ahead": ahead, "validated": [[3, {"val/a": 0.3}]]})
    for step, found in ((4, [(2, {"val/a": 0.2})]), (5, [(3, {"val/a": 0.3})]), (6, [])):
        if step == resume_at:
            collector = build(collector.state())
        metrics = Metrics()
        assert collector.validations(step, metrics) == found
        groups = collector.groups(step, 3, metrics)
        assert [sample.response_ids[0] for group in groups for sample in group.samples][::2] == [
            3 * (step - 4) + i for i in range(3)
        ]
        assert {group.version for group in groups} == {step}
        row = metrics.reduce(LoneMesh().all_gather)
        assert (row.get("train/num_gen_batches"), row.get("timing_s/gen")) == (
            (step, 2.0) if step < 6 else (None, None)
        )
        assert collector.epoch() == (step / 10 if step < 6 else 9.0)
    assert collector.state() == {"cursor": 9}
