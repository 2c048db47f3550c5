"""All mistakes of a config in one error: keys that cannot be read, and what the checks find in the others.

The problems stand in the order of their keys in the file. A problem that names a key which could not be read is left out:
the checks have seen its default.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_megatron.cli.config_file import WrongKeys, read_raw
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.keys import config_keys

NAMED_KEY = re.compile(r"(?<!\w)[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")  # linear time: a match begins where a word does
LOOKED_AT = 2000  # characters of a problem


def with_other_mistakes(wrong: WrongKeys, check: Callable[[Config], object]) -> list[str]:
    """The problems of the wrong keys, and those that `check` raises for the others."""
    problems = problems_in(str(wrong))
    if wrong.config is None:
        return problems
    try:
        check(wrong.config)
    except ConfigError as error:
        problems += [text for text in problems_in(str(error)) if not _names_one(text, wrong.keys)]
    except Exception:  # noqa: BLE001 - a check that stumbles over a default must not hide the mistakes
        return problems
    return problems


def in_file_order(problems: list[str], path: Path, overrides: list[str]) -> list[str]:
    """Each problem once, in the order of the keys that they name first. Others keep their place among equals."""
    try:
        raw, _ = read_raw(path, overrides)
    except ConfigError:
        return problems
    order = {key: place for place, key in enumerate(_keys_of(raw))}
    known = {key.name: place for place, key in enumerate(config_keys(Config))}
    return sorted(dict.fromkeys(problems), key=lambda text: _place(text, order, known))


def problems_in(message: str) -> list[str]:
    """The problems of an error. A line that begins with white space belongs to the one before it."""
    return re.split(r"\n(?!\s)", message)


def _names_one(text: str, keys: set[str]) -> bool:
    return any(re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", text) for key in keys if key)


def _keys_of(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of a file in its order, those of a section behind the section."""
    for name, value in table.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _keys_of(value, f"{prefix}{name}.")


def _place(text: str, order: Mapping[str, int], known: Mapping[str, int]) -> tuple[int, int]:
    """Where the file has the first key of the text; for a key that it lacks, the end of the nearest section that it has."""
    for key in NAMED_KEY.findall(text[:LOOKED_AT]):
        if key in order:
            return order[key], 0
        if key in known:
            section = key
            while "." in section:
                section = section.rpartition(".")[0]
                if section in order:
                    last = max(
                        place for name, place in order.items() if name == section or name.startswith(f"{section}.")
                    )
                    return last, 1 + known[key]
            return len(order), 1 + known[key]
    return len(order), len(known) + 1
