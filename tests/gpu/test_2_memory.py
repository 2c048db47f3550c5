"""Device memory in every phase of a step, against the plan's arithmetic (checks/phases.py). Not run on a GPU yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.gpu import conftest, engine_ranks
from tests.gpu.building import ON_CPU

UTILIZATION = 0.3
PHASES = ("load", "update", "rollout")


def test_every_phase_needs_what_the_plan_says(half_b: Path, record_figure: Callable[..., None]) -> None:
    """Within 5 percent: weights, gradients and optimizer of the policy; the engine's share of the device.

    With local layers. Load, update and rollout are the sizes of torch's tensors, without contexts and workspaces; the others
    are differences of the device's free memory, since torch does not know that the engine's pool sleeps.
    """
    conftest.needs_vllm()
    (got,) = conftest.run(engine_ranks.phases, folder=half_b, utilization=UTILIZATION)
    free, planned = got["free"], got["planned"]
    pairs = {phase: (got["tensors"][phase], planned[phase]) for phase in PHASES}
    pairs["engine awake"] = (free["rollout"] - free["awake 2"], planned["engine"])
    pairs["onloaded"] = (free["asleep"] - free["asleep 2"], planned["update"] - planned["rollout"])
    stays = free["rollout"] - free["asleep"]
    record_figure("runner", got["runner"])
    for name, pair in pairs.items():
        record_figure(f"{name}: measured, planned", pair, "MiB")
    record_figure("peak of load: measured, planned", [got["tensors"]["peak of load"], planned["peak of load"]], "MiB")
    record_figure("tokens in the engine's cache", got["cache_tokens"])
    record_figure("engine asleep, still taken", stays, "MiB")
    record_figure("contexts before anything is built", got["total"] - free["empty"], "MiB")
    record_figure("free after three steps, asleep", [free[f"asleep {i}"] for i in range(3)], "MiB")
    if ON_CPU:
        return
    for name, (measured, wanted) in pairs.items():
        assert abs(measured - wanted) <= 0.05 * wanted, name
    assert stays <= 4096  # its workspace and CUDA graphs
    assert abs(free["asleep 2"] - free["asleep 1"]) <= 64  # no leak from step to step
