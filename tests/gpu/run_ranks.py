"""What the ranks of whole runs execute: the project's Trainer, or TRL's on the same work."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

from tests.gpu.reports import Skipped, perform


def train(raw: dict[str, Any]) -> None:
    """Run the config `raw` to its end. Its results are in the run's metrics.jsonl."""
    from grpo_megatron.checks.validate import validate
    from grpo_megatron.config import Config
    from grpo_megatron.observability.summary import Summary
    from grpo_megatron.trainer import Trainer

    config = Config.model_validate(raw)
    checked = validate(config, int(os.environ["WORLD_SIZE"]))
    with mock.patch.object(Summary, "show", lambda self, sinks: None):  # draws curves, with a package not needed here
        Trainer(config, checked).run()


def run_trl(names: list[str], path: Path, **work: Any) -> None:
    perform(dict.fromkeys(names, lambda: _train_with_trl(**work)), path)


def _train_with_trl(
    folder: Path, rows: Path, output: Path, *, prompts: int, samples: int, response: int, steps: int
) -> dict[str, Any]:
    """Seconds of each step of TRL's GRPOTrainer with vLLM colocated. One update per step of prompts x samples responses.

    Not run anywhere yet. Raises Skipped with the reason if this TRL does not run with this vLLM.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            self.start = time.monotonic()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            seconds.append(time.monotonic() - self.start)

    wanted = {
        "output_dir": str(output),
        "per_device_train_batch_size": samples * 2,
        "gradient_accumulation_steps": prompts // 2,  # all of a step's responses are drawn at once
        "num_generations": samples,
        "max_completion_length": response,
        "max_steps": steps,
        "learning_rate": 1e-6,
        "beta": 0.0,
        "bf16": True,
        "gradient_checkpointing": False,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.4,
        "vllm_enable_sleep_mode": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    texts = [json.loads(line)["prompt"] for line in rows.read_text().splitlines()]
    try:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
            reward_funcs=lambda completions, **kwargs: [float(len(text) % 7) for text in completions],
            args=GRPOConfig(**{name: value for name, value in wanted.items() if name in known}),
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[Clock()],
        )
        trainer.train()
    except Exception as error:  # TRL supports certain versions of vLLM and transformers only
        raise Skipped(f"TRL does not run here: {type(error).__name__}: {error}") from error
    return {"seconds": seconds, "left out": sorted(wanted.keys() - known)}
