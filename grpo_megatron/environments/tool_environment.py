"""ToolEnvironment, `rollout.multi_turn.environment: tools`: the task's own messages, and answers to the model's calls.

A turn's calls run in parallel; the results come in the order of the calls, each as a message of the role "tool". What is
wrong with a call is answered as such a result. A turn without a call is the last. The reward is the task's. Metrics per turn:
tool_calls, tool_errors (calls that were answered by an error), tool_seconds (the sum over calls of wall-clock time).
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_megatron.environments.environment import ChatMessage, Environment, Step, environments
from grpo_megatron.environments.tool import Tool, ToolError, get_tool
from grpo_megatron.processes.process import describe
from grpo_megatron.registry import Registry

# -- tool calls in what the model wrote: each format is a function from a text to its calls, in their order ------------

END_OF_TURN = re.compile(r"(?:<\|[\w ]*\|>|</s>|\s)+\Z")  # at the end of a turn
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class Call:
    """One call that can be read, of a tool that may not exist."""

    name: str
    arguments: dict[str, Any]


Calls = list[Call | str]  # a text: why the call in its place cannot be read
Parser = Callable[[str], Calls]
call_formats: Registry[Parser] = Registry("format of tool calls")


def parse_calls(call_format: str, completion: str) -> Calls:
    """Parses the calls of one turn behind the last `</think>`. Raises ValueError for an unknown format only."""
    return call_formats.get(call_format)(END_OF_TURN.sub("", completion.rpartition("</think>")[2]))


@call_formats.register("hermes")
def hermes(text: str) -> Calls:
    """Parses any number of <tool_call>{"name": "f", "arguments": {...}}</tool_call>, anywhere (Qwen, Hermes)."""
    calls: Calls = []
    for part in text.split("<tool_call>")[1:]:
        body, closing, _ = part.partition("</tool_call>")
        if not closing:
            calls.append("a <tool_call> has no </tool_call>")
            continue
        try:
            calls.append(_call(DECODER.decode(body)))
        except (ValueError, RecursionError) as error:
            calls.append(f"the text in <tool_call> is not a call in JSON: {error}")
    return calls


@call_formats.register("llama3_json")
def llama3_json(text: str) -> Calls:
    """Parses {"name": "f", "parameters": {...}}, or several with ";" between, also behind <|python_tag|> (Llama 3)."""
    tagged = text.lstrip().startswith(PYTHON_TAG)
    text = text.lstrip().removeprefix(PYTHON_TAG).lstrip()
    if not tagged and not (text.startswith("{") and '"name"' in text):
        return []
    calls: Calls = []
    while text.startswith("{") or not calls:
        try:
            value, end = DECODER.raw_decode(text)
            calls.append(_call(value))
        except (ValueError, RecursionError) as error:
            return [*calls, f"the text is not a call in JSON: {error}"]
        text = text[end:].lstrip("; \n\t,")
    return calls


@call_formats.register("python_tag")
def python_tag(text: str) -> Calls:
    """Parses <|python_tag|>f.call(x=1) or f(x=1); any other text is the `code` of the tool "python" (Llama 3.1)."""
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
        arguments = DECODER.decode(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f'"arguments" is {type(arguments).__name__}, not an object')
    return Call(name, arguments)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_no_constant)
MAX_ANSWERS = 100_000  # characters of all results of a turn; the tokens of an observation are limited elsewhere
MAX_ERROR = 500  # characters of what is wrong with a call


@environments.register("tools")
class ToolEnvironment(Environment):
    """Tools for the model. `tools`: names, or module:function. `format`: a name in `call_formats`. `options`: by tool."""

    def __init__(
        self,
        tools: Sequence[str] = (),
        format: str = "hermes",
        max_parallel_calls: int = 4,
        **options: Mapping[str, Any],
    ) -> None:
        call_formats.get(format)
        self._tools = {tool.name: tool for tool in _find(tools, options)}
        self._format, self._max_parallel_calls = format, max_parallel_calls

    @classmethod
    def preload(cls, **kwargs: Any) -> None:
        """Loads what each tool shares. Raises ValueError where the constructor does."""
        for tool in cls(**kwargs)._tools.values():
            tool.preload()

    def tools(self) -> list[dict[str, Any]]:
        """Returns the schemas in the order of the config."""
        return [tool.schema for tool in self._tools.values()]

    def reset(self, row: Mapping[str, Any], seed: int) -> list[ChatMessage]:
        """Returns the task's messages, which the caller has put into the row as "messages"."""
        return list(row["messages"])

    async def step(self, completion: str) -> Step:
        """Answers all calls of a turn."""
        calls = parse_calls(self._format, completion)
        answers = await asyncio.gather(*(self._answer(call) for call in calls[: self._max_parallel_calls]))
        share = MAX_ANSWERS // max(len(answers), 1)
        messages = [{"role": "tool", "name": name, "content": _cut(text, share)} for name, text, _, _ in answers]
        left_out = len(calls) - len(answers)
        if left_out:
            text = f"Error: {left_out} more calls were not run; at most {self._max_parallel_calls} run per turn"
            messages.append({"role": "tool", "name": "error", "content": text})
        metrics = {
            "tool_calls": float(len(calls)),
            "tool_errors": float(left_out + sum(failed for _, _, failed, _ in answers)),
            "tool_seconds": sum(seconds for _, _, _, seconds in answers),
        }
        for tool in self._tools if len(self._tools) > 1 else ():
            of_tool = [(failed, seconds) for name, _, failed, seconds in answers if name == tool]
            metrics[f"tool_calls/{tool}"] = float(len(of_tool))
            metrics[f"tool_errors/{tool}"] = float(sum(failed for failed, _ in of_tool))
            metrics[f"tool_{tool}_seconds"] = sum(seconds for _, seconds in of_tool)
        return Step(messages, done=not calls, metrics=metrics)

    async def _answer(self, call: Call | str) -> tuple[str, str, bool, float]:
        """Returns (name of the tool, text for the model, is it an error, seconds)."""
        if isinstance(call, str):
            return "error", f"Error: {call}", True, 0.0
        tool = self._tools.get(call.name)
        if tool is None:
            return "error", f"Error: unknown tool {call.name[:80]!r} (known: {', '.join(self._tools)})", True, 0.0
        if problem := tool.problem(call.arguments):
            return tool.name, f"Error: {problem[:MAX_ERROR]}", True, 0.0
        began = time.monotonic()
        text, failed = await asyncio.to_thread(_run, tool, call.arguments)
        return tool.name, text, failed, time.monotonic() - began


def _cut(text: str, length: int) -> str:
    """Cuts the middle out of a longer text."""
    half = length // 2
    return text if len(text) <= length else f"{text[:half]}\n[{len(text) - 2 * half} characters cut]\n{text[-half:]}"


def _run(tool: Tool, arguments: dict[str, Any]) -> tuple[str, bool]:
    """Calls a tool in a thread with an event loop of its own: a tool that blocks does not delay the others."""
    try:
        returned = asyncio.run(tool.call(arguments))
        return returned if isinstance(returned, str) else json.dumps(returned, ensure_ascii=False), False
    except MemoryError:
        raise  # ends the trajectory
    except ToolError as error:
        return f"Error: {error}", True
    except BaseException as error:  # noqa: BLE001 - also sys.exit() in a tool
        return f"Error: {describe(error)}", True


def _find(names: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> list[Tool]:
    """Finds the tools. Raises ValueError: no tool, an unknown one, one name twice, options of no tool."""
    named = {name.rpartition(":")[2]: get_tool(name, options.get(name.rpartition(":")[2], {})) for name in names}
    if len(named) < max(len(names), 1):
        raise ValueError(f"rollout.multi_turn.tools={list(names)} must name at least one tool, and each name once")
    if unknown := sorted(set(options) - set(named)):
        raise ValueError(f"rollout.multi_turn.kwargs has options of {', '.join(unknown)}, not in tools {sorted(named)}")
    return list(named.values())
