"""Bad inputs in real processes: each problem is reported once under torchrun, and no file is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TP = "actor.megatron.tensor_model_parallel_size"
NO_TOKENIZER = "model.tokenizer_path=nowhere"  # the process then does not import transformers, which takes seconds


def test_two_ranks_report_each_problem_once(run: Path, tmp_path: Path) -> None:
    """Started by torchrun: the program prints one line, and torchrun's table repeats it as the root cause."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "grpo_megatron", "train", str(run / "run.yaml"), f"{TP}=4", NO_TOKENIZER]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1  # torchrun's own
    assert done.stderr.count("error: actor.megatron") == 1, done.stderr
    before, _, table = done.stderr.partition("Root Cause")
    assert f"{TP}=4" in before and f"{TP}=4" in table
    assert done.stderr.count("Traceback") == 1, "there must be torchrun's traceback only"
    assert list(tmp_path.iterdir()) == []
