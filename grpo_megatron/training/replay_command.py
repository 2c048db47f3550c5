"""The command `replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from grpo_megatron.config.options import Argument, Option, Options
from grpo_megatron.imports import large_imports
from grpo_megatron.untrusted import visible_line


class ReplayOptions(Options):
    """The options of `replay`."""

    program = "replay"
    description = "Compute the loss of a dumped mini-batch again, on one CPU process."
    epilog = "Exit codes: 0 if the loss is that of the run, 1 if it is not, 2 if DUMP cannot be read."
    dump: Annotated[Path, Argument("OUTPUT_DIR/dumps/step_000012_NAME", "DUMP")]
    tolerance: Annotated[float | None, Option("of the loss; default: 1e-6 in float32, 1e-2 in bfloat16", "X", ge=0)] = (
        None
    )


def replay_dump(options: ReplayOptions) -> int:
    """Compute the loss of a dumped mini-batch again, in this process; returns the exit code of the epilog."""
    with large_imports():
        from grpo_megatron.training.dump import TOLERANCE, read_dump, recompute

    dump = read_dump(options.dump)
    incident = dump.incident
    print(f"step {incident.step}, update {incident.update}, guard {incident.guard}: {len(dump.batch)} responses")
    for text in incident.problems.values():
        print(f"  {visible_line(str(text))}")
    tolerance = TOLERANCE[dump.config.model.dtype] if options.tolerance is None else options.tolerance
    compared = recompute(dump)
    width = max(len(row.name) for row in compared)
    print(f"{'':{width}}  {'recorded':>14}  {'replayed':>14}  {'difference':>10}")
    for row in compared:
        difference = row.recomputed - row.recorded
        print(f"{row.name:{width}}  {row.recorded:14.8g}  {row.recomputed:14.8g}  {difference:10.1e}")
    is_same = compared[0].is_equal(tolerance)
    print(f"the loss is {'that of the run' if is_same else 'another one'} (tolerance {tolerance:g})")
    return 0 if is_same else 1
