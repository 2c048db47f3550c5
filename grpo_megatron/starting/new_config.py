"""`grpo-megatron init MODEL --task TASK --train FILE ...`: a commented config for a model, a task and a machine.

The comments say why a value is what it is. What is written was checked as `train --dry-run` checks it.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from grpo_megatron.checks.validate import validate
from grpo_megatron.config import Config, ConfigError, DataConfig
from grpo_megatron.data.tasks import get_task, task_names
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import read_architecture
from grpo_megatron.planning.gpus import GPUS, REFERENCE, find_gpu
from grpo_megatron.reading import parse_yaml
from grpo_megatron.starting.config_text import NewRun, config_text
from grpo_megatron.starting.suggestion import Machine, suggest
from grpo_megatron.storage.atomic import write_file

PER_NODE = 8
CPU_RANKS = 2


def write_config(args: argparse.Namespace) -> int:
    """`args`: those of `parse_init`. Returns the exit code. Raises ConfigError, and then nothing was written."""
    if args.output.exists():
        raise ConfigError(f"{args.output} exists; name another file with --output, or remove it")
    arch = _architecture(args.model)
    machine = _machine(args)
    run = _new_run(args, arch, machine)

    text = config_text(run, machine)
    if machine.gpu is not None:
        text = config_text(run, machine, suggest(_config(text), arch, machine))
    validate(_config(text), machine.ranks, dry_run=True, rehearsed=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_file(args.output, text)
    print(f"wrote {args.output}. Read its comments, then:")
    print(f"  grpo-megatron train {args.output} --dry-run{_gpu_option(machine)}")
    print(f"  grpo-megatron train {args.output}")
    return 0


def parse_init(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "grpo-megatron init", description="Write a commented config for a model, a task and a machine."
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="a local Hugging Face folder")
    parser.add_argument(
        "--task", default="gsm8k", help=f"a task file, or one of {', '.join(task_names())} (default gsm8k)"
    )
    parser.add_argument("--train", nargs="+", required=True, metavar="FILE", help="training rows")
    parser.add_argument("--val", nargs="+", default=[], metavar="FILE", help="held-out rows")
    parser.add_argument("--reward", metavar="MODULE:FUNCTION", help="your own reward, instead of the task's")
    parser.add_argument("--cpu", action="store_true", help=f"train on this machine's CPU, on {CPU_RANKS} ranks")
    parser.add_argument(
        "--gpus", type=_positive, default=PER_NODE, metavar="N", help=f"GPUs of all nodes (default {PER_NODE})"
    )
    parser.add_argument(
        "--gpus-per-node", type=_positive, default=PER_NODE, metavar="N", help=f"GPUs per node (default {PER_NODE})"
    )
    parser.add_argument(
        *("--gpu", "--gpu-memory"),
        default=REFERENCE,
        metavar="NAME|GIB",
        help=f"{', '.join(GPUS)} (a100 is a100-80), or GiB of memory (default {REFERENCE})",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("grpo.yaml"), metavar="YAML", help="the file to write (default grpo.yaml)"
    )
    return parser.parse_args(argv)


def _gpu_option(machine: Machine) -> str:
    """For a plan on a machine without that GPU."""
    if machine.gpu is None:
        return ""
    return f" --gpu {machine.gpu.name if machine.gpu.name in GPUS else f'{machine.gpu.usable_gib:g}'}"


def _positive(text: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]{0,5}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 999999")
    return int(text)


def _architecture(folder: Path) -> Architecture:
    try:
        return read_architecture(folder)
    except ValueError as error:
        raise ConfigError(f"MODEL {str(folder)!r}: {error}; name a Hugging Face folder of a supported model") from error


def _machine(args: argparse.Namespace) -> Machine:
    if args.cpu:
        return Machine(1, CPU_RANKS, None)
    per_node = min(args.gpus, args.gpus_per_node)
    if args.gpus % per_node:
        raise ConfigError(f"--gpus {args.gpus} is no multiple of --gpus-per-node {per_node}")
    try:
        gpu = find_gpu(args.gpu)
    except ValueError as error:
        raise ConfigError(f"--gpu {error}") from error
    return Machine(args.gpus // per_node, per_node, gpu)


def _new_run(args: argparse.Namespace, arch: Architecture, machine: Machine) -> NewRun:
    task = get_task(args.task)
    if args.reward is None and not task.graders:
        raise ConfigError(f"task {args.task} does not grade answers; name your function with --reward my_module:reward")
    on_cpu, room = machine.gpu is None, arch.max_position_embeddings
    max_response = min(256 if on_cpu else 2048, room // 2)
    return NewRun(
        args.model,
        arch,
        _has_template(args.model),
        args.task,
        args.train,
        args.val,
        args.reward,
        max_prompt=min(512 if on_cpu else 1024, room - max_response),
        max_response=max_response,
        output_dir=Path("outputs") / args.output.stem,
    )


def _has_template(model: Path) -> bool:
    try:
        return load_tokenizer(model, DataConfig()).chat_template is not None
    except ConfigError as error:
        raise ConfigError(f"{error}\n  (for init, put the tokenizer's files into MODEL)") from error


def _config(text: str) -> Config:
    raw: Any = parse_yaml(text)
    return Config.model_validate(raw)
