"""The command line: `grpo-megatron COMMAND ...`. A failure is reported once (failures.py).

Exit codes: 0; 2 for a mistake of the user, before anything was started; 1 for a later failure; 75, or 130 after Ctrl-C,
when a run was stopped on request (training/stopping.py) and can be started again; 128 + signal. `convert`, `curate` and
`replay` say more in their --help.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from grpo_megatron import __version__
from grpo_megatron.cli import failures, ranks
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.methods import dated_defaults, methods
from grpo_megatron.config.options import COMMAND_NAME, HIDDEN, Argument, Option, Options, check_choice, parse
from grpo_megatron.config.section import ConfigKey, config_keys
from grpo_megatron.planning.gpus import GPUS, Gpu, find_gpu
from grpo_megatron.processes.variables import check_rank_variables
from grpo_megatron.registry import did_you_mean, find_modules, import_function
from grpo_megatron.storage.files import remove_leftovers
from grpo_megatron.untrusted import reason_of


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. In a rank of several, a failure ends the process at once."""
    argv = sys.argv[1:] if argv is None else argv
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: ranks share the cores
    find_modules(Path("CONFIG"))  # a user's task, family or reward, in the current folder
    try:
        ranks.join_nodes()
        check_rank_variables()
        code = _run_command(argv)
        if code == 0:
            failures.mark_finished()
            return 0
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        if failures.is_first() and failures.LAUNCHER_PID not in os.environ:
            print("interrupted", file=sys.stderr)
    except BrokenPipeError:  # `grpo-megatron keys | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit
        code = 128 + signal.SIGPIPE
    except Exception as error:
        code = failures.report_failure(error)
    if failures.is_one_of_several():
        _exit_at_once(code)
    return code


def _run_command(argv: list[str]) -> int:
    name, arguments = find_command(argv)
    command, is_rank = COMMANDS[name], "RANK" in os.environ
    options, run = parse(command.options, arguments), command.run
    if command.is_prelude:
        return _run_command(run(options))
    if isinstance(options, RunOptions):
        return int(run(options, argv, main))
    failures.quieten(is_rank and command.starts_ranks, starts_ranks=False)
    if not command.starts_ranks:
        try:
            return int(run(options))
        except OSError as error:
            if error.filename is None:
                raise
            raise ConfigError(f"{os.fsdecode(error.filename)}: {reason_of(error)}") from error
    ranks.prepare_environment(options.device)  # type: ignore[attr-defined]
    if not is_rank:
        remove_leftovers()
    else:
        ranks.join_launcher()
        failures.mark_started()

    def start_ranks(world_size: int, device: str) -> int:
        return ranks.start_ranks(main, world_size, argv, device)

    return int(run(options, None if failures.LAUNCHER_PID in os.environ else start_ranks))


def _exit_at_once(code: int) -> None:
    """Exit without the interpreter's clean-up, which threads of the engine and broken process groups can block for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# -- the table of all commands -----------------------------------------------------------------------------------------
# A command's options and its function are imported only when it runs, so that the command line starts at once.


@dataclass(frozen=True)
class Command:
    """A command: its line in --help (none for an action of another command), its options and the function of them.

    Both are `module:name` in this package; a function without a module is in that of the options. It returns the exit
    code. With `starts_ranks` it also gets a StartRanks (grpo_megatron/evaluation/evaluate.py). With `is_prelude` it returns
    the arguments of the command that is to run then.
    """

    help: str | None
    options_path: str
    run_path: str
    starts_ranks: bool = False
    is_prelude: bool = False

    @property
    def options(self) -> type[Options]:
        """Imports the class of the options."""
        return _imported(self.options_path)

    @property
    def run(self) -> Callable[..., Any]:
        """Imports the function of the options."""
        module = self.options_path.partition(":")[0]
        return _imported(self.run_path if ":" in self.run_path else f"{module}:{self.run_path}")


def _imported(path: str) -> Any:
    return import_function(f"grpo_megatron.{path}")


COMMANDS = {  # in the order of --help: as a user meets them
    "quickstart": Command(
        "train a tiny model on this CPU in one to two minutes",
        "starting.quickstart:QuickstartOptions",
        "prepare_quickstart",
        is_prelude=True,
    ),
    "examples": Command(
        "copy the examples and the Slurm scripts", "starting.quickstart:ExamplesOptions", "copy_examples"
    ),
    "init": Command(
        "write a commented config for a model and a task", "starting.new_config:InitOptions", "write_config"
    ),
    "import": Command(
        "write a config from one of another trainer", "migration.translation:ImportOptions", "import_config"
    ),
    "plan": Command(
        "what a config needs, whether it fits, and layouts that do", "cli.main:PlanOptions", "cli.run:train"
    ),
    "train": Command("train with the settings of a YAML file", "cli.main:TrainOptions", "cli.run:train"),
    "train-reward": Command(
        "train a reward model on pairs, or a process reward model on labelled steps",
        "cli.main:TrainRewardOptions",
        "cli.run:train",
    ),
    "serve-training": Command(
        "serve training to clients of the public tinker package",
        "cli.serve_training:ServeOptions",
        "serve_training",
        starts_ranks=True,
    ),
    "watch": Command("a run in the terminal, from its files", "report.watch:WatchOptions", "watch"),
    "report": Command(
        "one page of a run, or of two beside each other, from their files", "report.watch:ReportOptions", "report"
    ),
    "diff": Command("the first place where two runs part, and why", "trust.diff:DiffOptions", "print_diff"),
    "certify": Command(
        "prove on this machine, by short runs, what training relies on", "trust.certify:CertifyOptions", "certify"
    ),
    "evaluate": Command(
        "sample answers to GSM8K, MATH and others, grade and report them",
        "evaluation.options:EvaluateOptions",
        "evaluation.evaluate:run_evaluation",
        starts_ranks=True,
    ),
    "evaluate grade": Command(None, "evaluation.options:GradeOptions", "evaluation.evaluate:grade_rows"),
    "evaluate compare": Command(None, "evaluation.comparison:CompareOptions", "print_comparison"),
    "evaluate tasks": Command(None, "evaluation.options:TasksOptions", "evaluation.evaluate:list_tasks"),
    "generate": Command(
        "answers of a model to your prompts, or a chat",
        "evaluation.options:GenerateOptions",
        "evaluation.generate:generate",
        starts_ranks=True,
    ),
    "curate": Command(
        "pass rates per prompt, filtered data, rows for SFT and DPO",
        "data.curate_options:CurateOptions",
        "data.curate:curate",
    ),
    "convert": Command(
        "Hugging Face <-> Megatron-Core checkpoints", "convert.options:ConvertOptions", "convert.inspection:convert"
    ),
    "prepare": Command(
        "the data of an example, or a model with random weights", "starting.prepare:PrepareOptions", "prepare_inputs"
    ),
    "replay": Command(
        "compute the loss of a batch again that a guard has dumped",
        "training.replay_command:ReplayOptions",
        "replay_dump",
    ),
    "keys": Command("list the keys of a config, with their defaults", "cli.main:KeysOptions", "print_keys"),
}


def find_command(argv: list[str]) -> tuple[str, list[str]]:
    """Returns (the name of the command, its arguments). Without a known one it prints the help and ends."""
    for length in (2, 1):
        if (name := " ".join(argv[:length])) in COMMANDS and len(argv) >= length:
            return name, argv[length:]
    parser = argparse.ArgumentParser(
        COMMAND_NAME,
        description="GRPO training of language models on Megatron-Core.",
        epilog=f"{COMMAND_NAME} COMMAND --help lists the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"{COMMAND_NAME} {__version__}")
    names = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        if command.help is not None:
            names.add_parser(name, help=command.help, add_help=False)
    check_choice(parser, "command", argv, names.choices)
    parser.parse_args(argv)
    raise AssertionError(f"argparse knows a command that COMMANDS lacks: {argv[:1]}")


# -- options of the commands that read a config: `train`, `train-reward` and `plan` ------------------------------------

MAX_PLANNED_RANKS = 1 << 20  # of --world-size
MAX_COUNT = 9_999_999


def _steps(text: str) -> range:
    """Reads "3" or "3-5"."""
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if last < first:
        raise ValueError(f"{text!r} is not a step like 3, or first and last step like 3-5")
    return range(first, last + 1)


def _gib(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,3})?", text) or float(text) == 0:
        raise ValueError(f"{text!r} is no size in GiB, such as 1024")
    return float(text)


class RunOptions(Options):
    """The options of every command that reads a config. The last four are for plans: a run has its own machine and folder."""

    epilog = "GRPO_DEBUG=1 shows the traceback of every error, and the warnings of Megatron-Core and torch."
    config: Annotated[Path, Argument("YAML file with sections model, data, actor, ...", "CONFIG")]
    overrides: Annotated[
        tuple[str, ...], Argument("replace a value of the file; ~section.key takes one out", "section.key=value")
    ] = ()
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
    host_memory: Annotated[
        float | None, Option("say whether the host memory of a node, of GIB, is enough for its ranks", "GIB", read=_gib)
    ] = None
    resolved_config: Annotated[
        Path | None,
        Option("the file that a plan writes every key and its value to (default: OUTPUT_DIR.resolved.yaml)", "FILE"),
    ] = None

    dry_run: Annotated[bool, Option(HIDDEN)] = False
    profile: Annotated[range | None, Option(HIDDEN, read=_steps)] = None
    last_step: Annotated[int | None, Option(HIDDEN, ge=0)] = None  # the run ends after it: `diff --replay`

    @property
    def settings(self) -> list[str]:
        """Lists all `section.key=value` that replace values of the file."""
        return list(self.overrides)

    def problems(self) -> Iterator[str]:
        """Yields options of a plan without one."""
        if self.world_size is not None and not 1 <= self.world_size <= MAX_PLANNED_RANKS:
            yield f"--world-size {self.world_size} is outside 1 to {MAX_PLANNED_RANKS:,}; set a number of ranks"
        elif self.world_size is not None and not self.dry_run:
            yield "--world-size needs --dry-run; a run has trainer.nnodes x n_gpus_per_node ranks"
        if self.gpu is not None and not self.dry_run:
            yield "--gpu needs --dry-run; a run reads the memory of its own GPU"
        if self.host_memory is not None and not self.dry_run:
            yield "--host-memory needs --dry-run; a run takes what its node has"
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

    program, description = "plan", "Print what a config needs, whether it fits, and layouts that do."
    dry_run: Annotated[bool, Option(HIDDEN)] = True
    search: Annotated[bool, Option("list the layouts that fit, the fastest first (estimated)")] = False
    nodes_of: Annotated[
        int | None, Option("GPUs per node (default: trainer.n_gpus_per_node)", "N", ge=1, le=MAX_COUNT)
    ] = None
    top: Annotated[int | None, Option("layouts that --search lists (default 10)", "N", ge=1, le=MAX_COUNT)] = None
    mean_response: Annotated[
        int | None,
        Option(
            "mean length of a response, for --search (default: half of data.max_response_length)",
            "TOKENS",
            ge=1,
            le=MAX_COUNT,
        ),
    ] = None

    @property
    def settings(self) -> list[str]:
        """Adds the keys that --nodes-of stands for."""
        settings = list(self.overrides)
        if self.nodes_of is not None:
            settings.append(f"trainer.n_gpus_per_node={self.nodes_of}")
            if self.world_size is not None:
                settings.append(f"trainer.nnodes={-(-self.world_size // self.nodes_of)}")
        return settings

    def problems(self) -> Iterator[str]:
        """Adds options of a search without one."""
        for name in ("top", "mean_response"):
            if getattr(self, name) is not None and not self.search:
                yield f"--{name.replace('_', '-')} needs --search"
        if self.search and self.resolved_config is not None:
            yield "--resolved-config writes one config, and --search lists many layouts; leave one of them out"
        yield from super().problems()


# -- `keys` of a config ------------------------------------------------------------------------------------------------

WIDTH = 110  # of the comments on keys


class KeysOptions(Options):
    """The options of `keys`."""

    program, description = (
        "keys",
        "List the keys of a config: default, type, resume class (docs/training.md), the key it needs, and comment; or those"
        " that a method sets.",
    )
    section: Annotated[str, Argument("actor, rollout.multi_turn, ... or a method (default: all keys)", "SECTION")] = ""


def print_keys(options: KeysOptions) -> int:
    """Print every key of a section with its default and its date, or the keys of a method; returns the exit code.

    Raises ConfigError: no such section or method.
    """
    section, keys = options.section, list(config_keys(Config))
    if section in methods():
        return _print_method(section, {key.name: key for key in keys})
    chosen = [key for key in keys if not section or f"{key.name}.".startswith(f"{section}.")]
    if not chosen:
        sections = sorted({".".join(key.name.split(".")[:depth]) for key in keys for depth in (1, 2, 3)})
        named = [one for one in sections if one.endswith(f".{section}")]
        named = named or [one for one in sections if section in one.rpartition(".")[2].split("_")]
        close = f"; keys of this name: {', '.join(named)}" if named else did_you_mean(section, [*sections, *methods()])
        known = ", ".join(dict.fromkeys(key.name.partition(".")[0] for key in keys))
        listed = "" if close else f" (sections: {known}; methods: {', '.join(methods())})"
        raise ConfigError(f"no key of a config begins with {section!r}{close}{listed}")
    dated = dated_defaults()
    for key in chosen:
        default = "needed" if key.is_required else json.dumps(key.default, default=str)
        resume = "" if key.resume == "applies" else f"; resume: {key.resume}"
        rest = "".join([resume, *(f"; needs {one}" for one in key.needs)])
        print(f"{key.name}: {default}   ({key.kind}; since {dated[key.name][0]}{rest})")
        for line in textwrap.wrap(key.description, WIDTH, initial_indent="    ", subsequent_indent="    "):
            print(line)
    return 0


def _print_method(name: str, keys: dict[str, ConfigKey]) -> int:
    method = methods()[name]
    print(f"# {method.title}{f' (arXiv {method.papers})' if method.papers else ''}: {method.changes}")
    print(f"method: {name}   sets the keys that a config does not set to")
    for key, value in method.keys.items():
        print(
            f"{key}: {value if isinstance(value, str) else json.dumps(value)}   (default {json.dumps(keys[key].default)})"
        )
    return 0
