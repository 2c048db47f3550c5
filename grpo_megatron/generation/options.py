"""The options of `generate`, and the checks that argparse cannot do."""

from __future__ import annotations

import argparse
from pathlib import Path

from grpo_megatron.config import ENGINE_TEMPERATURES, ConfigError
from grpo_megatron.evaluation.options import DEVICES, json_value, non_negative_integer, positive_integer

USAGE = """
one greedy answer; the prompt from standard input:
  grpo-megatron generate --model outputs/run/hf --prompt "What is 12 * 12?"
  grpo-megatron generate --model HF_DIR --prompt - < question.txt
answers to the rows of a file, or to its lines:
  grpo-megatron generate --model outputs/run/checkpoints/step_000020 \\
      --file test.jsonl --samples 4 --temperature 1 --output out.jsonl
  grpo-megatron generate --model HF_DIR --file prompts.txt --output out.jsonl
a conversation in the terminal:
  grpo-megatron generate --model HF_DIR --chat

A model of one of our runs gets the run's prompts: task, chat template, system
prompt and stop texts of its config.
"""


def parse_generation(argv: list[str]) -> argparse.Namespace:
    """Raises ConfigError for values that argparse accepts and generation does not."""
    parser = argparse.ArgumentParser(
        "grpo-megatron generate",
        description="Answers of a model to your prompts.",
        epilog=USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_prompts(parser.add_argument_group("model and prompts"))
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--samples", type=positive_integer, default=1, metavar="N", help="answers per prompt")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0: greedy")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default 1: all tokens")
    sampling.add_argument("--top-k", type=positive_integer, metavar="K", help="default: all tokens")
    sampling.add_argument(
        "--max-tokens", type=positive_integer, metavar="N", help="of an answer; default: the run's, else 512"
    )
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="a text that ends an answer; may be repeated")
    sampling.add_argument(
        "--seed", type=non_negative_integer, default=0, metavar="N", help="of the samples (default 0)"
    )
    _add_execution(parser.add_argument_group("execution"))
    args = parser.parse_args(argv)
    problems = _problems(args)
    if problems:
        raise ConfigError("\n".join(problems))
    return args


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    help_of_model = "Hugging Face folder, converted checkpoint, or training step"
    group.add_argument("--model", type=Path, required=True, metavar="DIR", help=help_of_model)
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="one prompt; -: standard input")
    source.add_argument("--file", type=Path, metavar="FILE", help="rows (.jsonl, .json, .csv), or else lines of text")
    source.add_argument("--chat", action="store_true", help="a conversation in the terminal")
    group.add_argument("--task", metavar="NAME", help="the task that renders prompts; default: the run's, else as is")
    group.add_argument("--system-prompt", metavar="TEXT", help="default: the run's, or the task's; \"\": none")
    group.add_argument("--chat-template", type=Path, metavar="FILE", help="default: the run's, or the tokenizer's")
    group.add_argument(
        "--format", choices=("auto", "chat", "text"), default="auto", help="auto: as the run, else a chat if it can be"
    )
    group.add_argument("--tokenizer", type=Path, metavar="DIR", help="default: the model's folder")
    group.add_argument("--hf", type=Path, metavar="DIR", help="config.json and tokenizer of a checkpoint without them")
    group.add_argument("--family", metavar="MODULE:FAMILY", help="your own model family (as model.family)")


def _add_execution(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output", type=Path, metavar="OUT.jsonl", help="default: standard output")
    group.add_argument("--json", action="store_true", help="JSON lines, for one answer too")
    group.add_argument("--tp", type=positive_integer, default=1, metavar="N", help="ranks (tensor parallel)")
    group.add_argument("--device", choices=DEVICES, default="auto", help="auto: GPUs if there are any")
    group.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: float32 for a float32 model, else bfloat16"
    )
    group.add_argument(
        "--max-length", type=positive_integer, default=4096, metavar="N", help="tokens of a conversation (--chat)"
    )
    group.add_argument(
        "--max-num-seqs", type=positive_integer, default=256, metavar="N", help="answers drawn at a time"
    )
    group.add_argument(
        "--kv-cache-gib", type=positive_integer, default=1, metavar="N", help="cache of the engine on a CPU"
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="X",
        help="the engine's share of a GPU (default 0.9)",
    )
    group.add_argument("--engine-kwargs", type=json_value, default={}, metavar="JSON", help="passed to vllm.LLM")


def _problems(args: argparse.Namespace) -> list[str]:
    problems = []
    low, high = ENGINE_TEMPERATURES
    if args.temperature and not low <= args.temperature <= high:
        problems.append(
            f"--temperature {args.temperature:g} is outside {low:g} to {high:g}; set one inside, or 0 (greedy)"
        )
    if args.samples > 1 and not args.temperature:
        problems.append(
            f"--samples {args.samples} with --temperature 0: greedy answers are all the same; set --temperature 1"
        )
    if not 0 < args.top_p <= 1:
        problems.append(f"--top-p {args.top_p:g} is outside 0 to 1; set a value above 0, at most 1")
    if not 0 < args.gpu_memory_utilization <= 1:
        problems.append(
            f"--gpu-memory-utilization {args.gpu_memory_utilization:g} is outside 0 to 1; set 0.9, for instance"
        )
    if not isinstance(args.engine_kwargs, dict):
        problems.append("--engine-kwargs must be a JSON object")
    if args.stop and not all(args.stop):
        problems.append('--stop "": an empty text is found everywhere; leave it out')
    if args.chat:
        unused = [name for name in ("output", "json") if getattr(args, name)]
        problems += [f"--{name} with --chat: a conversation is not written; leave one of them out" for name in unused]
        if args.samples > 1:
            problems.append(f"--samples {args.samples} with --chat: each turn has one answer; leave --samples out")
        if args.tp > 1:
            problems.append(
                f"--chat with --tp {args.tp}: a conversation runs in one process; serve the model instead (vllm serve"
                f" HF_DIR --tensor-parallel-size {args.tp}; vllm chat), or set --tp 1"
            )
    elif args.tp > 1 and args.prompt == "-":
        problems.append(
            f"--prompt - with --tp {args.tp}: only one process has standard input; write the prompt to a file"
        )
    elif args.tp > 1 and args.output is None:
        problems.append(f"--tp {args.tp} starts {args.tp} ranks, which share the terminal; set --output OUT.jsonl")
    return problems
