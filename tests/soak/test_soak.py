"""A short soak, by the real command: a rank killed while it saves in the background, a request to stop, a damaged
checkpoint. `make soak` has all faults.

Then the same checkpoint resumes on two nodes with tensor parallelism instead of one node with data parallelism.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

from tests import worlds
from tests.e2e import run_ranks
from tests.soak.soak import DAMAGES, MATRIX, Fault, Soak, make_workspace, rows_of, soak_settings
from tests.stored import same_stored

STEPS = 6
ENGINE = "transformers"  # its imports take a third of vLLM's, which `make soak` has
LAST = f"checkpoints/step_{STEPS:06d}"


def fault(name: str, point: str) -> Fault:
    (found,) = (entry for entry in MATRIX if (entry.name, entry.point) == (name, point))
    return found


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path) -> None:
    root, whole, output = make_workspace(tmp_path / "inputs"), tmp_path / "whole", tmp_path / "disturbed"
    expected = worlds.run(run_ranks.train, 2, raw=soak_settings(root, whole, STEPS, ENGINE))
    raw = soak_settings(root, output, STEPS, ENGINE)
    soak = Soak(raw, tmp_path, rows_of(whole), random.Random(0))
    soak.attempt(fault("a rank is killed, saving in the background", "save: files"), 2)
    assert soak.steps_done == 3  # the first save was complete before the second began
    soak.attempt(fault("SIGUSR1", "update_actor"))
    assert soak.steps_done == 4
    DAMAGES["a bit flipped"](output, soak.rng)
    soak.attempt(None)
    assert [attempt.problems for attempt in soak.attempts] == [[], [], []], soak.table()
    assert [attempt.sees for attempt in soak.attempts] == [
        "error: rank 1 was ended by SIGKILL (the machine may have run out of memory: see dmesg)",
        "SIGUSR1: the run stops after this step and saves; a second signal ends it at once",
        "the results",
    ]
    assert (output / "checkpoints/step_000004.damaged").is_dir()
    assert rows_of(output) == rows_of(whole) and len(rows_of(output)) == STEPS + 1  # and the last validation
    same_stored(output / LAST, whole / LAST)
    assert (output / "hf/model.safetensors").read_bytes() == (whole / "hf/model.safetensors").read_bytes()

    # From the checkpoint of three steps, once more.
    shutil.rmtree(output / LAST)
    raw["trainer"] |= {"nnodes": 2, "n_gpus_per_node": 1}
    raw["actor"]["megatron"] = {"tensor_model_parallel_size": 2}
    moved = worlds.run(run_ranks.train_on_nodes_of_one, 2, raw=raw)
    for step in range(3, STEPS):
        drawn, wanted = ([s[:3] for s in run_ranks.all_samples(run)[step]] for run in (moved, expected))
        assert drawn == wanted
    for name, tensor in expected[0]["weights"].items():
        torch.testing.assert_close(moved[0]["weights"][name], tensor, atol=1e-5, rtol=0)
    for row, other in zip(rows_of(output), rows_of(whole), strict=True):
        assert row.get("actor/pg_loss") == pytest.approx(other.get("actor/pg_loss"), abs=1e-5)
