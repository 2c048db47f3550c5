"""Folders and files whose tests start engines, jobs or many worlds are slow, without a mark on each test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as make does: some tests fork, and OpenMP's threads do not survive that

SLOW = (
    "convert/test_layouts.py",
    "distributed/",
    "e2e/",
    "evaluation/test_run.py",
    "models/test_context.py",
    "models/test_layouts.py",
    "models/test_logprobs.py",
    "models/test_memory.py",
    "models/test_moe.py",
    "models/test_offload.py",
    "models/test_policy.py",
    "models/test_reward_model.py",
    "rollout/",
    "slurm/test_checkpoints.py",
    "slurm/test_jobs.py",
)


LONGEST = "slurm/test_jobs.py"  # first, beside what is light, so that no worker ends long after the other


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    items.sort(key=lambda item: item.path.relative_to(root).as_posix() != LONGEST)
    for item in items:
        if item.path.relative_to(root).as_posix().startswith(SLOW):
            item.add_marker(pytest.mark.slow)
