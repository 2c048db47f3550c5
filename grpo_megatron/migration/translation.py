"""Translation: another trainer's settings as a config of this one, with a comment for each key that has no equal."""

from __future__ import annotations

import ast
import json
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.section import ConfigKey, config_keys
from grpo_megatron.reading import ReadError, parse_yaml, read_text, shown

# -- Rule: what becomes of one key of another trainer. A trainer is a table of rules (verl.py, trl.py) -----------------

Settings = dict[str, Any]  # their keys -> values
Convert = Callable[[Any, Settings], "Mapping[str, Any] | str"]  # -> our keys and values, or why there are none


@dataclass(frozen=True)
class Rule:
    """`ours`: the key of the same meaning; None: there is none, and `note` says why.

    `convert(value, settings)` returns what is to be written instead of `{ours: value}`, or a note for this value.
    """

    ours: str | None = None
    note: str = ""
    convert: Convert | None = None

    def apply(self, value: Any, settings: Settings) -> Mapping[str, Any] | str:
        if self.convert is not None:
            return self.convert(value, settings)
        return self.note if self.ours is None else {self.ours: value}


@dataclass(frozen=True)
class OtherTrainer:
    """One trainer whose configs are read. A rule for `a.b` also holds for all keys below it that have no rule."""

    name: str
    rules: Mapping[str, Rule]
    defaults: Mapping[str, Any]  # that trainer's defaults, where this program's differ
    prefixes: tuple[str, ...] = ()  # a key without a rule has our key's meaning if it is one after this is removed
    implied: Settings = field(default_factory=dict)  # our keys and values that hold for each run of that trainer

    def rule(self, key: str, known: Mapping[str, ConfigKey]) -> Rule | None:
        """The rule for their `key`; `known` are our keys. None: no key of that trainer that we know."""
        if key in self.rules:
            return self.rules[key]
        for prefix in self.prefixes:
            name = key.removeprefix(prefix)
            if name in known or any(name.startswith(f"{parent}.") and _is_mapping(known[parent]) for parent in known):
                return Rule(name)
        parents = key.split(".")
        above = (".".join(parents[:length]) for length in range(len(parents) - 1, 0, -1))
        return next(
            (self.rules[parent] for parent in above if parent in self.rules and not self.rules[parent].ours), None
        )


def _is_mapping(key: ConfigKey) -> bool:
    return isinstance(key.default, dict)


def same(ours: str) -> Rule:
    """The value is written as it is."""
    return Rule(ours)


def values(ours: str, table: Mapping[Any, Any], otherwise: str) -> Rule:
    """Values have other names here. `otherwise`: the note for a value that is not in the table."""

    def convert(value: Any, settings: Settings) -> Mapping[str, Any] | str:
        return {ours: table[value]} if isinstance(value, str | int | bool) and value in table else otherwise

    return Rule(ours, convert=convert)


def listed(ours: str) -> Rule:
    """One value or a list of them; ours is a list."""
    return Rule(ours, convert=lambda value, settings: {ours: value if isinstance(value, list) else [value]})


def unless(ours: str, off: Any, instead: Any = None) -> Rule:
    """The value `off` means that the setting is off, which is `instead` here."""
    return Rule(ours, convert=lambda value, settings: {ours: instead if value == off else value})


def none(note: str) -> Rule:
    """There is no such key here."""
    return Rule(note=note)


REQUIRED = "model.path"
UNKNOWN = re.compile(r"\$[\w{(]")  # a variable or an interpolation whose value is not known


@dataclass
class Translation:
    """`values`: our keys, with where each value comes from. `notes`: (their key and value, why it is not written)."""

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)


def translate(settings: Settings, trainer: OtherTrainer) -> Translation:
    """What they set, then what their trainer does where they are silent. A later key does not replace an earlier one."""
    result = Translation()
    known = {key.name: key for key in config_keys(Config)}
    result.values |= {ours: (value, f"as in {trainer.name}") for ours, value in trainer.implied.items()}
    for key, value in settings.items():
        written = f"{key}={_inline(value)}"
        rule = trainer.rule(key, known)
        if UNKNOWN.search(written):
            where = f"{rule.ours}: " if rule is not None and rule.ours else ""
            result.notes.append((written, f"{where}its value is not known here"))
        elif rule is None:
            result.notes.append((written, f"not a key of {trainer.name} that is known here"))
        elif value is None and key not in trainer.defaults:
            continue
        else:
            outcome = rule.apply(value, settings)
            if isinstance(outcome, str):
                result.notes.append((written, outcome))
            else:
                result.values |= {ours: (item, key) for ours, item in outcome.items() if _is_here(ours, known)}
                result.notes += [(written, f"{ours} is not here") for ours in outcome if not _is_here(ours, known)]
    for key, value in trainer.defaults.items():
        rule = trainer.rule(key, known)
        outcome = rule.apply(value, settings) if rule is not None and key not in settings else {}
        if not isinstance(outcome, str):
            comment = f"{trainer.name}'s default"
            result.values |= {
                ours: (item, comment)
                for ours, item in outcome.items()
                if ours not in result.values and _is_here(ours, known)
            }
    _fit_mini_batch(result)
    return result


def _fit_mini_batch(result: Translation) -> None:
    """A mini-batch by default must not be larger than the batch."""
    size = result.values.get("data.train_batch_size", (512, ""))[0]
    mini, origin = result.values.get("actor.ppo_mini_batch_size", (None, ""))
    if isinstance(mini, int) and isinstance(size, int) and mini > size and origin.endswith("default"):
        del result.values["actor.ppo_mini_batch_size"]


def _is_here(name: str, known: Mapping[str, ConfigKey]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in known)


def as_yaml(result: Translation, source: str) -> str:
    """The YAML text. Keys are in the order of the config."""
    order = {key.name: index for index, key in enumerate(config_keys(Config))}
    names = sorted(result.values, key=lambda name: (_place(name, order), name))
    lines = [f"# From {source}. Run it with --dry-run first: it shows every mistake and the plan."]
    if REQUIRED not in result.values:
        lines += ["", "model:", "  path: CHANGE_ME                # a Hugging Face folder on this machine"]
    path: list[str] = []
    for name in names:
        value, origin = result.values[name]
        *sections, leaf = name.split(".")
        shared = 0
        while shared < min(len(path), len(sections)) and path[shared] == sections[shared]:
            shared += 1
        if shared == 0:
            lines.append("")
        lines += [f"{'  ' * depth}{sections[depth]}:" for depth in range(shared, len(sections))]
        path = sections
        text = f"{'  ' * len(sections)}{leaf}: {_inline(value)}"
        lines.append(text if origin == name or origin.endswith(f".{name}") else f"{text:<58}  # {origin}")
    if result.notes:
        lines += ["", "# Without an equal here:"]
        lines += [f"#   {written}: {note}" for written, note in result.notes]
    return "\n".join(lines) + "\n"


def _place(name: str, order: dict[str, int]) -> int:
    """The place of a key, or of the table of free keys that it is in, such as override_transformer_config."""
    return next(index for key, index in order.items() if name == key or name.startswith(f"{key}."))


def _inline(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, float):
        return repr(value) if "e" not in repr(value) or "." in repr(value) else repr(value).replace("e", ".0e")
    return json.dumps(value, ensure_ascii=False, default=str)


# -- Their settings, from what users have: a YAML or JSON file, a shell script, or a Python script ---------------------
# A shell script gives verl's `a.b=value` and TRL's `--name value`; its variables are put in where their value is known.
# A Python script is read, never run: the keyword arguments of `GRPOConfig(...)` that are literals.

MAX_SOURCE = 1 << 18  # bytes
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^${}]*))?\}|\$(\w+)")
# What YAML 1.1 reads as a text, and their programs as a number.
NUMBER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)")
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,  # of a shell
}


def read_settings(path: Path, overrides: list[str]) -> Settings:
    """Their keys and values, flat (`a.b.c`). `overrides` are `a.b=value`, and replace the file's. Raises ConfigError."""
    try:
        text = read_text(path, MAX_SOURCE)
        if path.suffix == ".py":
            settings = _python(text)
        elif path.suffix in (".yaml", ".yml", ".json"):
            settings = flat(parse_yaml(text))
        else:
            settings = _shell(text)
    except OSError as error:
        raise ConfigError(f"cannot read {shown(str(path))}: {error.strerror}") from error
    except (ReadError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{shown(str(path))}: {error}") from error
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"override {shown(override)} is not of the form key=value")
        settings[key.lstrip("+")] = _value(value)
    if not settings:
        raise ConfigError(f"{shown(str(path))} sets nothing that can be read; give a YAML file, a script, or key=value")
    return settings


def flat(values: Any, prefix: str = "") -> Settings:
    """{"a": {"b": 1}} -> {"a.b": 1}. An empty table is left out."""
    if not isinstance(values, dict):
        raise ReadError(f"must be a mapping, not {type(values).__name__}")
    settings: Settings = {}
    for key, value in values.items():
        settings |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": _number(value)}
    return settings


def _python(text: str) -> Settings:
    settings: Settings = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "GRPOConfig":
            for keyword in node.keywords:
                try:
                    settings[str(keyword.arg)] = ast.literal_eval(keyword.value)
                except ValueError:  # a name or a call; its value is known only when the script runs
                    settings[str(keyword.arg)] = f"${{{ast.unparse(keyword.value)}}}"
    return settings


def _shell(text: str) -> Settings:
    """The settings of every command in a script. A value that holds an unknown variable stays as it is written."""
    text = ARITHMETIC.sub(lambda found: f"$(({''.join(found[1].split())}))", text.replace("\\\n", " "))
    words = shlex.split(text, comments=True)
    variables = {"HOME": str(Path.home())}
    settings: Settings = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        key, equals, value = word.lstrip("+").partition("=")
        if equals and re.fullmatch(r"\w+", key):
            variables[key] = _expanded(value, variables)
        elif equals and re.fullmatch(r"(--)?[\w.]+", key):
            settings[key.removeprefix("--")] = _value(_expanded(value, variables))
        elif re.fullmatch(r"--\w+", word) and not following.startswith("-"):
            settings[word[2:]] = _value(_expanded(following, variables))
        elif re.fullmatch(r"--\w+", word):
            settings[word[2:]] = True
    return settings


def _value(text: str) -> Any:
    """Its value as YAML."""
    try:
        return _number(parse_yaml(text))
    except ReadError:
        return text


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value


def _expanded(text: str, variables: dict[str, str]) -> str:
    """The text with known variables and integer arithmetic replaced."""

    def variable(found: re.Match[str]) -> str:
        return variables.get(found[1] or found[3], found[2] if found[2] is not None else found[0])

    text = VARIABLE.sub(variable, text)
    return ARITHMETIC.sub(lambda found: next(_computed(found[1], variables), found[0]), text)


def _computed(expression: str, variables: dict[str, str]) -> Iterator[str]:
    """The value of `1024 * 2`, or nothing."""
    for name, value in variables.items():
        expression = re.sub(rf"\b{name}\b", value, expression)
    try:
        yield str(_integer(ast.parse(expression.strip(), mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError):
        return


def _integer(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_integer(node.left), _integer(node.right))
    raise ValueError("not an integer expression")
