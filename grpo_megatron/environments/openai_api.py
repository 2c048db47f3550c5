"""OpenAI's API on a loopback address, behind which the run's policy answers one trajectory: it records what is
generated.

POST /t/TRAJECTORY/v1/chat/completions, /v1/responses, /v1/completions; GET /v1/models. The server runs in the
trajectory's process, and is gone with it. The client gets text; the run keeps the tokens (sampling/multi_turn.py). What
would make the tokens other than the run's own (another model, a temperature, `n`) gets a 400 that says why. An answer
is generated at the run's logical clock, with all others. A client that repeats its request meanwhile, as OpenAI's does
after a time-out, waits for the same answer.
"""

from __future__ import annotations

import asyncio
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
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from grpo_megatron.environments.environment import ChatMessage, TurnRequest
from grpo_megatron.environments.tool_environment import Call, parse_calls

MAX_BODY = 8 << 20  # bytes of a request
MAX_REFUSED = 200  # requests of one trajectory; then it is flooded
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

NEUTRAL: dict[str, tuple[Any, ...]] = {  # field -> the values that change nothing; also what else vLLM's server reads
    **dict.fromkeys(("top_p", "n", "best_of", "repetition_penalty"), (1,)),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "top_logprobs", "min_tokens"), (0,)),
    **dict.fromkeys(("echo", "ignore_eos", "continue_final_message"), (False,)),
    **dict.fromkeys(("stop_token_ids", "bad_words"), ([],)),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs"), ({},)),
    **dict.fromkeys(("seed", "functions", "allowed_token_ids", "structured_outputs", "chat_template"), ()),
    **dict.fromkeys(("guided_json", "guided_regex"), ()),
    "top_k": (-1, 0),
    "suffix": ("",),
    "add_generation_prompt": (True,),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}},),  # of responses
}
WHY = {
    "n": "a trajectory is one sequence, with one answer to each request; the other samples of its group have agents of their own",
    "top_logprobs": "the run records the log-probabilities of the generated tokens only",
    **dict.fromkeys(("chat_template", "chat_template_kwargs"), "the run decides how messages are rendered"),
}


def _check_neutral(body: Json, model: str, temperature: float) -> None:
    named = body.get("model", model)
    if named != model:
        raise RefusedError(f"model={named!r}: the only model here is {model!r}")
    allowed = {**NEUTRAL, "temperature": (temperature,)}
    for name, values in allowed.items():
        value = body.get(name)
        if value is not None and value not in values:
            values_text = " or ".join(map(json.dumps, values)) or "none"
            why = WHY.get(name, "the run decides how tokens are sampled")
            raise RefusedError(f"{name}={json.dumps(value)[:200]}: {why}; leave it out, or set {values_text}")


def _content(value: Any) -> str:
    """Returns the text of a content: itself, or its parts."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "".join(part["text"] for part in value)
    raise RefusedError(f"content is {json.dumps(value)[:200]}; only text is read")


def _listed(body: Json, name: str) -> list[Any]:
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise RefusedError(f"{name} is no list of objects")
    return value


def _turn_request(body: Json, *limits: str, tools: list[Any], prompt: str | list[int] | None = None) -> TurnRequest:
    limit = next((body[name] for name in limits if body.get(name) is not None), None)
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise RefusedError(f"{limits[0]}={limit!r}: at least 1")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop) or len(stop) > 16:
        raise RefusedError(f"stop={json.dumps(stop)[:200]}: a text, or up to 16 of them")
    return TurnRequest(tools, limit, stop, prompt)


# -- the three forms: request -> ClientRequest, Reply -> response ------------------------------------------------------


def read_chat(body: Json, history: Sequence[ChatMessage]) -> ClientRequest:
    """Reads a request of chat completions."""
    messages = []
    for message in _listed(body, "messages"):
        if not isinstance(message.get("role"), str):
            raise RefusedError("a message has no role")
        messages.append({**message, "content": _content(message.get("content"))})
    request = _turn_request(body, "max_completion_tokens", "max_tokens", tools=_listed(body, "tools"))
    return ClientRequest(messages, request, bool(body.get("logprobs")), bool(body.get("stream")))


def read_completions(body: Json, history: Sequence[ChatMessage]) -> ClientRequest:
    """Reads a request of completions, with raw text or token ids."""
    prompt = body.get("prompt")
    is_ids = isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
    if not is_ids and not (isinstance(prompt, str) and prompt):
        raise RefusedError("prompt: one text, or one list of token ids")
    request = _turn_request(body, "max_tokens", tools=[], prompt=prompt)
    return ClientRequest([], request, body.get("logprobs") is not None, bool(body.get("stream")))


def read_responses(body: Json, history: Sequence[ChatMessage]) -> ClientRequest:
    """Reads a request of responses. An answer's message and its calls are several items there, and one message here."""
    messages: list[ChatMessage] = list(history) if body.get("previous_response_id") else []
    if not messages and body.get("instructions"):
        messages.append({"role": "system", "content": _content(body["instructions"])})
    items = body.get("input")
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else _listed(body, "input"):
        kind = item.get("type", "message")
        is_answer = kind == "function_call" or item.get("role") == "assistant"
        if is_answer and not (messages and messages[-1]["role"] == "assistant" and len(messages) > len(history)):
            messages.append({"role": "assistant", "content": ""})
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", []), call]}
        elif kind == "function_call_output":
            text = item.get("output")
            text = text if isinstance(text, str) else json.dumps(text)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        elif kind == "message" and is_answer:
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + _content(item.get("content"))}
        elif kind == "message" and isinstance(item.get("role"), str):
            messages.append({"role": item["role"], "content": _content(item.get("content"))})
        elif kind != "reasoning":
            raise RefusedError(f"an item of the type {kind!r} is not read")
    tools = [
        {
            "type": "function",
            "function": {name: value for name, value in tool.items() if name not in ("type", "strict")},
        }
        for tool in _listed(body, "tools")
    ]
    return ClientRequest(
        messages, _turn_request(body, "max_output_tokens", tools=tools), False, bool(body.get("stream"))
    )


def write_chat(reply: Reply, model: str, question: ClientRequest) -> tuple[Json, list[Json]]:
    """Returns the response, and the same as the chunks of a stream."""
    head = {"id": f"chatcmpl-{reply.number}", "created": 0, "model": model}
    choice: Json = {"index": 0, "finish_reason": reply.finish_reason, "logprobs": None}
    if question.wants_logprobs:
        nothing: Json = {"bytes": None, "top_logprobs": []}
        content = [{"token": text, "logprob": value, **nothing} for text, value in reply.tokens]
        choice["logprobs"] = {"content": content, "refusal": None}
    response = {
        **head,
        "object": "chat.completion",
        "choices": [{**choice, "message": reply.message}],
        "usage": reply.usage,
    }
    delta = dict(reply.message)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    head["object"] = "chat.completion.chunk"
    first = {**head, "choices": [{**choice, "finish_reason": None, "delta": delta}]}
    last = {**head, "choices": [{**choice, "logprobs": None, "delta": {}}], "usage": reply.usage}
    return response, [first, last]


def write_completions(reply: Reply, model: str, question: ClientRequest) -> tuple[Json, list[Json]]:
    """Returns the same as `write_chat`."""
    choice: Json = {"index": 0, "text": reply.text, "finish_reason": reply.finish_reason, "logprobs": None}
    if question.wants_logprobs:
        texts, values = [text for text, _ in reply.tokens], [value for _, value in reply.tokens]
        choice["logprobs"] = {"tokens": texts, "token_logprobs": values, "text_offset": [], "top_logprobs": None}
    response = {"id": f"cmpl-{reply.number}", "object": "text_completion", "created": 0, "model": model}
    response |= {"choices": [choice], "usage": reply.usage}
    return response, [response]


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


PROTOCOLS: dict[str, tuple[Callable[..., ClientRequest], Callable[..., tuple[Json, list[Json]]]]] = {
    "chat/completions": (read_chat, write_chat),
    "completions": (read_completions, write_completions),
    "responses": (read_responses, write_responses),
}


# -- the conversation --------------------------------------------------------------------------------------------------


def _same(message: Mapping[str, Any]) -> Json:
    """Returns what two forms of one message share, without ids of calls, names and fields that a client adds."""
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return {
        "role": message["role"],
        "content": _content(message.get("content")),
        "calls": [(call.get("name"), _arguments(call.get("arguments"))) for call in calls],
    }


def _arguments(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
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
            return [], TurnRequest([], request.max_tokens, request.stop, prompt[len(self.prompt) :])
        for number, (before, now) in enumerate(zip(self.messages, question.messages, strict=False)):
            if _same(before) != _same(now):
                raise RefusedError(f"message {number} is another one than before{NO_BRANCH}")
        new = question.messages[len(self.messages) :]
        if not new:
            raise RefusedError(f"nothing follows the messages and the answer before{NO_BRANCH}")
        return new, TurnRequest([], request.max_tokens, request.stop, None)

    def add(self, question: ClientRequest, turn: Json) -> Reply:
        """Adds the question and the model's turn, a JSON object of `sampling/multi_turn.py`."""
        text, finish = turn["text"], turn["finish_reason"]
        for stop in question.request.stop:
            text = text.partition(stop)[0]
        calls = parse_calls(self.call_format, text) if question.request.tools else []
        named: list[tuple[str, str, str]] = [
            (f"call_{self.num_turns}_{i}", call.name, json.dumps(call.arguments))
            for i, call in enumerate(calls)
            if isinstance(call, Call)
        ]
        content = text.partition("<tool_call>")[0].strip() if named and self.call_format == "hermes" else text
        content = "" if named and self.call_format != "hermes" else content
        tokens = list(zip(turn["tokens"], turn["logprobs"], strict=True))
        finish = "tool_calls" if named else finish
        reply = Reply(text, content, named, finish, tokens, turn["prompt_tokens"], self.num_turns)
        self.num_turns, self.tools = self.num_turns + 1, question.request.tools
        self.messages = [*question.messages, reply.message]
        self.prompt = question.request.prompt
        if self.prompt is not None:
            self.prompt = self.prompt + text if isinstance(self.prompt, str) else [*self.prompt, *turn["token_ids"]]
        return reply


NO_BRANCH = (
    "; a trajectory is one conversation, each request of which repeats the one before and its answer, and adds to them."
    " Another branch is recorded with rollout.multi_turn.kwargs.branches=samples only"
)


# -- the server --------------------------------------------------------------------------------------------------------


class Endpoint:
    """The server, in a thread. `questions` has what the client asks; `answer` is to be called once for each.

    An item of `questions` is (messages, TurnRequest), or a text: the client has sent too much.
    """

    def __init__(self, model: str, temperature: float, call_format: str, branches: bool = False) -> None:
        self._model, self._temperature = model, temperature
        self.key = secrets.token_urlsafe(24)
        self.questions: queue.Queue[tuple[list[ChatMessage], TurnRequest] | str] = queue.Queue()
        self._conversation, self._branches = Conversation(call_format), branches
        # used in the loop's thread only
        self._pending: tuple[bytes, ClientRequest, asyncio.Future[Reply]] | None = None
        self._num_refused = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/t/{self.key}/v1"

    def serve(self) -> None:
        """Begins to answer. Clients that have connected before are answered, too."""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        self._loop = asyncio.new_event_loop()
        posts = Route("/t/{key}/v1/{form:path}", self._post, methods=["POST"])
        application = Starlette(routes=[Route("/t/{key}/v1/models", self._models), posts])
        settings: Json = {"log_config": None, "access_log": False, "lifespan": "off", "limit_concurrency": 64}
        server = uvicorn.Server(uvicorn.Config(application, http="h11", ws="none", **settings))
        self._loop.run_until_complete(server.serve(sockets=[self._socket]))

    def answer(self, turn: Json) -> None:
        """Gives the model's turn to the client that waits."""

        def give() -> None:
            assert self._pending is not None
            _, question, waiting = self._pending
            self._pending = None
            waiting.set_result(self._conversation.add(question, turn))

        self._loop.call_soon_threadsafe(give)

    async def _models(self, request: Request) -> Response:
        if not self._has_key(request):
            return JSONResponse(_error("no such trajectory"), 404)
        return JSONResponse({"object": "list", "data": [{"id": self._model, "object": "model", "owned_by": "run"}]})

    async def _post(self, request: Request) -> Response:
        form = request.path_params["form"]
        if not self._has_key(request) or form not in PROTOCOLS:
            return self._refused("no such trajectory or path", 404)
        try:
            question, reply = await self._reply(form, await _body(request))
        except RefusedError as error:
            return self._refused(str(error), 400)
        response, chunks = PROTOCOLS[form][1](reply, self._model, question)
        if not question.streams:
            return JSONResponse(response)
        return StreamingResponse(_events(chunks, named=form == "responses"), media_type="text/event-stream")

    async def _reply(self, form: str, body: bytes) -> tuple[ClientRequest, Reply]:
        if self._pending is not None and self._pending[0] == body:
            return self._pending[1], await asyncio.shield(self._pending[2])
        try:
            read = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"the body is no JSON: {error}") from None
        if not isinstance(read, dict):
            raise RefusedError("the body is no object")
        _check_neutral(read, self._model, self._temperature)
        question = PROTOCOLS[form][0](read, self._conversation.messages)
        if self._pending is not None:
            raise RefusedError("another request is being answered; a trajectory has one at a time")
        try:
            new = self._conversation.new_part(question)
        except RefusedError:
            if not (self._branches and self._conversation.num_turns and (question.messages or question.request.prompt)):
                raise
            new = question.messages, replace(question.request, branch=True)
        waiting: asyncio.Future[Reply] = self._loop.create_future()
        self._pending = body, question, waiting
        self.questions.put(new)
        return question, await asyncio.shield(waiting)  # a client that hangs up ends its own wait only

    def _has_key(self, request: Request) -> bool:
        return secrets.compare_digest(request.path_params["key"].encode(), self.key.encode())

    def _refused(self, text: str, status: int) -> Response:
        self._num_refused += 1
        if self._num_refused == MAX_REFUSED:
            self.questions.put(f"{MAX_REFUSED} of its requests were refused, the last one: {text}")
        return JSONResponse(_error(text), status)


def _error(text: str) -> Json:
    return {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": None}}


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
