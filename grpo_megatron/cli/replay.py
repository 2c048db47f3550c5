"""`python -m grpo_megatron replay DUMP`: computes the loss of a dumped mini-batch again, on one CPU process.

Exit codes: 0 when the loss is that of the run, 1 when it is not, 2 when DUMP cannot be read.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from grpo_megatron.importing import large_imports


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "grpo-megatron replay",
        description="Compute the loss of a dumped mini-batch again, on one CPU process.",
        epilog="Exit codes: 0 if the loss is that of the run, 1 if it is not, 2 if DUMP cannot be read.",
    )
    parser.add_argument("dump", type=Path, metavar="DUMP", help="OUTPUT_DIR/dumps/step_000012_NAME")
    parser.add_argument(
        "--tolerance", type=float, metavar="X", help="of the loss; default: 1e-6 in float32, 1e-2 in bfloat16"
    )
    args = parser.parse_args(argv)
    with large_imports():
        from grpo_megatron.training.dump import read_dump
        from grpo_megatron.training.replay import TOLERANCE, replay

    dump = read_dump(args.dump)
    incident = dump.incident
    print(f"step {incident.step}, update {incident.update}, guard {incident.guard}: {len(dump.batch)} responses")
    for text in incident.problems.values():
        print(f"  {text}")
    tolerance = TOLERANCE[dump.config.model.dtype] if args.tolerance is None else args.tolerance
    compared = replay(dump)
    width = max(len(row.name) for row in compared)
    print(f"{'':{width}}  {'recorded':>14}  {'replayed':>14}  {'difference':>10}")
    for row in compared:
        print(f"{row.name:{width}}  {row.recorded:14.8g}  {row.replayed:14.8g}  {row.replayed - row.recorded:10.1e}")
    is_same = compared[0].is_equal(tolerance)
    print(f"the loss is {'that of the run' if is_same else 'another one'} (tolerance {tolerance:g})")
    return 0 if is_same else 1
