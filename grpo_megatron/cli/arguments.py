"""The arguments of the command line. Those of commands.py parse their own options; --help lists them here."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from grpo_megatron.cli.commands import COMMANDS, STARTS_RANKS

MAX_PLANNED_RANKS, MAX_GPU_GIB = 1 << 20, 1 << 20  # of --world-size and --gpu-memory


def parse_command(argv: list[str]) -> argparse.Namespace:
    """The options of `train` or `train-reward`. A mistake ends the process with exit code 2."""
    parser = argparse.ArgumentParser("grpo-megatron", description="GRPO training of language models on Megatron-Core.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.help, add_help=False)
    for name, line in STARTS_RANKS.items():
        commands.add_parser(name, help=line, add_help=False)
    epilog = "GRPO_DEBUG=1 shows the traceback of every error, and the warnings of Megatron-Core and torch."
    train = commands.add_parser("train", help="train with the settings of a YAML file", epilog=epilog)
    reward = commands.add_parser(
        "train-reward", help="train a reward model on pairs, or a process reward model on labelled steps", epilog=epilog
    )
    for parser_of_run in (train, reward):
        _add_train_arguments(parser_of_run)
    args, rest = parser.parse_known_args(argv)
    train = reward if args.command == "train-reward" else train
    for argument in rest:  # overrides after an option
        if argument.startswith("-"):
            train.error(f"unknown option {argument}")
        args.overrides.append(argument)
    if args.world_size is not None and not (args.dry_run and 1 <= args.world_size <= MAX_PLANNED_RANKS):
        train.error(
            f"--world-size N needs --dry-run and 1 <= N <= {MAX_PLANNED_RANKS:,}; a run has trainer.nnodes x"
            " n_gpus_per_node ranks"
        )
    if args.gpu_memory is not None and not (args.dry_run and 0 < args.gpu_memory <= MAX_GPU_GIB):  # not NaN either
        train.error(
            f"--gpu-memory GIB needs --dry-run and 0 < GIB <= {MAX_GPU_GIB:,}; a run reads the memory of its own GPU"
        )
    if args.profile is not None and args.dry_run:
        train.error("--profile measures a run, and --dry-run starts none; leave one of them out")
    return args


def _steps(text: str) -> range:
    """Of "3" or "3-5"."""
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if last < first:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step like 3, or first and last step like 3-5")
    return range(first, last + 1)


def _add_train_arguments(train: argparse.ArgumentParser) -> None:
    train.add_argument("config", type=Path, metavar="CONFIG", help="YAML file with sections model, data, actor, ...")
    train.add_argument("overrides", nargs="*", metavar="section.key=value", help="replace a value of the file")
    train.add_argument("--dry-run", action="store_true", help="check everything, print the plan, start nothing")
    train.add_argument(
        "--world-size", type=int, metavar="N", help="plan for N ranks on other machines (with --dry-run)"
    )
    train.add_argument(
        "--gpu-memory", type=float, metavar="GIB", help="memory of one GPU: which phases fit it (with --dry-run)"
    )
    train.add_argument(
        "--profile",
        type=_steps,
        metavar="STEPS",
        help="record these training steps, as 3 or 3-5, and write where their time went to trainer.output_dir/profile",
    )
