"""A Python function with type hints and a Google-style docstring -> the JSON schema that chat templates show to the model.

The same as `transformers.utils.get_json_schema`, without the import of transformers and torch into every worker, and with
one difference: keyword-only parameters are options of the config, which the model does not see. What a function returns is
not described.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any

BASIC = {int: "integer", float: "number", str: "string", bool: "boolean", list: "array", dict: "object"}
SECTION = re.compile(r"\n\s*(?:Args|Returns|Raises):\s*(?:\n|$)")
ARGUMENTS = re.compile(r"(?:^|\n)\s*Args:\s*\n(.*?)(?=\n\s*(?:Returns|Raises):|\Z)", re.DOTALL)
ARGUMENT = re.compile(r"^\s*(\w+):\s*(.*?)\s*(?=^\s*\w+:|\Z)", re.DOTALL | re.MULTILINE)


def function_schema(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """Schema of a tool called `name`. Raises ValueError for a missing hint or description, or a hint JSON cannot express."""
    document = inspect.getdoc(function) or ""
    description = SECTION.split(document, maxsplit=1)[0].strip()
    if not description:
        raise ValueError(f"tool {name!r} has no docstring; the model reads it")
    block = ARGUMENTS.search(document)
    described = {key: re.sub(r"\s*\n+\s*", " ", text) for key, text in ARGUMENT.findall(block[1] if block else "")}
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in parameters(function):
        if parameter.name not in hints:
            raise ValueError(f"tool {name!r}: parameter {parameter.name!r} has no type hint")
        if parameter.name not in described:
            raise ValueError(f"tool {name!r}: the docstring's 'Args:' do not describe {parameter.name!r}")
        try:
            properties[parameter.name] = _type_schema(hints[parameter.name])
        except ValueError as error:
            raise ValueError(f"tool {name!r}: parameter {parameter.name!r}: {error}") from None
        properties[parameter.name]["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    schema = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def parameters(function: Callable[..., Any], *, options: bool = False) -> list[inspect.Parameter]:
    """The parameters that the model gives, or with `options` those that the config gives. Raises ValueError: *args."""
    found = list(inspect.signature(function).parameters.values())
    if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY) for one in found):
        raise ValueError(
            f"{inspect.signature(function)}: *args, **kwargs and positional-only parameters have no schema"
        )
    return [one for one in found if (one.kind is one.KEYWORD_ONLY) is options]


def _type_schema(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in BASIC:
        return {"type": BASIC[hint]}
    if origin is list:
        return {"type": "array", "items": _type_schema(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(arguments[1])}
    if origin is typing.Literal and all(type(value) in BASIC for value in arguments):
        names = list(dict.fromkeys(BASIC[type(value)] for value in arguments))
        return {"type": names[0] if len(names) == 1 else names, "enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return _union_schema(arguments)
    raise ValueError(f"{hint} has no JSON schema; use str, int, float, bool, list, dict, Literal, or a union of them")


def _union_schema(hints: tuple[Any, ...]) -> dict[str, Any]:
    schemas = [_type_schema(hint) for hint in hints if hint is not type(None)]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(one.keys() == {"type"} for one in schemas):
        schema = {"type": sorted({one["type"] for one in schemas})}
    else:
        schema = {"anyOf": schemas}
    return schema | ({"nullable": True} if type(None) in hints else {})
