"""The options of a command: from the command line and from Python, with the same checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from grpo_megatron.config import ConfigError
from grpo_megatron.config.options import HIDDEN, Argument, Option, Options, parse, parser_of


class CookOptions(Options):
    """The options of a command that does not exist."""

    program, description = "cook", "Cook a meal."
    groups = ("time", "spice")
    meal: Annotated[Path, Argument("what to cook", "MEAL")]
    guests: Annotated[tuple[str, ...], Argument("who comes", "NAME")] = ()
    salt: Annotated[float, Option("grams", "G", group="spice", above=0, high=5)] = 1.0
    minutes: Annotated[int, Option("of boiling", "N", group="time", low=1, high=90)] = 10
    taste: Annotated[Literal["mild", "hot"] | None, Option("how hot", group="spice")] = None
    herbs: Annotated[tuple[str, ...], Option("one herb", "HERB", repeated=True)] = ()
    pans: Annotated[tuple[str, ...], Option("pans", "A,B", read=lambda text: tuple(text.split(",")))] = ()
    more: Annotated[Mapping[str, Any], Option("for the oven", "JSON")] = field(default_factory=dict)
    no_lid: Annotated[bool, Option("without a lid")] = False
    secret: Annotated[bool, Option(HIDDEN)] = False

    def problems(self) -> Iterator[str]:
        """Too many guests."""
        if len(self.guests) > 3:
            yield f"{len(self.guests)} guests have no seat; invite 3 or fewer"


def test_the_command_line_and_python_make_the_same() -> None:
    line = ["soup", "--salt", "2", "Ann", "--herbs", "dill", "--herbs", "mint", "Bob", "--no-lid", "--pans", "a,b"]
    options = parse(CookOptions, [*line, "--taste", "hot", "--more", '{"grill": true}', "--secret"])
    same: dict[str, Any] = {"meal": "soup", "guests": ("Ann", "Bob"), "herbs": ("dill", "mint"), "pans": ("a", "b")}
    assert options == CookOptions(**same, salt=2.0, taste="hot", more={"grill": True}, no_lid=True, secret=True)
    assert CookOptions(meal="soup", guests="Ann", pans="a,b").guests == ("Ann",)  # type: ignore[arg-type] # no letters
    assert options.meal == Path("soup") and parse(CookOptions, ["soup"]) == CookOptions(meal=Path("soup"))


def test_help_has_groups_in_their_order_and_hides_what_is_hidden() -> None:
    text = parser_of(CookOptions).format_help()
    assert text.index("\ntime:") < text.rindex("--minutes N") < text.index("\nspice:") < text.rindex("--salt G")
    assert "usage: grpo-megatron cook" in text and "secret" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: MEAL"),
        (["soup", "--minutes", "1e3"], "argument --minutes: '1e3' is not a whole number"),
        (["soup", "--salt", "much"], "argument --salt: invalid float value: 'much'"),
        (["soup", "--taste", "sour"], "argument --taste: invalid choice: 'sour' (choose from 'mild', 'hot')"),
        (["soup", "--more", "[1]"], "argument --more: '[1]' must be a JSON object"),
        (["soup", "--lid"], "unknown option --lid"),
    ],
)
def test_what_only_a_command_line_can_get_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(CookOptions, arguments)
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_all_wrong_values_are_one_error() -> None:
    with pytest.raises(ConfigError) as error:
        parse(CookOptions, ["soup", *"abcd", "--salt", "0", "--minutes", "200"])
    assert [problem.text for problem in error.value.problems] == [
        "--salt 0 is outside 0 to 5; set a value above 0, at most 5",
        "--minutes 200 is more than 90; set that or less",
        "4 guests have no seat; invite 3 or fewer",
    ]
    with pytest.raises(ConfigError, match="--salt nan is not a finite number") as error:
        CookOptions(meal=Path("soup"), salt=float("nan"), minutes=0)
    assert "--minutes 0 is too small; set 1 or more" in str(error.value)
