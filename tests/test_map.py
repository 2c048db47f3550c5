"""docs/map.md: every file of the package is in it once, and every noun is defined in the file beside which it stands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_layers import ROOMS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "grpo_megatron"
IN_THE_ROOT = {"the ground", "`trainer.py`", "`device.py`"}


def entries() -> Iterator[tuple[str, str]]:
    """(file relative to the package, the nouns that the map gives it) of every file of the map."""
    text = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    table = text.partition("| room | what it holds | file: its nouns |\n")[2].partition("\n\n")[0].rstrip()
    for line in table.splitlines()[1:]:
        room, _, files = (cell.strip() for cell in line.strip("| ").split(" | "))
        folder = "" if room in IN_THE_ROOT else room.strip("`")
        for part in files.split(" \u00b7 "):
            named, _, nouns = part.partition(": ")
            for name in re.findall(r"`([\w/.]+)`", named):
                yield folder + name, nouns


def test_the_map_has_the_order_of_the_layers() -> None:
    """A room of the map imports only rooms above it: the order is that of the table that imports are held to."""
    order = list(dict.fromkeys(name.split("/")[0].removesuffix(".py") for name, _ in entries()))
    ground = order[: order.index("storage")]
    assert set(ground) == set(list(ROOMS)[: len(ground)])
    assert order[len(ground) :] == [room for room in ROOMS if room not in (*ground, "__main__")]


def defined(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def test_every_file_is_in_the_map_once() -> None:
    named = [name for name, _ in entries()]
    files = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if not path.stem.startswith("__")}
    folders = {name for name in named if name.endswith("/")}
    assert all((PACKAGE / folder).is_dir() for folder in folders), folders
    outside = {name for name in files if not name.startswith(tuple(folders))}
    assert sorted(name for name in named if name not in folders) == sorted(outside)


@pytest.mark.parametrize(("name", "nouns"), [entry for entry in entries() if entry[0].endswith(".py")])
def test_nouns_are_where_the_map_says(name: str, nouns: str) -> None:
    """Words that begin with a capital or have an underscore are names of the code; the others are prose."""
    words = set(re.findall(r"\b(?:[A-Z]+[a-z]\w+|[a-z]+_\w+)\b", nouns)) - {"McNemar", "TensorBoard"}
    assert words <= defined(PACKAGE / name), name
