"""`tools.benchmarks lora`: steps with LoRA, merged and split, beside training of all weights. `train` runs each in turn.

Two ranks on the CPU, TP2 in training and TP1 in the engines, so that half of the weights travel into each rank. Memory is
a rank's largest resident set, engine and libraries included. Seconds are medians over the steps of all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from tools.benchmarks.step import ROOT, launch, own_config
from tools.benchmarks.workload import WORKLOADS, machine, write_folder

COLUMNS = {  # title -> (metric, factor)
    "step, s": ("timing_s/step", 1.0),
    "update, s": ("timing_s/update_actor", 1.0),
    "sync, s": ("timing_s/update_weights", 1.0),
    "sync, MB": ("sync/bytes_received", 1e-6),
    "memory, GB": ("perf/cpu_memory_used_gb", 2**30 / 1e9),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", choices=WORKLOADS, default="26M")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4, help="steps of a run; the first is not counted")
    parser.add_argument("--rounds", type=int, default=3)


def lora(args: argparse.Namespace) -> int:
    adapters = [f"actor.lora.rank={args.rank}", "actor.optim.lr=1e-5"]
    sides = {"all weights": [], "LoRA, merged": adapters, "LoRA, split": [*adapters, "actor.lora.mode=split"]}
    workload, rows = WORKLOADS[args.workload], {side: [] for side in sides}  # type: dict[str, list[Any]]
    with tempfile.TemporaryDirectory(prefix="benchmark-lora-") as root:
        folder = Path(root)
        write_folder(folder, workload, workload.prompts * args.steps)
        config = own_config(folder, workload, args.steps)
        config["actor"]["megatron"] = {"tensor_model_parallel_size": 2}
        config["actor"]["ppo_max_token_len_per_gpu"] = 2048  # one micro-batch of 12,000 tokens would hide all else
        config["rollout"]["engine_options"] = {"kv_cache_gib": 0.5}
        (folder / "own.yaml").write_text(yaml.safe_dump(config))
        for _ in range(args.rounds):
            for side, overrides in sides.items():
                rows[side] += run(folder, overrides)
    print(f"{machine()}\n{args.workload}, rank {args.rank}; medians of {args.rounds} x {args.steps - 1} steps")
    print("| | " + " | ".join(COLUMNS) + " |\n|" + " --- |" * (1 + len(COLUMNS)))
    for side, steps in rows.items():
        values = (statistics.median(step[name] for step in steps) * factor for name, factor in COLUMNS.values())
        print(f"| {side} | " + " | ".join(f"{value:.3g}" for value in values) + " |")
    return 0


def run(folder: Path, overrides: list[str]) -> list[dict[str, float]]:
    """The metrics of the counted steps."""
    shutil.rmtree(folder / "own_output", ignore_errors=True)
    command = [sys.executable, *launch(), "-m", "grpo_megatron", "train", str(folder / "own.yaml"), *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}:{ROOT}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{overrides} failed with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    lines = (folder / "own_output" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][1:]
