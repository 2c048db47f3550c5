"""ToolEnvironment, `rollout.multi_turn.environment: tools`: the task's own messages, and answers to the model's calls.

A turn's calls run in parallel, at most `max_parallel_calls` of them; the results come in the order of the calls, each as a
message of the role "tool". What is wrong with a call is answered as such a result. A turn without a call is the last. The
reward is the task's. Metrics per turn: tool_calls, tool_errors (calls that were answered by an error), tool_seconds (the
sum over calls of wall-clock time).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import grpo_megatron.environments.tools  # noqa: F401 - registers the built-in tools
from grpo_megatron.environments.calls import Call, CallError, call_formats, parse_calls
from grpo_megatron.environments.environment import ChatMessage, Environment, Step
from grpo_megatron.environments.tool import Tool, ToolError, get_tool
from grpo_megatron.workers.program import describe

MAX_ANSWERS = 100_000  # characters of all results of a turn; the tokens of an observation are limited elsewhere
MAX_ERROR = 500  # characters of what is wrong with a call


class ToolEnvironment(Environment):
    """`tools`: names, or module:function. `format`: see calls.py. `options`: those of each tool, by its name."""

    def __init__(
        self,
        tools: Sequence[str] = (),
        format: str = "hermes",
        max_parallel_calls: int = 4,
        **options: Mapping[str, Any],
    ) -> None:
        call_formats.get(format)
        self._tools = {tool.name: tool for tool in _find(tools, options)}
        self._format = format
        self._max_parallel_calls = max_parallel_calls

    @classmethod
    def preload(
        cls,
        tools: Sequence[str] = (),
        format: str = "hermes",
        max_parallel_calls: int = 4,
        **options: Mapping[str, Any],
    ) -> None:
        """Load what each tool shares. Raises ValueError where the constructor does."""
        call_formats.get(format)
        for tool in _find(tools, options):
            tool.preload()

    def tools(self) -> list[dict[str, Any]]:
        """In the order of the config."""
        return [tool.schema for tool in self._tools.values()]

    def reset(self, row: Mapping[str, Any], seed: int) -> list[ChatMessage]:
        """The task's messages, which the caller has put into the row as "messages"."""
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
        return Step(messages, done=not calls, metrics=metrics)

    async def _answer(self, call: Call | CallError) -> tuple[str, str, bool, float]:
        """(name of the tool, text for the model, whether it is an error, seconds)."""
        if isinstance(call, CallError):
            return "error", f"Error: {call.message}", True, 0.0
        tool = self._tools.get(call.name)
        if tool is None:
            return "error", f"Error: unknown tool {call.name[:80]!r} (known: {', '.join(self._tools)})", True, 0.0
        if problem := tool.problem(call.arguments):
            return tool.name, f"Error: {problem[:MAX_ERROR]}", True, 0.0
        began = time.monotonic()
        text, failed = await asyncio.to_thread(_run, tool, call.arguments)
        return tool.name, text, failed, time.monotonic() - began


def _cut(text: str, length: int) -> str:
    """Without its middle, if it is longer."""
    half = length // 2
    return text if len(text) <= length else f"{text[:half]}\n[{len(text) - 2 * half} characters cut]\n{text[-half:]}"


def _run(tool: Tool, arguments: dict[str, Any]) -> tuple[str, bool]:
    """In a thread with an event loop of its own: a tool that blocks does not delay the others."""
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
    """Raises ValueError: no tool, an unknown one, one name twice, options of no tool."""
    found = {name.rpartition(":")[2]: get_tool(name, options.get(name.rpartition(":")[2], {})) for name in names}
    if len(found) < max(len(names), 1):
        raise ValueError(f"rollout.multi_turn.tools={list(names)} must name at least one tool, and each name once")
    if unknown := sorted(set(options) - set(found)):
        raise ValueError(f"rollout.multi_turn.kwargs has options of {', '.join(unknown)}, not in tools {sorted(found)}")
    return list(found.values())
