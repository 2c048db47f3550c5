"""Where a step's time went, on traces made by hand: every number below follows from the times that are written here.

Two ranks, one step of 10 s, in seconds. Rank 1 draws until 6 and then enters the all-reduce that rank 0 has entered at 2.
The reduction takes 1 s more. Both then update until 10; rank 1 has a core for only 1 of these 3 s.

    rank 0   gen 0-2   reward 2-7 (all-reduce 2-7)   update_actor 7-10
    rank 1   gen 0-6   reward 6-7 (all-reduce 6-7)   update_actor 7-10
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import Config
from grpo_megatron.observability.clocks import clock_offset
from grpo_megatron.observability.profile_report import build_profile_report
from grpo_megatron.observability.recorder import COLLECTIVE, ENGINE, PHASE, STEP, Event, Recorder
from grpo_megatron.observability.remedies import all_remedies, largest_remedies
from grpo_megatron.observability.step_time import AFTER, BETWEEN, StepTime, TimeParts, measure
from grpo_megatron.observability.trace import trace_lines
from grpo_megatron.training.profiler import flat_settings
from tests.browser import WIDTHS, Browser

S = 10**9
SETTINGS: dict[str, Any] = {"actor.ppo_epochs": 1, "rollout.sync": "full"}


def event(kind: str, name: str, begin: float, end: float, cpu: float | None = None, **more: Any) -> Event:
    """Times in seconds; without `cpu` the process computes all the time."""
    return Event(kind, name, int(begin * S), int(end * S), int((end - begin if cpu is None else cpu) * S), **more)


def reduction(begin: float, end: float, number: str = "1", started: float | None = None) -> Event:
    started = begin if started is None else started
    return event(COLLECTIVE, "all_reduce", begin, end, 0, number=int(started * S), key=("0", number, 2))


def rank(drawn: float, update_cpu: float) -> list[Event]:
    gen, update = drawn, 3
    return [
        event(STEP, "training step 4", 0, 10, gen + update_cpu, number=4),
        event(PHASE, "step", 0, 10, gen + update_cpu),
        event(PHASE, "gen", 0, drawn),
        event(PHASE, "reward", drawn, 7, 0),
        reduction(drawn, 7),
        event(PHASE, "update_actor", 10 - update, 10, update_cpu),
    ]


@pytest.fixture
def time() -> StepTime:
    return measure([rank(2, 3), rank(6, 1)])


def test_waiting_is_charged_to_the_late_rank_and_its_phase(time: StepTime) -> None:
    assert time.shares[0, 4, "reward"] == TimeParts(waiting=4, moving=1)
    assert time.shares[1, 4, "reward"] == TimeParts(moving=1)
    assert time.charged == {(1, "gen"): 4.0}
    assert time.waiting_for("gen") == 2.0  # of the average rank
    assert [(w.rank, w.late) for w in time.waits] == [(0, 1)]


def test_the_parts_add_up_to_the_step(time: StepTime) -> None:
    assert time.shares[1, 4, "update_actor"] == TimeParts(computing=1, idle=2)
    assert time.whole() == TimeParts(computing=(5 + 7) / 2, waiting=2, moving=1, idle=1)
    assert time.of_rank(0).total == time.of_rank(1).total == time.whole().total == 10


def test_time_outside_phases_has_a_name_and_copying_is_moving() -> None:
    """2 s of the step are in no phase but `step`, 1 s is after it; the phases are not in the order of time."""
    events = [
        event(PHASE, "update_weights", 1, 4, 2),
        event(PHASE, "step", 0, 5, 3),
        event(STEP, "training step 0", 0, 6, 4),
    ]
    time = measure([events])
    assert time.shares[0, 0, BETWEEN] == TimeParts(computing=1, idle=1)
    assert time.shares[0, 0, "update_weights"] == TimeParts(moving=2, idle=1)
    assert time.shares[0, 0, AFTER] == TimeParts(computing=1)


def test_an_operation_waits_from_when_it_was_awaited() -> None:
    """Started early, awaited late: rank 0 computes until 5, and its peer starts at 3. Nobody has waited."""
    steps = [[event(STEP, "s", 0, 6)], [event(STEP, "s", 0, 6)]]
    time = measure([[*steps[0], reduction(5, 6, started=1)], [*steps[1], reduction(3, 6)]])
    assert not time.waits and time.whole().moving == (1 + 3) / 2


def test_an_operation_that_a_rank_did_not_record_is_not_divided() -> None:
    time = measure([[event(STEP, "s", 0, 6), reduction(1, 6)], [event(STEP, "s", 0, 6), reduction(5, 6, "2")]])
    assert time.num_undivided == 2 and not time.waits and time.whole().moving == (5 + 1) / 2


def test_remedies_are_the_largest_three_and_name_what_was_measured(time: StepTime) -> None:
    engine = [event(ENGINE, "engine step", 0.1 * i, 0.1 * i + 0.1, number=16 - i) for i in range(16)]
    time = measure([[*rank(2, 3), *engine], rank(6, 1)])
    remedies = largest_remedies(time, SETTINGS)
    assert [(r.key, round(r.seconds, 6)) for r in remedies] == [
        ("rollout.tensor_model_parallel_size", 2.0),
        ("trainer.n_gpus_per_node", 1.0),
        ("data.max_response_length", 0.1),  # steps with 2 and 1 of 16 left: 0.2 s on one of two ranks
    ]
    three_epochs = largest_remedies(time, {**SETTINGS, "actor.ppo_epochs": 3})
    assert three_epochs[1].key == "actor.ppo_epochs" and three_epochs[1].seconds == pytest.approx(2 * 2 / 3)
    assert all(r.seconds <= time.whole().total for r in remedies)


@pytest.mark.parametrize(
    "changed",
    [
        {"rollout.sync": "delta", "actor.ppo_epochs": 2, "rollout.multi_turn.environment": "tools"},
        {"algorithm.use_kl_in_reward": True},
    ],
)
def test_remedies_name_keys_of_the_config(time: StepTime, changed: dict[str, Any]) -> None:
    known = flat_settings(Config.model_validate({"model": {"path": "m"}}).model_dump())
    assert {remedy.key for remedy in all_remedies(time, known | changed)} <= set(known)
    assert set(changed) <= set(known)


def test_the_report_says_it_in_words(time: StepTime) -> None:
    report = build_profile_report(time, SETTINGS, accuracy_s=0.00025, num_dropped=7, limit=100)
    text, page = report.text(), report.page()
    assert "Step 4 took 10.000 s on 2 ranks" in text
    assert "  2.000 s ( 20 %)  waiting for the slowest rank" in text
    assert "waited 4.000 s per step for rank 1, which was in gen." in text
    assert "1. rollout.tensor_model_parallel_size:" in text and "At most 2.000 s per step" in text
    assert "0.250 ms" in text and "7 events did not fit" in text
    assert "waited 4.000 s per step for rank 1" in page and "http:" not in page and "src=" not in page


def test_the_page_of_a_profile_in_a_browser(time: StepTime, browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "index.html"
    path.write_text(build_profile_report(time, SETTINGS, accuracy_s=0.00025, num_dropped=7, limit=100).page())
    for width in WIDTHS:
        with browser.open(path, width) as page:
            assert page.faults() == []
            assert "waited 4.000 s per step for rank 1" in page.text()


def test_the_trace_is_json_with_a_process_per_rank(time: StepTime) -> None:
    trace = json.loads("".join(trace_lines(time, ["rank 0 (a)", 'rank 1 "b"'], {"dropped_events": 0})))
    named = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert named == {1: "rank 0 (a)", 2: 'rank 1 "b"'}
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e.get("cat") == "waiting"] == [
        (1, "for rank 1", 2e6, 4e6)
    ]


def test_a_rank_keeps_a_bounded_number_of_events_and_its_phases() -> None:
    """9 of 10 places are for anything, the last one for phases."""
    recorder = Recorder(10, iter(range(100)).__next__, lambda: 0)
    for _ in range(12):
        with recorder.span(COLLECTIVE, "all_reduce"):
            pass
    for name in ("gen", "reward"):
        with recorder.span(PHASE, name):
            pass
    assert [e.name for e in recorder.events] == ["all_reduce"] * 9 + ["gen"] and recorder.num_dropped == 4
    assert recorder.events[-1].begin == 24 and recorder.events[-1].end == 25


def test_the_clocks_bound_holds() -> None:
    """The other clock is 500 ahead. The first rank waits 90 in round 1, the other one 80 in round 2; a round takes 10.

    ClockRound 1 says that the offset is at least 590 - 100, round 2 that it is at most 711 - 200.
    """
    first, other = [(0, 100), (200, 210)], [(590, 601), (620, 711)]
    assert clock_offset(first, other) == ((490 + 511) / 2, (511 - 490) / 2)
