"""`tools.benchmarks mirror`: what a step waits for the state in memory (`trainer.healing.memory`), on one CPU rank per node.

Runs by the real command take turns, with the mirror and without. A step is without the mirror's own phase. With `--nodes 2`
two launchers of this machine are two nodes, each of which keeps the other's pieces.
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

from grpo_megatron.cli.nodes import NODE_ADDRESS, NODE_RANK
from tools.benchmarks.workload import WORKLOADS, machine, write_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", choices=WORKLOADS, default="26M")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1)


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
    times = {memory: " ".join(f"{each:.2f}" for each in seconds) for memory, seconds in steps.items()}
    print(f"steps with a mirror: {times['true']}\nsteps without: {times['false']}")
    wait = statistics.median(waits)
    print(
        f"{args.workload}, {args.nodes} nodes: the run waits {wait:.3f} s for a mirror after a step of {step:.2f} s:"
        f" {wait / step:.2%}; without a mirror a step takes {without:.2f} s"
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
    trainer = {
        "device": "cpu",
        "nnodes": args.nodes,
        "n_gpus_per_node": 1,
        "output_dir": str(output),
        "total_training_steps": args.steps + 1,
    }
    trainer |= {"val_before_train": False, "test_freq": -1, "save_freq": 1000, "save_hf_at_end": False}
    raw["trainer"] = trainer | {"healing": {"layouts": "same", "memory": memory == "true"}, "logger": ["jsonl"]}
    (root / "run.yaml").write_text(json.dumps(raw))
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(root)])
    command = [sys.executable, "-m", "grpo_megatron", "train", str(root / "run.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, NODE_ADDRESS: "127.0.0.1"}
    nodes = [environment | {NODE_RANK: str(node)} for node in range(args.nodes)]
    launchers = [subprocess.Popen(command, cwd=root, env=each, stdout=subprocess.DEVNULL) for each in nodes]
    codes = [launcher.wait() for launcher in launchers]
    if any(codes):
        raise RuntimeError("a launcher has failed; see above")
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return rows[1 : args.steps + 1]
