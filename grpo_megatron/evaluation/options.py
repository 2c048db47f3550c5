"""The arguments of `evaluate`, and the checks that argparse cannot do."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, get_args

from grpo_megatron.config import ENGINE_TEMPERATURES, ConfigError, TrainerConfig
from grpo_megatron.reading import ReadError, parse_json, shown

DEVICES = get_args(TrainerConfig.model_fields["device"].annotation)

MAX_DIGITS_OF_OPTION = 18
LARGEST_OPTIONS = {
    "samples": 65_536,
    "num_fewshot": 10_000,
    "max_tokens": 100_000_000,
    "report_samples": 1_000_000,
    "tp": 1024,
    "dp": 65_536,
    "workers": 1024,
    "kv_cache_gib": 4096,
    "max_num_seqs": 1_000_000,
    "batch_size": 1_000_000,
}

EXAMPLES = """
one greedy sample per problem:
  grpo-megatron evaluate --model HF_DIR --tasks gsm8k,math500 --data DATA
and 16 drawn samples, for avg, pass@k and maj@16:
  grpo-megatron evaluate --model HF_DIR --tasks math500 --data DATA --samples 16
a training step, on 4 copies of tp 4; a task of one file:
  grpo-megatron evaluate --model outputs/run/checkpoints/step_000020 \\
      --tasks gsm8k --data DATA --tp 4 --dp 4
  grpo-megatron evaluate --model HF_DIR --tasks aime --file aime=aime25.jsonl
rows {"answer": ..., "completion": ...}; two results; the tasks and files:
  grpo-megatron evaluate grade --task math ROWS.jsonl --output OUT.jsonl
  grpo-megatron evaluate compare A/results.json B/results.json
  grpo-megatron evaluate tasks

DATA holds gsm8k/test.jsonl, math/test.jsonl, ...: `evaluate tasks` lists them.
"""


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "grpo-megatron evaluate",
        description="Scores of a model on mathematics benchmarks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    prompts = parser.add_argument_group("model and prompts")
    prompts.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="DIR",
        help="Hugging Face folder, converted checkpoint, or training step",
    )
    prompts.add_argument(
        "--tasks", required=True, metavar="A,B", help="names, paths of task files (.yaml), or module:function"
    )
    prompts.add_argument("--data", type=Path, metavar="DIR", help="folder with the benchmarks' files")
    prompts.add_argument("--file", action="append", default=[], metavar="TASK=PATH", help="the data file of a task")
    prompts.add_argument(
        "--limit",
        type=positive_integer,
        metavar="N",
        help="only the first N problems; scores are then not those of the benchmark",
    )
    prompts.add_argument(
        "--num-fewshot",
        type=non_negative_integer,
        metavar="K",
        help="worked examples from the training file (default: the task's, mostly 0)",
    )
    prompts.add_argument(
        "--fewshot-seed", type=non_negative_integer, default=1234, metavar="N", help="of the choice of examples"
    )
    prompts.add_argument(
        "--format", choices=("auto", "chat", "text"), default="auto", help="auto: chat, or text with worked examples"
    )
    prompts.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="a Jinja file instead of the tokenizer's own"
    )
    prompts.add_argument(
        "--system-prompt", metavar="TEXT", help='instead of the task\'s own; "": none (as data.system_prompt)'
    )
    prompts.add_argument("--tokenizer", type=Path, metavar="DIR", help="default: the model's folder")
    prompts.add_argument(
        "--hf", type=Path, metavar="DIR", help="config.json and tokenizer, for a checkpoint without them"
    )
    prompts.add_argument("--family", metavar="MODULE:FAMILY", help="your own model family (as model.family)")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--samples",
        type=positive_integer,
        default=1,
        metavar="N",
        help="drawn samples per problem besides the greedy one; 1: only the greedy one",
    )
    sampling.add_argument("--no-greedy", action="store_true", help="without the greedy sample")
    sampling.add_argument("--temperature", type=float, metavar="T", help="default: the task's")
    sampling.add_argument("--top-p", type=float, metavar="P", help="default: the task's")
    sampling.add_argument("--max-tokens", type=positive_integer, metavar="N", help="default: the task's")
    sampling.add_argument(
        "--seed", type=non_negative_integer, default=0, metavar="N", help="of the samples (default 0)"
    )
    sampling.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: float32 for a float32 model, else bfloat16"
    )
    sampling.add_argument("--engine-kwargs", type=json_value, default={}, metavar="JSON", help="passed to vllm.LLM")
    execution = parser.add_argument_group("execution")
    execution.add_argument(
        "--output", type=Path, metavar="OUT", help="default: outputs/evaluation/NAME OF THE MODEL FOLDER"
    )
    execution.add_argument(
        "--tp", type=positive_integer, default=1, metavar="N", help="ranks per copy of the model (tensor parallel)"
    )
    execution.add_argument(
        "--dp", type=positive_integer, metavar="N", help="copies of the model (default 1; under torchrun: ranks / tp)"
    )
    execution.add_argument("--device", choices=DEVICES, default="auto", help="auto: GPUs if there are any")
    execution.add_argument(
        "--batch-size", type=positive_integer, default=2048, metavar="N", help="samples between two writes to the disk"
    )
    execution.add_argument(
        "--max-num-seqs",
        type=positive_integer,
        default=256,
        metavar="N",
        help="samples generated at a time, per copy of the model",
    )
    execution.add_argument(
        "--kv-cache-gib", type=positive_integer, default=1, metavar="N", help="cache of the engine on a CPU (default 1)"
    )
    execution.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="X",
        help="the engine's share of a GPU (default 0.9)",
    )
    execution.add_argument(
        "--workers",
        type=positive_integer,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes that grade (default: one per core)",
    )
    execution.add_argument(
        "--report-samples",
        type=non_negative_integer,
        default=400,
        metavar="N",
        help="problems per task whose texts are in the report (default 400)",
    )
    return parser.parse_args(argv)


def positive_integer(text: str) -> int:
    if not text.isdecimal() or len(text) > MAX_DIGITS_OF_OPTION or not int(text):
        raise argparse.ArgumentTypeError(f"{shown(text, 40)} is not a positive whole number of 64 bits")
    return int(text)


def non_negative_integer(text: str) -> int:
    if not text.isdecimal() or len(text) > MAX_DIGITS_OF_OPTION:
        raise argparse.ArgumentTypeError(f"{shown(text, 40)} is not a whole number from 0, of 64 bits")
    return int(text)


def json_value(text: str) -> Any:
    try:
        return parse_json(text)
    except ReadError as error:
        raise argparse.ArgumentTypeError(f"{shown(text, 40)} {error}") from None


def check_arguments(args: argparse.Namespace) -> None:
    """Raises ConfigError with every value that is out of range."""
    problems = []
    low, high = ENGINE_TEMPERATURES
    if args.temperature is not None and args.temperature != 0 and not low <= args.temperature <= high:
        problems.append(
            f"--temperature {args.temperature:g} is outside the engine's {low:g} to {high:g} (or 0: greedy)"
        )
    if args.top_p is not None and not 0 < args.top_p <= 1:
        problems.append(f"--top-p {args.top_p:g} is outside 0 to 1; set a value above 0, at most 1")
    if not 0 < args.gpu_memory_utilization <= 1:
        problems.append(
            f"--gpu-memory-utilization {args.gpu_memory_utilization:g} is outside 0 to 1; set 0.9, for instance"
        )
    for name, largest in LARGEST_OPTIONS.items():
        value = getattr(args, name)
        if value is not None and value > largest:
            problems.append(f"--{name.replace('_', '-')} {value} is more than {largest:,}; set that or less")
    if not isinstance(args.engine_kwargs, dict):
        problems.append("--engine-kwargs must be a JSON object")
    problems += [f"--file {file!r} is not of the form TASK=PATH" for file in args.file if not all(file.partition("="))]
    if problems:
        raise ConfigError("\n".join(problems))
