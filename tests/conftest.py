"""Folders and files whose tests start engines, jobs or many worlds are slow, without a mark on each test."""

from __future__ import annotations

from pathlib import Path

import pytest

SLOW = (
    "convert/test_layouts.py",
    "distributed/",
    "e2e/",
    "evaluation/test_run.py",
    "models/test_layouts.py",
    "models/test_moe.py",
    "models/test_offload.py",
    "models/test_policy.py",
    "models/test_reward_model.py",
    "rollout/",
    "slurm/test_checkpoints.py",
    "slurm/test_jobs.py",
)


LONGEST = (
    "slurm/test_jobs.py",
    "e2e/test_examples.py",
    "distributed/",
)  # first, so that no worker ends long after the other


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent

    def rank(item: pytest.Item) -> int:
        name = item.path.relative_to(root).as_posix()
        return next((i for i, first in enumerate(LONGEST) if name.startswith(first)), len(LONGEST))

    items.sort(key=rank)
    for item in items:
        if item.path.relative_to(root).as_posix().startswith(SLOW):
            item.add_marker(pytest.mark.slow)
