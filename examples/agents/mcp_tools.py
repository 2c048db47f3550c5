"""MCP servers as tools: the model calls what a server of the Model Context Protocol offers, over stdio or HTTP.

    rollout:
      multi_turn:
        environment: mcp_tools:McpTools
        kwargs: {command: [python, examples/agents/mcp_server.py]}      # or {url: "http://tools.local:8000/mcp"}

Each trajectory has a connection of its own, and with `command` a server of its own, which ends with the trajectory. The reward
is the task's. An error that a tool or the server answers to a call is shown to the model. A server that is gone, or writes what
is no message and then no answer, ends the trajectory by the name `raised`.

Needs the package `mcp` (2.x), which vLLM installs.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from grpo_megatron.environments.environment import Step, TurnRequest
from grpo_megatron.environments.tool import Tool, ToolError, check_parameters
from grpo_megatron.environments.tool_environment import ToolEnvironment, call_formats

WHERE = "rollout.multi_turn.kwargs"
JUNK_S = 2.0  # seconds for an answer after the server has written what is no message: some print a greeting


class McpTools(ToolEnvironment):
    """`command`: the program of a server that speaks over stdio; or `url`: that of a server that speaks HTTP.

    `pass_env`: names of environment variables, such as keys, that the program gets besides PATH and HOME. `only`: the names
    of the tools that the model may call (default: all). `format`, `max_parallel_calls`: those of the environment `tools`.
    """

    def __init__(
        self,
        command: Sequence[str] = (),
        url: str = "",
        pass_env: Sequence[str] = (),
        only: Sequence[str] = (),
        format: str = "hermes",
        max_parallel_calls: int = 4,
    ) -> None:
        if bool(command) == bool(url):
            raise ValueError(f'{WHERE}: set either command: ["python", "server.py"] or url: "http://host:8000/mcp"')
        if command and shutil.which(command[0]) is None:
            raise ValueError(f"{WHERE}.command: there is no program {command[0]!r}; name one that can be run")
        if missing := [name for name in pass_env if name not in os.environ]:
            raise ValueError(f"{WHERE}.pass_env: the environment variable {missing[0]} is not set; set it")
        call_formats.get(format)
        self._command, self._url, self._only = list(command), url, list(only)
        self._variables = {name: os.environ[name] for name in pass_env}
        self._format, self._max_parallel_calls = format, max_parallel_calls
        self._tools: dict[str, Tool] = {}  # the server names them at the start of a trajectory
        self._lost = ""  # why the server does not answer any more
        self._junk: Any = None  # what the server has written that is no message

    @classmethod
    def preload(cls, **kwargs: Any) -> None:
        """Import the client."""
        import mcp.client.stdio
        import mcp.client.streamable_http  # noqa: F401

        cls(**kwargs)

    def reset(self, row: Mapping[str, Any], seed: int) -> Step:  # type: ignore[override]
        """The task's messages, and the tools that the server names. Raises ConnectionError: there is no server."""
        from anyio.from_thread import start_blocking_portal
        from mcp.client import Client
        from mcp.client.stdio import StdioServerParameters

        server: Any = self._url
        if self._command:
            program, *arguments = self._command
            server = StdioServerParameters(command=program, args=arguments, env=self._variables)
        # An event loop in a thread, which holds the connection. Both end with the trajectory's process.
        self._held = ExitStack()
        self._portal = self._held.enter_context(start_blocking_portal())
        try:
            client = Client(server, message_handler=self._read_junk)
            self._client = self._held.enter_context(self._portal.wrap_async_context_manager(client))
            listed = self._portal.call(self._answered, self._client.list_tools)
            offered = {tool.name: tool for tool in listed.tools}
        except Exception as error:  # noqa: BLE001 - a group of them, from the tasks of the connection
            raise ConnectionError(
                f"no MCP server answers at {self._url or self._command}: {_innermost(error)}"
            ) from None
        if unknown := sorted(set(self._only) - set(offered)):
            raise ValueError(f"{WHERE}.only={unknown}: the server has {sorted(offered)}")
        self._tools = {name: self._tool(offered[name]) for name in self._only or offered}
        return Step(list(row["messages"]), request=TurnRequest([tool.schema for tool in self._tools.values()]))

    async def step(self, completion: str) -> Step:
        """Answers all calls of a turn. Raises ConnectionError if the server is gone."""
        step = await super().step(completion)
        if self._lost:
            raise ConnectionError(f"the MCP server does not answer: {self._lost}")
        return step

    def _tool(self, offered: Any) -> Tool:
        parameters = {**offered.input_schema, "properties": offered.input_schema.get("properties") or {}}
        try:
            check_parameters(parameters)
        except ValueError as error:
            raise ValueError(f"the tool {offered.name!r} of the MCP server: {error}") from None
        function = {"name": offered.name, "description": offered.description or "", "parameters": parameters}
        return Tool(offered.name, self._caller(offered.name), {}, {"type": "function", "function": function})

    async def _read_junk(self, message: Any) -> None:
        """Keeps what the transport could not read; it gives messages to this handler, too."""
        if isinstance(message, Exception):
            self._junk = self._junk or message

    async def _answered(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Awaits a call, but not for long once the server has written what is no message: that was its answer."""
        task = asyncio.ensure_future(call(*arguments))
        while not task.done() and self._junk is None:
            await asyncio.wait([task], timeout=0.05)
        if not (await asyncio.wait([task], timeout=JUNK_S))[0]:
            task.cancel()
            raise ConnectionError(f"it has written what is no message: {str(self._junk)[:300]}")
        self._junk = None
        return task.result()

    def _caller(self, name: str) -> Callable[..., str]:
        def call(**arguments: Any) -> str:
            from mcp import MCPError
            from mcp_types import CONNECTION_CLOSED

            try:
                result = self._portal.call(self._answered, self._client.call_tool, name, arguments)
            except (MCPError, ConnectionError) as error:
                if isinstance(error, MCPError) and error.code != CONNECTION_CLOSED:
                    raise ToolError(str(error)) from None  # the server's answer to this call: the model may correct it
                self._lost = str(error)
                raise
            text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
            if result.is_error:
                raise ToolError(text)
            return text

        return call


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
