"""The reward `calls`: tool calls against the calls that a row allows, as the single-turn part of BFCL (Gorilla) matches them.

A row has `function`, the schemas, and as its answer the calls in any order, as JSON: [{name: {parameter: [allowed values]}}].
The value "" allows to leave a parameter out. Texts are compared without case, blanks and ,./-_*^. With none (`[]`, or an `id`
with "irrelevance") no call is right; with an `id` that begins with live_relevance any call is. The response is a list of calls in
Python, as BFCL's prompt asks for it, or has calls in <tool_call>. The types are Python's, not those of Java and JavaScript.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_megatron.rewards.reward import rewards

Schema = Mapping[str, Any]
Named = tuple[str, dict[str, Any]]  # a call: its name, its arguments
_NAMES = ("string", "any", "integer", "float", "boolean", "array", "tuple", "dict")
TYPES: dict[str, Any] = dict(zip(_NAMES, (str, str, int, float, bool, list, list, dict), strict=True))
_DROPPED = re.compile(r"[ ,./\-_*^]")


@rewards.register("calls")
def calls_reward(
    completion: str, answer: str, *, function: str | Sequence[Schema] = (), id: str = ""
) -> dict[str, float]:
    """Returns 1 when the calls are those that the row allows, else 0. Raises ValueError: a wrong row."""
    schemas, allowed = (json.loads(one or "[]") if isinstance(one, str) else one for one in (function, answer))
    if not answer and "relevance" not in id:
        raise ValueError(
            f"row {id!r} has no ground_truth; join the file of possible answers, or set [] where no call is right"
        )
    try:
        calls = read_calls(completion)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # no calls: text, or {[1]: 2}
        calls = []
    right = match_calls(calls, allowed, schemas) if allowed else bool(calls) is id.startswith("live_relevance")
    return {"score": float(right), "acc": float(right)}


# -- the response --------------------------------------------------------------------------------------------------------


def read_calls(completion: str) -> list[Named]:
    """Reads the calls behind the thought. Raises ValueError, SyntaxError: it is no list of calls."""
    text = completion.rpartition("</think>")[2].strip("`\n ")
    if "<tool_call>" in text:
        from grpo_megatron.environments.tool_environment import Call, parse_calls

        found = parse_calls("hermes", text)
        if not all(isinstance(one, Call) for one in found):
            raise ValueError("a call cannot be read")
        return [(one.name, one.arguments) for one in found if isinstance(one, Call)]
    text = f"{'' if text.startswith('[') else '['}{text}{'' if text.endswith(']') else ']'}"
    body = ast.parse(text.strip("'"), mode="eval").body
    return [_call(node) for node in (body.elts if isinstance(body, ast.List) else [body])]


def _call(node: ast.expr) -> Named:
    if not isinstance(node, ast.Call):
        raise ValueError(f"{ast.unparse(node)[:40]!r} is no call")
    return ast.unparse(node.func), {str(one.arg): _value(one.value) for one in node.keywords}


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return "..." if value is Ellipsis else value
        case ast.UnaryOp(operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return (tuple if isinstance(node, ast.Tuple) else list)(map(_value, parts))
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {_value(key): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.Call(keywords=[_, *_]):
            return dict([_call(node)])
        case ast.Name() | ast.Call() | ast.Subscript():  # a variable: the text that names it
            return ast.unparse(node)
    raise ValueError(f"{ast.unparse(node)[:40]!r} is no value")


# -- the match -----------------------------------------------------------------------------------------------------------


def match_calls(calls: Sequence[Named], allowed: Sequence[Mapping[str, Schema]], schemas: Sequence[Schema]) -> bool:
    """Tells whether each allowed call, in their order, has a call of its own, and no call is left. Raises ValueError."""
    left, known = list(calls), {schema["name"]: schema["parameters"] for schema in reversed(schemas)}
    for one in allowed:
        ((name, values),) = one.items()
        if name not in known:
            raise ValueError(f"no schema in `function` is called {name!r}, which `ground_truth` names")
        fitting = [call for call in left if call[0] == name and _fits(call[1], values, known[name])]
        if not fitting or len(calls) != len(allowed):
            return False
        left.remove(fitting[0])
    return True


def _fits(arguments: Mapping[str, Any], values: Schema, schema: Schema) -> bool:
    known = schema["properties"]
    if not all(name in arguments for name in schema.get("required", ())):
        return False
    if not all(name in arguments or "" in options for name, options in values.items()):
        return False
    return all(
        name in known and name in values and _is_allowed(value, values[name], known[name])
        for name, value in arguments.items()
    )


def _is_allowed(value: Any, options: Sequence[Any], schema: Schema) -> bool:
    kind = schema["type"]
    if kind not in TYPES:
        raise ValueError(f"the type {kind!r} is none of {', '.join(TYPES)}")
    inner = TYPES[schema["items"]["type"]] if kind in ("array", "tuple") else None
    if (kind, type(value)) in (("float", int), ("tuple", tuple)):
        value = TYPES[kind](value)
    of_options = _type_of(options)
    if type(value) is not TYPES[kind]:  # a variable, where the options are the texts that name it
        return type(value) is of_options and value in options
    if inner and not any(_has_items(value, option, inner) for option in options):
        return False
    if of_options not in (None, TYPES[kind]):
        return value in options
    if kind == "dict":
        return any(_fits_table(value, option) for option in options)
    if inner is dict:
        return any(len(value) == len(option) and all(map(_fits_table, value, option)) for option in options)
    if inner:
        return [*map(_plain, value)] in [[*map(_plain, option)] for option in options]
    return _plain(value) in map(_plain, options)


def _type_of(options: Sequence[Any]) -> type | None:
    return next((type(option) for option in options if option != ""), None)


def _has_items(value: Any, option: Any, inner: type) -> bool:
    return not isinstance(option, list) or all(type(item) in (inner, _type_of(option)) for item in value)


def _fits_table(value: Any, option: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(option, dict):
        return False
    known = all(name in option and _plain(item) in map(_plain, option[name]) for name, item in value.items())
    return known and all(name in value or "" in options for name, options in option.items())


def _plain(value: Any) -> Any:
    return _DROPPED.sub("", value).lower().replace("'", '"') if isinstance(value, str) else value
