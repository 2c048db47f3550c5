"""The ranks' part of healing: the seconds of a recovery (cli/healing.py decides, and starts the ranks again)."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from grpo_megatron.report.metrics import Metrics, Sinks
from grpo_megatron.storage.run_files import add_event
from grpo_megatron.training.stopping import RESTART_FILE


class Recovery:
    """The seconds from the last sign of life of a lost rank to the first sample of the step that is repeated."""

    def __init__(self, lost_at: float, ended_at: float) -> None:
        self.lost_at, self.ended_at, self.built_at = lost_at, ended_at, time.time()

    @classmethod
    def of_restart(cls) -> Recovery | None:
        """Call it when all parts are built. None: the ranks of this launcher were not started again."""
        file = os.environ.get(RESTART_FILE)
        restart = {} if file is None else json.loads(Path(file).read_text())
        return cls(restart["lost_at"], restart["ended_at"]) if restart.get("lost_at") else None

    def end(self, step: int, output_dir: Path, metrics: Metrics, sinks: Sinks, *, is_first: bool) -> None:
        """Logs the seconds by phase; the engine has its weights, and generates next."""
        now = time.time()
        metrics.constant("timing_s/healing", now - self.lost_at)
        text = (
            f"{now - self.lost_at:.1f} s after the last sign of the lost rank: {self.ended_at - self.lost_at:.1f} until all ranks"
            f" had ended, {self.built_at - self.ended_at:.1f} until all parts were built, {now - self.built_at:.1f} for the sync"
        )
        if is_first:
            add_event(output_dir, "healed", step, text)
        sinks.note(f"healed: step {step} generates {text}")
