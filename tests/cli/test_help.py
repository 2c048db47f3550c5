"""The help of every command: its program name, a line about it, 80 columns, and no option that the command refuses."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest

from grpo_megatron.cli import main
from grpo_megatron.cli.main import COMMANDS, PlanOptions, TrainOptions
from grpo_megatron.config.options import COMMAND_NAME, parse, parser_of


def _children(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


@pytest.fixture(scope="module")
def parsers() -> dict[str, argparse.ArgumentParser]:
    found = {}
    for name, command in COMMANDS.items():
        found[name] = parser_of(command.options)
        found |= {f"{name} {child}": parser for child, parser in _children(found[name])}
    return found


def test_every_command_is_listed_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--help"])
    listed = re.findall(r"^    ([a-z-]+)(?: |$)", capsys.readouterr().out, re.MULTILINE)
    assert listed == [name for name, command in COMMANDS.items() if command.help is not None]
    for name, command in COMMANDS.items():
        assert command.options.program == name and callable(command.run)
    with pytest.raises(SystemExit) as end:
        main.main(["evalute"])
    assert end.value.code == 2
    assert "unknown command evalute; did you mean 'evaluate'?" in capsys.readouterr().err
    for words, message in {
        "xyzzy": "invalid choice: 'xyzzy'",  # nothing is close: all are listed
        "prepare modle out": "unknown WHAT modle; did you mean 'model'?",
        "prepare arithmetic --out x": "unknown option --out; did you mean 'OUT'?",
    }.items():
        with pytest.raises(SystemExit):
            main.main(words.split())
        assert message in capsys.readouterr().err


def test_program_names_descriptions_and_widths(
    parsers: dict[str, argparse.ArgumentParser], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert {"convert verify", "evaluate compare", "prepare model", "plan"} < set(parsers)
    for name, parser in parsers.items():
        assert parser.prog == f"{COMMAND_NAME} {name}"
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
            if not line.lstrip().startswith(f"{COMMAND_NAME} "):
                assert name.partition(" ")[0] not in line.split()[:1], f"{name}: {line} lacks {COMMAND_NAME}"
                continue
            command = shlex.split(re.split(r" < | {3,}", line.strip())[0])[1:]
            longest = max((other for other in parsers if " ".join(command).startswith(other)), key=len)
            assert longest.startswith(name)
            parsers[longest].parse_args(command[len(longest.split()) :])  # SystemExit: the test fails
            count += 1
    assert count >= 15


def test_a_plan_has_no_option_of_a_run(
    parsers: dict[str, argparse.ArgumentParser], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its help lists what it takes. --dry-run is what a plan is: it may be given, and is not listed."""
    for option in ("--profile", "--dry-run"):
        assert option not in parsers["plan"].format_help() and option in parsers["train"].format_help()
    assert parse(PlanOptions, ["x.yaml", "--dry-run"]).dry_run and parse(PlanOptions, ["x.yaml"]).dry_run
    assert main.main(["plan", "x.yaml", "--profile", "3"]) == 2
    assert "--profile measures a run, and --dry-run starts none" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(TrainOptions, ["x.yaml", "--search"])
    assert "unknown option --search" in capsys.readouterr().err


def test_overrides_may_stand_between_options() -> None:
    options = parse(PlanOptions, ["x.yaml", "a.b=1", "--world-size", "16", "c.d=2", "--nodes-of", "8", "e.f=-3"])
    own = ["trainer.n_gpus_per_node=8", "trainer.nnodes=2"]
    assert options.settings == ["a.b=1", "c.d=2", "e.f=-3", *own] and options.world_size == 16
