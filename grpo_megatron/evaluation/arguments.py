"""The arguments of `evaluate`, and what argparse cannot check of them."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import get_args

from grpo_megatron.config import ENGINE_TEMPERATURES, ConfigError, TrainerConfig

DEVICES = get_args(TrainerConfig.model_fields["device"].annotation)

EXAMPLES = """
  evaluate --model HF_DIR --tasks gsm8k,math500 --data DATA              one greedy answer to every problem
  evaluate --model HF_DIR --tasks math500 --data DATA --samples 16       and 16 drawn ones: avg, pass@k, maj@16
  evaluate --model outputs/run/checkpoints/step_000020 --tasks gsm8k --data DATA --tp 4 --dp 2
  evaluate --model HF_DIR --tasks aime --file aime=aime25.jsonl --samples 32
  evaluate grade --task math ROWS.jsonl --output OUT.jsonl               rows {"gold": ..., "completion": ...}
  evaluate compare A/results.json B/results.json
  evaluate tasks                                                         the tasks, their versions and files

DATA holds gsm8k/test.jsonl, math/test.jsonl, ... (evaluate tasks prints the names that are looked for).
"""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "evaluate",
        description="Scores of a model on mathematics benchmarks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is asked")
    what.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="DIR",
        help="Hugging Face folder, converted checkpoint, or training step",
    )
    what.add_argument("--tasks", required=True, metavar="A,B", help="names, or paths of task files (.yaml)")
    what.add_argument("--data", type=Path, metavar="DIR", help="folder with the benchmarks' files")
    what.add_argument("--file", action="append", default=[], metavar="TASK=PATH", help="the data file of a task")
    what.add_argument("--limit", type=positive, metavar="N", help="the first N problems only: no benchmark any more")
    what.add_argument(
        "--num-fewshot",
        type=count,
        metavar="K",
        help="worked examples from the training file (default: the task's, mostly 0)",
    )
    what.add_argument("--fewshot-seed", type=count, default=1234, metavar="N")
    what.add_argument(
        "--format", choices=("auto", "chat", "text"), default="auto", help="auto: chat, but text with examples"
    )
    what.add_argument("--chat-template", type=Path, metavar="FILE", help="a Jinja file instead of the tokenizer's own")
    what.add_argument("--tokenizer", type=Path, metavar="DIR", help="default: the model's folder")
    what.add_argument(
        "--hf", type=Path, metavar="DIR", help="config.json and tokenizer of a checkpoint that has none of its own"
    )
    how = parser.add_argument_group("how it is answered")
    how.add_argument(
        "--samples",
        type=positive,
        default=1,
        metavar="N",
        help="drawn answers a problem, beside the greedy one; 1: the greedy one only",
    )
    how.add_argument("--no-greedy", action="store_true", help="without the greedy answer")
    how.add_argument("--temperature", type=float, metavar="T", help="default: the task's")
    how.add_argument("--top-p", type=float, metavar="P", help="default: the task's")
    how.add_argument("--max-tokens", type=positive, metavar="N", help="default: the task's")
    how.add_argument("--seed", type=count, default=0, metavar="N")
    how.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: float32 for a float32 model, else bfloat16"
    )
    how.add_argument("--engine-kwargs", type=json.loads, default={}, metavar="JSON", help="passed to vllm.LLM")
    where = parser.add_argument_group("where")
    where.add_argument("--output", type=Path, metavar="OUT", help="default: outputs/evaluation/MODEL'S NAME")
    where.add_argument("--tp", type=positive, default=1, metavar="N", help="ranks that share the model")
    where.add_argument(
        "--dp", type=positive, metavar="N", help="copies of the model (default 1; under torchrun: ranks / tp)"
    )
    where.add_argument("--device", choices=DEVICES, default="auto")
    where.add_argument(
        "--batch-size", type=positive, default=2048, metavar="N", help="answers between two writes to the disk"
    )
    where.add_argument("--max-num-seqs", type=positive, default=256, metavar="N", help="answers at a time, of one copy")
    where.add_argument("--kv-cache-gib", type=positive, default=1, metavar="N", help="CPU only")
    where.add_argument("--gpu-memory-utilization", type=float, default=0.9, metavar="X")
    where.add_argument(
        "--workers", type=positive, default=os.cpu_count() or 1, metavar="N", help="graders (default: the cores)"
    )
    where.add_argument(
        "--report-samples",
        type=count,
        default=400,
        metavar="N",
        help="problems of a task whose texts are in the report (default 400)",
    )
    return parser.parse_args(argv)


def positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def check(args: argparse.Namespace) -> None:
    """What argparse cannot. Raises ConfigError."""
    problems = []
    low, high = ENGINE_TEMPERATURES
    if args.temperature is not None and args.temperature != 0 and not low <= args.temperature <= high:
        problems.append(
            f"--temperature {args.temperature:g} is outside the engine's {low:g} to {high:g} (or 0: greedy)"
        )
    if args.top_p is not None and not 0 < args.top_p <= 1:
        problems.append(f"--top-p {args.top_p:g} is outside 0 to 1; set a value above 0, at most 1")
    if not 0 < args.gpu_memory_utilization <= 1:
        problems.append(f"--gpu-memory-utilization {args.gpu_memory_utilization:g} is a share; set 0.9, say")
    if not isinstance(args.engine_kwargs, dict):
        problems.append("--engine-kwargs must be a JSON object")
    problems += [f"--file {file!r} is not of the form TASK=PATH" for file in args.file if not all(file.partition("="))]
    if problems:
        raise ConfigError("\n".join(problems))
