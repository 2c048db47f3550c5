"""Reads the config file: YAML plus `section.key=value` overrides -> Config, and gathers all mistakes of a file.

A wrong key is taken out of the file, so that the checks can look at the others. The problems stand in the order of their keys
in the file. A check's problem about a key that could not be read is left out: the check has seen its default.
"""

from __future__ import annotations

import copy
import difflib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.methods import methods, with_defaults
from grpo_megatron.config.options import COMMAND_NAME
from grpo_megatron.config.problems import CHANGE_ME, KEY_MARK, Problem
from grpo_megatron.config.section import config_keys, reason_and_remedy
from grpo_megatron.config.tables import read_yaml_table
from grpo_megatron.registry import did_you_mean
from grpo_megatron.untrusted import MAX_LEVELS, REDACTED, ReadError, cut, parse_yaml, shown

Defaults = Callable[[dict[str, Any]], dict[str, Any]]  # the file's content -> `section.key` -> value
MAX_EXPLAINED = 50  # wrong keys that are shown
MAX_LISTED = 200  # characters of the keys that an unknown one may have meant
MAX_READINGS = 5  # a key that is right alone may be wrong without another one
LEFT_TO_WRITE = {
    CHANGE_ME: "write the value of your run there",
    REDACTED: "a record has no secrets; give it again behind the file as KEY=VALUE, or by an environment variable",
}
NO_PATH = "(missing)"  # of model.path, the one key without a default


class WrongKeys(ConfigError):
    """Keys that cannot be read: `keys`. `config` is the file with their defaults instead; None if there is none."""

    def __init__(self, problems: Sequence[Problem], config: Config | None, keys: set[str]) -> None:
        super().__init__(*problems)
        self.config, self.keys = config, keys


def load_config(path: Path | str, overrides: Sequence[str] | None = None, defaults: Defaults | None = None) -> Config:
    """Read the YAML at `path`, apply `section.key=value` overrides, check types and names. Raises ConfigError.

    The override `~section.key` takes the key out of the file.
    `defaults` makes the values of keys that are set nowhere, from the file's content with the overrides.
    """
    raw, wrong = read_raw(path, overrides)
    if defaults:
        raw = with_defaults(raw, defaults(raw))
    config, mistakes = _read_right_keys(raw)
    problems = wrong + [Problem(_explain(mistake), _named_by(mistake)) for mistake in mistakes[:MAX_EXPLAINED]]
    named = {key for problem in problems for key in problem.keys}
    left = [(key, value) for key, value in _left_to_write(raw) if key not in named]
    problems += [Problem(f"{key}={value}: {LEFT_TO_WRITE[value]}", (key,)) for key, value in left]
    if len(mistakes) > MAX_EXPLAINED:
        problems.append(Problem(f"and {len(mistakes) - MAX_EXPLAINED:,} more keys are wrong"))
    if problems or config is None:
        keys = {key for problem in problems for key in problem.keys} | {
            key for one in mistakes for key in _named_by(one)
        }
        if "method" in keys:  # the checks have seen other defaults than were meant
            keys |= {key for method in methods().values() for key in method.keys}
        raise WrongKeys(problems, config, keys)
    return config


def _left_to_write(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _left_to_write(value, f"{prefix}{name}.")
        elif value == CHANGE_ME or REDACTED in str(value):
            yield f"{prefix}{name}", CHANGE_ME if value == CHANGE_ME else REDACTED


def read_raw(path: Path | str, overrides: Sequence[str] | None = None) -> tuple[dict[str, Any], list[Problem]]:
    """Returns (the file's content with the overrides, wrong overrides). Raises ConfigError: unreadable file."""
    _, raw = read_yaml_table(path, "config")
    problems = []
    for override in overrides or ():
        try:
            _apply_override(raw, override)
        except ConfigError as error:
            problems.append(Problem(str(error), (override.partition("=")[0],)))
    return raw, problems


def _apply_override(raw: dict[str, Any], override: str) -> None:
    if override.startswith("~"):
        name = override[1:]
        names = [key.name for key in config_keys(Config)]
        is_known = any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for key in names)
        if not _take_out(raw, name.split("."), is_missing=False, is_exact=True) and not is_known:
            section, _, leaf = name.rpartition(".")
            here = [key.removeprefix(f"{section}.") for key in names if section and key.startswith(f"{section}.")]
            hint = did_you_mean(leaf, here, f"{section}.") if here else did_you_mean(name, names)
            hint = hint or f"; `{COMMAND_NAME} keys{f' {section}' if here else ''}` lists them"
            raise ConfigError(f"override {shown(override)}: there is no key {shown(name)}{hint}")
        return
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {shown(override)} is not of the form section.key=value")
    try:
        parsed = (
            value if value.startswith("*") else parse_yaml(value)
        )  # a pattern of files: there is no alias on one line
    except ReadError as error:
        raise ConfigError(f"override {shown(override)}: the value is not valid YAML: {error}") from error
    *sections, leaf = key.split(".")
    if len(sections) > MAX_LEVELS:
        raise ConfigError(f"override {shown(override)}: the key has {len(sections):,} sections within each other")
    node = raw
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {shown(override)}: {shown(section)} is a value, not a section")
    node[leaf] = parsed


def _read_right_keys(raw: dict[str, Any]) -> tuple[Config | None, list[Any]]:
    """Returns (the config or None, pydantic's errors). With errors, wrong keys have their defaults."""
    mistakes: list[Any] = []
    for number in range(MAX_READINGS):
        try:
            return Config.model_validate(raw), mistakes
        except ValidationError as error:
            errors = _once_per_place(error.errors(), raw)
        if not number:
            mistakes, raw = errors, copy.deepcopy(raw)
        for mistake in reversed(errors):  # from the last place of a list to the first
            _take_out(raw, mistake["loc"], is_missing=mistake["type"] == "missing")
        model = raw.setdefault("model", {})
        if isinstance(model, dict):
            model.setdefault("path", NO_PATH)
    return None, mistakes


def _once_per_place(errors: Sequence[Any], raw: Any) -> list[Any]:
    """Joins the errors of one value: pydantic has one for each kind that a key may have, with the kind in its place."""
    places: dict[tuple[Any, ...], Any] = {}
    for error in errors:
        place: tuple[Any, ...] = ()
        node = raw
        for part in error["loc"]:
            if not _has(node, part):
                break
            place, node = (*place, part), node[part]
        place = error["loc"] if error["type"] == "missing" else place
        if place in places:
            message = re.sub("^(set |it is a list; )", "", reason_and_remedy({**error, "input": node}))
            places[place]["reason"] += "" if message in places[place]["reason"] else f", or {message}"
        else:
            entry = {**error, "loc": place, "input": error["input"] if error["type"] == "missing" else node}
            places[place] = {**entry, "reason": reason_and_remedy(entry)}
    return list(places.values())


def _take_out(raw: Any, location: Sequence[Any], *, is_missing: bool, is_exact: bool = False) -> bool:
    """Remove the value at `location`, or the deepest table or list entry on the way that is there; `is_exact`: the value alone.

    Returns whether something was removed.

    Where a key is missing, the table that lacks it goes, unless it is a section of the file.
    """
    place: tuple[Any, Any] | None = None
    node = raw
    for part in location[:-1] if is_missing and len(location) > 2 else location:
        if not _has(node, part):
            if is_exact:
                return False
            break
        place, node = (node, part), node[part]
    if place is None or (is_missing and len(location) <= 2):
        return False
    del place[0][place[1]]
    return True


def _has(node: Any, part: Any) -> bool:
    if isinstance(node, list):
        return isinstance(part, int) and part < len(node)
    return isinstance(node, dict) and part in node


def _named_by(error: Any) -> tuple[str, ...]:
    """Names the keys of one pydantic error: the wrong one, and the one that was probably meant.

    Places in a list are left out of them.
    """
    *section, leaf = [str(part) for part in error["loc"]] or [""]
    close = []
    if error["type"] == "extra_forbidden":
        close = difflib.get_close_matches(leaf[:100], _fields_at(error["loc"][:-1]), n=1)
    return tuple(".".join(part for part in (*section, name) if not part.isdigit()) for name in (leaf, *close))


def _explain(error: Any) -> str:
    """Explains one pydantic error in a line; for an unknown key with the nearest known key."""
    location = cut(".".join(str(part) for part in error["loc"]))
    if error["type"] == "extra_forbidden":
        from grpo_megatron.migration.translation import MEANT, SAME_NAME, explained, known_elsewhere, with_words_of

        known, leaf = _fields_at(error["loc"][:-1]), str(error["loc"][-1])[:100]
        close = (with_words_of(leaf, known) if len(error["loc"]) > 1 else []) or difflib.get_close_matches(
            leaf, known, n=1
        )
        elsewhere = known_elsewhere(location)
        section = ".".join(str(part) for part in error["loc"][:-1] if not isinstance(part, int))
        is_below = elsewhere is not None and bool(section) and f"'{section}." in elsewhere
        if close and not is_below and (elsewhere is None or elsewhere.startswith(SAME_NAME)):  # of this section first
            hint = f"; did you mean {'.'.join([*map(str, error['loc'][:-1]), close[0]])!r}?"
            hint += f" (elsewhere {elsewhere})" if elsewhere else ""
        else:
            below = "" if elsewhere and elsewhere.startswith(MEANT) else explained(error["input"], location)
            hint = "".join(f"; {text}" for text in (elsewhere, below) if text)
        listed = "" if hint else f" (known here: {', '.join(known)})"
        if len(listed) > MAX_LISTED and any(one.name.startswith(section) for one in config_keys(Config)):
            listed = f"; `grpo-megatron keys {section}` lists those of this section"
        if not hint and "kwargs" in known:
            hint = f"; a parameter of the function or class itself is {f'{section}.kwargs.{leaf}'!r}"
        if ":" in leaf and error["input"] is None:
            hint, listed = "; YAML needs a space behind the ':' of KEY: VALUE", ""
        return f"unknown key {location!r}{hint}{listed}"
    if error["type"] == "missing" and isinstance(error["loc"][-1], int):
        return f"{location.rpartition('.')[0]} lacks entry {error['loc'][-1] + 1}; give all that it needs"
    if error["type"] == "missing":
        return f"missing key {location!r}: it has no default"
    if error["input"] == CHANGE_ME:
        return f"{location}={CHANGE_ME}: {LEFT_TO_WRITE[CHANGE_ME]}"
    return f"{location}={shown(error['input'])}: {error['reason']}"


def _fields_at(location: tuple[Any, ...]) -> list[str]:
    model: Any = Config
    for part in location:
        if isinstance(part, str):  # a number is a place in a list of sections
            # get_args: of a mapping from the user's names to sections, or of an optional one
            kind = model.model_fields[part].annotation if hasattr(model, "model_fields") else get_args(model)[1]
            options = (kind, *(() if get_origin(kind) is dict else get_args(kind)))
            model = next((option for option in options if hasattr(option, "model_fields")), kind)
    return list(model.model_fields)


# -- all mistakes of a file --------------------------------------------------------------------------------------------


def with_other_mistakes(wrong: WrongKeys, check: Callable[[Config], object]) -> list[Problem]:
    """Adds to the problems of the wrong keys those that `check` raises for the others."""
    if wrong.config is None:
        return wrong.problems
    try:
        check(wrong.config)
    except ConfigError as error:
        return wrong.problems + [one for one in error.problems if not _is_of(one, wrong.keys)]
    except Exception:  # noqa: BLE001 - a check that stumbles over a default must not hide the mistakes
        return wrong.problems
    return wrong.problems


MISSING = re.compile("No such file|is not a folder, and")
LEFT_OUT = re.compile(f"leave (it|{KEY_MARK}?[a-z_]+[.][a-z_.]+{KEY_MARK}?) out(?! [(]on a command line)( [(])?")


def for_command_line(problem: Problem) -> Problem:
    """Adds to the remedy "leave KEY out" what does so on a command line."""

    def typed(match: re.Match[str]) -> str:
        head = re.split("[=:, ]", problem.text)[0]
        key = match[1] if match[1] != "it" else head if "." in head else (*problem.keys, "")[0]
        added = f"{match[0].removesuffix(' (')} (on a command line: ~{key}" + ("; " if match[2] else ")")
        return added if "." in key else match[0]

    return Problem(LEFT_OUT.sub(typed, problem.message), problem.others)


def preparation(path: Path, problems: Sequence[Problem]) -> list[Problem]:
    """Names the folder where missing inputs are, or what makes those of an example: the quickstart, or `prepare` in a comment."""
    text = "\n".join(problem.text for problem in problems if MISSING.search(problem.text))
    missing = {name for name in re.findall("'([^']+)'", text) if not Path(name).is_absolute()}
    for folder in path.absolute().parents[:4]:
        if missing and folder != Path.cwd() and all((folder / name).exists() for name in missing):
            where = "relative paths begin in the current folder, also those of a config in another one"
            return [Problem(f"{where}; start it where they are: cd {shlex.quote(str(folder))}")]
    commands = [f"{COMMAND_NAME} quickstart"] if "outputs/quickstart/" in text else []
    if text and path.is_file():
        commands += re.findall(r"^# +(python -m grpo_megatron prepare .*[^\\\n])$", path.read_text(), re.MULTILINE)
    return (
        [Problem(f"first make the inputs of {path}, in this folder:\n  " + "\n  ".join(commands))] if commands else []
    )


def in_file_order(problems: Sequence[Problem], path: Path, overrides: Sequence[str]) -> list[Problem]:
    """Sorts the problems, each once, in the order of the keys to change. Others keep their place among equals."""
    unique = list({problem.text: problem for problem in problems}.values())
    try:
        raw, _ = read_raw(path, overrides)
    except ConfigError:
        return unique
    order = {key: place for place, key in enumerate(_keys_of(raw))}
    known = {key.name: place for place, key in enumerate(config_keys(Config))}
    return sorted(unique, key=lambda problem: _place(problem.keys, order, known))


def _is_of(problem: Problem, wrong: set[str]) -> bool:
    return any(f"{key}.".startswith(f"{one}.") for key in problem.keys for one in wrong if one)


def _keys_of(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the keys of a file in its order, those of a section behind the section."""
    for name, value in table.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _keys_of(value, f"{prefix}{name}.")


def _place(keys: Sequence[str], order: Mapping[str, int], known: Mapping[str, int]) -> tuple[int, int]:
    """Finds the place of the first of the keys; for a key that the file lacks, the end of the nearest section."""
    for key in keys:
        if key in order:
            return order[key], 0
        behind, section = 1 + known.get(key, len(known)), key
        while "." in section:
            section = section.rpartition(".")[0]
            if section in order:
                return max(place for name, place in order.items() if f"{name}.".startswith(f"{section}.")), behind
        if key in known:
            return len(order), behind
    return len(order), len(known) + 1


# -- what `train-reward` sets where a config does not: the method, and no validation without rows for it ---------------
# The same run by `train` needs these keys in the file.


def reward_defaults(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns key -> value. `reward_model.kind: process`, or `actor.loss_mode: step_labels`, asks for a model of steps."""
    is_process = _value(raw, "reward_model", "kind") == "process" or _value(raw, "actor", "loss_mode") == "step_labels"
    without_validation = {"trainer.val_before_train": False, "trainer.test_freq": -1}
    return {
        "method": "process_reward_model" if is_process else "reward_model",
        **({} if _value(raw, "data", "val_loss_files") else without_validation),
    }


def _value(raw: dict[str, Any], section: str, key: str) -> Any:
    values = raw.get(section)
    return values.get(key) if isinstance(values, dict) else None
