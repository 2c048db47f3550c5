"""Tool calls in what the model wrote. Each format is a function: text -> the calls in their order, well formed or not.

    hermes        <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number of them, anywhere (Qwen, Hermes)
    llama3_json   the text is {"name": "f", "parameters": {...}}, or several with ";" between; <|python_tag|> may precede
    python_tag    <|python_tag|>f.call(x=1) or f(x=1), else the text is the `code` of the tool "python" (Llama 3.1)

What precedes the last `</think>` is not read. A call that cannot be read is a CallError, which is shown to the model.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_megatron.registry import Registry

END_OF_TURN = re.compile(r"(?:<\|[\w ]*\|>|</s>|\s)+\Z")  # at the end of a turn
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class Call:
    """One call that can be read; whether there is such a tool is not known here."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class CallError:
    """One call that cannot be read, and why."""

    message: str


Parser = Callable[[str], list[Call | CallError]]
call_formats: Registry[Parser] = Registry("format of tool calls")


def parse_calls(call_format: str, completion: str) -> list[Call | CallError]:
    """The calls of one turn. Raises ValueError for an unknown format only."""
    return call_formats.get(call_format)(END_OF_TURN.sub("", completion.rpartition("</think>")[2]))


@call_formats.register("hermes")
def hermes(text: str) -> list[Call | CallError]:
    calls: list[Call | CallError] = []
    for part in text.split("<tool_call>")[1:]:
        body, closing, _ = part.partition("</tool_call>")
        if not closing:
            calls.append(CallError("a <tool_call> has no </tool_call>"))
            continue
        try:
            calls.append(_call(_loads(body)))
        except (ValueError, RecursionError) as error:
            calls.append(CallError(f"the text in <tool_call> is not a call in JSON: {error}"))
    return calls


@call_formats.register("llama3_json")
def llama3_json(text: str) -> list[Call | CallError]:
    tagged = text.lstrip().startswith(PYTHON_TAG)
    text = text.lstrip().removeprefix(PYTHON_TAG).lstrip()
    if not tagged and not (text.startswith("{") and '"name"' in text):
        return []
    calls: list[Call | CallError] = []
    while text.startswith("{") or not calls:
        try:
            value, end = DECODER.raw_decode(text)
            calls.append(_call(value))
        except (ValueError, RecursionError) as error:
            return [*calls, CallError(f"the text is not a call in JSON: {error}")]
        text = text[end:].lstrip("; \n\t,")
    return calls


@call_formats.register("python_tag")
def python_tag(text: str) -> list[Call | CallError]:
    _, tag, code = text.partition(PYTHON_TAG)
    if not tag:
        return []
    try:
        expression = ast.parse(code.strip(), mode="eval").body
        assert isinstance(expression, ast.Call)
        assert not expression.args
        function = expression.func
        if isinstance(function, ast.Attribute) and function.attr == "call":
            function = function.value
        assert isinstance(function, ast.Name)
        arguments = {keyword.arg or "**": ast.literal_eval(keyword.value) for keyword in expression.keywords}
        if function.id not in ("print", "exit"):
            return [Call(function.id, arguments)]
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
        pass  # not a single call with literal arguments
    return [Call("python", {"code": code.strip()})]


def _call(value: Any) -> Call:
    """Raises ValueError unless `value` is {"name": text, "arguments" or "parameters": object}."""
    if not isinstance(value, dict):
        raise ValueError(f"it is {type(value).__name__}, not an object")
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str):
        raise ValueError('"name" is missing or is no text')
    if isinstance(arguments, str):  # as OpenAI's API writes them
        arguments = _loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f'"arguments" is {type(arguments).__name__}, not an object')
    return Call(name, arguments)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _loads(text: str) -> Any:
    return DECODER.decode(text)
