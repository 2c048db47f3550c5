"""Tool: a plain Python function that the model may call.

Its positional parameters are the model's arguments: type hints and the docstring become the schema. Its keyword-only
parameters are options, which `rollout.multi_turn.kwargs` gives per tool: `kwargs: {search: {corpus: docs.jsonl}}`. It may be
a coroutine function. A returned text is shown to the model as it is, anything else as JSON, an exception as "Error: ...".
`@tools.register("search", preload=load_index)` names one of this package; `my.module:function` a user's own.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema
import referencing

from grpo_megatron.registry import FactRegistry

# -- the schema of a function ------------------------------------------------------------------------------------------

BASIC = {int: "integer", float: "number", str: "string", bool: "boolean", list: "array", dict: "object"}
SECTION = re.compile(r"\n\s*(?:Args|Returns|Raises):\s*(?:\n|$)")
ARGUMENTS = re.compile(r"(?:^|\n)\s*Args:\s*\n(.*?)(?=\n\s*(?:Returns|Raises):|\Z)", re.DOTALL)
ARGUMENT = re.compile(r"^\s*(\w+):\s*(.*?)\s*(?=^\s*\w+:|\Z)", re.DOTALL | re.MULTILINE)


def function_schema(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """Makes the JSON schema of a tool called `name` from its type hints and its Google-style docstring.

    As `transformers.utils.get_json_schema`, without the import of transformers and torch into every worker, and without
    keyword-only parameters and what the function returns. Raises ValueError for a missing hint or description, or a
    hint JSON cannot express.
    """
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
    """Returns the parameters that the model gives, or (`options`) the config. Raises ValueError: *args."""
    every = list(inspect.signature(function).parameters.values())
    if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY) for one in every):
        raise ValueError(
            f"{inspect.signature(function)}: *args, **kwargs and positional-only parameters have no schema"
        )
    return [one for one in every if (one.kind is one.KEYWORD_ONLY) is options]


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


ToolFunction = Callable[..., Any]


class ToolError(Exception):
    """An error that the model sees without the name of a type."""


@dataclass(frozen=True)
class ToolFacts:
    """Facts of a tool that a worker reads."""

    preload: Callable[..., None] | None = None  # called with the options once per worker, to load what calls share


tools: FactRegistry[ToolFunction, ToolFacts] = FactRegistry(
    "tool", ToolFacts(), [f"grpo_megatron.environments.tools.{name}" for name in ("calculator", "python", "search")]
)


@dataclass(frozen=True)
class Tool:
    """A function with its options. `schema` is what the chat template shows."""

    name: str
    function: ToolFunction
    options: dict[str, Any]
    schema: dict[str, Any]

    def preload(self) -> None:
        """Loads what calls share."""
        if load := tools.facts_of(self.function).preload:
            load(**self.options)

    async def call(self, arguments: dict[str, Any]) -> Any:
        """Calls the function. Its exceptions pass through."""
        returned = self.function(**arguments, **self.options)
        return await returned if inspect.isawaitable(returned) else returned

    def problem(self, arguments: Mapping[str, Any]) -> str:
        """Says why the function cannot be called with `arguments`; "" if it can."""
        schema = self.schema["function"]["parameters"]
        given = {key: value for key, value in arguments.items() if not _is_absent(value, schema["properties"].get(key))}
        unknown = sorted(set(given) - set(schema["properties"]))
        if unknown:
            return f"unknown argument {', '.join(unknown)} (known: {', '.join(schema['properties']) or 'none'})"
        validator = jsonschema.Draft202012Validator(schema, registry=referencing.Registry())  # fetches no reference
        error = jsonschema.exceptions.best_match(validator.iter_errors(given))
        return f"{'.'.join(map(str, [*error.absolute_path, '']))[:-1] or 'arguments'}: {error.message}" if error else ""


def check_parameters(schema: Mapping[str, Any]) -> None:
    """Raises ValueError for a schema of others that is none, or refers to other documents, which are not fetched."""
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.exceptions.SchemaError as error:
        raise ValueError(f"its parameters are no JSON schema: {error.message}") from None
    pending: list[Any] = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            for name in ("$ref", "$dynamicRef"):
                if isinstance(target := part.get(name), str) and not target.startswith("#"):
                    raise ValueError(f"its parameters refer to {target[:200]!r}; other documents are not fetched")
        pending += part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ()


def _is_absent(value: Any, schema: Mapping[str, Any] | None) -> bool:
    return value is None and bool(schema and schema.get("nullable"))


def get_tool(path: str, options: Mapping[str, Any]) -> Tool:
    """Returns the tool called `path`: a registered name or `module:function`. Raises ValueError: what is wrong with it."""
    function = tools.get(path)
    if not isinstance(options, Mapping):
        raise ValueError(f"the options of tool {path!r} are {type(options).__name__}, not a mapping of names to values")
    name = path.rpartition(":")[2]
    if not callable(function):
        raise ValueError(f"tool {path!r} is {type(function).__name__}, not a function")
    schema = function_schema(function, name)
    known = {one.name: one for one in parameters(function, options=True)}
    wrong = sorted(set(options) - set(known))
    if wrong:
        raise ValueError(f"tool {name!r} has no option {', '.join(wrong)} (it has: {', '.join(known) or 'none'})")
    missing = [key for key, one in known.items() if one.default is one.empty and key not in options]
    if missing:
        raise ValueError(
            f"tool {name!r} needs the option {', '.join(missing)}: kwargs: {{{name}: {{{missing[0]}: ...}}}}"
        )
    return Tool(name, function, dict(options), schema)
