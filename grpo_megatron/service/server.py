"""The server on rank 0: who may do what, in which order, and where the answers are. It computes nothing itself.

A client's request becomes a Job, whose id the client derives from its own numbers: a request that is sent again, after a lost
connection or a restart, finds the same job. A model's jobs run in the order of their numbers, whenever they arrive. Jobs of
different models run in the order of arrival, and all waiting samples of one sampler run together. `take` gives the ranks
commands, `finish` takes results. HTTP runs in a thread of its own; one lock guards all that both threads read.

Every object has an owner, the digest of a key. For all other keys it does not exist: the answer is the same as for a wrong name.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import json
import math
import re
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse, Response

from grpo_megatron.config import ServiceConfig
from grpo_megatron.rollout.engine import stable_hash
from grpo_megatron.service import wire
from grpo_megatron.service.store import KINDS, Json, Store
from grpo_megatron.service.wire import RequestError
from grpo_megatron.service.work import Sampled, SampleJob

POLL_S = 30.0  # seconds that a client waits for an answer before it asks again
MAX_AHEAD = 4096  # requests of one model that may arrive before one with a lower number
MAX_ANSWERS = 20_000  # answers in memory; those of training are on disk, too
TOGETHER_S = 0.003  # a batch of samples begins when none has come for so long
T = TypeVar("T", bound=BaseModel)


@dataclass(frozen=True)
class ServedModel:
    """The base model, as clients see it."""

    name: str
    tokenizer: str
    vocab_size: int
    max_tokens: int  # of prompt and response
    rank: int | None  # the most that adapters may have; None: all weights are trained
    seed: int


@dataclass
class Session:
    """A client. `seen`: seconds of the clock of its last sign of life."""

    id: str
    owner: str
    about: Json
    seen: float
    is_over: bool = False


@dataclass
class Job:
    """One request. `answer`: media type and content, or None; `error`: its answer is an error."""

    id: str
    owner: str
    kind: str
    body: bytes
    request: Any
    target: Any  # a Model or a Sampler
    seq: int = 0
    arrived: float = field(default_factory=time.monotonic)
    answer: tuple[str, bytes] | None = None
    is_again: bool = False  # it has an answer on disk, and runs for the state it makes
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Model:
    """A training run. `origin`: how it began. `next_seq`: the number of the request that is to run next."""

    id: str
    owner: str
    session: str
    origin: Json
    next_seq: int = 1
    waiting: dict[int, Job] = field(default_factory=dict)
    is_loaded: bool = False
    is_failed: bool = False
    steps: int = 0  # since the last snapshot
    passes: int = 0  # with gradients, since the last step
    touched: float = field(default_factory=time.time)

    @property
    def lora(self) -> wire.LoraRequest | None:
        content = self.origin["lora"]
        return None if content is None else wire.LoraRequest.model_validate(content)


@dataclass
class Sampler:
    """A sampling session. `folder`: of its weights; None: the base's. `source`: the model that had them after `step`."""

    id: str
    owner: str
    session: str
    path: str | None
    folder: Path | None


@dataclass(frozen=True)
class Command:
    """What all ranks are to run next: a method of Work. `jobs`: those that it answers, on rank 0."""

    method: str
    arguments: tuple[Any, ...] = ()
    options: Json = field(default_factory=dict)
    jobs: tuple[Job, ...] = ()
    model: Model | None = None


class Server:
    """The state of all clients. `take` and `finish` are called by the main thread of rank 0."""

    def __init__(self, config: ServiceConfig, store: Store, served: ServedModel) -> None:
        """Read what an earlier server of the folder has left. Raises ConfigError."""
        self.config, self.store, self.served = config, store, served
        self.owners = {digest(token): digest(token)[:16] for token in store.tokens(config)}
        self.lock = threading.RLock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        self.jobs: collections.OrderedDict[str, Job] = collections.OrderedDict()
        self._ready: collections.deque[Job] = collections.deque()  # of models
        self.commands: collections.deque[Command] = collections.deque()  # before all jobs
        self._samples: list[Job] = []
        self._arrival = threading.Condition(self.lock)
        self._resident: tuple[str, int] | None = (
            None  # the model of the last snapshot for a sampler, and its state's number
        )
        self._states: dict[str, int] = collections.defaultdict(int)  # model -> how often its weights have changed
        self._of_folder: dict[Path, tuple[str, int]] = {}  # sampler's folder -> model and number of its state
        self._recall()

    # -- the restart -------------------------------------------------------------------------------------------------

    def _recall(self) -> None:
        now = time.monotonic()
        for name, content in self.store.read_all("sessions"):
            about = content["about"]
            self.sessions[name] = Session(name, content["owner"], about, now, is_over=content.get("is_over", False))
        for name, content in self.store.read_all("models"):
            model = Model(name, content["owner"], content["session"], content["origin"])
            self.models[name] = model
            first, requests = self._after_snapshot(model)
            model.next_seq = first
            while model.next_seq in requests:
                model.next_seq += 1
            answered = {
                int(path.name) for path in (self.store.model(name) / "results").iterdir() if path.name.isdigit()
            }
            if {*requests} - answered and not self.sessions[model.session].is_over:
                self._restore(model)
        for name, content in self.store.read_all("samplers"):
            folder = None if content["folder"] is None else Path(content["folder"])
            sampler = Sampler(name, content["owner"], content["session"], content["path"], folder)
            self.samplers[name] = sampler
            for seq, body in self.store.requests(self.store.folder / "samplers" / name).items():
                with contextlib.suppress(RequestError):
                    self._add_sample(sampler, seq, body)

    def _after_snapshot(self, model: Model) -> tuple[int, dict[int, bytes]]:
        snapshot = self.store.snapshot(model.id)
        first = 1 + (snapshot[0] if snapshot else 0)
        requests = self.store.requests(self.store.model(model.id) / "requests")
        return first, {seq: body for seq, body in requests.items() if seq >= first}

    def _restore(self, model: Model) -> None:
        """Bring a model into memory: its last snapshot, or its beginning, and the requests since then, again."""
        if model.is_loaded:
            return
        num_loaded = sum(other.is_loaded for other in self.models.values())
        if num_loaded >= self.config.max_models:
            raise RequestError(
                f"{num_loaded} models are in memory (service.max_models); close a session, or wait until one is over",
                429,
            )
        model.is_loaded, model.steps, model.passes = True, 0, 0
        snapshot, origin = self.store.snapshot(model.id), model.origin
        if snapshot is not None:
            command = Command("load", (model.id, snapshot[1], model.lora), {"optimizer": True}, (), model)
        elif origin["source"] is not None:
            options = {"optimizer": origin["optimizer"]}
            command = Command("load", (model.id, Path(origin["source"]), model.lora), options, (), model)
        else:
            command = Command("create", (model.id, model.lora), {}, (), model)
        self.commands.append(command)
        first, requests = self._after_snapshot(model)
        for seq in range(first, model.next_seq):
            if seq in requests:
                job = self._parsed(model, seq, requests[seq])
                job.is_again = (self.store.model(model.id) / "results" / f"{seq:010d}").exists()
                if not job.is_again:
                    self.jobs[job.id] = job
                self._ready.append(job)
        for seq in sorted(set(requests) - set(range(model.next_seq))):
            job = model.waiting.setdefault(seq, self._parsed(model, seq, requests[seq]))
            self.jobs[job.id] = job

    # -- commands for the ranks --------------------------------------------------------------------------------------

    def take(self, timeout_s: float) -> Command | None:
        """Returns the next command; None after `timeout_s` without one."""
        end = time.monotonic() + timeout_s
        with self._arrival:
            while True:
                self._end_sessions()
                if (command := self._next()) is not None:
                    return command
                now = time.monotonic()
                if now >= end:
                    return None
                self._arrival.wait(TOGETHER_S if self._samples else min(0.5, end - now))

    def _next(self) -> Command | None:
        while self.commands:
            return self.commands.popleft()
        while self._ready:
            if self._samples and self._samples[0].arrived < self._ready[0].arrived and self._are_together():
                break
            job = self._ready.popleft()
            if (command := self._command(job)) is not None:
                return command
        if self._samples and self._are_together():
            first = self._samples[0].target
            jobs = tuple(job for job in self._samples if job.target.folder == first.folder)
            self._samples = [job for job in self._samples if job.target.folder != first.folder]
            model, number = self._of_folder.get(first.folder, ("", 0)) if first.folder else ("", 0)
            source = model if model and self._states[model] == number else None
            return Command("sample", (first.folder, source, [job.request for job in jobs]), {}, jobs)
        return None

    def _are_together(self) -> bool:
        now = time.monotonic()
        return now - self._samples[-1].arrived >= TOGETHER_S or now - self._samples[0].arrived >= 20 * TOGETHER_S

    def _command(self, job: Job) -> Command | None:
        """Returns the command of a model's job; None: nothing is to run."""
        model: Model = job.target
        if model.is_failed:
            self.answer(job, error=f"{model.id} could not be brought into memory; load a checkpoint into a new model")
            return None
        request, folder = job.request, self.store.model(model.id)
        if job.kind == "refused":
            self.answer(job, error=request)
            return None
        is_state = job.kind in ("load", "step") or (job.kind == "pass" and not request.forward_only)
        if job.is_again and not is_state:
            return None
        if job.kind == "pass":
            model.passes += not request.forward_only
            return Command("run_pass", (request,), {}, (job,), model)
        if job.kind == "step":
            return Command("step", (model.id, request.adam_params), {}, (job,), model)
        if job.kind == "load":
            try:
                source = self.checkpoint_folder(request.path, job.owner)
            except RequestError as error:
                self.answer(job, error=str(error))
                return None
            options = {"optimizer": request.optimizer}
            return Command("load", (model.id, source, model.lora), options, (job,), model)
        name = request.path or f"session-{job.seq:010d}"
        if f"{job.kind}/{name}" in self.store.checkpoints(model.id):
            if not request.overwrite:
                error = f"{job.kind}/{name} is there already; choose another name, or set overwrite"
                self.answer(job, error=error)
                return None
            self.store.remove_checkpoint(model.id, f"{job.kind}/{name}")
        method = {"weights": "save", "sampler_weights": "snapshot", "external_weights": "export"}[job.kind]
        return Command(method, (model.id, folder / job.kind / name), {}, (job,), model)

    def finish(self, command: Command, result: Any, error: Exception | None) -> None:
        """Answer the jobs of a command."""
        with self.lock:
            model = command.model
            if error is not None:
                is_user = isinstance(error, RequestError)
                for job in command.jobs:
                    self.answer(job, error=str(error), category="user" if is_user else "server")
                if model is not None and not command.jobs and command.method in ("load", "create"):
                    model.is_failed = True
                return
            if command.method in ("load", "step", "create") and model is not None:
                self._states[model.id] += 1
            for number, job in enumerate(command.jobs):
                if command.method == "sample":
                    self.answer(job, wire.PROTOBUF, _sample_bytes(job, result[number]))
                elif command.method == "run_pass":
                    logprobs, total = result
                    metrics = {"loss:sum": total, "num_tokens:sum": float(sum(map(len, logprobs)))}
                    self.answer(job, wire.PROTOBUF, wire.pass_response(logprobs, metrics))
                else:
                    self._answer_json(job, command, result)
            if model is not None and command.method == "step":
                model.steps, model.passes = model.steps + 1, 0
                if model.steps >= self.config.snapshot_steps:
                    self._take_snapshot(model, command.jobs[0].seq)
            if model is not None and command.method == "save" and not command.jobs:
                self.store.has_snapshot(model.id, int(command.arguments[1].name.removeprefix("state_")))

    def _take_snapshot(self, model: Model, seq: int) -> None:
        model.steps = 0
        folder = self.store.model(model.id) / f"state_{seq:010d}"
        self.commands.append(Command("save", (model.id, folder), {}, (), model))

    def _answer_json(self, job: Job, command: Command, result: Any) -> None:
        model: Model = job.target
        if job.kind == "step":
            if not math.isfinite(result):
                self.answer(job, error="the gradient is not finite: no step was made, and the gradients are dropped")
                return
            content: Json = {"metrics": {"grad_norm": result, "lr": job.request.adam_params.learning_rate}}
        elif job.kind == "load":
            content = {"path": job.request.path, "model_id": model.id, "type": "load_weights"}
        else:
            content = self._saved(job, command.arguments[1])
        self.answer(job, "application/json", json.dumps(content).encode())

    def _saved(self, job: Job, folder: Path) -> Json:
        """Note a complete checkpoint. Returns the answer."""
        model, request = job.target, job.request
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        expires = None if request.ttl_seconds is None else time.time() + request.ttl_seconds
        about = {"time": time.time(), "size": size, "expires": expires, "user_metadata": request.user_metadata}
        self.store.write(folder.with_name(f"{folder.name}.json"), about)
        path = f"tinker://{model.id}/{job.kind}/{folder.name}"
        kind = {"weights": "", "sampler_weights": "_for_sampler", "external_weights": "_external"}[job.kind]
        content: Json = {"path": path, "type": f"save_weights{kind}"}
        if job.kind == "external_weights":
            content["size_bytes"] = size
        if job.kind == "sampler_weights":
            self._of_folder[folder] = model.id, self._states[model.id]
            if request.path is None:
                number = request.sampling_session_seq_id or 0
                sampler = self._add_sampler(model.session, job.owner, number, path, folder)
                content = {"path": None, "sampling_session_id": sampler.id, "type": content["type"]}
        return content

    def answer(
        self, job: Job, media: str = "", content: bytes = b"", *, error: str = "", category: str = "user"
    ) -> None:
        if error:
            media, content = "application/json", json.dumps({"error": error, "category": category}).encode()
        job.answer = media, content
        if isinstance(job.target, Model) and job.kind != "create":
            path = self.store.model(job.target.id) / "results" / f"{job.seq:010d}"
            self.store.write(path, (b"P" if media == wire.PROTOBUF else b"J") + content)
        job.body, job.request = b"", job.request if job.kind == "sample" else None
        for old in list(self.jobs)[: max(0, len(self.jobs) - MAX_ANSWERS)]:
            if self.jobs[old].answer is not None:
                del self.jobs[old]
        if self.loop is not None:
            self.loop.call_soon_threadsafe(job.done.set)
        else:
            job.done.set()

    def _end_sessions(self) -> None:
        """Free what the clients hold that have given no sign of life."""
        limit = time.monotonic() - self.config.session_timeout_s
        for session in self.sessions.values():
            if not session.is_over and session.seen < limit:
                self.end(session)
        for model in self.models.values():
            if model.is_loaded and self.sessions[model.session].is_over and not self.is_busy(model):
                if model.steps and not model.passes:
                    self._take_snapshot(model, model.next_seq - 1)
                model.is_loaded = False
                self.commands.append(Command("drop", (model.id,)))

    def end(self, session: Session) -> None:
        session.is_over = True
        self._write_session(session)
        for model in self.models.values():
            if model.session == session.id:
                for seq in [*model.waiting]:  # for one that will not come
                    job = model.waiting.pop(seq)
                    self.jobs.pop(job.id, None)
                    (self.store.model(model.id) / "requests" / f"{seq:010d}").unlink(missing_ok=True)

    def is_busy(self, model: Model) -> bool:
        return any(job.target is model for job in self._ready) or any(one.model is model for one in self.commands)

    # -- requests ----------------------------------------------------------------------------------------------------

    def session_of(self, session_id: str, owner: str) -> Session:
        """Returns a session of this owner, which has given a sign of life. Raises RequestError."""
        session = self.sessions.get(session_id)
        if session is None or session.owner != owner:
            raise RequestError(f"there is no session {session_id[:200]!r}", 404)
        session.seen = time.monotonic()
        return session

    def _open_session(self, session_id: str, owner: str) -> Session:
        session = self.session_of(session_id, owner)
        if session.is_over:
            raise RequestError(f"session {session_id} is over: it was closed, or gave no sign of life", 410)
        return session

    def model_of(self, model_id: str, owner: str) -> Model:
        """Returns a model of this owner. Raises RequestError."""
        model = self.models.get(model_id)
        if model is None or model.owner != owner:
            raise RequestError(f"there is no model {model_id[:200]!r}", 404)
        model.touched = time.time()
        return model

    def sampler_of(self, sampler_id: str, owner: str) -> Sampler:
        """Returns a sampling session of this owner. Raises RequestError."""
        sampler = self.samplers.get(sampler_id)
        if sampler is None or sampler.owner != owner:
            raise RequestError(f"there is no sampling session {sampler_id[:200]!r}", 404)
        return sampler

    def checkpoint_folder(self, path: str, owner: str, kinds: Sequence[str] = ("weights",)) -> Path:
        """Returns the folder of a checkpoint by its tinker:// path. Raises RequestError."""
        match = re.fullmatch(r"tinker://([^/]+)/([a-z_]+)/([^/]+)", path)
        model = self.models.get(match[1]) if match else None
        name = f"{match[2]}/{match[3]}" if match else ""
        is_there = model is not None and model.owner == owner and name in self.store.checkpoints(model.id)
        if match is None or model is None or not is_there or match[2] not in kinds:
            raise RequestError(f"there is no checkpoint {path[:200]!r} of {' or '.join(kinds)}", 404)
        return self.store.model(model.id) / name

    def _write_session(self, session: Session) -> None:
        content = {"owner": session.owner, "about": session.about, "is_over": session.is_over}
        self.store.write(self.store.folder / "sessions" / f"{session.id}.json", content)

    def create_session(self, request: wire.CreateSession, owner: str) -> Json:
        """Begin a session."""
        about = {"user_metadata": request.user_metadata, "display_name": request.display_name, "tags": request.tags}
        session = Session(uuid.uuid4().hex, owner, about, time.monotonic())
        self.sessions[session.id] = session
        self._write_session(session)
        return {"type": "create_session", "session_id": session.id}

    def _check_lora(self, lora: wire.LoraRequest | None) -> wire.LoraRequest | None:
        most = self.served.rank
        rank = 0 if lora is None else lora.rank
        if most is None and rank:
            raise RequestError(
                f"lora_config.rank={rank}: this server trains all weights; rank=0 asks for that (actor.lora.rank)"
            )
        if most is not None and not 1 <= rank <= most:
            raise RequestError(
                f"lora_config.rank={rank}: this server has adapters of rank 1 to {most} (actor.lora.rank)"
            )
        return lora if rank else None

    def _check_base(self, name: str | None) -> None:
        if name is not None and name.partition(":")[0] != self.served.name:
            raise RequestError(f"base_model {name!r} is not served; this server has {self.served.name!r}", 404)

    def _new_model(self, session: Session, number: int, origin: Json, metadata: Any) -> Model:
        model_id = f"{session.id}:train:{number}"
        model = Model(model_id, session.owner, session.id, {**origin, "user_metadata": metadata})
        if (known := self.models.get(model_id)) is not None:
            if known.origin != model.origin:
                raise RequestError(f"{model_id} exists, and began otherwise; use a new model_seq_id")
            return known
        self._restore(model)  # raises before it is known
        self.models[model_id] = model
        self.store.create_model(model_id, {"owner": model.owner, "session": session.id, "origin": model.origin})
        return model

    def create_model(self, request: wire.CreateModel, owner: str) -> Json:
        """Begin a training run of the base model."""
        session = self._open_session(request.session_id, owner)
        self._check_base(request.base_model)
        lora = self._check_lora(request.lora_config)
        origin = {"lora": lora and lora.model_dump(), "source": None, "optimizer": False}
        model = self._new_model(session, request.model_seq_id, origin, request.user_metadata)
        return self._created(model, "create_model")

    def _created(self, model: Model, kind: str) -> Json:
        """The future of a new model is complete at once: requests run after the command that makes it."""
        content: Json = {"model_id": model.id, "type": kind}
        if kind == "load_weights":
            content["path"] = model.origin["path"]
        job = Job(f"{model.id}:create", model.owner, "create", b"", None, model)
        self.answer(job, "application/json", json.dumps(content).encode())
        self.jobs[job.id] = job
        return {"request_id": job.id, "model_id": model.id}

    def load_new(self, request: wire.LoadWeights, owner: str) -> Json:
        """Begin a training run with a checkpoint."""
        session = self._open_session(request.session_id or "", owner)
        self._check_base(request.base_model)
        folder = self.checkpoint_folder(request.path, owner)
        source = self.model_of(folder.parents[1].name, owner)
        origin = {
            "lora": source.origin["lora"],
            "source": str(folder),
            "optimizer": request.optimizer,
            "path": request.path,
        }
        model = self._new_model(session, request.model_seq_id or 0, origin, request.user_metadata)
        if self.store.snapshot(model.id) is None and model.next_seq == 1:
            self._take_snapshot(model, 0)  # the checkpoint may be removed
        return self._created(model, "load_weights")

    def add_job(self, model: Model, seq: int, body: bytes, owner: str) -> Json:
        """Queue a request of a model. The same one again has the same future."""
        self._open_session(model.session, owner)
        if seq > model.next_seq + MAX_AHEAD or seq < 1:
            raise RequestError(f"seq_id {seq} is out of order: {model.id} expects {model.next_seq}")
        answer = {"request_id": f"{model.id}:{seq}", "model_id": model.id}
        known = self.jobs.get(answer["request_id"])
        if known is not None or seq < model.next_seq or seq in model.waiting:
            if known is not None and known.body and known.body != body:
                raise RequestError(f"request {seq} of {model.id} was another one; number requests 1, 2, ...")
            return answer
        self._check_room()
        job = self._parsed(model, seq, body)
        self._restore(model)
        self.store.write(self.store.model(model.id) / "requests" / f"{seq:010d}", body)
        self.jobs[job.id] = job
        model.waiting[seq] = job
        while model.next_seq in model.waiting:
            self._ready.append(model.waiting.pop(model.next_seq))
            model.next_seq += 1
        self._arrival.notify()
        return answer

    def _check_room(self) -> None:
        if (
            len(self._ready) + len(self._samples) + sum(len(m.waiting) for m in self.models.values())
            >= self.config.max_queued
        ):
            raise RequestError(
                f"{self.config.max_queued} requests are waiting (service.max_queued); come again later", 429
            )

    def _parsed(self, model: Model, seq: int, body: bytes) -> Job:
        """Reads a stored or new request of a model. One that is wrong keeps its place in the order: its answer is the error."""
        try:
            kind, request = self.read_body(body)
        except RequestError as error:
            kind, request = "refused", str(error)
        return Job(f"{model.id}:{seq}", model.owner, kind, body, request, model, seq)

    def add_request(self, path: str, content: bytes, owner: str) -> Json:
        """Queue a request of a model, which was sent to `path`. Raises RequestError where no model expects it."""
        body = path.encode() + b"\n" + content
        place = wire.place_of(path, content)
        if place is None:
            kind, request = self.read_body(body)  # raises, or is the first request of a new model
            if kind != "load":
                raise RequestError(f"{path} needs model_id and seq_id")
            with self.lock:
                return self.load_new(request, owner)
        with self.lock:
            return self.add_job(self.model_of(place[0], owner), place[1], body, owner)

    def read_body(self, body: bytes) -> tuple[str, Any]:
        """Returns kind and content of a model's request. JSON bodies begin with their path. Raises RequestError."""
        path, _, content = body.partition(b"\n")
        if path == b"forward_backward":
            return "pass", wire.read_pass(content, self.served.vocab_size, self.served.max_tokens)
        if path == b"optim_step":
            return "step", read_json_request(wire.OptimStep, content)
        if path == b"load_weights":
            return "load", read_json_request(wire.LoadWeights, content)
        kinds = {b"save_weights": "weights", b"save_weights_for_sampler": "sampler_weights"}
        kind = kinds.get(path, "external_weights")
        request = read_json_request(wire.SaveWeights, content)
        if request.path is None and kind != "sampler_weights":
            raise RequestError("path: a checkpoint needs a name")
        return kind, request

    # -- samplers ----------------------------------------------------------------------------------------------------

    def _add_sampler(self, session: str, owner: str, number: int, path: str | None, folder: Path | None) -> Sampler:
        sampler = Sampler(f"{session}:sample:{number}", owner, session, path, folder)
        known = self.samplers.setdefault(sampler.id, sampler)
        if known.folder != folder:
            raise RequestError(f"{sampler.id} exists with other weights; use a new sampling_session_seq_id")
        content = {"owner": owner, "session": session, "path": path, "folder": folder and str(folder)}
        (self.store.folder / "samplers" / sampler.id).mkdir(exist_ok=True)
        self.store.write(self.store.folder / "samplers" / f"{sampler.id}.json", content)
        return known

    def create_sampler(self, request: wire.CreateSampler, owner: str) -> Json:
        """Begin a sampling session of the base model, or of a checkpoint for samplers."""
        session = self._open_session(request.session_id, owner)
        self._check_base(request.base_model)
        folder = None
        if request.model_path is not None:
            folder = self.checkpoint_folder(request.model_path, owner, ("sampler_weights",))
        number = request.sampling_session_seq_id
        sampler = self._add_sampler(session.id, owner, number, request.model_path, folder)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    def sample(self, request: wire.Sample, owner: str, body: bytes) -> Json:
        """Queue a sampling request."""
        sampler = self.sampler_of(request.sampling_session_id, owner)
        self._open_session(sampler.session, owner)
        request_id = f"{sampler.id}:{request.seq_id}"
        if request_id not in self.jobs:
            self._check_room()
            self._add_sample(sampler, request.seq_id, body)
            self.store.write(self.store.folder / "samplers" / sampler.id / f"{request.seq_id:010d}", body)
            self._arrival.notify()
        ids = [f"{request_id}:{index}" for index in range(request.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    def _add_sample(self, sampler: Sampler, seq: int, body: bytes) -> None:
        request = read_json_request(wire.Sample, body)
        prompt = np.asarray([token for chunk in request.prompt.chunks for token in chunk.tokens], np.int64)
        wire.check_tokens("prompt", prompt, self.served.vocab_size, self.served.max_tokens - 1)
        settings = request.sampling_params
        if request.prompt_logprobs_last_n is not None and request.prompt_logprobs_last_n >= len(prompt):
            raise RequestError(
                f"prompt_logprobs_last_n={request.prompt_logprobs_last_n} of a prompt of {len(prompt)} tokens"
            )
        stop = [settings.stop] if isinstance(settings.stop, str) else settings.stop
        if stop == []:
            raise RequestError(
                "stop=[]: responses end at the model's end tokens here; leave stop out, and set max_tokens"
            )
        texts = tuple(one for one in stop or () if isinstance(one, str))
        if not all(texts) or len(stop or ()) > 64:
            raise RequestError("stop has an empty text, or more than 64 entries")
        # From the client's own numbers, so that the same client draws the same samples, whatever else is served.
        base = [self.served.seed, sampler.id.partition(":")[2], seq, settings.seed, prompt.tolist()]
        job = SampleJob(
            prompt=tuple(prompt.tolist()),
            seeds=tuple(stable_hash(json.dumps([*base, index])) for index in range(request.num_samples)),
            max_tokens=min(settings.max_tokens or self.served.max_tokens, self.served.max_tokens - len(prompt)),
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k if settings.top_k > 0 else -1,
            stop_token_ids=tuple(one for one in stop or () if isinstance(one, int)),
            stop=texts,
            prompt_logprobs=bool(request.prompt_logprobs),
        )
        made = Job(f"{sampler.id}:{seq}", sampler.owner, "sample", body, job, sampler, seq)
        made.arrived = time.monotonic()
        self.jobs[made.id] = made
        self._samples.append(made)

    async def retrieve(self, request: wire.Retrieve, owner: str) -> Response:
        """Wait for an answer, for a while."""
        with self.lock:
            job = self.jobs.get(request.request_id)
            stored = None if job is not None else self._stored_answer(request.request_id, owner)
        if stored is not None:
            return stored
        if job is None or job.owner != owner:
            raise RequestError(f"there is no request {request.request_id[:200]!r}", 404)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(job.done.wait(), POLL_S)
        if job.answer is None:
            body = {"type": "try_again", "request_id": job.id, "queue_state": "active"}
            return JSONResponse(body, 408)
        if job.kind == "sample":
            path = self.store.folder / "samplers" / job.target.id / f"{job.seq:010d}"
            path.unlink(missing_ok=True)
        media, content = job.answer
        return Response(content, media_type=media)

    def _stored_answer(self, request_id: str, owner: str) -> Response | None:
        name, _, number = request_id.rpartition(":")
        if name in self.models and self.models[name].owner == owner and number.isdigit():
            path = self.store.model(name) / "results" / f"{int(number):010d}"
            if path.exists():
                content = path.read_bytes()
                media = wire.PROTOBUF if content[:1] == b"P" else "application/json"
                return Response(content[1:], media_type=media)
        is_own = (name in self.samplers and self.samplers[name].owner == owner) or (
            name in self.models and self.models[name].owner == owner
        )
        if is_own:
            raise RequestError(f"the answer to {request_id[:200]} is no longer kept; send the request again", 410)
        return None

    # -- about models and checkpoints --------------------------------------------------------------------------------

    def about_model(self, model: Model) -> Json:
        """Returns a training run in the protocol's form."""
        checkpoints = self.list_checkpoints(model)["checkpoints"]
        last = {kind: [one for one in checkpoints if one["checkpoint_type"] == kind] for kind in KINDS.values()}
        return {
            "training_run_id": model.id,
            "base_model": self.served.name,
            "model_owner": model.owner,
            "is_lora": model.lora is not None,
            "lora_rank": model.lora.rank if model.lora else None,
            "last_request_time": _time(model.touched),
            "last_checkpoint": last["training"][-1] if last["training"] else None,
            "last_sampler_checkpoint": last["sampler"][-1] if last["sampler"] else None,
            "user_metadata": model.origin["user_metadata"],
        }

    def list_checkpoints(self, model: Model) -> Json:
        """Returns a model's checkpoints, the oldest first; removes those that have expired."""
        found = []
        for name, about in self.store.checkpoints(model.id).items():
            if about["expires"] is not None and about["expires"] < time.time():
                self.store.remove_checkpoint(model.id, name)
                continue
            found.append(
                {
                    "checkpoint_id": name,
                    "checkpoint_type": KINDS[name.partition("/")[0]],
                    "time": _time(about["time"]),
                    "tinker_path": f"tinker://{model.id}/{name}",
                    "size_bytes": about["size"],
                    "user_metadata": about["user_metadata"],
                    "expires_at": None if about["expires"] is None else _time(about["expires"]),
                }
            )
        return {"checkpoints": sorted(found, key=lambda one: one["time"])}

    def about_weights(self, path: str, owner: str) -> Json:
        """Returns what a checkpoint is of."""
        folder = self.checkpoint_folder(path, owner, tuple(KINDS))
        lora = self.model_of(folder.parents[1].name, owner).lora
        switches = {} if lora is None else lora.model_dump(include={"train_unembed", "train_mlp", "train_attn"})
        rank = None if lora is None else lora.rank
        return {"base_model": self.served.name, "is_lora": lora is not None, "lora_rank": rank, **switches}


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _sample_bytes(job: Job, sampled: Sampled) -> bytes:
    sequences = [(one.response_ids, one.logprobs, one.finish_reason) for one in sampled.completions]
    prompt = None
    if sampled.prompt_logprobs is not None:
        last = json.loads(job.body).get("prompt_logprobs_last_n") if job.body else None
        prompt = [math.nan, *sampled.prompt_logprobs]
        if last is not None:
            prompt = [math.nan] * (len(prompt) - last) + prompt[len(prompt) - last :]
    return wire.sample_response(sequences, prompt)


def read_json_request(kind: type[T], body: bytes) -> T:
    """Reads a JSON request. Raises RequestError, which names the fields."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, one['loc']))[:200]}: {one['msg'][:300]}" for one in error.errors()[:8]]
        raise RequestError("; ".join(wrong)) from None
