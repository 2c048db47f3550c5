"""A stream and a curriculum that follows the run's own pass rates: the same prompts on another layout, and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import worlds
from tests.e2e import run_ranks
from tests.stored import metric_rows


def settings(root: Path, output_dir: Path, world: int, steps: int) -> dict[str, Any]:
    raw = run_ranks.settings(root, output_dir, world, rollout={"engine": "transformers"})
    for name in ("enforce_eager", "engine_options"):
        del raw["rollout"][name]
    raw["reward"] = {"function": "tests.e2e.rewards:scheduled_reward"}
    raw["trainer"] |= {"total_training_steps": steps, "save_freq": 2}
    old = {"name": "old", "files": raw["data"].pop("train_files")}
    new = {"name": "new", "files": "tests.data.streamed:Sums", "weight": 1, "n": 2, "max_response_length": 3}
    raw["data"] |= {"sources": [old, new]}
    low = {"name": "low", "source": "old", "max_pass_rate": 0.5, "weight": [[0, 1], [3, 2]]}
    high = {"name": "high", "source": "old", "min_pass_rate": 0.5}
    stream = {"name": "stream", "source": "new", "weight": 2}
    raw["data"]["curriculum"] = {"pieces": [low, high, stream], "rates": "run"}
    return raw


def prompts(results: list[Any]) -> dict[int, list[str]]:
    return {step: sorted(str(one[:2]) for one in drawn) for step, drawn in run_ranks.all_samples(results).items()}


@pytest.mark.soak
def test_the_same_prompts_on_two_ranks_and_after_a_resume(workspace: Path, tmp_path: Path) -> None:
    alone = worlds.run(run_ranks.train, 1, raw=settings(workspace, tmp_path / "a", 1, 4))
    both = worlds.run(run_ranks.train, 2, raw=settings(workspace, tmp_path / "b", 2, 2))
    later = worlds.run(run_ranks.train, 2, raw=settings(workspace, tmp_path / "b", 2, 4))
    rows, others = metric_rows(tmp_path / "a"), metric_rows(tmp_path / "b")
    names = [f"data/curriculum/{name}/prompts" for name in ("low", "high", "stream")]
    assert [[row[name] for name in names] for row in rows] == [[row[name] for name in names] for row in others]
    assert rows[0]["data/curriculum/stream/prompts"] == 3 and all(row[names[0]] + row[names[1]] >= 3 for row in rows)
    assert prompts(alone) == prompts(both) | prompts(later)
    assert all(row["response_length/source/new/mean"] <= 3 for row in rows)
