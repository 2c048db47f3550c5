"""Commands with options of their own. Each is imported only when it runs.

`train` and `train-reward` are in arguments.py. The commands of STARTS_RANKS are run by main.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


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
    from grpo_megatron.cli.replay import main

    return main(argv)


def _import(argv: list[str]) -> int:
    from grpo_megatron.migration.cli import main

    return main(argv)


def _keys(argv: list[str]) -> int:
    from grpo_megatron.cli.key_list import main

    return main(argv)


def _prepare(argv: list[str]) -> int:
    from grpo_megatron.starting.prepare import main

    return main(argv)


def _examples(argv: list[str]) -> int:
    from grpo_megatron.starting.shipped import main

    return main(argv)


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
