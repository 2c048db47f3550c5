"""One rank of this project's side of `tools.benchmarks step`: `train` with a clock. torchrun starts it.

torchrun --nproc-per-node 2 tools/benchmarks/step_own.py TIMES.json CONFIG.yaml section.key=value ...
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout that is not installed

from grpo_megatron import trainer
from grpo_megatron.cli.main import main
from tools.benchmarks.workload import family_processor_seconds


class TimedTrainer(trainer.Trainer):
    """Writes the time at the end of every step."""

    out: Path
    ends: list[tuple[float, float]]

    def save(self, steps_done: int) -> None:
        super().save(steps_done)
        if self.parts.mesh.rank == 0:
            self.ends.append((time.perf_counter(), family_processor_seconds(os.getppid())))
            self.out.write_text(json.dumps(self.ends))


def run(arguments: list[str]) -> Any:
    TimedTrainer.out, TimedTrainer.ends = Path(arguments[0]), []
    trainer.Trainer = TimedTrainer  # type: ignore[misc]  # `train` imports it when the config is checked
    return main(["train", *arguments[1:]])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
