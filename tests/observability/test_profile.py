"""Where a step's time went, on events made by hand: every number below follows from the times that are written here.

Two ranks, one step of 10 s. Rank 1 draws until 6 and then enters the all-reduce that rank 0 has entered at 2. The reduction
takes 1 s more. Both then update until 10; rank 1 has a core for only 1 of these 3 s.

    rank 0   gen 0-2   reward 2-7 (all-reduce 2-7)   update_actor 7-10
    rank 1   gen 0-6   reward 6-7 (all-reduce 6-7)   update_actor 7-10
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from grpo_megatron.observability.profile import (
    AFTER,
    BETWEEN,
    Cut,
    PhaseClock,
    PhaseSeconds,
    TimeParts,
    divide,
    phase_seconds,
    profile_tables,
)

S = 10**9


def cut(phase: str, begin: float, end: float, cpu: float) -> Cut:
    return Cut(phase, int(begin * S), int(end * S), int(cpu * S))


def event(name: str, begin: float, end: float, device: str = "CPU", is_user_annotation: bool = False) -> Any:
    return SimpleNamespace(
        name=lambda: name,
        start_ns=lambda: int(begin * S),
        end_ns=lambda: int(end * S),
        device_type=lambda: SimpleNamespace(name=device),
        is_user_annotation=lambda: is_user_annotation,
    )


def rank(drawn: float, update_cpu: float) -> dict[str, PhaseSeconds]:
    cuts = [cut("gen", 0, drawn, drawn), cut("reward", drawn, 7, 0), cut("update_actor", 7, 10, update_cpu)]
    return phase_seconds(cuts, [event("gloo:all_reduce", drawn, 7), event("aten::add", 0, 10)], 1)


def test_the_rank_that_arrives_last_waits_for_nobody() -> None:
    first, second = divide([rank(2, 3), rank(6, 1)])
    assert first == {
        "gen": TimeParts(computing=2),
        "reward": TimeParts(waiting=4, moving=1),
        "update_actor": TimeParts(computing=3),
    }
    assert second == {
        "gen": TimeParts(computing=6),
        "reward": TimeParts(moving=1),
        "update_actor": TimeParts(computing=1, idle=2),
    }


def test_kernels_are_a_devices_computation_and_hide_communication() -> None:
    """Kernels 0-2 and 1-3, NCCL 2-5, one span of `gen` over all of it, 6 s of wall time, over two steps."""
    events = [
        event("gemm", 0, 2, "CUDA"),
        event("softmax", 1, 3, "CUDA"),
        event("ncclDevKernel_AllReduce_Sum_bf16", 2, 5, "CUDA"),
        event("nccl:all_reduce", 0, 6),  # the launch, on the host
        event("gen", 0, 6, "CUDA", is_user_annotation=True),
    ]
    assert phase_seconds([cut("gen", 0, 6, 6)], events, 2) == {"gen": PhaseSeconds(3.0, 1.5, 1.0)}
    # the same in two cuts of the phase
    assert phase_seconds([cut("gen", 0, 4, 6), cut("gen", 4, 6, 6)], events, 2) == {"gen": PhaseSeconds(3.0, 1.5, 1.0)}


def test_a_step_is_cut_at_the_borders_of_its_phases() -> None:
    """Clocks that advance by 1 at each look. Time outside phases has a name, and copying is moving."""
    clock = PhaseClock(iter(range(0, 100 * S, S)).__next__, lambda: 0)
    with clock.within(AFTER), clock.within("step"):
        for phase in ("gen", "update_weights"):
            with clock.within(phase):
                pass
    phases = [AFTER, BETWEEN, "gen", BETWEEN, "update_weights", BETWEEN, AFTER]
    assert [(c.phase, c.begin // S, c.end // S) for c in clock.cuts] == [(p, n, n + 1) for n, p in enumerate(phases)]
    (parts,) = divide([phase_seconds([cut("update_weights", 1, 4, 2)], [], 1)])
    assert parts == {"update_weights": TimeParts(moving=2, idle=1)}


def test_the_tables() -> None:
    means, table = profile_tables(range(4, 6), divide([rank(2, 3), rank(6, 1)]))
    title, _, *rows = means.splitlines()
    assert title == "Steps 4 to 5, 2 ranks: seconds per step, mean of the ranks"
    assert rows[2].split() == ["reward", "3.000", "0.000", "2.000", "1.000", "0.000"]
    assert rows[-1].split() == ["whole", "10.000", "6.000", "2.000", "1.000", "1.000"]
    assert [line.split()[:2] for line in table.splitlines()[3:]] == [
        [str(rank), phase] for rank in range(2) for phase in ("gen", "reward", "update_actor")
    ]
