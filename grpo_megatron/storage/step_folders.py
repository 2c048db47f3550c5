"""The folders of a run's checkpoints: their names, and the small file of each that says what it holds.

    output_dir/checkpoints/step_000020/trainer.json
                                       critic/critic.json            in a run with a critic
                                       reward_model/pairs.json       in a run whose reward model learns

A launcher reads them before it imports torch.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

STEP_FILE = "trainer.json"
CRITIC_FOLDER, CRITIC_FILE = "critic", "critic.json"
REWARD_MODEL_FOLDER, PAIRS_FILE = "reward_model", "pairs.json"
STEP_FOLDER = re.compile(r"step_\d+")


def on_disk(output_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = (p for p in (output_dir / "checkpoints").glob("step_*") if STEP_FOLDER.fullmatch(p.name))
    return sorted(found, key=steps_of)


def steps_of(checkpoint: Path) -> int:
    """The number of steps that a checkpoint has done, from its name."""
    return int(checkpoint.name.removeprefix("step_"))


def saved_config(checkpoint: Path) -> dict[str, Any]:
    """The config of the run that wrote the checkpoint, as plain JSON. Raises OSError, ValueError and KeyError."""
    config: dict[str, Any] = json.loads((checkpoint / STEP_FILE).read_text())["config"]
    return config
