"""Their settings, from what users have: a YAML or JSON file, a shell script, or a Python script.

A shell script gives verl's `a.b=value` and TRL's `--name value`; its variables are put in where their value is known.
A Python script is read, never run: the keyword arguments of `GRPOConfig(...)` that are literals.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.migration.rules import Settings
from grpo_megatron.reading import ReadError, parse_yaml, read_text, shown

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
