"""Settings of the whole suite, and the list of the folders and files whose tests are slow."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests import shapes

shapes.install()  # before anything imports the checked modules
from tests.browser import Browser, missing  # noqa: E402
from tests.files import DATA, WHOLE  # noqa: E402

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # as in the Makefile: some tests fork, and OpenMP's threads do not survive it
os.environ["HF_HUB_OFFLINE"] = "1"  # the id of a model is looked for in the cache only
os.environ["COLUMNS"] = "120"  # pytest's workers set 80, in which a plan wraps its rows
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # without bytecode, a process imports vLLM in 20 s instead of 6
sys.dont_write_bytecode = False

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a GPU host may have pytest only, for tests/gpu
    pass
else:  # Property tests have no time limit and sample the same values in every run: neither a slow machine nor chance fails them.
    settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("suite")

SLOW = (  # all their tests get the mark: they start engines, jobs or many worlds, or compute for ten seconds
    "convert/test_layouts.py",
    "convert/test_round_trip.py",
    "convert/test_vision.py",
    "distributed/",
    "e2e/",
    "environments/test_pool.py",
    "environments/test_sandbox.py",
    "environments/test_tools.py",
    "evaluation/test_images.py",
    "evaluation/test_run.py",
    "models/test_context.py",
    "models/test_head_kernel.py",
    "models/test_layouts.py",
    "models/test_logprobs.py",
    "models/test_memory.py",
    "models/test_moe.py",
    "models/test_offload.py",
    "models/test_policy.py",
    "models/test_reward_model.py",
    "models/test_scored_policy.py",
    "report/test_run_page.py",
    "parallel/test_exchange.py",
    "rewards/test_pool.py",
    "rollout/",
    "service/",
    "slurm/test_checkpoints.py",
    "sync/test_patches.py",
    "sync/test_exchange.py",
    "sync/test_adapters.py",
    "sync/test_plan.py",
    "test_run.py",
    "training/test_correction.py",
    "training/test_disk_errors.py",
    "trust/test_certify.py",
)
LONGEST = (  # run first, the longest one before the others, so that no worker ends long after the others
    "e2e/test_methods.py",
    "service/test_client.py",
    "cli/test_nodes.py",
    "models/test_moe.py",
    "environments/test_openai_api.py",
    "models/test_lora.py",
    "e2e/test_recipes.py",
    "trust/test_diff.py",
    "service/test_work.py",
    "service/test_server.py",
    "trust/test_certify.py",
    "environments/test_pool.py",
    "training/test_teachers.py",
    "exact/test_exact.py",
    "e2e/test_vision.py",
    "e2e/test_trajectories.py",
    "starting/test_new_config.py",
    "evaluation/test_run.py",
    "models/test_divergence.py",
    "e2e/test_determinism.py",
    "e2e/test_examples.py",
    "rollout/test_vllm.py",
    "e2e/test_roles.py",
    "convert/test_vision.py",
    "environments/test_adapters.py",
    "distributed/test_sync.py",
    "environments/test_containers.py",
    "models/test_vision.py",
    "e2e/test_agents.py",
    "convert/test_round_trip.py",
    "models/test_routes.py",
    "models/test_layouts.py",
    "planning/test_parameters.py",
    "cli/test_main.py",
    "parallel/test_heartbeat.py",
    "trust/test_replay.py",
    "models/test_reward_model.py",
    "models/test_head_kernel.py",
    "cli/test_healing.py",
    "environments/test_local_sandbox.py",
)


@pytest.fixture
def same_environment() -> Iterator[None]:
    """An engine in this process names its rank in the environment; later tests of the process must not see it."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for a file: playwright's event loop runs in this thread meanwhile, and no other can.

    Skips with the reason on a machine that has none and cannot install it.
    """
    if reason := missing():
        pytest.skip(reason)
    with Browser() as opened:
        yield opened


def pytest_configure(config: pytest.Config) -> None:
    if not WHOLE.is_dir():
        raise pytest.UsageError(
            f"GRPO_TEST_DATA={WHOLE} is no folder; unset it, or name one with whole benchmark files"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if WHOLE == DATA:  # GRPO_TEST_DATA is not set
        left_out = [item for item in items if item.get_closest_marker("real_data")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("real_data")]
    root, rank = Path(__file__).parent, {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.relative_to(root).as_posix(), len(rank)))
    for item in items:
        file = item.path.relative_to(root).as_posix()
        if file.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
