"""Bad inputs in real processes: each problem is reported once, by hand and under torchrun, and no file is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import make_run

ROOT = Path(__file__).resolve().parents[2]
TP = "actor.megatron.tensor_model_parallel_size"
NO_TOKENIZER = "model.tokenizer_path=nowhere"  # the process then does not import transformers, which takes seconds


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


def _call(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=600
    )


def test_one_process_reports_each_problem_once(run: Path, tmp_path: Path) -> None:
    done = _call("grpo_megatron", "train", str(run / "run.yaml"), f"{TP}=4", NO_TOKENIZER, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout.startswith("checking, then starting ") and done.stdout.count("\n") == 1
    first, second = done.stderr.splitlines()
    assert first.startswith("error: tokenizer folder 'nowhere'")  # in the order of the file
    assert second.startswith(f"error: {TP}=4")
    assert list(tmp_path.iterdir()) == []


def test_two_ranks_report_each_problem_once(run: Path, tmp_path: Path) -> None:
    """Started by torchrun: the program prints one line, and torchrun's table repeats it as the root cause."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "grpo_megatron"]
    done = _call(*torchrun, "train", str(run / "run.yaml"), f"{TP}=4", NO_TOKENIZER, cwd=tmp_path)
    assert done.returncode == 1  # torchrun's own
    assert done.stderr.count("error: actor.megatron") == 1, done.stderr
    before, _, table = done.stderr.partition("Root Cause")
    assert f"{TP}=4" in before and f"{TP}=4" in table
    assert done.stderr.count("Traceback") == 1, "there must be torchrun's traceback only"
    assert list(tmp_path.iterdir()) == []
