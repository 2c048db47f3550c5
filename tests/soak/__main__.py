"""`make soak`: hundreds of steps under every fault of soak.py, compared with an undisturbed run. Prints the fault matrix.

    python -m tests.soak [--steps N] [--seed N] [--faults N] [--folder DIR]

Ends with 1 if metrics or weights differ, an exit code is wrong, a process survives, or memory, descriptors or temporary
files grow.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from grpo_megatron.report.console import format_table
from grpo_megatron.storage import files
from tests.soak.soak import FIRST, LAST, MATRIX, Fault, Soak, make_workspace, rows_of, run_command, soak_settings

RSS_GROWTH = 1.05  # largest ratio of a rank's memory in the last quarter to that in the second quarter
WEIGHTS = "hf/model.safetensors"


def main() -> int:
    parser = argparse.ArgumentParser("soak")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=len(MATRIX) + 2, help="with the first and the last one")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.steps < 4 * args.faults:
        parser.error(f"--steps {args.steps} is too few for {args.faults} faults: set {4 * args.faults} or more")
    print(f"soak: {args.steps} steps, {args.faults} faults, seed {args.seed}", flush=True)
    rng = random.Random(args.seed)
    faults = [FIRST, *rng.sample(MATRIX, args.faults - 2), LAST]
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        return _soak(args.folder or Path(temporary), args.steps, faults, rng)


def _soak(folder: Path, steps: int, faults: list[Fault], rng: random.Random) -> int:
    root, usage, temporary = make_workspace(folder / "inputs"), folder / "usage", folder / "tmp"
    for path in (usage, temporary):
        path.mkdir()
    os.environ["TMPDIR"] = str(temporary)
    tempfile.tempdir = None
    undisturbed = folder / "undisturbed"
    began = time.monotonic()
    settings = soak_settings(root, undisturbed, steps)
    code, _, err, _ = run_command(settings, folder / "undisturbed-command", SOAK_USAGE=str(usage))
    if code:
        print(f"the undisturbed run has failed with exit code {code}:\n{err}")
        return 1
    print(f"undisturbed: {time.monotonic() - began:.0f} s", flush=True)
    raw = soak_settings(root, folder / "disturbed", steps)
    soak = Soak(raw, folder / "disturbed-command", rows_of(undisturbed), rng, functools.partial(print, flush=True))
    soak.run(faults)
    print(f"disturbed: {len(soak.attempts)} attempts in {time.monotonic() - began:.0f} s\n\n{soak.table()}\n")
    problems = [f"attempt {number}: {p}" for number, a in enumerate(soak.attempts, start=1) for p in a.problems]
    if rows_of(soak.output) != rows_of(undisturbed):
        problems.append("the metrics differ")
    if (soak.output / WEIGHTS).read_bytes() != (undisturbed / WEIGHTS).read_bytes():
        problems.append("the weights differ")
    problems += [*_growth(usage), *_leftovers(temporary)]
    print(
        "\n".join(problems) or f"after all faults, metrics and {WEIGHTS} are those of the undisturbed run, bit for bit"
    )
    return 1 if problems else 0


def _growth(folder: Path) -> list[str]:
    """Lists what has grown over the steps of the undisturbed run. Prints the figures."""
    problems, rows = [], []
    for file in sorted(folder.glob("*.jsonl")):
        used = [json.loads(line) for line in file.read_text().splitlines()]
        quarter = len(used) // 4
        early, late = used[quarter : 2 * quarter], used[-quarter:]
        for name in ("rss_kib", "files", "threads"):
            before, after = (statistics.median(row[name] for row in part) for part in (early, late))
            rows.append([f"rank {file.stem}", name, before, after])
            if after > before * (RSS_GROWTH if name == "rss_kib" else 1):
                problems.append(f"rank {file.stem}: {name} has grown from {before:g} to {after:g}")
    print(format_table(rows, ["undisturbed", "", "second quarter", "last quarter"]) + "\n")
    return problems


def _leftovers(temporary: Path) -> list[str]:
    """Lists temporary files of killed attempts that the clean-up at a start does not remove once they are old enough."""
    with mock.patch.object(files, "MIN_AGE_S", 0.0):
        files.remove_leftovers()
    left = sorted(path.name for path in temporary.iterdir())
    print(f"temporary files after the clean-up: {len(left)}\n")
    return [f"temporary files are left: {left}"] if left else []


if __name__ == "__main__":
    sys.exit(main())
