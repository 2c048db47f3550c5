"""Tool: a plain Python function that the model may call.

Its positional parameters are the model's arguments: type hints and the docstring become the schema. Its keyword-only
parameters are options, which `rollout.multi_turn.kwargs` gives per tool: `kwargs: {search: {corpus: docs.jsonl}}`. It may be a
coroutine function. What it returns is shown to the model: a text as it is, anything else as JSON. An exception is
shown as "Error: ...", so that the model can learn from it.

    @tools.register("search", preload=load_index)   # in this package; `my.module:function` names a user's own
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema

from grpo_megatron.environments.schema import function_schema, parameters
from grpo_megatron.registry import FactRegistry

ToolFunction = Callable[..., Any]


class ToolError(Exception):
    """Its text is for the model, which sees it without the name of a type."""


@dataclass(frozen=True)
class ToolFacts:
    """What a worker must know about a tool."""

    preload: Callable[..., None] | None = None  # called with the options once per worker, to load what calls share


tools: FactRegistry[ToolFunction, ToolFacts] = FactRegistry("tool", ToolFacts())


@dataclass(frozen=True)
class Tool:
    """A function with its options. `schema` is what the chat template shows."""

    name: str
    function: ToolFunction
    options: dict[str, Any]
    schema: dict[str, Any]

    def preload(self) -> None:
        """Load what calls share."""
        if load := tools.facts_of(self.function).preload:
            load(**self.options)

    async def call(self, arguments: dict[str, Any]) -> Any:
        """What the function returns. Raises whatever it raises."""
        returned = self.function(**arguments, **self.options)
        return await returned if inspect.isawaitable(returned) else returned

    def problem(self, arguments: Mapping[str, Any]) -> str:
        """Why the function cannot be called with `arguments`; "" if it can."""
        schema = self.schema["function"]["parameters"]
        given = {key: value for key, value in arguments.items() if not _is_absent(value, schema["properties"].get(key))}
        unknown = sorted(set(given) - set(schema["properties"]))
        if unknown:
            return f"unknown argument {', '.join(unknown)} (known: {', '.join(schema['properties']) or 'none'})"
        error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(given))
        return f"{'.'.join(map(str, [*error.absolute_path, '']))[:-1] or 'arguments'}: {error.message}" if error else ""


def _is_absent(value: Any, schema: Mapping[str, Any] | None) -> bool:
    return value is None and bool(schema and schema.get("nullable"))


def get_tool(path: str, options: Mapping[str, Any]) -> Tool:
    """The tool called `path`: a registered name or `module:function`. Raises ValueError: what is wrong with it."""
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
