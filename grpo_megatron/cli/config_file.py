"""Reads the config file: YAML plus `section.key=value` overrides -> Config. An error has one line per wrong key."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.keys import config_keys
from grpo_megatron.reading import MAX_LEVELS, MAX_YAML, ReadError, cut, parse_yaml, read_text, shown

# -- A Config of the right keys of a file: wrong ones are taken out, so that the others can be checked too -------------

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


Defaults = Callable[[dict[str, Any]], dict[str, dict[str, Any]]]  # the file's content -> section -> key -> value
MAX_EXPLAINED = 50  # wrong keys that are shown


class WrongKeys(ConfigError):
    """Keys that cannot be read: `keys`. `config` is the file with their defaults instead; None if there is none.

    The checks that follow can still look at the other keys (mistakes.py). A problem that names one of `keys` may be caused by
    the default.
    """

    def __init__(self, lines: list[str], config: Config | None, keys: set[str]) -> None:
        super().__init__("\n".join(lines))
        self.config, self.keys = config, keys


def load_config(path: Path | str, overrides: list[str] | None = None, defaults: Defaults | None = None) -> Config:
    """Read the YAML at `path`, apply `section.key=value` overrides, check types and names. Raises ConfigError.

    `defaults` makes the values of keys that are set nowhere, from the file's content with the overrides.
    """
    raw, wrong = read_raw(path, overrides)
    for section, values in (defaults(raw) if defaults else {}).items():
        given = raw.setdefault(section, {})
        if isinstance(given, dict):
            raw[section] = {**values, **given}
    config, mistakes = read_without_wrong_keys(raw)
    lines = [*wrong.values(), *(_explain(mistake) for mistake in mistakes[:MAX_EXPLAINED])]
    if len(mistakes) > MAX_EXPLAINED:
        lines.append(f"and {len(mistakes) - MAX_EXPLAINED:,} more keys are wrong")
    if lines or config is None:
        keys = {override.partition("=")[0] for override in wrong}
        keys |= {key for mistake in mistakes for key in _named_by(mistake)}
        raise WrongKeys(lines, config, keys)
    return config


def read_raw(path: Path | str, overrides: list[str] | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """(the file's content with the overrides, override -> what is wrong with it). Raises ConfigError: unreadable file."""
    try:
        text = read_text(path, MAX_YAML)
    except OSError as error:
        raise ConfigError(f"cannot read config {shown(str(path))}: {error.strerror}") from error
    except ReadError as error:
        raise ConfigError(f"config {shown(str(path))} {error}") from error
    try:
        raw = parse_yaml(text)
    except ReadError as error:
        raise ConfigError(f"config {shown(str(path))} is not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"config {shown(str(path))} must be a mapping of sections, not {type(raw).__name__}")
    problems = {}
    for override in overrides or []:
        try:
            _apply_override(raw, override)
        except ConfigError as error:
            problems[override] = str(error)
    return raw, problems


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {shown(override)} is not of the form section.key=value")
    try:
        parsed = parse_yaml(value)
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


def _named_by(error: Any) -> set[str]:
    """The keys whose value is not known because of one pydantic error: its own, and the one that was probably meant."""
    *section, leaf = [str(part) for part in error["loc"]] or [""]
    close = []
    if error["type"] == "extra_forbidden":
        close = difflib.get_close_matches(leaf[:100], _fields_at(error["loc"][:-1]), n=1)
    return {without_places([*section, name]) for name in [leaf, *close]}


def _explain(error: Any) -> str:
    """One line for one pydantic error; for an unknown key with the nearest known key."""
    location = cut(".".join(str(part) for part in error["loc"]))
    if error["type"] == "extra_forbidden":
        from grpo_megatron.migration.cli import explained, known_elsewhere

        known = _fields_at(error["loc"][:-1])
        close = difflib.get_close_matches(str(error["loc"][-1])[:100], known, n=1)
        elsewhere = known_elsewhere(location)
        if close and elsewhere is None:
            hint = f"; did you mean {'.'.join([*map(str, error['loc'][:-1]), close[0]])!r}?"
        else:
            hint = "".join(f"; {text}" for text in (elsewhere, explained(error["input"], location)) if text)
        return f"unknown key {location!r}{hint} (known here: {', '.join(known)})"
    if error["type"] == "missing":
        return f"missing key {location!r}: it has no default"
    return f"{location}={shown(error['input'])}: {cut(error['msg'], 1000)}"


def _fields_at(location: tuple[Any, ...]) -> list[str]:
    model: Any = Config
    for part in location:
        if isinstance(part, str):  # a number is a place in a list of sections
            # get_args: of a mapping from the user's names to sections, or of an optional one
            kind = model.model_fields[part].annotation if hasattr(model, "model_fields") else get_args(model)[1]
            model = next((option for option in (kind, *get_args(kind)) if hasattr(option, "model_fields")), kind)
    return list(model.model_fields)


# -- All mistakes of a config in one error: keys that cannot be read, and what the checks find in the others -----------
# The problems stand in the order of their keys in the file. A problem that names a key which could not be read is left out:
# the checks have seen its default.

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


# -- What `train-reward` sets where a config does not: the loss of a reward model, its rows, and no engine -------------
# The same run by `train` needs these keys in the file.

OUTCOME = {"adv_estimator": "preference", "loss_mode": "bradley_terry", "loss_agg_mode": "seq-mean-token-mean"}
PROCESS = {"adv_estimator": "step_labels", "loss_mode": "step_labels", "loss_agg_mode": "token-mean"}


def reward_defaults(raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Section -> key -> value. `reward_model.kind: process`, or `actor.loss_mode: step_labels`, asks for a model of steps."""
    is_process = _value(raw, "reward_model", "kind") == "process" or _value(raw, "actor", "loss_mode") == "step_labels"
    chosen = PROCESS if is_process else OUTCOME
    without_validation = {"val_before_train": False, "test_freq": -1}
    return {
        "trainer": {} if _value(raw, "data", "val_loss_files") else without_validation,
        "algorithm": {"source": "file", "adv_estimator": chosen["adv_estimator"]},
        "actor": {"loss_mode": chosen["loss_mode"], "loss_agg_mode": chosen["loss_agg_mode"], "use_kl_loss": False},
    }


def _value(raw: dict[str, Any], section: str, key: str) -> Any:
    values = raw.get(section)
    return values.get(key) if isinstance(values, dict) else None
