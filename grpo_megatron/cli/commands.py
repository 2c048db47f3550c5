"""One table of all commands, and the options of those that read a config: `train`, `train-reward` and `plan`.

A command's options and its function are imported only when it runs, so that the command line starts at once.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from grpo_megatron.config.options import COMMAND_NAME, HIDDEN, Argument, Option, Options
from grpo_megatron.planning.gpus import GPUS, Gpu, find_gpu
from grpo_megatron.registry import import_function

MAX_PLANNED_RANKS = 1 << 20  # of --world-size
MAX_COUNT = 9_999_999
DEBUGGING = "GRPO_DEBUG=1 shows the traceback of every error, and the warnings of Megatron-Core and torch."


@dataclass(frozen=True)
class Command:
    """A command: its line in --help (none for an action of another command), its options and the function of them.

    Both are `module:name` in this package. The function returns the exit code; with `starts_ranks` it is also told how. With
    `is_prelude` it returns the arguments of the command that is to run then.
    """

    help: str | None
    options_path: str
    run_path: str
    starts_ranks: bool = False
    is_prelude: bool = False

    @property
    def options(self) -> type[Options]:
        """The class of the options."""
        return _imported(self.options_path)

    @property
    def run(self) -> Callable[..., Any]:
        """The function of the options, and with `starts_ranks` also of a StartRanks (evaluation/cli.py)."""
        return _imported(self.run_path)


def _imported(path: str) -> Any:
    return import_function(f"grpo_megatron.{path}")


COMMANDS = {  # in the order of --help: as a user meets them. cli/main.py tells a run its command line
    "quickstart": Command(
        "train a tiny model on this CPU in one to two minutes",
        *("starting.quickstart:QuickstartOptions", "starting.quickstart:prepare_quickstart"),
        is_prelude=True,
    ),
    "examples": Command(
        "copy the examples and the Slurm scripts",
        *("starting.quickstart:ExamplesOptions", "starting.quickstart:copy_examples"),
    ),
    "init": Command(
        "write a commented config for a model and a task",
        *("starting.new_config:InitOptions", "starting.new_config:write_config"),
    ),
    "import": Command(
        "write a config from one of verl or TRL",
        "migration.translation:ImportOptions",
        "migration.translation:import_config",
    ),
    "plan": Command(
        "what a config needs, whether it fits, and layouts that do", "cli.commands:PlanOptions", "cli.run:train"
    ),
    "train": Command("train with the settings of a YAML file", "cli.commands:TrainOptions", "cli.run:train"),
    "train-reward": Command(
        "train a reward model on pairs, or a process reward model on labelled steps",
        *("cli.commands:TrainRewardOptions", "cli.run:train"),
    ),
    "watch": Command("a run in the terminal, from its files", "report.cli:WatchOptions", "report.cli:watch"),
    "report": Command(
        "one page of a run, or of two beside each other, from their files",
        "report.cli:ReportOptions",
        "report.cli:report",
    ),
    "evaluate": Command(
        "draw answers to GSM8K, MATH and others, grade and report them",
        *("evaluation.options:EvaluateOptions", "evaluation.cli:run_evaluation"),
        starts_ranks=True,
    ),
    "evaluate grade": Command(None, "evaluation.options:GradeOptions", "evaluation.cli:grade_rows"),
    "evaluate compare": Command(None, "evaluation.options:CompareOptions", "evaluation.cli:print_comparison"),
    "evaluate tasks": Command(None, "evaluation.options:TasksOptions", "evaluation.cli:list_tasks"),
    "generate": Command(
        "answers of a model to your prompts, or a chat",
        *("generation.options:GenerateOptions", "generation.cli:generate"),
        starts_ranks=True,
    ),
    "curate": Command(
        "pass rates per prompt, filtered data, rows for SFT and DPO",
        "curation.options:CurateOptions",
        "curation.cli:curate",
    ),
    "convert": Command(
        "Hugging Face <-> Megatron-Core checkpoints", "convert.cli:ConvertOptions", "convert.cli:convert"
    ),
    "prepare": Command(
        "the data of an example, or a model with random weights",
        "starting.prepare:PrepareOptions",
        "starting.prepare:prepare_inputs",
    ),
    "replay": Command(
        "compute the loss of a batch again that a guard has dumped",
        "cli.inspecting:ReplayOptions",
        "cli.inspecting:replay_dump",
    ),
    "keys": Command(
        "list the keys of a config, with their defaults", "cli.inspecting:KeysOptions", "cli.inspecting:print_keys"
    ),
}


def find_command(argv: list[str]) -> tuple[str, list[str]]:
    """(the name of the command, its arguments). No command or an unknown one: prints the help or the mistake and ends."""
    for length in (2, 1):
        if (name := " ".join(argv[:length])) in COMMANDS and len(argv) >= length:
            return name, argv[length:]
    parser = argparse.ArgumentParser(
        COMMAND_NAME,
        description="GRPO training of language models on Megatron-Core.",
        epilog=f"{COMMAND_NAME} COMMAND --help lists the options of a command.",
    )
    names = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        if command.help is not None:
            names.add_parser(name, help=command.help, add_help=False)
    parser.parse_args(argv)
    raise AssertionError(f"argparse knows a command that COMMANDS lacks: {argv[:1]}")


# -- options of the commands that read a config ------------------------------------------------------------------------


class _ListKeys(argparse.Action):
    """Prints the keys of a section and ends, as --help does: no CONFIG is needed."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: Any, option: str | None = None
    ) -> None:
        from grpo_megatron.cli.inspecting import KeysOptions, print_keys

        print_keys(KeysOptions(section=values or ""))
        parser.exit()


def _steps(text: str) -> range:
    """Of "3" or "3-5"."""
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if last < first:
        raise ValueError(f"{text!r} is not a step like 3, or first and last step like 3-5")
    return range(first, last + 1)


class RunOptions(Options):
    """The options of every command that reads a config. The last three are for plans: a run has its own machine and folder."""

    epilog = DEBUGGING
    config: Annotated[Path, Argument("YAML file with sections model, data, actor, ...", "CONFIG")]
    overrides: Annotated[tuple[str, ...], Argument("replace a value of the file", "section.key=value")] = ()
    list_keys: Annotated[
        str | None,
        Option(
            "print all keys of a config, or those of a section such as actor.optim, with their defaults, and stop",
            "SECTION",
            action=_ListKeys,
        ),
    ] = None
    world_size: Annotated[int | None, Option("plan for N ranks on other machines", "N")] = None
    gpu: Annotated[
        Gpu | None,
        Option(
            f"plan for this GPU: {', '.join(GPUS)} (h100 is h100-80, a100 is a100-80), or GiB of memory",
            "NAME|GIB",
            flags=("--gpu", "--gpu-memory"),
            read=find_gpu,
        ),
    ] = None
    resolved_config: Annotated[
        Path | None,
        Option("the file that a plan writes every key and its value to (default: OUTPUT_DIR.resolved.yaml)", "FILE"),
    ] = None

    dry_run: Annotated[bool, Option(HIDDEN)] = False
    profile: Annotated[range | None, Option(HIDDEN, read=_steps)] = None

    @property
    def settings(self) -> list[str]:
        """All `section.key=value` that replace values of the file."""
        return list(self.overrides)

    def problems(self) -> Iterator[str]:
        """Options of a plan without one."""
        if self.world_size is not None and not (self.dry_run and 1 <= self.world_size <= MAX_PLANNED_RANKS):
            yield (
                f"--world-size N needs --dry-run and 1 <= N <= {MAX_PLANNED_RANKS:,}; a run has trainer.nnodes x"
                " n_gpus_per_node ranks"
            )
        if self.gpu is not None and not self.dry_run:
            yield "--gpu needs --dry-run; a run reads the memory of its own GPU"
        if self.resolved_config is not None and not self.dry_run:
            yield "--resolved-config needs --dry-run; a run writes its config to trainer.output_dir"
        if self.profile is not None and self.dry_run:
            yield "--profile measures a run, and --dry-run starts none; leave one of them out"


class TrainOptions(RunOptions):
    """The options of `train`."""

    program, description = "train", "train with the settings of a YAML file."
    dry_run: Annotated[
        bool,
        Option("check everything, print the plan, start nothing; --world-size, --gpu and --resolved-config need it"),
    ] = False
    profile: Annotated[
        range | None,
        Option(
            "record these training steps, as 3 or 3-5, and write where their time went to trainer.output_dir/profile",
            "STEPS",
            read=_steps,
        ),
    ] = None


class TrainRewardOptions(TrainOptions):
    """The options of `train-reward`."""

    program = "train-reward"
    description = "train a reward model on pairs, or a process reward model on labelled steps."


class PlanOptions(RunOptions):
    """The options of `plan`. --dry-run is what a plan is: it may be given, and is not listed."""

    program, description = "plan", "what a config needs, whether it fits, and layouts that do."
    dry_run: Annotated[bool, Option(HIDDEN)] = True
    search: Annotated[bool, Option("list the layouts that fit, the fastest first (estimated)")] = False
    nodes_of: Annotated[
        int | None, Option("GPUs per node (default: trainer.n_gpus_per_node)", "N", low=1, high=MAX_COUNT)
    ] = None
    top: Annotated[int | None, Option("layouts that --search lists (default 10)", "N", low=1, high=MAX_COUNT)] = None
    mean_response: Annotated[
        int | None,
        Option(
            "mean length of a response, for --search (default: half of data.max_response_length)",
            "TOKENS",
            low=1,
            high=MAX_COUNT,
        ),
    ] = None

    @property
    def settings(self) -> list[str]:
        """Also the keys that --nodes-of stands for."""
        settings = list(self.overrides)
        if self.nodes_of is not None:
            settings.append(f"trainer.n_gpus_per_node={self.nodes_of}")
            if self.world_size is not None:
                settings.append(f"trainer.nnodes={-(-self.world_size // self.nodes_of)}")
        return settings

    def problems(self) -> Iterator[str]:
        """Also options of a search without one."""
        for name in ("top", "mean_response"):
            if getattr(self, name) is not None and not self.search:
                yield f"--{name.replace('_', '-')} needs --search"
        if self.search and self.resolved_config is not None:
            yield "--resolved-config writes one config, and --search lists many layouts; leave one of them out"
        yield from super().problems()
