"""One process of TRL's side of `tools.benchmarks step`. torchrun of TRL's own environment starts it.

Imports nothing of this project: `workload.py` uses the standard library only, at its top.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tools.benchmarks import trl_vllm
from tools.benchmarks.workload import SAMPLES, WORKLOADS, Workload, family_processor_seconds


def settings(workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Settings of GRPOConfig. What is not named here has TRL's default, among others: no old log-probabilities without vLLM."""
    processes = int(os.environ["WORLD_SIZE"])
    per_device = workload.num_samples // processes
    return {
        "output_dir": str(args.folder / "trl_output"),
        "use_cpu": not args.gpu,
        "bf16": args.gpu,
        "gradient_checkpointing": False,  # TRL's default trades time for memory
        "per_device_train_batch_size": per_device // args.accumulate,
        "gradient_accumulation_steps": args.accumulate,
        "num_generations": SAMPLES,
        "max_completion_length": workload.response_length,
        "max_steps": args.steps,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "beta": 0.0,
        "num_iterations": 1,
        "loss_type": "dapo",  # a token has the weight 1 / (all tokens of the step), as token-mean
        "epsilon": 0.2,
        "temperature": 1.0,
        "shuffle_dataset": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        **(trl_vllm.settings(workload.max_length, 0.4 if args.gpu else 0.1) if args.vllm else {}),
        "ddp_backend": "gloo" if processes > 1 else None,
        "ddp_find_unused_parameters": False if processes > 1 else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("times", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--gpu", action="store_true", help="on one GPU, in bfloat16 (not run yet)")
    args = parser.parse_args()
    sys.path.insert(0, str(args.folder))
    if args.vllm and not args.gpu:
        trl_vllm.prepare()

    import torch
    from benchmark_reward import trl_reward
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    workload = WORKLOADS[args.workload]
    rows = [json.loads(line) for line in (args.folder / "train.jsonl").read_text().splitlines()]
    ends: list[tuple[float, float]] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if os.environ["RANK"] == "0":
                ends.append((time.perf_counter(), family_processor_seconds(os.getppid())))

    folder = args.folder / "model"
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if args.gpu else torch.float32),
        reward_funcs=[trl_reward],
        args=GRPOConfig(**settings(workload, args)),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        callbacks=[Clock()],
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        logs = [row for row in trainer.state.log_history if "completions/mean_length" in row]
        args.times.write_text(
            json.dumps(
                {
                    "ends": ends,
                    "mean_length": sum(row["completions/mean_length"] for row in logs) / len(logs),
                    "tokens": logs[-1]["num_tokens"],
                    "last": {key: value for key, value in logs[-1].items() if isinstance(value, (int, float))},
                }
            )
        )


if __name__ == "__main__":
    main()
