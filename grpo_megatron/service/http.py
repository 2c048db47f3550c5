"""HTTP of the service: the protocol's paths, keys, and limits on what a connection may cost. It runs in a thread of rank 0.

An error has the status that makes the client raise its own class: 401 AuthenticationError, 404 NotFoundError; at 429 it waits and
comes again. Nothing that a client sends is unpickled or run.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from grpo_megatron.service import wire
from grpo_megatron.service.server import Server, digest
from grpo_megatron.service.store import CHECKPOINT_KINDS, JsonObject
from grpo_megatron.service.wire import RequestError, read_json_request

HEADERS_S, BODY_S = 20.0, 60.0  # seconds for the headers of a first request, and for a body
KEEP_ALIVE_S = 75  # seconds without a request, or for the headers of a later one
MAX_CONNECTIONS = 2048
JSON_BYTES = 1 << 18  # of a JSON request without its tokens


class _Connection(H11Protocol):
    """A connection, which is closed when its first request has no headers after HEADERS_S, or a later one after KEEP_ALIVE_S."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEADERS_S, self._close_unless_used, None)

    def _close_unless_used(self, last: Any) -> None:
        """Close the connection when no request has come since `last`, which was answered."""
        if self.cycle is last and (last is None or last.response_complete):
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(KEEP_ALIVE_S, self._close_unless_used, self.cycle)


class HttpServer:
    """The paths of the protocol. `url`: where it listens."""

    def __init__(self, server: Server) -> None:
        """Listen. Raises OSError."""
        self.server, self.config = server, server.config
        self._socket = socket.create_server((self.config.host, self.config.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://{host}:{port}"

    def start(self) -> None:
        """Begin to answer."""
        threading.Thread(target=self._serve, name="http", daemon=True).start()

    def _serve(self) -> None:
        self.server.loop = asyncio.new_event_loop()
        settings: JsonObject = {"log_config": None, "access_log": False, "lifespan": "off", "ws": "none"}
        settings |= {"http": _Connection, "limit_concurrency": MAX_CONNECTIONS, "timeout_keep_alive": KEEP_ALIVE_S}
        application = Starlette(routes=list(self._routes()), exception_handlers={404: _no_path, 405: _no_path})
        serving = uvicorn.Server(uvicorn.Config(application, **settings)).serve(sockets=[self._socket])
        self.server.loop.run_until_complete(serving)

    def _routes(self) -> Iterator[Route]:
        server, name = self.server, self.server.served.name
        flags: JsonObject = dict.fromkeys(
            ("pjwt_auth_enabled", "use_pyqwest_transport", "sample_use_retrieve_futures", "custom_loss_server_side"),
            False,
        )
        flags |= {"proto_compress_fwdbwd": False, "sample_join_sampling_session": False}
        flags["fwdbwd_max_chunk_bytes_count"] = min(5_000_000, self.config.max_body_megabytes << 19)
        model = {"model_name": name, "max_context_length": server.served.max_tokens}
        model |= {"trainable": True, "sampleable": True}

        def route(path: str, answer: Callable[[Any, str, bytes], Any], kind: Any = None, method: str = "POST") -> Route:
            """Answers `answer(request, owner, body)`; the request is read as `kind`, if there is one."""

            async def run(request: Request, owner: str, body: bytes) -> Any:
                read = request.path_params if kind is None else read_json_request(kind, body)
                with server.lock:
                    return answer(read, owner, body)

            return Route(f"/api/v1/{path}", self._guarded(run), methods=[method])

        def of_model(path: str) -> Route:
            async def run(request: Request, owner: str, body: bytes) -> Any:
                return await asyncio.to_thread(server.add_request, path, body, owner)

            return Route(f"/api/v1/{path}", self._guarded(run), methods=["POST"])

        async def retrieve(request: Request, owner: str, body: bytes) -> Any:
            return await server.retrieve(read_json_request(wire.Retrieve, body).request_id, owner)

        yield Route("/api/v1/healthz", lambda request: JSONResponse({"status": "ok"}))
        yield Route("/api/v1/retrieve_future", self._guarded(retrieve), methods=["POST"])
        for path in ("forward_backward", "optim_step", "load_weights", *wire.SAVES):
            yield of_model(path)
        yield route("client/config", lambda *_: flags)
        yield route("client/dynamic_config", lambda *_: {})
        yield route("telemetry", lambda *_: {"status": "accepted"})
        yield route("get_server_capabilities", lambda *_: {"supported_models": [model]}, method="GET")
        yield route("create_session", lambda read, owner, _: server.create_session(read, owner), wire.CreateSession)
        yield route("session_heartbeat", self._heartbeat, wire.OfSession)
        yield route("sessions/{id}/finish", lambda read, owner, _: server.end(server.session(read["id"], owner)))
        yield route("create_model", lambda read, owner, _: server.create_model(read, owner), wire.CreateModel)
        yield route("get_info", self._info, wire.OfModel)
        yield route(
            "create_sampling_session", lambda read, owner, _: server.create_sampler(read, owner), wire.CreateSampler
        )
        yield route("samplers/{id}", self._sampler, method="GET")
        yield route("asample", server.sample, wire.SampleRequest)
        yield route("training_runs/{id}", self._training_run, method="GET")
        checkpoints = "training_runs/{id}/checkpoints"
        yield route(
            checkpoints, lambda r, owner, _: server.list_checkpoints(server.model(r["id"], owner)), method="GET"
        )
        yield route(checkpoints + "/{kind}/{name}", self._remove, method="DELETE")

    def _guarded(
        self, run: Callable[[Request, str, bytes], Awaitable[Any]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Answers `run(request, owner, body)` for a known key, and errors in the protocol's form."""

        async def answer(request: Request) -> Response:
            try:
                bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
                token = request.headers.get("x-api-key") or bearer
                owner = self.server.owners.get(digest(token))
                if owner is None:
                    raise RequestError("the key is not one of this server's; set TINKER_API_KEY (docs/service.md)", 401)
                result = await run(request, owner, await self._body(request))
            except RequestError as error:
                close = {"Connection": "close"} if error.status in (401, 413) else None
                return JSONResponse({"error": str(error), "detail": str(error)}, error.status, headers=close)
            except ClientDisconnect:
                return Response(status_code=400)
            except OSError as error:  # the client comes again for 5 minutes
                text = f"the server cannot write: {error.strerror}; make room in its trainer.output_dir"
                return JSONResponse({"error": text, "detail": text}, 507)
            if isinstance(result, Response):
                return result
            return Response(status_code=204) if result is None else JSONResponse(result)

        return answer

    async def _body(self, request: Request) -> bytes:
        most, setting, body = self.config.max_body_megabytes << 20, "service.max_body_megabytes", bytearray()
        json_bytes = JSON_BYTES + 16 * self.server.served.max_tokens
        if json_bytes < most and not request.url.path.endswith(("/forward_backward", "/telemetry")):
            most, setting = json_bytes, "256 KiB and 16 for each token of data.max_prompt_length + max_response_length"
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RequestError("compressed bodies are not served (client config proto_compress_fwdbwd=false)", 415)
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise RequestError(f"the body has more than {most} bytes ({setting}); send less", 413)
        except TimeoutError:
            raise RequestError(f"the body was not complete after {BODY_S:g} s", 408) from None
        return bytes(body)

    def _heartbeat(self, read: Any, owner: str, _: bytes) -> JsonObject:
        self.server.session(read.session_id, owner)
        return {"type": "session_heartbeat"}

    def _about(self, model_id: str, owner: str) -> JsonObject:
        lora = self.server.model(model_id, owner).lora
        return {"is_lora": lora is not None, "lora_rank": lora.rank if lora else None}

    def _info(self, read: Any, owner: str, _: bytes) -> JsonObject:
        served = self.server.served
        data = {"arch": "decoder", "model_name": served.name, "tokenizer_id": served.tokenizer}
        about = self._about(read.model_id, owner)
        return {"model_data": data, "model_id": read.model_id, "model_name": served.name, **about}

    def _training_run(self, read: Any, owner: str, _: bytes) -> JsonObject:
        model = self.server.model(read["id"], owner)
        run = {"training_run_id": model.id, "base_model": self.server.served.name, "model_owner": owner}
        run |= {"last_request_time": "1970-01-01T00:00:00Z", "user_metadata": model.origin["user_metadata"]}
        return {**run, **self._about(model.id, owner)}

    def _sampler(self, read: Any, owner: str, _: bytes) -> JsonObject:
        sampler = self.server.sampler(read["id"], owner)
        return {"sampler_id": sampler.id, "base_model": self.server.served.name, "model_path": sampler.path}

    def _remove(self, read: Any, owner: str, _: bytes) -> None:
        self.server.checkpoint(f"tinker://{read['id']}/{read['kind']}/{read['name']}", owner, tuple(CHECKPOINT_KINDS))
        self.server.remove_checkpoint(read["id"], f"{read['kind']}/{read['name']}")


async def _no_path(request: Request, _: Exception) -> Response:
    text = f"{request.method} {request.url.path[:200]} is not served here; docs/service.md lists what is"
    return JSONResponse({"error": text, "detail": text}, 404)
