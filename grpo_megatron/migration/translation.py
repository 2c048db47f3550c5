"""Translation: another trainer's settings as a config of this one, with a comment for each key that has no equal."""

from __future__ import annotations

import ast
import itertools
import json
import operator
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.options import Argument, Option, Options
from grpo_megatron.config.section import ConfigKey, config_keys
from grpo_megatron.migration.trainers import ACTOR, OTHER_TRAINERS, TRL, OtherTrainer, Settings
from grpo_megatron.reading import ReadError, parse_yaml, read_text, shown
from grpo_megatron.storage.files import write_file

REQUIRED = "model.path"
UNKNOWN = re.compile(r"\$[\w{(]")  # a variable or an interpolation whose value is not known


@dataclass
class Translation:
    """`values`: our keys, with where each value comes from. `notes`: (their key and value, why it is not written)."""

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)


def translate(settings: Settings, trainer: OtherTrainer) -> Translation:
    """What they set, then what their trainer does where they are silent. A later key does not replace an earlier one."""
    known = {key.name: key for key in config_keys(Config)}
    result = Translation({ours: (value, f"as in {trainer.name}") for ours, value in trainer.implied.items()})
    for key, value in settings.items():
        rule = trainer.rule(key, known)
        if UNKNOWN.search(f"{key}={_inline(value)}"):
            where = f"{rule.ours}: " if rule is not None and rule.ours else ""
            outcome: Mapping[str, Any] | str = f"{where}its value is not known here"
        elif rule is None:
            outcome = f"not a key of {trainer.name} that is known here"
        else:
            is_unset = value is None and key not in trainer.defaults
            outcome = {} if is_unset else rule.apply(value, settings)
        notes = (
            [outcome] if isinstance(outcome, str) else [f"{o} is not here" for o in outcome if not _key_of(o, known)]
        )
        result.notes += [(f"{key}={_inline(value)}", note) for note in notes]
        if not isinstance(outcome, str):
            result.values |= {ours: (item, key) for ours, item in outcome.items() if _key_of(ours, known)}
    for key, value in trainer.defaults.items():
        rule = trainer.rule(key, known)
        outcome = rule.apply(value, settings) if rule is not None and key not in settings else {}
        if not isinstance(outcome, str):
            result.values = {
                ours: (item, f"{trainer.name}'s default") for ours, item in outcome.items()
            } | result.values
    _fit_mini_batch(result)
    return result


def _fit_mini_batch(result: Translation) -> None:
    """A mini-batch by default must not be larger than the batch."""
    size = result.values.get("data.train_batch_size", (512, ""))[0]
    mini, origin = result.values.get("actor.ppo_mini_batch_size", (None, ""))
    if isinstance(mini, int) and isinstance(size, int) and mini > size and origin.endswith("default"):
        del result.values["actor.ppo_mini_batch_size"]


def _key_of(name: str, known: Mapping[str, ConfigKey]) -> str | None:
    """The key of the config that a name is, or the table of free keys that it is in, as override_transformer_config."""
    return next((key for key in known if name == key or name.startswith(f"{key}.")), None)


def as_yaml(result: Translation, source: str) -> str:
    """The YAML text. Keys are in the order of the config."""
    known = {key.name: key for key in config_keys(Config)}
    order = list(known)
    names = sorted(result.values, key=lambda name: (order.index(_key_of(name, known) or name), name))
    lines = [f"# From {source}. Run it with --dry-run first: it shows every mistake and the plan."]
    if REQUIRED not in result.values:
        lines += ["", "model:", "  path: CHANGE_ME                # a Hugging Face folder on this machine"]
    path: list[str] = []
    for name in names:
        value, origin = result.values[name]
        *sections, leaf = name.split(".")
        shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(path, sections, strict=False))))
        lines += [""] if shared == 0 else []
        lines += [f"{'  ' * depth}{sections[depth]}:" for depth in range(shared, len(sections))]
        path = sections
        text = f"{'  ' * len(sections)}{leaf}: {_inline(value)}"
        lines.append(text if origin == name or origin.endswith(f".{name}") else f"{text:<58}  # {origin}")
    if result.notes:
        lines += ["", "# Without an equal here:"]
        lines += [f"#   {written}: {note}" for written, note in result.notes]
    return "\n".join(lines) + "\n"


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
    """The text with known variables and integer arithmetic (`$((1024 * 2))`) replaced."""

    def variable(found: re.Match[str]) -> str:
        return variables.get(found[1] or found[3], found[2] if found[2] is not None else found[0])

    def computed(found: re.Match[str]) -> str:
        expression = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), found[1])
        try:
            return str(_integer(ast.parse(expression.strip(), mode="eval").body))
        except (ValueError, SyntaxError, ZeroDivisionError):
            return found[0]

    return ARITHMETIC.sub(computed, VARIABLE.sub(variable, text))


def _integer(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_integer(node.left), _integer(node.right))
    raise ValueError("not an integer expression")


# -- `grpo-megatron import verl|trl FILE [key=value ...]`: a config of this program from one of another trainer --------


class ImportOptions(Options):
    """The options of `import`."""

    program = "import"
    description = "Write a config of this program from one of verl or TRL; what has no equal becomes a comment."
    epilog = "grpo-megatron import verl run_qwen2_7b.sh --output grpo.yaml"
    trainer: Annotated[Literal["trl", "verl"], Argument("whose config FILE is")]
    file: Annotated[Path, Argument("YAML, JSON, a shell script, or a Python script (TRL)", "FILE")]
    overrides: Annotated[tuple[str, ...], Argument("settings that were given on its command line", "key=value")] = ()
    output: Annotated[Path | None, Option("write it there instead of printing it", "YAML")] = None


def import_config(options: ImportOptions) -> int:
    """Print the config, or write it to --output; returns the exit code. Raises ConfigError."""
    file, output = options.file, options.output
    result = translate(read_settings(file, list(options.overrides)), OTHER_TRAINERS[options.trainer])
    text = as_yaml(result, f"{file.name}, of {options.trainer}")
    if output is None:
        print(text, end="")
        return 0
    if output.exists():
        raise ConfigError(f"--output {output} exists; name another file, or remove it")
    try:
        write_file(output, text)
    except OSError as error:
        raise ConfigError(f"cannot write --output {output}: {error.strerror}") from error
    print(f"{output}: {len(result.values)} keys; {len(result.notes)} have no equal here", file=sys.stderr)
    return 0


# -- where a key of verl or TRL is here: for the message about an unknown key ------------------------------------------

MAX_HINTS = 5
VERL_PREFIX = "actor_rollout_ref."
SECTIONS = ("data", "algorithm", "critic", "trainer", "reward_model")  # of both programs


def explained(value: Any, key: str) -> str:
    """What is known about the keys below an unknown one, if its value is a table; or nothing."""
    below = flat(value, f"{key}.") if isinstance(value, dict) else {}
    return "; ".join(f"{name}: {hint}" for name in list(below)[:MAX_HINTS] if (hint := known_elsewhere(name)))


def known_elsewhere(key: str) -> str | None:
    """What becomes of another trainer's key, or of a key in another section. None: nothing is known.

    A key may be written as there (`actor_rollout_ref.actor.clip_ratio`, `learning_rate`) or below a section of ours
    (`actor.lr`, `algorithm.beta`): then its last part counts.
    """
    if f"{key}." == VERL_PREFIX:
        return "`grpo-megatron import verl FILE` writes a config of verl in this program's terms"
    names = [name.name for name in config_keys(Config)]
    own = key.removeprefix(VERL_PREFIX)
    for trainer in OTHER_TRAINERS.values():
        if trainer is TRL and own != key and own in names:  # verl's section, without a rule of its own
            break
        for name in dict.fromkeys([key, f"{ACTOR}{key.removeprefix('actor.')}", key.rpartition(".")[2]]):
            if name in trainer.rules and name not in SECTIONS:
                rule = trainer.rules[name]
                return (
                    f"{trainer.name}'s {name} is {rule.ours!r}"
                    if rule.ours
                    else f"{trainer.name}'s {name}: {rule.note}"
                )
    if own in names:
        return f"here it is {own!r}"
    section, _, leaf = key.rpartition(".")
    same = [name for name in names if section and name.endswith(f".{leaf}")]
    same = [name for name in same if name.startswith(f"{section.partition('.')[0]}.")] or same
    return f"there is {' and '.join(map(repr, same))}" if 0 < len(same) <= 3 else None
