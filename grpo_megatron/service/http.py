"""HTTP of the service: the protocol's paths, keys, and limits on what a connection may cost. It runs in a thread of rank 0.

Errors are JSON with the status that makes the client raise its own class: 401 AuthenticationError, 404 NotFoundError, 429 wait
and come again. Nothing that a client sends is unpickled or run.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import uvicorn
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from grpo_megatron.service import wire
from grpo_megatron.service.server import Command, Job, Server, digest, read_json_request
from grpo_megatron.service.store import KINDS, Json
from grpo_megatron.service.wire import RequestError

HEADERS_S, BODY_S = 20.0, 60.0  # seconds for the headers of a first request, and for a body
MAX_CONNECTIONS = 2048
T = TypeVar("T", bound=BaseModel)


class _Connection(H11Protocol):
    """A connection, which is closed when its first request has no headers after HEADERS_S."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEADERS_S, lambda: None if self.cycle is not None else transport.close())


class HttpServer:
    """The paths of the protocol, in a thread. `url`: where it listens."""

    def __init__(self, server: Server) -> None:
        """Listen. Raises OSError."""
        self.server, self.config = server, server.config
        self._socket = socket.create_server((self.config.host, self.config.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://{host}:{port}"
        self._uvicorn: uvicorn.Server | None = None

    def start(self) -> None:
        """Begin to answer."""
        threading.Thread(target=self._serve, name="http", daemon=True).start()

    def _serve(self) -> None:
        loop = asyncio.new_event_loop()
        self.server.loop = loop
        settings: Json = {"log_config": None, "access_log": False, "lifespan": "off", "ws": "none"}
        settings |= {"http": _Connection, "limit_concurrency": MAX_CONNECTIONS, "timeout_keep_alive": 75}
        application = Starlette(routes=list(self._routes()), exception_handlers={404: _no_path, 405: _no_path})
        self._uvicorn = uvicorn.Server(uvicorn.Config(application, **settings))
        loop.run_until_complete(self._uvicorn.serve(sockets=[self._socket]))

    def _routes(self) -> Iterator[Route]:
        server, accepted = self.server, {"status": "accepted"}
        flags = {"pjwt_auth_enabled": False, "use_pyqwest_transport": False, "sample_use_retrieve_futures": False}
        flags |= {
            "custom_loss_server_side": False,
            "proto_compress_fwdbwd": False,
            "sample_join_sampling_session": False,
        }
        flags |= {"fwdbwd_max_chunk_bytes_count": min(5_000_000, self.config.max_body_megabytes << 19)}
        model = {
            "model_name": server.served.name,
            "max_context_length": server.served.max_tokens,
            "trainable": True,
            "sampleable": True,
        }
        models = {"supported_models": [model]}

        def get(path: str, answer: Callable[[Request, str], Any]) -> Route:
            async def run(request: Request, owner: str, body: bytes) -> Any:
                with server.lock:
                    return answer(request, owner)

            return Route(f"/api/v1/{path}", self._guarded(run))

        def post(
            path: str, kind: type[T] | None, answer: Callable[[Any, str, bytes], Any], method: str = "POST"
        ) -> Route:
            async def run(request: Request, owner: str, body: bytes) -> Any:
                read = read_json_request(kind, body) if kind is not None else request
                with server.lock:
                    return answer(read, owner, body)

            return Route(f"/api/v1/{path}", self._guarded(run), methods=[method])

        def of_model(path: str) -> Route:
            async def run(request: Request, owner: str, body: bytes) -> Any:
                return await asyncio.to_thread(server.add_request, path, body, owner)

            return Route(f"/api/v1/{path}", self._guarded(run), methods=["POST"])

        yield Route("/api/v1/healthz", lambda request: JSONResponse({"status": "ok"}))
        yield post("client/config", None, lambda *_: flags)
        yield post("client/dynamic_config", None, lambda *_: {})
        yield post("telemetry", None, lambda *_: accepted)
        yield get("get_server_capabilities", lambda *_: models)
        yield post("create_session", wire.CreateSession, lambda read, owner, _: server.create_session(read, owner))
        yield post("session_heartbeat", wire.OfSession, self._heartbeat)
        yield post("sessions/{id}/finish", None, self._end_session)
        yield get("sessions/{id}", self._about_session)
        yield get(
            "sessions", lambda _, owner: {"sessions": [s.id for s in server.sessions.values() if s.owner == owner]}
        )
        yield post("create_model", wire.CreateModel, lambda read, owner, _: server.create_model(read, owner))
        yield post("get_info", wire.OfModel, self._info)
        yield post("unload_model", wire.OfModel, self._unload)
        for path in ("forward_backward", "optim_step", "load_weights", "save_weights"):
            yield of_model(path)
        for path in ("save_weights_for_sampler", "save_weights_external"):
            yield of_model(path)
        yield post(
            "create_sampling_session", wire.CreateSampler, lambda read, owner, _: server.create_sampler(read, owner)
        )
        yield get("samplers/{id}", self._about_sampler)
        yield post("asample", wire.Sample, server.sample)
        yield post("cancel_future", wire.Retrieve, lambda *_: None)  # a sample is short: it is completed

        async def retrieve(request: Request, owner: str, body: bytes) -> Any:
            return await server.retrieve(read_json_request(wire.Retrieve, body), owner)

        yield Route("/api/v1/retrieve_future", self._guarded(retrieve), methods=["POST"])
        yield get("training_runs", self._runs)
        yield get(
            "training_runs/{id}", lambda r, owner: server.about_model(server.model_of(r.path_params["id"], owner))
        )
        yield get(
            "training_runs/{id}/checkpoints",
            lambda r, owner: server.list_checkpoints(server.model_of(r.path_params["id"], owner)),
        )
        yield get("checkpoints", self._all_checkpoints)
        yield post("training_runs/{id}/checkpoints/{kind}/{name}", None, self._remove, "DELETE")
        yield post("weights_info", wire.OfPath, lambda read, owner, _: server.about_weights(read.tinker_path, owner))

    def _guarded(
        self, run: Callable[[Request, str, bytes], Awaitable[Any]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Answers `run(request, owner, body)` for a known key, and errors in the protocol's form."""

        async def answer(request: Request) -> Response:
            try:
                token = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix(
                    "Bearer "
                )
                owner = self.server.owners.get(digest(token))
                if owner is None:
                    raise RequestError("the key is not one of this server's; set TINKER_API_KEY (docs/service.md)", 401)
                result = await run(request, owner, await self._body(request))
            except RequestError as error:
                close = {"Connection": "close"} if error.status in (401, 413) else None
                return JSONResponse({"error": str(error), "detail": str(error)}, error.status, headers=close)
            except ClientDisconnect:
                return Response(status_code=400)
            if isinstance(result, Response):
                return result
            return Response(status_code=204) if result is None else JSONResponse(result)

        return answer

    async def _body(self, request: Request) -> bytes:
        most = self.config.max_body_megabytes << 20
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RequestError("compressed bodies are not served (client config proto_compress_fwdbwd=false)", 415)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > most:
                        raise RequestError(
                            f"the body has more than {most} bytes (service.max_body_megabytes); send less", 413
                        )
        except TimeoutError:
            raise RequestError(f"the body was not complete after {BODY_S:g} s", 408) from None
        return b"".join(parts)

    def _heartbeat(self, read: wire.OfSession, owner: str, _: bytes) -> Json:
        if self.server.session_of(read.session_id, owner).is_over:
            raise RequestError(f"session {read.session_id} is over", 410)
        return {"type": "session_heartbeat"}

    def _end_session(self, request: Request, owner: str, _: bytes) -> None:
        session = self.server.session_of(request.path_params["id"], owner)
        self.server.end(session)

    def _about_session(self, request: Request, owner: str) -> Json:
        session = self.server.session_of(request.path_params["id"], owner)
        return {
            "training_run_ids": [one.id for one in self.server.models.values() if one.session == session.id],
            "sampler_ids": [one.id for one in self.server.samplers.values() if one.session == session.id],
            "user_metadata": session.about["user_metadata"],
            "display_name": session.about["display_name"],
        }

    def _info(self, read: wire.OfModel, owner: str, _: bytes) -> Json:
        model, served = self.server.model_of(read.model_id, owner), self.server.served
        lora = model.lora
        about = {"arch": "decoder", "model_name": served.name, "tokenizer_id": served.tokenizer}
        info: Json = {"type": "get_info", "model_data": about, "model_id": model.id, "model_name": served.name}
        return {**info, "is_lora": lora is not None, "lora_rank": lora.rank if lora else None}

    def _unload(self, read: wire.OfModel, owner: str, _: bytes) -> Json:
        model = self.server.model_of(read.model_id, owner)
        job = Job(f"{model.id}:unload", owner, "create", b"", None, model)
        if model.is_loaded and not self.server.is_busy(model):
            model.is_loaded = False  # its requests since the snapshot are on disk
            self.server.commands.append(Command("drop", (model.id,)))
        content = {"model_id": model.id, "type": "unload_model"}
        self.server.answer(job, "application/json", json.dumps(content).encode())
        self.server.jobs[job.id] = job
        return {"request_id": job.id, "model_id": model.id}

    def _about_sampler(self, request: Request, owner: str) -> Json:
        sampler = self.server.sampler_of(request.path_params["id"], owner)
        return {"sampler_id": sampler.id, "base_model": self.server.served.name, "model_path": sampler.path}

    def _runs(self, request: Request, owner: str) -> Json:
        found = [model for model in self.server.models.values() if model.owner == owner]
        offset, limit = _page(request)
        runs = [self.server.about_model(model) for model in found[offset : offset + limit]]
        return {"training_runs": runs, "cursor": {"offset": offset, "limit": limit, "total_count": len(found)}}

    def _all_checkpoints(self, request: Request, owner: str) -> Json:
        models = [model for model in self.server.models.values() if model.owner == owner]
        found = [one for model in models for one in self.server.list_checkpoints(model)["checkpoints"]]
        offset, limit = _page(request)
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return {"checkpoints": found[offset : offset + limit], "cursor": cursor}

    def _remove(self, request: Request, owner: str, _: bytes) -> None:
        place = request.path_params
        path = f"tinker://{place['id']}/{place['kind']}/{place['name']}"
        folder = self.server.checkpoint_folder(path, owner, tuple(KINDS))
        self.server.store.remove_checkpoint(place["id"], f"{place['kind']}/{folder.name}")


def _page(request: Request) -> tuple[int, int]:
    try:
        offset, limit = int(request.query_params.get("offset", 0)), int(request.query_params.get("limit", 100))
    except ValueError:
        raise RequestError("offset and limit are integers") from None
    return max(0, offset), min(1000, max(0, limit))


async def _no_path(request: Request, _: Exception) -> Response:
    text = f"{request.method} {request.url.path[:200]} is not served here; docs/service.md lists what is"
    return JSONResponse({"error": text, "detail": text}, 404)
