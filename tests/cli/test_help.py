"""The help of every command: its program name, a line about it, 80 columns, and no option that the command refuses."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from typing import NoReturn
from unittest import mock

import pytest

from grpo_megatron.cli import main
from grpo_megatron.cli.commands import COMMAND_ORDER, RUN_COMMANDS, parse_command

PROGRAM = "grpo-megatron"


class _Reached(Exception):
    """The parser of a command, complete: it was about to parse."""


def parser_of(command: list[str]) -> argparse.ArgumentParser:
    """The parser that `grpo-megatron COMMAND` asks first; for a run, that of its sub-command."""
    found: list[argparse.ArgumentParser] = []

    def stop(self: argparse.ArgumentParser, *_: object) -> NoReturn:
        found.append(self)
        raise _Reached

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", stop),
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop),
        pytest.raises(_Reached),
    ):
        if command[0] in RUN_COMMANDS:
            parse_command(command)
        else:
            run(command)
    (parser,) = found
    return parser if command[0] not in RUN_COMMANDS else dict(_children(parser))[command[0]]


def run(command: list[str]) -> None:
    from grpo_megatron.cli.commands import COMMANDS
    from grpo_megatron.evaluation.cli import main as evaluate
    from grpo_megatron.generation.options import parse_generation
    from grpo_megatron.starting.quickstart import quickstart_arguments

    name, *rest = command
    if name == "evaluate":
        evaluate(rest, lambda *_: 0)
    elif name == "generate":
        parse_generation(rest)
    elif name == "quickstart":
        quickstart_arguments(rest)
    else:
        COMMANDS[name].run(rest)


def _children(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def with_children(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for child, its_parser in _children(parser):
        yield from with_children(f"{name} {child}", its_parser)


EVALUATION = [["evaluate", action] for action in ("grade", "compare", "tasks")]


@pytest.fixture(scope="module")
def parsers() -> dict[str, argparse.ArgumentParser]:
    commands = [[name] for name in COMMAND_ORDER] + EVALUATION
    return dict(pair for command in commands for pair in with_children(" ".join(command), parser_of(command)))


def test_every_command_is_listed_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--help"])
    listed = re.findall(r"^    ([a-z-]+)(?: |$)", capsys.readouterr().out, re.MULTILINE)
    assert listed == list(COMMAND_ORDER)


def test_program_names_descriptions_and_widths(
    parsers: dict[str, argparse.ArgumentParser], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert {"convert verify", "evaluate compare", "prepare model", "plan"} < set(parsers)
    for name, parser in parsers.items():
        assert parser.prog == f"{PROGRAM} {name}"
        assert parser.description and parser.description.strip().endswith("."), name
        text = parser.format_help()
        assert max(map(len, text.splitlines())) <= 80, text
        assert "python -m" not in text and "convert_hf" not in text, name
    actions = [(name, action) for name, parser in parsers.items() for action in parser._actions]
    silent = [(name, action.dest) for name, action in actions if not action.help]
    assert not [(name, option) for name, option in silent if not dict(_children(parsers[name]))], silent


def test_examples_are_commands_that_parse(parsers: dict[str, argparse.ArgumentParser]) -> None:
    count = 0
    for name, parser in parsers.items():
        for line in re.sub(r" \\\n\s*", " ", parser.epilog or "").splitlines():
            if not line.lstrip().startswith(f"{PROGRAM} "):
                assert name.partition(" ")[0] not in line.split()[:1], f"{name}: {line} lacks {PROGRAM}"
                continue
            command = shlex.split(re.split(r" < | {3,}", line.strip())[0])[1:]
            longest = max((other for other in parsers if " ".join(command).startswith(other)), key=len)
            assert longest.startswith(name)
            parsers[longest].parse_args(command[len(longest.split()) :])  # SystemExit: the test fails
            count += 1
    assert count >= 15


def test_a_plan_has_no_option_of_a_run(parsers: dict[str, argparse.ArgumentParser]) -> None:
    """Its help lists what it takes. --dry-run is what a plan is: it may be given, and is not listed."""
    for option in ("--profile", "--dry-run"):
        assert option not in parsers["plan"].format_help() and option in parsers["train"].format_help()
    assert parse_command(["plan", "x.yaml", "--dry-run"]).dry_run and parse_command(["plan", "x.yaml"]).dry_run
    for command in (["plan", "x.yaml", "--profile", "3"], ["train", "x.yaml", "--search"]):
        with pytest.raises(SystemExit):
            parse_command(command)
