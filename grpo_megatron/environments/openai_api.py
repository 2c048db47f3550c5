"""OpenAI's API and Anthropic's messages on a loopback address: the run's policy answers one trajectory, and is recorded.

POST /t/TRAJECTORY/v1/chat/completions, /v1/responses, /v1/completions, /v1/messages; GET /v1/models, /v1/models/NAME. The
server runs in the trajectory's process, and is gone with it. The client gets text; the run keeps the tokens
(sampling/multi_turn.py). What would make the tokens other than the run's own, and each field that is not in REQUEST_FIELDS,
gets a 400 that says why. A client that repeats its request before the answer, as OpenAI's does after a time-out, waits for
the same answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from grpo_megatron.data.images import DATA_URI, check_image
from grpo_megatron.environments.environment import (
    ChatMessage,
    TurnRequest,
    check_call,
    plain_json,
    plain_request,
    written_turn,
)
from grpo_megatron.environments.tool_environment import Call, parse_calls
from grpo_megatron.processes.pool import FloodedError
from grpo_megatron.processes.process import describe, valid_text

MAX_BODY = 8 << 20  # bytes of a request
MAX_REFUSED = 200  # requests of one trajectory; then it is flooded
IDLE_S = 10.0  # seconds for the headers and the body of a request
Json = dict[str, Any]


class RefusedError(ValueError):
    """An error of a request, for its sender."""


@dataclass(frozen=True)
class ClientRequest:
    """One request to the model. `messages` is the full conversation; empty where `request.prompt` is set."""

    messages: list[ChatMessage]
    request: TurnRequest
    wants_logprobs: bool
    streams: bool
    reads_calls: bool = True  # False, with tool_choice "none": a call in the answer is text
    streams_usage: bool = False  # the last chunk of the stream has the usage and no choice
    num_answers: int = 1  # the second and further ones are branches


@dataclass(frozen=True)
class Reply:
    """The model's turn as a client reads it. `calls`: (id, name, arguments as JSON)."""

    text: str
    content: str  # `text` without the calls
    calls: list[tuple[str, str, str]]
    finish_reason: str
    tokens: list[tuple[str, float]]  # with log-probabilities
    prompt_tokens: int
    number: int
    stopped_by: str | None = None  # a text of the request's `stop`

    @property
    def message(self) -> ChatMessage:
        """Returns the turn as OpenAI's API writes it."""
        calls = [{"id": key, "type": "function", "function": {"name": n, "arguments": a}} for key, n, a in self.calls]
        message: ChatMessage = {"role": "assistant", "content": self.content or (None if calls else "")}
        return message | ({"tool_calls": calls} if calls else {})

    @property
    def usage(self) -> Json:
        """Returns numbers of tokens."""
        written = len(self.tokens)
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": written}
        return counts | {"total_tokens": self.prompt_tokens + written}


# -- what the run decides ----------------------------------------------------------------------------------------------

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "chat/completions", "completions", "responses", "messages"
ANY: tuple[Any, ...] = (...,)
READ = {  # protocol -> fields whose values are read
    CHAT: "messages tools max_completion_tokens max_tokens stop n seed",
    COMPLETIONS: "prompt max_tokens stop n seed",
    RESPONSES: "input instructions previous_response_id tools max_output_tokens stop",
    MESSAGES: "messages system tools max_tokens stop_sequences",
}
UNSEEN = (  # no token depends on them
    "model temperature user metadata store stream_options service_tier safety_identifier prompt_cache_key"
    " prompt_cache_options prompt_cache_retention request_id session_id cache_salt priority"
)
NEUTRAL: dict[str, tuple[Any, ...]] = {  # field of OpenAI's or vLLM's server -> the values that change nothing
    **dict.fromkeys(("top_p", "best_of", "repetition_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "top_logprobs", "min_tokens"), (0,)),
    **dict.fromkeys(("echo", "ignore_eos", "continue_final_message", "use_beam_search", "background"), (False,)),
    **dict.fromkeys(("include_stop_str_in_output", "return_token_ids", "return_tokens_as_token_ids"), (False,)),
    **dict.fromkeys(("add_generation_prompt", "parallel_tool_calls", "include_reasoning"), (True,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("stop_token_ids", "bad_words", "documents"), ([],)),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs", "reasoning"), ({},)),
    "stream": (True, False),
    "top_k": (-1, 0),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "include": ([], ["reasoning.encrypted_content"]),
    "truncation": ("disabled",),
    "text": ({}, {"format": {"type": "text"}}),
}
REQUEST_FIELDS = {  # protocol -> field -> accepted values; null is accepted as absence everywhere
    form: {**dict.fromkeys(f"{UNSEEN} {read}".split(), ANY), **NEUTRAL, "logprobs": values}
    for (form, read), values in zip(READ.items(), ((True, False), (0, 1), (), ()), strict=True)
}
REQUEST_FIELDS[MESSAGES] |= {
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "auto"}, {"type": "none"}, {"type": "auto", "disable_parallel_tool_use": False}),
}
WHY = {
    "top_logprobs": "the run records the log-probabilities of the generated tokens only",
    "parallel_tool_calls": "the model writes as many calls as it does",
    **dict.fromkeys(("chat_template", "chat_template_kwargs", "documents"), "the run renders the messages"),
}
TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image_url", "input_image")
MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


def _check_fields(form: str, body: Json, model: str, temperature: float) -> None:
    if body.get("model") not in (None, model):
        raise RefusedError(f"model={json.dumps(body['model'])[:200]}: the only model here is {model!r}")
    allowed = {**REQUEST_FIELDS[form], "temperature": (temperature,)}
    for name, value in body.items():
        values = allowed.get(name, ())
        if value is not None and values is not ANY and not any(_equal(value, one) for one in values):
            values_text = "".join(f", or set {json.dumps(one)}" for one in values)
            why = WHY.get(name, "the run decides how tokens are sampled" if values else "it is not read here")
            raise RefusedError(f"{name[:80]}={json.dumps(value)[:200]}: {why}; leave it out{values_text}")


def _equal(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _content(value: Any) -> str:
    """Returns the text of a content: itself, or its parts."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS and isinstance(part.get("text"), str)
        for part in value
    ):
        return "".join(part["text"] for part in value)
    raise RefusedError(f"content is {json.dumps(value)[:200]}; only text is read")


def _shown(value: Any) -> Any:
    """Returns a content that may show images: its text, or its parts as an environment's message has them."""
    if not isinstance(value, list) or not any(isinstance(p, dict) and p.get("type") in IMAGE_PARTS for p in value):
        return _content(value)
    return [_shown_part(part) for part in value]


def _shown_part(part: Any) -> Json:
    if not isinstance(part, dict) or part.get("type") not in IMAGE_PARTS:
        return {"type": "text", "text": _content([part])}
    url = part.get("image_url")
    named = url if isinstance(url, dict) else {**part, "url": url}
    if (detail := named.get("detail")) not in (None, "auto", "high"):
        text = 'the model\'s processor decides the size; leave it out, or set "auto"'
        raise RefusedError(f"detail={json.dumps(detail)[:80]}: {text}")
    head, _, body = str(named.get("url")).partition(",")
    if not (head.startswith("data:image") and head.endswith(";base64")):
        raise RefusedError(f"an image is {head[:80]!r}; only data:image/...;base64,... is read, and nothing is fetched")
    check_image(image := DATA_URI + body)
    return {"type": "image", "image": image}


def _message(message: Json) -> ChatMessage:
    """Returns a message as it is rendered. What a client adds to it may only be empty."""
    if not (isinstance(message.get("role"), str) and message["role"]):
        raise RefusedError("a message has no role")
    if added := [name for name, value in message.items() if name not in MESSAGE and value not in (None, "", [], {})]:
        raise RefusedError(f"a message has the field {added[0][:80]!r}, which is not read here; leave it out")
    read = {name: message[name] for name in MESSAGE if message.get(name) not in (None, "", [])}
    for call in read.get("tool_calls", ()):
        check_call(call)
    return {**read, "content": _shown(message.get("content"))}


def _listed(body: Json, name: str) -> list[Any]:
    value = [] if body.get(name) is None else body[name]
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise RefusedError(f"{name} is no list of objects")
    return value


def _tools(body: Json, *, are_flat: bool = False) -> list[Any]:
    tools = _listed(body, "tools")
    if are_flat:  # as responses has them; `strict` would need guided decoding
        inner = [{name: value for name, value in tool.items() if name not in ("type", "strict")} for tool in tools]
        tools = [{"type": tool.get("type"), "function": one} for tool, one in zip(tools, inner, strict=True)]
    for tool in tools:
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise RefusedError(f"a tool of the type {tool.get('type')!r}: only functions are known here")
        if not isinstance(function.get("name"), str) or not isinstance(function.get("parameters", {}), dict | None):
            raise RefusedError("a function has no name, or parameters that are no object")
    return tools


def _turn_request(body: Json, *limits: str, tools: list[Any], prompt: str | list[int] | None = None) -> TurnRequest:
    given = {body[name] for name in limits if body.get(name) is not None}
    if len(given) > 1:
        raise RefusedError(f"{' and '.join(limits)} differ: set one of them")
    stop = body.get("stop") or []
    seed = body.get("seed")
    request = TurnRequest(tools, next(iter(given), None), [stop] if isinstance(stop, str) else stop, prompt, seed=seed)
    plain_request(request, MAX_BODY)
    return request


# -- the four forms: request -> ClientRequest, Reply -> response ------------------------------------------------------


def read_chat(body: Json, conversation: Conversation) -> ClientRequest:
    """Reads a request of chat completions."""
    messages = [_message(message) for message in _listed(body, "messages")]
    request = _turn_request(body, "max_completion_tokens", "max_tokens", tools=_tools(body))
    streams = bool(body.get("stream")), _reads_calls(body), _streams_usage(body), _num_answers(body)
    return ClientRequest(messages, request, bool(body.get("logprobs")), *streams)


def read_completions(body: Json, conversation: Conversation) -> ClientRequest:
    """Reads a request of completions, with raw text or token ids."""
    prompt = body.get("prompt")
    is_ids = isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
    if not is_ids and not (isinstance(prompt, str) and prompt):
        raise RefusedError("prompt: one text, or one list of token ids")
    request = _turn_request(body, "max_tokens", tools=[], prompt=prompt)
    streams = bool(body.get("stream")), False, _streams_usage(body), _num_answers(body)
    return ClientRequest([], request, body.get("logprobs") is not None, *streams)


def read_responses(body: Json, conversation: Conversation) -> ClientRequest:
    """Reads a request of responses. An answer's message and its calls are several items there, and one message here.

    `previous_response_id` stands for all messages up to that answer. `instructions` are the first message; beside an id
    they may be left out, and are those of before.
    """
    messages: list[ChatMessage] = []
    if (previous := body.get("previous_response_id")) is not None:
        if not isinstance(previous, str) or previous not in conversation.histories:
            raise RefusedError(f"previous_response_id={json.dumps(previous)[:200]}: no answer here has this id")
        messages = list(conversation.histories[previous])
    if instructions := _content(body.get("instructions")):
        rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
        messages = [{"role": "system", "content": instructions}, *rest]
    items, start = body.get("input"), len(messages)
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else _listed(body, "input"):
        kind = item.get("type", "message")
        is_answer = kind == "function_call" or item.get("role") == "assistant"
        if is_answer and not (len(messages) > start and messages[-1]["role"] == "assistant"):
            messages.append({"role": "assistant", "content": ""})
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1] = _message({**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", []), call]})
        elif kind == "function_call_output":
            content = _shown(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind == "message" and is_answer:
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + _content(item.get("content"))}
        elif kind == "message":
            messages.append(_message({"role": item.get("role"), "content": item.get("content")}))
        else:
            raise RefusedError(f"an item of the type {kind!r} is not read")
    request = _turn_request(body, "max_output_tokens", tools=_tools(body, are_flat=True))
    return ClientRequest(messages, request, False, bool(body.get("stream")), _reads_calls(body))


def read_messages(body: Json, conversation: Conversation) -> ClientRequest:
    """Reads a request of Anthropic's messages. A user's message with results of tools is several messages here."""
    system = _content(body.get("system"))
    messages: list[ChatMessage] = [{"role": "system", "content": system}] if system else []
    for message in _listed(body, "messages"):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            raise RefusedError(f"a message of the role {str(role)[:80]!r}: user or assistant")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _listed(message, "content")
        read: list[ChatMessage] = [{"role": role, "content": ""}] if role == "assistant" else []
        for block in blocks:
            kind = block.get("type")
            if kind == "text":
                if not read or read[-1]["role"] == "tool":
                    read.append({"role": role, "content": ""})
                read[-1]["content"] += _content([block])
            elif kind == "tool_use" and role == "assistant":
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"))}
                call = {"id": block.get("id"), "type": "function", "function": function}
                read[-1] = _message({**read[-1], "tool_calls": [*read[-1].get("tool_calls", []), call]})
            elif kind == "tool_result" and role == "user":
                text = _content(block.get("content"))
                read.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
            else:
                raise RefusedError(f"a block of the type {str(kind)[:80]!r} of the role {role} is not read")
        messages += read or [{"role": role, "content": ""}]
    names = {"type": "type", "name": "name", "description": "description", "input_schema": "parameters"}
    tools = [{to: tool[name] for name, to in names.items() if name in tool} for tool in _listed(body, "tools")]
    tools = [{**tool, "type": "function" if tool.get("type") in (None, "custom") else tool["type"]} for tool in tools]
    tools = _tools({"tools": tools}, are_flat=True)
    request = _turn_request({**body, "stop": body.get("stop_sequences")}, "max_tokens", tools=tools)
    return ClientRequest(messages, request, False, bool(body.get("stream")), _reads_calls(body))


def _reads_calls(body: Json) -> bool:
    return body.get("tool_choice") not in ("none", {"type": "none"})


def _num_answers(body: Json) -> int:
    count = 1 if body.get("n") is None else body["n"]
    if type(count) is not int or count < 1 or (count > 1 and body.get("stream")):
        raise RefusedError(f"n={json.dumps(count)[:200]}: leave it out, or set 1 or more (1 in a stream)")
    return count


def _streams_usage(body: Json) -> bool:
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise RefusedError("stream_options is no object")
    return bool(options.get("include_usage"))


def _usage_chunk(reply: Reply, head: Json, question: ClientRequest) -> list[Json]:
    return [{**head, "choices": [], "usage": reply.usage}] if question.streams_usage else []


def write_chat(reply: Reply, model: str, question: ClientRequest) -> tuple[Json, list[Json]]:
    """Returns the response, and the same as the chunks of a stream."""
    head = {"id": f"chatcmpl-{reply.number}", "created": 0, "model": model}
    choice: Json = {"index": 0, "finish_reason": reply.finish_reason, "logprobs": None}
    if question.wants_logprobs:
        nothing: Json = {"bytes": None, "top_logprobs": []}
        content = [{"token": text, "logprob": value, **nothing} for text, value in reply.tokens]
        choice["logprobs"] = {"content": content, "refusal": None}
    choices = [{**choice, "message": reply.message}]
    response = {**head, "object": "chat.completion", "choices": choices, "usage": reply.usage}
    delta = dict(reply.message)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    head["object"] = "chat.completion.chunk"
    first = {**head, "choices": [{**choice, "finish_reason": None, "delta": delta}]}
    last = {**head, "choices": [{**choice, "logprobs": None, "delta": {}}]}
    return response, [first, last, *_usage_chunk(reply, head, question)]


def write_completions(reply: Reply, model: str, question: ClientRequest) -> tuple[Json, list[Json]]:
    """Returns the same as `write_chat`."""
    choice: Json = {"index": 0, "text": reply.text, "finish_reason": reply.finish_reason, "logprobs": None}
    if question.wants_logprobs:
        texts, values = [text for text, _ in reply.tokens], [value for _, value in reply.tokens]
        choice["logprobs"] = {"tokens": texts, "token_logprobs": values, "text_offset": [], "top_logprobs": None}
    head: Json = {"id": f"cmpl-{reply.number}", "object": "text_completion", "created": 0, "model": model}
    chunk = {**head, "choices": [choice]}
    return chunk | {"usage": reply.usage}, [chunk, *_usage_chunk(reply, head, question)]


def write_responses(reply: Reply, model: str, question: ClientRequest) -> tuple[Json, list[Json]]:
    """Returns the same as `write_chat`. The stream has the events that carry something."""
    key = f"resp_{reply.number}"
    output: list[Json] = []
    if reply.content or not reply.calls:
        part = {"type": "output_text", "text": reply.content, "annotations": []}
        message = {"type": "message", "id": f"msg_{reply.number}", "role": "assistant", "status": "completed"}
        output.append({**message, "content": [part]})
    for call, name, arguments in reply.calls:
        item = {"type": "function_call", "id": f"fc_{call}", "call_id": call, "name": name, "arguments": arguments}
        output.append({**item, "status": "completed"})
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": len(reply.tokens)}
    usage["total_tokens"] = sum(usage.values())
    is_cut = reply.finish_reason == "length"
    response: Json = {
        "id": key,
        "object": "response",
        "created_at": 0,
        "model": model,
        "output": output,
        "usage": usage,
    }
    response |= {"status": "incomplete" if is_cut else "completed", "parallel_tool_calls": True, "tool_choice": "auto"}
    response |= {"tools": [], "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None}
    events: list[Json] = [{"type": "response.created", "response": {**response, "status": "in_progress", "output": []}}]
    for place, item in enumerate(output):
        place_of = {"output_index": place, "item_id": item["id"]}
        events.append({"type": "response.output_item.added", "output_index": place, "item": item})
        if item["type"] == "message":
            text = {"content_index": 0, "logprobs": [], "delta": reply.content}
            events.append({"type": "response.output_text.delta", **place_of, **text})
        events.append({"type": "response.output_item.done", "output_index": place, "item": item})
    events.append({"type": "response.incomplete" if is_cut else "response.completed", "response": response})
    return response, [{**event, "sequence_number": number} for number, event in enumerate(events)]


STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}


def write_messages(reply: Reply, model: str, question: ClientRequest) -> tuple[Json, list[Json]]:
    """Returns the same as `write_chat`."""
    content: list[Json] = []
    added: list[tuple[Json, Json]] = []  # of each block: its fields as it begins, and what follows
    if reply.content:
        content.append({"type": "text", "text": reply.content})
        added.append(({"text": ""}, {"type": "text_delta", "text": reply.content}))
    for key, name, arguments in reply.calls:
        content.append({"type": "tool_use", "id": key, "name": name, "input": json.loads(arguments)})
        added.append(({"input": {}}, {"type": "input_json_delta", "partial_json": arguments}))
    reason = STOP_REASONS.get(reply.finish_reason, "stop_sequence" if reply.stopped_by is not None else "end_turn")
    end = {"stop_reason": reason, "stop_sequence": reply.stopped_by if reason == "stop_sequence" else None}
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": len(reply.tokens)}
    head: Json = {"id": f"msg_{reply.number}", "type": "message", "role": "assistant", "model": model}
    start = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**usage, "output_tokens": 0}}
    events: list[Json] = [{"type": "message_start", "message": start}]
    for place, (block, (empty, delta)) in enumerate(zip(content, added, strict=True)):
        events.append({"type": "content_block_start", "index": place, "content_block": {**block, **empty}})
        events.append({"type": "content_block_delta", "index": place, "delta": delta})
        events.append({"type": "content_block_stop", "index": place})
    events += [{"type": "message_delta", "delta": end, "usage": usage}, {"type": "message_stop"}]
    return {**head, "content": content, **end, "usage": usage}, events


def _with_choices(written: Sequence[Json]) -> Json:
    """Returns one response with the choices of several. The prompt's tokens are counted once."""
    first, usages = written[0], [one["usage"] for one in written]
    counts = {"prompt_tokens": usages[0]["prompt_tokens"]}
    counts["completion_tokens"] = sum(usage["completion_tokens"] for usage in usages)
    choices = [{**one["choices"][0], "index": index} for index, one in enumerate(written)]
    return {**first, "choices": choices, "usage": counts | {"total_tokens": sum(counts.values())}}


PROTOCOLS: dict[str, tuple[Callable[[Json, Conversation], ClientRequest], Callable[..., tuple[Json, list[Json]]]]] = {
    CHAT: (read_chat, write_chat),
    COMPLETIONS: (read_completions, write_completions),
    RESPONSES: (read_responses, write_responses),
    MESSAGES: (read_messages, write_messages),
}


# -- the conversation --------------------------------------------------------------------------------------------------


def _same(message: Mapping[str, Any]) -> Json:
    """Returns what two forms of one message share, without ids of calls, names and fields that a client adds."""
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return {
        "role": message["role"],
        "content": message.get("content") or "",
        "reasoning": message.get("reasoning_content"),
        "calls": [(call.get("name"), _arguments(call.get("arguments"))) for call in calls],
    }


def _arguments(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


@dataclass
class Conversation:
    """The conversation so far. `prompt`: as text or ids, where the client speaks in those.

    A request must continue it: its messages begin with those of the request before and the answer to it, compared as
    messages, and only what follows is rendered and becomes an observation, so that nothing is tokenized twice.
    """

    call_format: str
    messages: list[ChatMessage] = field(default_factory=list)
    prompt: str | list[int] | None = None
    tools: list[Any] = field(default_factory=list)
    num_turns: int = 0
    histories: dict[str, list[ChatMessage]] = field(default_factory=dict)  # by the id of an answer: all up to it

    def new_part(self, question: ClientRequest) -> tuple[list[ChatMessage], TurnRequest]:
        """Returns what is new in a question. Raises RefusedError where it does not continue the conversation."""
        request, prompt = question.request, question.request.prompt
        if not self.num_turns:
            if not question.messages and prompt is None:
                raise RefusedError("there is no message")
            return question.messages, request
        if type(prompt) is not type(self.prompt):
            raise RefusedError("a trajectory speaks in messages, in text or in token ids, and stays with it")
        if request.tools != self.tools:
            raise RefusedError("the tools differ from those of the first request, which the model has read")
        if prompt is not None:
            assert self.prompt is not None
            if prompt[: len(self.prompt)] != self.prompt or len(prompt) == len(self.prompt):
                raise RefusedError(f"the prompt does not go on where the last one and its completion end{NO_BRANCH}")
            return [], replace(request, tools=[], prompt=prompt[len(self.prompt) :])
        for number, (before, now) in enumerate(zip(self.messages, question.messages, strict=False)):
            if _same(before) != _same(now):
                raise RefusedError(f"message {number} is another one than before{NO_BRANCH}")
        new = question.messages[len(self.messages) :]
        if not new:
            raise RefusedError(f"nothing follows the messages and the answer before{NO_BRANCH}")
        answer = question.messages[len(self.messages) - 1]
        return new, replace(request, tools=[], answer=answer)

    def add(self, question: ClientRequest, turn: Json) -> Reply:
        """Adds the question and the model's turn, a JSON object of `sampling/multi_turn.py`."""
        text, finish = turn["text"], turn["finish_reason"]
        stopped_by = None
        for stop in question.request.stop:
            text, found, _ = text.partition(stop)
            stopped_by = found or stopped_by
        reads_calls = question.request.tools and question.reads_calls
        calls = parse_calls(self.call_format, text) if reads_calls else []
        named: list[tuple[str, str, str]] = []
        for i, call in enumerate(calls):
            with contextlib.suppress(TypeError, ValueError, RecursionError):  # Python's literals that JSON cannot write
                if isinstance(call, Call):
                    arguments = json.dumps(call.arguments, allow_nan=False)
                    named.append((f"call_{self.num_turns}_{i}", valid_text(call.name), arguments))
        content = text.partition("<tool_call>")[0].strip() if named and self.call_format == "hermes" else text
        content = "" if named and self.call_format != "hermes" else content
        tokens = list(zip(turn["tokens"], turn["logprobs"], strict=True))
        finish = "tool_calls" if named else finish
        reply = Reply(text, content, named, finish, tokens, turn["prompt_tokens"], self.num_turns, stopped_by)
        self.num_turns, self.tools = self.num_turns + 1, question.request.tools
        self.messages = [*question.messages, reply.message]
        self.histories[f"resp_{reply.number}"] = self.messages
        self.prompt = question.request.prompt
        if self.prompt is not None:
            self.prompt = self.prompt + text if isinstance(self.prompt, str) else [*self.prompt, *turn["token_ids"]]
        return reply


RECORDED = ". Branches are recorded with rollout.multi_turn.kwargs.branches=samples only"
NO_BRANCH = (
    "; a trajectory is one conversation, each request of which repeats the one before and its answer, and adds to them"
    f"{RECORDED}"
)


# -- the server --------------------------------------------------------------------------------------------------------


class _Connection(H11Protocol):
    """A connection, which is closed when no request with the key has come for IDLE_S.

    uvicorn itself limits the pause after an answer only.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(IDLE_S, self._look, None)

    def _look(self, last: RequestResponseCycle | None) -> None:
        """Goes on where a request has come since the last look, or where one waits for the model."""
        cycle = self.cycle
        waits = (
            cycle is not None and not (cycle.response_complete or cycle.more_body) and self.scope["state"].get("key")
        )
        if waits or cycle is not last:
            self.loop.call_later(IDLE_S, self._look, cycle)
        else:
            self.transport.close()


SERVER: Json = {"http": _Connection, "ws": "none", "log_config": None, "access_log": False, "lifespan": "off"}


class Endpoint:
    """The server, in a thread. `questions` has what the client asks; `answer` is to be called once for each.

    An item of `questions` is (messages, TurnRequest), or an error that ends the trajectory. The command puts None at its end.
    """

    def __init__(self, model: str, temperature: float, call_format: str, branches: bool = False) -> None:
        self._model, self._temperature = model, temperature
        self.key = secrets.token_urlsafe(24)
        self._call_format, self._branches = call_format, branches
        self.questions: queue.Queue[tuple[list[ChatMessage], TurnRequest] | Exception | None] = queue.Queue()
        # used in the loop's thread only
        self._pending: tuple[bytes, ClientRequest, asyncio.Future[list[Reply]]] | None = None
        self._replies: list[Reply] = []  # to the pending request
        self._reset()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each answer waits 40 ms for an ACK
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/t/{self.key}/v1"

    def _reset(self) -> None:
        if self._pending is not None:
            self._pending[2].set_exception(RefusedError("its trajectory has ended"))
        self._pending, self._num_refused, self._conversation = None, 0, Conversation(self._call_format)

    def begin_conversation(self) -> None:
        """Begins another trajectory at the same address, for a client that stays."""
        self.questions = queue.Queue()
        self._loop.call_soon_threadsafe(self._reset)

    def serve(self) -> None:
        """Begins to answer. Clients that have connected before are answered, too."""
        threading.Thread(target=self._serve, daemon=True).start()

    def _application(self) -> Starlette:
        posts = Route("/t/{key}/v1/{form:path}", self._post, methods=["POST"])
        models = [Route(f"/t/{{key}}/v1/models{name}", self._models) for name in ("", "/{name:path}")]
        return Starlette(routes=[*models, posts])

    def _serve(self) -> None:
        self._loop = asyncio.new_event_loop()
        server = uvicorn.Server(uvicorn.Config(self._application(), **SERVER))
        self._loop.run_until_complete(server.serve(sockets=[self._socket]))

    async def rehearse(self, openai: Any, http: Any) -> None:
        """Answers one request of OpenAI's client without a connection, for what both sides build at their first use."""
        self._socket.close()
        self._loop, application = asyncio.get_running_loop(), self._application()
        uvicorn.Config(application, **SERVER).load()
        "localhost".encode("idna")  # imports that encoding
        client = http.AsyncClient(transport=http.ASGITransport(application))
        async with openai.AsyncOpenAI(base_url=self.url, api_key=self.key, http_client=client) as asking:
            messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
            request = asyncio.create_task(asking.chat.completions.create(model=self._model, messages=messages))
            while self.questions.empty() and not request.done():
                await asyncio.sleep(0)
            self.answer(json.loads(written_turn("x", [1], ["x"], [0.0])))
            await request

    def answer(self, turn: Json) -> None:
        """Gives the model's turn to the client that waits."""

        def give() -> None:
            assert self._pending is not None
            _, question, waiting = self._pending
            try:
                self._replies.append(self._conversation.add(question, turn))
            except Exception as error:  # noqa: BLE001 - of whatever the model has written
                self._pending = None
                self.questions.put(error)
                return
            if len(self._replies) < question.num_answers:
                self.questions.put((question.messages, replace(question.request, branch=True)))
            else:
                self._pending = None
                waiting.set_result(self._replies)

        self._loop.call_soon_threadsafe(give)

    async def _models(self, request: Request) -> Response:
        if not self._has_key(request):
            return _without_key()
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "run"}
        name = request.path_params.get("name", self._model)
        if name != self._model:
            return self._refused(f"there is no model {name[:200]!r}; the only one here is {self._model!r}", 404)
        return JSONResponse(model if "name" in request.path_params else {"object": "list", "data": [model]})

    async def _post(self, request: Request) -> Response:
        if not self._has_key(request):
            return _without_key()
        form = request.path_params["form"]
        if form not in PROTOCOLS:
            return self._refused(f"there is no path {form[:200]!r}", 404)
        try:
            question, replies = await self._reply(form, await _body(request))
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:  # noqa: BLE001 - of whatever a client has sent
            is_plain = type(error) in (RefusedError, ValueError)
            return self._refused(str(error) if is_plain else f"the request cannot be read: {describe(error)}", 400)
        written = [PROTOCOLS[form][1](reply, self._model, question) for reply in replies]
        response, chunks = written[0]
        if not question.streams:
            return JSONResponse(response if len(replies) == 1 else _with_choices([one for one, _ in written]))
        return StreamingResponse(_events(chunks, named=form in (RESPONSES, MESSAGES)), media_type="text/event-stream")

    async def _reply(self, form: str, body: bytes) -> tuple[ClientRequest, list[Reply]]:
        if self._pending is not None and self._pending[0] == body:
            return self._pending[1], await asyncio.shield(self._pending[2])
        read = plain_json(json.loads(body), MAX_BODY)
        if not isinstance(read, dict):
            raise RefusedError("the body is no object")
        _check_fields(form, read, self._model, self._temperature)
        question = PROTOCOLS[form][0](read, self._conversation)
        if self._pending is not None:
            raise RefusedError("another request is being answered; a trajectory has one at a time")
        if question.num_answers > 1 and not self._branches:
            count = question.num_answers
            raise RefusedError(f"n={count}: each further answer begins a sequence, and they are not recorded{RECORDED}")
        try:
            new = self._conversation.new_part(question)
        except RefusedError:
            if not (self._branches and self._conversation.num_turns and (question.messages or question.request.prompt)):
                raise
            new = question.messages, replace(question.request, branch=True)
        waiting: asyncio.Future[list[Reply]] = self._loop.create_future()
        self._pending, self._replies = (body, question, waiting), []
        self.questions.put(new)
        return question, await asyncio.shield(waiting)  # a client that hangs up ends its own wait only

    def _has_key(self, request: Request) -> bool:
        request.state.key = secrets.compare_digest(request.path_params["key"].encode(), self.key.encode())
        return bool(request.state.key)

    def _refused(self, text: str, status: int) -> Response:
        self._num_refused += 1
        if self._num_refused == MAX_REFUSED:
            self.questions.put(FloodedError(f"{MAX_REFUSED} of its requests were refused, the last one: {text}"))
        return JSONResponse(_error(text), status)


def _without_key() -> Response:
    """Answers whoever is not the agent: that counts for nothing, and the connection ends."""
    return JSONResponse(_error("no such trajectory"), 404, headers={"Connection": "close"})


def _error(text: str) -> Json:
    return {"type": "error", "error": {"message": text, "type": "invalid_request_error", "param": None, "code": None}}


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise RefusedError(f"the body has more than {MAX_BODY} bytes")
    return bytes(body)


async def _events(chunks: Sequence[Json], *, named: bool) -> AsyncIterator[str]:
    for chunk in chunks:
        yield (f"event: {chunk['type']}\n" if named else "") + f"data: {json.dumps(chunk)}\n\n"
    if not named:
        yield "data: [DONE]\n\n"
