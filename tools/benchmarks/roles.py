"""`tools.benchmarks roles`: steps of ranks that train and draw in turn, beside ranks of two roles with a lag of 0, 1 and 2.

Two ranks on the CPU, with the quickstart's sizes and transformers' engine. What a GPU would take is emulated by sleeping: each
engine step takes DECODE seconds, however many sequences it decodes, and an update UPDATE seconds for all tokens of the batch,
divided over the ranks that train. So colocated ranks gain nothing from sharing the draws, and everything from sharing the update.

This file is also what the ranks run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.benchmarks.workload import WORKLOADS, write_folder

WARM = 3  # steps that are not counted
WAYS = {"colocated": {}, **{f"lag {lag}": {"placement": "separate", "num_ranks": 1, "lag": lag} for lag in (0, 1, 2)}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--decode", type=float, default=0.025, help="seconds of an engine step")
    parser.add_argument("--update", type=float, default=0.8, help="seconds of an update by one rank")


def roles(args: argparse.Namespace) -> int:
    workload, rows = WORKLOADS["0.4M"], []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    for name, placement in WAYS.items():
        with tempfile.TemporaryDirectory(prefix="benchmark-roles-") as folder:
            root = Path(folder)
            write_folder(root, workload, 64)
            raw = {
                "model": {"path": str(root / "model"), "dtype": "float32"},
                "data": {
                    "task": "jsonl",
                    "train_files": [str(root / "train.jsonl")],
                    "train_batch_size": workload.prompts,
                }
                | {"max_prompt_length": workload.prompt_length, "max_response_length": workload.response_length}
                | {"apply_chat_template": False},
                "actor": {"use_kl_loss": False, "optim": {"lr": 1e-5}},
                "rollout": {"engine": "transformers", "n": 8, **placement},
                "reward": {"function": "benchmark_reward:reward"},
                "trainer": {"total_training_steps": WARM + args.steps, "save_freq": -1, "save_hf_at_end": False}
                | {"output_dir": str(root / "out"), "device": "cpu", "n_gpus_per_node": 2, "logger": ["jsonl"]}
                | {"val_before_train": False, "test_freq": -1},
            }
            (root / "run.json").write_text(json.dumps({"raw": raw, "decode": args.decode, "update": args.update}))
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
            paths = {"PYTHONPATH": f"{environment['PYTHONPATH']}:{root}"}
            subprocess.run([*command, folder], env=environment | paths, check=True, stdout=subprocess.DEVNULL)
            lines = (root / "out/metrics.jsonl").read_text().splitlines()
            rows.append((name, [json.loads(line) for line in lines][WARM:]))
    print(f"medians of {args.steps} steps; a wait in seconds, and in engine steps of {args.decode:g} s")
    print(
        f"{'':<10} {'samples/s':>10} {'step s':>8} {'draws s':>8} {'update s':>9} {'training waits':>16} {'drawing waits':>16}"
    )
    for name, steps in rows:
        names = ("step", "gen", "update_actor", "wait_samples", "wait_weights")
        found = [statistics.median(row.get(f"timing_s/{key}", 0.0) for row in steps) for key in names]
        step, draws, update, *waits = found
        waited = "".join(f"{wait:>8.2f} ({wait / args.decode:>5.0f})" for wait in waits)
        print(f"{name:<10} {workload.num_samples / step:>10.1f} {step:>8.2f} {draws:>8.2f} {update:>9.2f} {waited}")
    return 0


def run_rank(folder: Path) -> None:
    from grpo_megatron.checks.validate import validate
    from grpo_megatron.config import Config
    from grpo_megatron.models.policy import Policy
    from grpo_megatron.rollout.transformers_engine import TransformersEngine
    from grpo_megatron.rollout_rank import RolloutRank
    from grpo_megatron.trainer import Trainer

    content = json.loads((folder / "run.json").read_text())
    config = Config.model_validate(content["raw"])
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    training = world - config.num_rollout_ranks
    poll, update = TransformersEngine.poll, Policy.update

    def slow_poll(self: Any) -> Any:
        time.sleep(content["decode"])
        return poll(self)

    def slow_update(self: Any, *args: Any, **named: Any) -> Any:
        time.sleep(content["update"] / training)
        return update(self, *args, **named)

    TransformersEngine.poll, Policy.update = slow_poll, slow_update  # type: ignore[method-assign]
    checked = validate(config, world)
    (Trainer(config, checked) if rank < training else RolloutRank(config, checked)).run()
    os._exit(0)


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
