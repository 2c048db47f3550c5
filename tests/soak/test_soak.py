"""A short soak, by the real command: a rank is killed while it saves in the background, and then the newest checkpoint is
damaged. `make soak` has all faults. Other layouts than the saved one: tests/training/test_layout_change.py.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests import worlds
from tests.e2e import run_ranks
from tests.soak.soak import DAMAGES, MATRIX, Fault, Soak, make_workspace, rows_of, soak_settings
from tests.stored import same_stored

STEPS = 9
ENGINE = "transformers"  # its imports take a third of vLLM's, which `make soak` has
LAST = f"checkpoints/step_{STEPS:06d}"


def fault(name: str, point: str) -> Fault:
    (found,) = (entry for entry in MATRIX if (entry.name, entry.point) == (name, point))
    return found


@pytest.mark.soak
def test_a_short_soak(tmp_path: Path) -> None:
    root, whole, output = make_workspace(tmp_path / "inputs"), tmp_path / "whole", tmp_path / "disturbed"
    worlds.run(run_ranks.train, 2, raw=soak_settings(root, whole, STEPS, ENGINE), keep_weights=False)
    soak = Soak(soak_settings(root, output, STEPS, ENGINE), tmp_path, rows_of(whole), random.Random(0))
    soak.attempt(fault("a rank is killed, saving in the background", "save: files"), 3)
    assert soak.steps_done == 6  # the second save was complete before the third began
    DAMAGES["a bit flipped"](output, soak.rng)
    soak.attempt(None)
    assert [attempt.problems for attempt in soak.attempts] == [[], []], soak.table()
    assert [attempt.sees for attempt in soak.attempts] == [
        "error: rank 1 was ended by SIGKILL (the machine may have run out of memory: see dmesg)",
        "the results",
    ]
    assert (output / "checkpoints/step_000006.damaged").is_dir()
    assert rows_of(output) == rows_of(whole) and len(rows_of(output)) == STEPS + 1  # and the last validation
    same_stored(output / LAST, whole / LAST)
    assert (output / "hf/model.safetensors").read_bytes() == (whole / "hf/model.safetensors").read_bytes()
