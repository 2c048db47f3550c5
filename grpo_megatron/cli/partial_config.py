"""A Config of the right keys of a file: wrong ones are taken out, so that the others can be checked too."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from grpo_megatron.config import Config

MAX_READINGS = 5  # a key that is right alone may be wrong without another one
NO_PATH = "(missing)"  # of model.path, the one key without a default


def read_without_wrong_keys(raw: dict[str, Any]) -> tuple[Config | None, list[Any]]:
    """(the config, pydantic's errors). With errors, the config has the defaults of the wrong keys; None: there is none."""
    mistakes: list[Any] = []
    for number in range(MAX_READINGS):
        try:
            return Config.model_validate(raw), mistakes
        except ValidationError as error:
            found = error.errors()
        if not number:
            mistakes, raw = found, copy.deepcopy(raw)
        for mistake in reversed(found):  # from the last place of a list to the first
            _take_out(raw, mistake["loc"], is_missing=mistake["type"] == "missing")
        model = raw.setdefault("model", {})
        if isinstance(model, dict):
            model.setdefault("path", NO_PATH)
    return None, mistakes


def without_places(parts: Sequence[str]) -> str:
    """A key from its parts: those that are places in a list are left out."""
    return ".".join(part for part in parts if not part.isdigit())


def _take_out(raw: Any, location: Sequence[Any], *, is_missing: bool) -> None:
    """Remove the value at `location`, or the deepest table or list entry on the way that is there.

    Where a key is missing, the table that lacks it goes, unless it is a section of the file.
    """
    place: tuple[Any, Any] | None = None
    node = raw
    for part in location[:-1] if is_missing and len(location) > 2 else location:
        if not _has(node, part):
            break
        place, node = (node, part), node[part]
    if place is not None and not (is_missing and len(location) <= 2):
        del place[0][place[1]]


def _has(node: Any, part: Any) -> bool:
    if isinstance(node, list):
        return isinstance(part, int) and part < len(node)
    return isinstance(node, dict) and part in node
