"""`tools.benchmarks mirror`: what a step waits for the state in memory (`trainer.healing.memory`), on one CPU rank.

Runs by the real command take turns, with the mirror and without. A step is without the mirror's own phase.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.benchmarks.workload import WORKLOADS, machine, write_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", choices=WORKLOADS, default="26M")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)


def measure_mirror(args: argparse.Namespace) -> int:
    print(machine())
    waits: list[float] = []
    steps: dict[str, list[float]] = {"true": [], "false": []}
    with tempfile.TemporaryDirectory(prefix="benchmark-mirror-") as folder:
        root, workload = Path(folder), WORKLOADS[args.workload]
        write_folder(root, workload, 64)
        for _ in range(args.repeats):
            for memory, seconds in steps.items():
                rows = run_steps(root, args, memory)
                seconds += [row["timing_s/step"] for row in rows]
                waits += [row["timing_s/mirror"] for row in rows] if memory == "true" else []
    step, without = statistics.median(steps["true"]), statistics.median(steps["false"])
    wait = statistics.median(waits)
    print(
        f"{args.workload}: the run waits {wait:.3f} s for a mirror after a step of {step:.2f} s: {wait / step:.2%};"
        f" without a mirror a step takes {without:.2f} s"
    )
    return 0


def run_steps(root: Path, args: argparse.Namespace, memory: str) -> list[dict[str, float]]:
    """Returns the rows of metrics of all steps but the first, in which kernels are warmed up."""
    workload, output = WORKLOADS[args.workload], root / f"run_{len(list(root.glob('run_*')))}"
    raw = {
        "model": {"path": str(root / "model"), "dtype": "float32"},
        "data": {
            "train_files": [str(root / "train.jsonl")],
            "train_batch_size": workload.prompts,
            "apply_chat_template": False,
            "max_prompt_length": workload.prompt_length,
            "max_response_length": workload.response_length,
        },
        "rollout": {"engine": "transformers", "n": 8},
        "reward": {"function": "benchmark_reward:reward"},
        "actor": {"use_kl_loss": False},
    }
    trainer = {"device": "cpu", "n_gpus_per_node": 1, "output_dir": str(output), "total_training_steps": args.steps + 1}
    trainer |= {"val_before_train": False, "test_freq": -1, "save_freq": 1000, "save_hf_at_end": False}
    raw["trainer"] = trainer | {"healing": {"layouts": "same", "memory": memory == "true"}, "logger": ["jsonl"]}
    (root / "run.yaml").write_text(json.dumps(raw))
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(root)])
    command = [sys.executable, "-m", "grpo_megatron", "train", str(root / "run.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    subprocess.run(command, cwd=root, env=environment, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return rows[1 : args.steps + 1]
