"""`tools.benchmarks trace`: what the trace of a step costs, in the same run, on one CPU rank.

Thread seconds of the trace (digests, gathering, the file) beside processor seconds of the whole step, so that other processes
on the machine count for neither. The engine is transformers'.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.benchmarks.workload import WORKLOADS, machine, write_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="default: 0.4M, the quickstart's sizes")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, help="default: the workload's")


def measure_trace(args: argparse.Namespace) -> int:
    os.environ |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    import torch

    torch.set_num_threads(1)
    print(machine())
    for name in args.workload or list(WORKLOADS)[:1]:
        with tempfile.TemporaryDirectory(prefix="benchmark-trace-") as root:
            write_folder(Path(root), WORKLOADS[name], 64)
            measure_steps(Path(root), name, args)
    return 0


def measure_steps(root: Path, name: str, args: argparse.Namespace) -> None:
    import grpo_megatron
    from grpo_megatron.config import Config
    from grpo_megatron.training.trace import Trace

    workload, spent = WORKLOADS[name], {"gradients": 0.0, "the rest": 0.0}
    count = args.prompts or workload.prompts
    raw: dict[str, Any] = {
        "model": {"path": root / "model", "dtype": "float32"},
        "data": {"train_files": [root / "train.jsonl"], "train_batch_size": count, "apply_chat_template": False},
        "rollout": {"engine": "transformers", "n": 8},
        "reward": {"function": "benchmark_reward:reward"},
        "actor": {"use_kl_loss": False},
        "trainer": {"device": "cpu", "n_gpus_per_node": 1, "output_dir": root / "run", "save_freq": -1},
    }
    raw["trainer"] |= {"val_before_train": False, "test_freq": -1, "logger": ["jsonl"]}
    sys.path.insert(0, str(root))
    raw["data"] |= {"max_prompt_length": workload.prompt_length, "max_response_length": workload.response_length}
    with grpo_megatron.open(Config.model_validate(raw)) as run:
        run.trace = Trace(run.effective, run.policy, run.placement.provenance, None, 0)

        def timed(part: str, method: Any) -> Any:
            def call(*values: Any) -> None:
                begin = time.thread_time()
                method(*values)
                spent[part] += time.thread_time() - begin

            return call

        run.trace.gradients = timed("gradients", run.trace.gradients)
        run.trace.write = timed("the rest", run.trace.write)
        steps: list[dict[str, float]] = []
        for step in range(args.steps + 1):
            spent.update(dict.fromkeys(spent, 0.0))
            begin = time.process_time()
            samples = run.sample(run.prompts[:count])
            batch = run.batch(samples)
            run.update(batch)
            run.trace.write(step, samples, batch)
            steps.append({"step": time.process_time() - begin, **spent})
        size = (root / "run/trace/step_000001.bin").stat().st_size
        run.trace.close()
    whole, *parts = (statistics.median(step[part] for step in steps[1:]) for part in ("step", *spent))
    print(f"{name} parameters, {count * 8} rows; processor seconds, medians of {args.steps}; {size:,} bytes a step")
    print(f"  step {whole:8.3f} s")
    for part, seconds in zip(spent, parts, strict=True):
        print(f"  {part:<10} {1e3 * seconds:8.2f} ms  {100 * seconds / whole:5.2f} %")
