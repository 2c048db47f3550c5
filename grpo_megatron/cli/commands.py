"""Commands with options of their own. Each is imported only when it runs.

`train` and `train-reward` are in arguments.py. The commands of STARTS_RANKS are run by main.py.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import shutil
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.keys import ConfigKey, config_keys
from grpo_megatron.importing import large_imports
from grpo_megatron.planning.gpus import GPUS, Gpu, find_gpu

if TYPE_CHECKING:
    from grpo_megatron.checks.validate import Checked


@dataclass(frozen=True)
class Command:
    """A command: its line in --help, and the function of its arguments that runs it and returns the exit code."""

    help: str
    run: Callable[[list[str]], int]


def _convert(argv: list[str]) -> int:
    from grpo_megatron.convert.cli import main

    return main(argv)


def _curate(argv: list[str]) -> int:
    from grpo_megatron.curation.cli import main

    return main(argv)


def _replay(argv: list[str]) -> int:
    return replay_dump(argv)


def _import(argv: list[str]) -> int:
    from grpo_megatron.migration.cli import main

    return main(argv)


def _keys(argv: list[str]) -> int:
    return list_the_keys(argv)


def _prepare(argv: list[str]) -> int:
    from grpo_megatron.starting.prepare import main

    return main(argv)


def _examples(argv: list[str]) -> int:
    from grpo_megatron.starting.quickstart import copy_examples

    return copy_examples(argv)


def _init(argv: list[str]) -> int:
    from grpo_megatron.cli.module_path import find_modules
    from grpo_megatron.starting.new_config import parse_init, write_config

    args = parse_init(argv)
    find_modules(args.output)  # the user's reward is called
    return write_config(args)


def _report(argv: list[str]) -> int:
    from grpo_megatron.report.cli import report_main

    return report_main(argv)


def _watch(argv: list[str]) -> int:
    from grpo_megatron.report.cli import watch_main

    return watch_main(argv)


STARTS_RANKS = {  # name: line in --help
    "evaluate": "draw answers to GSM8K, MATH and others, grade and report them",
    "generate": "answers of a model to your prompts, or a chat",
}
COMMANDS = {
    "init": Command("write a commented config for a model and a task", _init),
    "examples": Command("copy the examples and the Slurm scripts", _examples),
    "prepare": Command("the data of an example, or a model with random weights", _prepare),
    "convert": Command("Hugging Face <-> Megatron-Core checkpoints", _convert),
    "curate": Command("pass rates per prompt, filtered data, rows for SFT and DPO", _curate),
    "replay": Command("compute the loss of a batch again that a guard has dumped", _replay),
    "import": Command("write a config from one of verl or TRL", _import),
    "report": Command("one page of a run, or of two beside each other, from their files", _report),
    "watch": Command("a run in the terminal, from its files", _watch),
    "keys": Command("list the keys of a config, with their defaults", _keys),
}


# -- `grpo-megatron keys [SECTION]`: every key of a config with its default, its type and its comment ------------------

WIDTH = 110


def list_the_keys(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "grpo-megatron keys", description="List the keys of a config: default, type and comment."
    )
    parser.add_argument(
        "section", nargs="?", default="", metavar="SECTION", help="actor, rollout.multi_turn, ... (default: all)"
    )
    print(list_keys(parser.parse_args(argv).section), end="")
    return 0


def list_keys(section: str) -> str:
    """A text for the terminal. `section`: the beginning of the names; "" for all. Raises ConfigError: no such section."""
    keys = list(config_keys(Config))
    chosen = [key for key in keys if not section or key.name == section or key.name.startswith(f"{section}.")]
    if not chosen:
        sections = sorted({".".join(key.name.split(".")[:depth]) for key in keys for depth in (1, 2, 3)})
        close = difflib.get_close_matches(section, sections, n=1)
        known = ", ".join(dict.fromkeys(key.name.partition(".")[0] for key in keys))
        raise ConfigError(
            f"no key of a config begins with {section!r}{f'; did you mean {close[0]!r}?' if close else ''} (sections: {known})"
        )
    return "\n".join(_described(key) for key in chosen) + "\n"


def _described(key: ConfigKey) -> str:
    default = "needed" if key.is_required else json.dumps(key.default, default=str)
    lines = [f"{key.name}: {default}   ({key.kind})"]
    return "\n".join([*lines, *textwrap.wrap(key.comment, WIDTH, initial_indent="    ", subsequent_indent="    ")])


# -- The arguments of the command line. Those of commands.py parse their own options; --help lists them here -----------

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


# -- `python -m grpo_megatron replay DUMP`: computes the loss of a dumped mini-batch again, on one CPU process ---------
# Exit codes: 0 when the loss is that of the run, 1 when it is not, 2 when DUMP cannot be read.


def replay_dump(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "grpo-megatron replay",
        description="Compute the loss of a dumped mini-batch again, on one CPU process.",
        epilog="Exit codes: 0 if the loss is that of the run, 1 if it is not, 2 if DUMP cannot be read.",
    )
    parser.add_argument("dump", type=Path, metavar="DUMP", help="OUTPUT_DIR/dumps/step_000012_NAME")
    parser.add_argument(
        "--tolerance", type=float, metavar="X", help="of the loss; default: 1e-6 in float32, 1e-2 in bfloat16"
    )
    args = parser.parse_args(argv)
    with large_imports():
        from grpo_megatron.training.dump import TOLERANCE, read_dump, recompute

    dump = read_dump(args.dump)
    incident = dump.incident
    print(f"step {incident.step}, update {incident.update}, guard {incident.guard}: {len(dump.batch)} responses")
    for text in incident.problems.values():
        print(f"  {text}")
    tolerance = TOLERANCE[dump.config.model.dtype] if args.tolerance is None else args.tolerance
    compared = recompute(dump)
    width = max(len(row.name) for row in compared)
    print(f"{'':{width}}  {'recorded':>14}  {'replayed':>14}  {'difference':>10}")
    for row in compared:
        print(
            f"{row.name:{width}}  {row.recorded:14.8g}  {row.recomputed:14.8g}  {row.recomputed - row.recorded:10.1e}"
        )
    is_same = compared[0].is_equal(tolerance)
    print(f"the loss is {'that of the run' if is_same else 'another one'} (tolerance {tolerance:g})")
    return 0 if is_same else 1


# -- `train ... --dry-run`, which is `plan ...`, and `plan ... --search`: they print a page and start nothing ----------


def print_plan(config: Config, checked: Checked, world_size: int, args: argparse.Namespace) -> None:
    """Raises ConfigError, after the plan, if the run cannot fit the GPU. Then the resolved config is not written."""
    from grpo_megatron.planning.page import PAGE_WIDTH, plan_page
    from grpo_megatron.planning.resolved import write_beside_run, write_resolved

    width = min(max(shutil.get_terminal_size((PAGE_WIDTH, 24)).columns, 80), PAGE_WIDTH)
    page = plan_page(config, checked, world_size, args.gpu, elsewhere=args.world_size is not None, width=width)
    if page.problem is not None:
        print(page, flush=True)
        raise ConfigError(page.problem)
    if args.resolved_config is None:
        written = write_beside_run(config)
    else:
        write_resolved(config, args.resolved_config)
        written = str(args.resolved_config)
    print(page.with_section("Every key with its value, as a config", [written]), flush=True)


def print_search(config: Config, args: argparse.Namespace) -> int:
    """Returns the exit code. Raises ConfigError."""
    with large_imports():
        from grpo_megatron.planning.search_page import search_page

    print(search_page(config, args.world_size, args.gpu, top=args.top, mean_response=args.mean_response))
    return 0
