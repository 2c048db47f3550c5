"""The arguments of the command line. Those of commands.py parse their own options; --help lists them here."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from grpo_megatron.cli.commands import COMMANDS, STARTS_RANKS
from grpo_megatron.planning.gpus import GPUS, Gpu, find_gpu

RUN_COMMANDS = {  # name: line in --help
    "train": "train with the settings of a YAML file",
    "train-reward": "train a reward model on pairs, or a process reward model on labelled steps",
    "plan": "what a config needs, whether it fits, and layouts that do",
}
COMMAND_ORDER = (  # in --help: as a user meets them
    *("quickstart", "examples", "init", "import", "plan", "train", "train-reward", "watch", "report", "evaluate"),
    *("generate", "curate", "convert", "prepare", "replay", "keys"),
)
MAX_PLANNED_RANKS = 1 << 20  # of --world-size


def parse_command(argv: list[str]) -> argparse.Namespace:
    """The options of `train`, `train-reward` or `plan`. A mistake ends the process with exit code 2."""
    parser = argparse.ArgumentParser(
        "grpo-megatron",
        description="GRPO training of language models on Megatron-Core.",
        epilog="grpo-megatron COMMAND --help lists the options of a command.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    lines = {name: command.help for name, command in COMMANDS.items()} | STARTS_RANKS | RUN_COMMANDS
    lines["quickstart"] = "train a tiny model on this CPU in one to two minutes"
    epilog = "GRPO_DEBUG=1 shows the traceback of every error, and the warnings of Megatron-Core and torch."
    parsers = {}
    for name in sorted(lines, key=COMMAND_ORDER.index):
        if name in RUN_COMMANDS:
            parsers[name] = commands.add_parser(name, help=lines[name], description=f"{lines[name]}.", epilog=epilog)
        else:
            commands.add_parser(name, help=lines[name], add_help=False)
    for name, parser_of_run in parsers.items():
        _add_run_arguments(parser_of_run)
        (_add_plan_arguments if name == "plan" else _add_train_arguments)(parser_of_run)
    plan = parsers["plan"]
    args, rest = parser.parse_known_args(argv)
    train = parsers[args.command]
    for argument in rest:  # overrides after an option
        if argument.startswith("-"):
            train.error(f"unknown option {argument}")
        args.overrides.append(argument)
    if args.command == "plan":
        _check_plan(plan, args)
    if args.world_size is not None and not (args.dry_run and 1 <= args.world_size <= MAX_PLANNED_RANKS):
        train.error(
            f"--world-size N needs --dry-run and 1 <= N <= {MAX_PLANNED_RANKS:,}; a run has trainer.nnodes x"
            " n_gpus_per_node ranks"
        )
    if args.gpu is not None and not args.dry_run:
        train.error("--gpu needs --dry-run; a run reads the memory of its own GPU")
    if args.resolved_config is not None and not args.dry_run:
        train.error("--resolved-config needs --dry-run; a run writes its config to trainer.output_dir")
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


class _ListKeys(argparse.Action):
    """Prints the keys of a section and ends, as --help does: no CONFIG is needed."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: Any, option: str | None = None
    ) -> None:
        from grpo_megatron.cli.key_list import list_keys
        from grpo_megatron.config import ConfigError

        try:
            print(list_keys(values or ""), end="")
        except ConfigError as error:
            parser.error(str(error))
        parser.exit()


def _gpu(text: str) -> Gpu:
    try:
        return find_gpu(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _check_plan(plan: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Options of a search without one; then --nodes-of becomes the keys of the config that it stands for."""
    for name in ("top", "mean_response"):
        if getattr(args, name) is not None and not args.search:
            plan.error(f"--{name.replace('_', '-')} needs --search")
    if args.search and args.resolved_config is not None:
        plan.error("--resolved-config writes one config, and --search lists many layouts; leave one of them out")
    if args.nodes_of is not None:
        args.overrides.append(f"trainer.n_gpus_per_node={args.nodes_of}")
        if args.world_size is not None:
            args.overrides.append(f"trainer.nnodes={-(-args.world_size // args.nodes_of)}")


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,7}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of at most 7 digits")
    return int(text)


def _add_plan_arguments(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("--dry-run", action="store_true", default=True, help=argparse.SUPPRESS)  # that is what a plan is
    plan.set_defaults(profile=None)
    plan.add_argument("--search", action="store_true", help="list the layouts that fit, the fastest first (estimated)")
    plan.add_argument("--nodes-of", type=_count, metavar="N", help="GPUs per node (default: trainer.n_gpus_per_node)")
    plan.add_argument("--top", type=_count, metavar="N", help="layouts that --search lists (default 10)")
    plan.add_argument(
        "--mean-response",
        type=_count,
        metavar="TOKENS",
        help="mean length of a response, for --search (default: half of data.max_response_length)",
    )


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of every command of RUN_COMMANDS. The last three are for plans: a run has its own machine and folder."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file with sections model, data, actor, ...")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="replace a value of the file"
    )
    text = "print all keys of a config, or those of a section such as actor.optim, with their defaults, and stop"
    parser.add_argument("--list-keys", nargs="?", action=_ListKeys, metavar="SECTION", help=text)
    parser.add_argument("--world-size", type=int, metavar="N", help="plan for N ranks on other machines")
    parser.add_argument(
        *("--gpu", "--gpu-memory"),
        type=_gpu,
        metavar="NAME|GIB",
        help=f"plan for this GPU: {', '.join(GPUS)} (h100 is h100-80, a100 is a100-80), or GiB of memory",
    )
    text = "the file that a plan writes every key and its value to (default: OUTPUT_DIR.resolved.yaml)"
    parser.add_argument("--resolved-config", type=Path, metavar="FILE", help=text)


def _add_train_arguments(train: argparse.ArgumentParser) -> None:
    text = "check everything, print the plan, start nothing; --world-size, --gpu and --resolved-config need it"
    train.add_argument("--dry-run", action="store_true", help=text)
    train.add_argument(
        "--profile",
        type=_steps,
        metavar="STEPS",
        help="record these training steps, as 3 or 3-5, and write where their time went to trainer.output_dir/profile",
    )
