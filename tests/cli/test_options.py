"""The options of a command: from the command line and from Python, with the same checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    salt: Annotated[float, Option("grams", "G", group="spice", gt=0, le=5)] = 1.0
    minutes: Annotated[int, Option("of boiling", "N", group="time", ge=1, le=90)] = 10
    taste: Annotated[Literal["mild", "hot"] | None, Option("how hot", group="spice")] = None
    herbs: Annotated[tuple[str, ...], Option("one herb", "HERB", repeated=True)] = ()
    pans: Annotated[tuple[str, ...], Option("pans", "A,B", read=lambda text: tuple(text.split(",")))] = ()
    more: Annotated[Mapping[str, Any], Option("for the oven", "JSON")] = {}
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
        (["soup", "--no_ld"], "unknown option --no_ld; did you mean '--no-lid'?"),
        (["soup", "--taste"], "argument --taste: expected one argument"),
    ],
)
def test_what_only_a_command_line_can_get_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(CookOptions, arguments)
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_all_wrong_values_are_one_error() -> None:
    wrong = ["--salt", "0", "--minutes", "200", "--taste", "sour", "--more", "[1]"]
    with pytest.raises(ConfigError) as error:
        parse(CookOptions, ["soup", *wrong])
    assert [problem.text for problem in error.value.problems] == [
        "--salt '0': set more than 0",
        "--minutes '200': set 90 or less",
        "--taste 'sour': set 'mild' or 'hot'",
        "--more '[1]': it must be a JSON object",
    ]
    with pytest.raises(ConfigError) as error:
        CookOptions(meal=Path("soup"), salt=float("nan"), minutes="1e3", tast="hot")  # type: ignore[call-arg, arg-type]
    assert str(error.value).splitlines() == [
        "--salt nan: set a finite number",
        "--minutes '1e3': set a whole number",
        "cook: unknown option 'tast'; did you mean 'taste'? (known: meal, guests, salt, minutes, taste, herbs, pans, more,"
        " no_lid, secret)",
    ]
    with pytest.raises(ConfigError, match="^4 guests have no seat; invite 3 or fewer$"):  # once each option is right
        CookOptions(meal=Path("soup"), guests=("a", "b", "c", "d"))
