"""The server on rank 0: who may do what, in which order, and where the answers are. It computes nothing itself.

A request becomes a Job whose id follows from the client's own numbers: sent again, after a lost connection or a restart, it finds
the same job. A model's jobs run in the order of their numbers, different models' in the order of arrival, and all waiting
samples of one set of weights together. `take` gives the ranks commands, `finish` takes results. One lock guards all of it.

Every object has an owner, the digest of a key. For all other keys it does not exist: the answer is that to a wrong name.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import json
import math
import re
import shutil
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse, Response

from grpo_megatron.config import ServiceConfig
from grpo_megatron.service import wire
from grpo_megatron.service.store import CHECKPOINT_KINDS, REQUEST_FAILED, JsonObject, Store, numbered
from grpo_megatron.service.wire import RequestError, read_json_request
from grpo_megatron.service.work import Sampled

POLL_S = 30.0  # seconds that a client waits for an answer before it asks again
MAX_STARTS = 3  # of a command that ends the server each time
MAX_AHEAD = 4096  # requests of one model that may arrive before one with a lower number
MAX_KEPT_BYTES = 1 << 30  # of answers in memory that nobody has fetched; those of training are on disk, too
SNAPSHOT_SHARE = 0.05  # of a model's computing time, that its snapshots take at most
TOGETHER_S = 0.003  # a batch of samples begins when none has come for so long, or after twenty times as long
METHODS = {"weights": "save", "sampler_weights": "snapshot", "external_weights": "export"}  # of Work
# First byte of a stored answer -> its media type. E: the error of a request that changed nothing, and does not run again.
MEDIA = {b"P": wire.PROTOBUF, b"J": "application/json", b"E": "application/json"}
NOT_FINITE = {
    "step": "the gradient is not finite: no step was made, and the gradients are dropped",
    "pass": "the loss is not finite: its data or the last steps are too large. Its gradients stay until optim_step",
}


@dataclass(frozen=True)
class ServedModel:
    """The base model, as clients see it. `rank`: the most that adapters may have; None: all weights are trained."""

    name: str
    tokenizer: str
    vocab_size: int
    max_tokens: int  # of prompt and response
    rank: int | None
    seed: int


@dataclass
class Session:
    """A client. `seen`: seconds of the clock of its last sign of life."""

    id: str
    owner: str
    seen: float
    is_over: bool = False


@dataclass
class Model:
    """A training run. `origin`: how it began. `next_seq`: the number of the request that is to be queued next."""

    id: str
    owner: str
    session: str
    origin: JsonObject
    next_seq: int = 1
    waiting: dict[int, Job] = field(default_factory=dict)
    is_loaded: bool = False
    is_failed: bool = False
    steps: int = 0  # since the last snapshot
    passes: int = 0  # with gradients, since the last step
    busy_s: float = 0.0  # spent on its commands since the last snapshot
    snapshot_s: float = 0.0  # spent on the last snapshot

    @property
    def lora(self) -> Any:
        content = self.origin["lora"]
        return None if content is None else wire.LoraRequest(**content)


@dataclass
class SamplingSession:
    """A sampling session. `folder`: of its weights; None: the base's."""

    id: str
    owner: str
    session: str
    path: str | None
    folder: Path | None
    place: str  # what its samples without a seed follow from


@dataclass
class Job:
    """One request. `kind`: pass, step, load, a kind of checkpoint, sample, or refused, whose `request` is the error."""

    id: str
    owner: str
    kind: str
    request: Any
    target: Any  # a Model or a SamplingSession
    seq: int = 0
    arrived: float = field(default_factory=time.monotonic)
    answer: tuple[str, bytes] | None = None  # media type and content
    is_again: bool = False  # its answer is on disk: it runs for the state that it makes
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class RankCommand:
    """The next thing that all ranks run: a method of Work. `jobs`: those that it answers; `model`: the one that it changes."""

    method: str
    arguments: tuple[Any, ...]
    options: JsonObject = field(default_factory=dict)
    jobs: tuple[Job, ...] = ()
    model: Model | None = None


class Server:
    """The state of all clients. The main thread of rank 0 calls `take` and `finish`, the thread of HTTP all else."""

    def __init__(self, config: ServiceConfig, store: Store, served: ServedModel) -> None:
        """Read what an earlier server of the folder has left. Raises ConfigError."""
        self.config, self.store, self.served = config, store, served
        self.owners = {digest(token): digest(token)[:16] for token in store.tokens(config)}
        self.lock = threading.RLock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, SamplingSession] = {}
        self.jobs: dict[str, Job] = {}  # in the order of arrival
        self._ready: collections.deque[Job] = collections.deque()  # of models
        self._commands: collections.deque[RankCommand] = collections.deque()  # before all jobs
        self._samples: list[Job] = []
        self._num_alone = 0  # samples that run alone, as one of them failed among others
        self._removed: list[Path] = []  # checkpoints whose folder goes when no rank reads it
        self._began = 0.0  # when `take` returned the command that runs
        self.running = store.folder  # the file of this command
        self._kept = 0  # bytes of answers in memory
        self._fetched: dict[str, tuple[float, Path]] = {}  # samples -> when their answer was asked for, their file
        self._arrival = threading.Condition(self.lock)
        self._recall()

    def _recall(self) -> None:
        for name, content in self.store.read_all("sessions"):
            self.sessions[name] = Session(name, content["owner"], time.monotonic(), content["is_over"])
        for name, content in self.store.read_all("models"):
            model = self.models[name] = Model(name, content["owner"], content["session"], content["origin"])
            snapshot, home = self.store.snapshot(name), self.store.model(name)
            model.next_seq = 1 + (snapshot[0] if snapshot else 0)
            requests = {seq for seq in self.store.numbers(home / "requests") if seq >= model.next_seq}
            while model.next_seq in requests:
                model.next_seq += 1
            if requests.difference(self.store.numbers(home / "results")) and not self.sessions[model.session].is_over:
                self._restore(model)
        for name, content in self.store.read_all("samplers"):
            folder = None if content["folder"] is None else Path(content["folder"])
            place = content.get("place", name.partition(":")[2])
            sampler = SamplingSession(name, content["owner"], content["session"], content["path"], folder, place)
            if self.sessions[sampler.session].is_over:
                self.store.remove_sampler(name)
                continue
            self.samplers[name] = sampler
            for body in self.store.requests(self.store.folder / "samplers" / name).values():
                with contextlib.suppress(RequestError):
                    self._queue_sample(self._read_sample(sampler, read_json_request(wire.SampleRequest, body)))
        for path in sorted((self.store.folder / "running").iterdir()):
            self._recall_running(path)

    def _recall_running(self, path: Path) -> None:
        """End a request, or a model, whose command ended the ranks with an error, or the server MAX_STARTS times."""
        first, *later = path.read_text().splitlines() or [""]
        job, model = self.jobs.get(first), self.models.get(path.name.rpartition(":")[0])
        self._num_alone = len(self._samples)
        failed = [line for line in later if line.startswith(REQUEST_FAILED)]
        if " " in first:  # samples: which of them was it?
            path.unlink()
        elif not failed and len(later) < MAX_STARTS - 1:
            return
        elif job is not None:
            (self._samples if job.kind == "sample" else self._ready).remove(job)
            self._fail(job, failed[0] if failed else f"{REQUEST_FAILED}it ended {MAX_STARTS} times", "server")
            if job.kind != "sample":  # the request of a sample stays until the answer is fetched
                path.unlink()
        elif model is not None:
            model.is_failed = model.is_loaded = True  # until somebody removes the file
            self._commands = collections.deque(one for one in self._commands if one.model is not model)

    def _restore(self, model: Model) -> None:
        """Bring a model into memory: its last snapshot or its beginning, and then the requests since, again."""
        if model.is_loaded:
            return
        self._check_memory()
        model.is_loaded, model.steps, model.passes = True, 0, 0
        snapshot, origin = self.store.snapshot(model.id), model.origin
        source = snapshot[1] if snapshot else origin["source"] and Path(origin["source"])
        if source:
            options = {"optimizer": bool(snapshot or origin["optimizer"])}
            self._commands.append(RankCommand("load", (model.id, source, model.lora), options, model=model))
        else:
            self._commands.append(RankCommand("create", (model.id, model.lora), model=model))
        folder, first = self.store.model(model.id), 1 + (snapshot[0] if snapshot else 0)
        answered = self.store.numbers(folder / "results")
        for seq, body in self.store.requests(folder / "requests").items():
            if seq < first or self.store.is_void(model.id, seq):
                continue
            job = self.jobs.get(f"{model.id}:{seq}") or self._read_job(model, seq, body)
            job.is_again = seq in answered
            if not job.is_again:
                self.jobs[job.id] = job
            if seq < model.next_seq:
                self._ready.append(job)
            else:
                model.waiting[seq] = job

    # -- commands for the ranks --------------------------------------------------------------------------------------

    def take(self, timeout_s: float) -> RankCommand | None:
        """Returns the next command; None after `timeout_s` without one."""
        end = time.monotonic() + timeout_s
        with self._arrival:
            while True:
                self._end_sessions()
                command, self._began = self._next(), time.monotonic()
                if command is not None:
                    names = [job.id for job in command.jobs] or [f"{command.arguments[0]}:{command.method}"]
                    self.running = self.store.folder / "running" / names[0]
                    with contextlib.suppress(OSError), self.running.open("a") as file:
                        file.write(" ".join(names) + "\n")
                if command is not None or self._began >= end:
                    return command
                self._arrival.wait(TOGETHER_S if self._samples else timeout_s)

    def _next(self) -> RankCommand | None:
        if self._commands:
            return self._commands.popleft()
        now, samples = time.monotonic(), self._samples
        are_together = samples and max(now - samples[-1].arrived, (now - samples[0].arrived) / 20) >= TOGETHER_S
        while self._ready and not (are_together and samples[0].arrived < self._ready[0].arrived):
            if (command := self._command(self._ready.popleft())) is not None:
                return command
        if not are_together:
            return None
        folder = samples[0].target.folder
        jobs = tuple(job for job in samples if job.target.folder == folder)
        if self._num_alone > 0:
            jobs, self._num_alone = jobs[:1], self._num_alone - 1
        taken = {job.id for job in jobs}
        self._samples = [job for job in samples if job.id not in taken]
        if folder is not None and not folder.exists():
            for job in jobs:
                self._fail(job, f"the checkpoint {job.target.path or ''} of this sampling session was removed")
            return self._next()
        return RankCommand("sample", (folder, [job.request for job in jobs]), jobs=jobs)

    def _command(self, job: Job) -> RankCommand | None:
        """Returns the command of a model's job; None: nothing is to run."""
        model, request = job.target, job.request
        try:
            if job.kind == "refused" or model.is_failed:
                lost = f"{model.id} could not be brought into memory; load a checkpoint into a new model"
                raise RequestError(request if job.kind == "refused" else lost)
            if job.is_again and (job.kind in METHODS or (job.kind == "pass" and request.forward_only)):
                return None
            if job.kind == "pass":
                model.passes += not request.forward_only
                return RankCommand("run_pass", (request,), {}, (job,), model)
            if job.kind == "step":
                return RankCommand("step", (model.id, request.adam_params), {}, (job,), model)
            if job.kind == "load":
                arguments = model.id, self.checkpoint(request.path, job.owner), model.lora
                return RankCommand("load", arguments, {"optimizer": request.optimizer}, (job,), model)
            name = f"{job.kind}/{request.path or f'session-{job.seq:010d}'}"
            about = self.store.checkpoints(model.id).get(name, {"seq": job.seq})
            if about["seq"] != job.seq and not request.overwrite:  # the same: a kill came before its answer
                raise RequestError(f"{name} is there already; choose another name, or set overwrite")
            return RankCommand(METHODS[job.kind], (model.id, self.store.model(model.id) / name), {}, (job,), model)
        except RequestError as error:
            self._fail(job, str(error))
            return None

    def finish(self, command: RankCommand, result: Any, error: Exception | None) -> None:
        """Answer the jobs of a command."""
        model = command.model
        with self.lock:
            self.running.unlink(missing_ok=True)
            if error is not None:
                is_request = isinstance(error, RequestError)
                if len(command.jobs) > 1 and not is_request:
                    self._samples, self._num_alone = [*command.jobs, *self._samples], len(command.jobs)
                    return
                for job in command.jobs:
                    self._fail(job, str(error), "user" if is_request else "server")
                if not command.jobs:
                    print(f"{command.method} {command.arguments[0]}: {error}", flush=True)
                if model is not None and not command.jobs and command.method in ("load", "create"):
                    model.is_failed = True
                elif model is not None and command.method in ("load", "step") and not model.is_failed:
                    self._bring_back(model)
                return
            for number, job in enumerate(command.jobs):
                if job.kind == "sample":
                    self._answer(job, b"P", _sample_bytes(result[number]))
                elif job.kind in NOT_FINITE and not math.isfinite(result if job.kind == "step" else result[1]):
                    self._answer(job, b"J", {"error": NOT_FINITE[job.kind], "category": "user"})
                elif job.kind == "pass":
                    metrics = {"loss:sum": result[1], "num_tokens:sum": float(sum(map(len, result[0])))}
                    self._answer(job, b"P", wire.pass_response(result[0], metrics))
                else:
                    self._answer(job, b"J", self._done(job, command, result))
            if model is None:
                return
            seconds = time.monotonic() - self._began
            model.busy_s += seconds
            if command.method == "step":
                model.steps, model.passes = model.steps + 1, 0
                is_due = model.snapshot_s <= SNAPSHOT_SHARE * model.busy_s
                if is_due and model.steps >= self.config.snapshot_steps:
                    self._take_snapshot(model, command.jobs[0].seq)
            elif command.method == "load" and command.jobs:
                model.passes = 0
                self._take_snapshot(model, command.jobs[0].seq)  # the checkpoint may be removed
            elif command.method == "save" and not command.jobs:
                model.busy_s, model.snapshot_s = 0.0, seconds
                self.store.remove_replaced(model.id, int(command.arguments[1].name.removeprefix("state_")))

    def _bring_back(self, model: Model) -> None:
        """Restore a model that a failed command may have left half changed."""
        self._ready = collections.deque(job for job in self._ready if job.target is not model)
        self._commands.append(RankCommand("drop", (model.id,)))
        model.is_loaded = False
        self._restore(model)

    def _fail(self, job: Job, error: str, category: str = "user") -> None:
        """Answer a job that has not changed its model, so that it does not run again."""
        if job.is_again:  # its client has another answer
            job.target.is_failed = True
        else:
            self._answer(job, b"E", {"error": error, "category": category})

    def _take_snapshot(self, model: Model, seq: int) -> None:
        model.steps = 0
        for name in self.store.checkpoints(model.id, expired=True):
            self.remove_checkpoint(model.id, name)
        self._commands.append(
            RankCommand("save", (model.id, self.store.model(model.id) / f"state_{seq:010d}"), model=model)
        )

    def _done(self, job: Job, command: RankCommand, result: Any) -> JsonObject:
        """Returns the answer to a step, a load or a checkpoint, which is noted as complete."""
        model, request = job.target, job.request
        if job.kind == "step":
            return {"metrics": {"grad_norm": result, "lr": request.adam_params.learning_rate}}
        if job.kind == "load":
            return {"path": request.path, "model_id": model.id, "type": "load_weights"}
        folder = command.arguments[1]
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        expires = None if request.ttl_seconds is None else time.time() + request.ttl_seconds
        about = {"time": time.time(), "size": size, "expires": expires, "user_metadata": request.user_metadata}
        about |= {"seq": job.seq, "is_unnamed": request.path is None}
        try:
            self.store.write(folder.with_name(f"{folder.name}.json"), about)
            self._removed = [path for path in self._removed if path != folder]  # while this one replaced it
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            return {"error": f"{REQUEST_FAILED}{error}", "category": "server"}
        path = f"tinker://{model.id}/{job.kind}/{folder.name}"
        if job.kind == "sampler_weights" and request.path is None:
            # Not the client's sampling_session_seq_id, which counts attempts of this request, too: samples would depend on
            # lost connections. Other sampling sessions are counted here (create_sampler).
            place = f"{model.id.rpartition(':')[2]}-{job.seq}"
            sampler = self._add_sampler(self.sessions[model.session], place, path, folder, f"sample:{place}")
            return {"sampling_session_id": sampler.id}
        return {"path": path, **({"size_bytes": size} if job.kind == "external_weights" else {})}

    def _answer(self, job: Job, form: bytes, content: bytes | JsonObject) -> None:
        if isinstance(content, dict):
            content = json.dumps(content).encode()
        if isinstance(job.target, Model) and job.seq:
            place = numbered(self.store.model(job.target.id) / "results", job.seq)
            self.store.write(place, form + content)  # an OSError ends the server, and the next start computes it again
            self.jobs.pop(job.id, None)
        else:
            self._kept += len(content)
        job.answer, job.request = (MEDIA[form], content), None
        answered = [one for one in self.jobs.values() if one.answer is not None] if self._kept > MAX_KEPT_BYTES else []
        for old in answered[: len(answered) // 2]:
            self._forget(old)
        if self.loop is not None:
            self.loop.call_soon_threadsafe(job.done.set)

    def _forget(self, job: Job) -> None:
        """Remove a job with its answer from the memory."""
        if self.jobs.pop(job.id, None) is not None and job.answer is not None:
            self._kept -= len(job.answer[1])

    # -- sessions ----------------------------------------------------------------------------------------------------

    def create_session(self, request: Any, owner: str) -> JsonObject:
        """Begin a session."""
        session = Session(uuid.uuid4().hex, owner, time.monotonic())
        self._write_session(session)
        self.sessions[session.id] = session
        return {"type": "create_session", "session_id": session.id}

    def _write_session(self, session: Session) -> None:
        content = {"owner": session.owner, "is_over": session.is_over}
        self.store.write(self.store.folder / "sessions" / f"{session.id}.json", content)

    def session(self, session_id: str, owner: str) -> Session:
        """Returns a session of this owner that is not over; this is a sign of life. Raises RequestError."""
        session = self.sessions.get(session_id)
        if session is None or session.owner != owner:
            raise RequestError(f"there is no session {session_id[:200]!r}", 404)
        if session.is_over:
            raise RequestError(f"session {session_id} is over: it was closed, or gave no sign of life", 410)
        session.seen = time.monotonic()
        return session

    def _end_sessions(self) -> None:
        """Free what the clients hold that have gone. Their models stay on disk."""
        limit = time.monotonic() - self.config.session_timeout_s
        for session in self.sessions.values():
            if not session.is_over and session.seen < limit:
                with contextlib.suppress(OSError):  # a later start ends it again
                    self.end(session)
        while self._removed:
            shutil.rmtree(self._removed.pop(), ignore_errors=True)
        busy = {id(job.target) for job in self._ready} | {id(command.model) for command in self._commands}
        for model in self.models.values():
            if model.is_loaded and self.sessions[model.session].is_over and id(model) not in busy:
                if model.steps and not model.passes and not model.is_failed:
                    self._take_snapshot(model, model.next_seq - 1)
                model.is_loaded = False
                with contextlib.suppress(OSError):
                    self.end(self.sessions[model.session])  # again: what its last requests have made
                self._commands.append(RankCommand("drop", (model.id,)))

    def end(self, session: Session) -> None:
        """End a session. Frees its answers, its samples, requests that wait for an earlier one, and weights without a name."""
        session.is_over = True
        for model in [model for model in self.models.values() if model.session == session.id]:
            for seq in [*model.waiting]:
                self.jobs.pop(model.waiting.pop(seq).id, None)
                self.store.remove_request(model.id, seq)
            for name, about in self.store.checkpoints(model.id).items():
                if about["is_unnamed"]:
                    self.remove_checkpoint(model.id, name)
        self._samples = [job for job in self._samples if job.target.session != session.id]
        for sampler in [sampler for sampler in self.samplers.values() if sampler.session == session.id]:
            self.store.remove_sampler(self.samplers.pop(sampler.id).id)
        for job in [job for job in self.jobs.values() if job.target.session == session.id]:
            if job.answer is not None or job.kind == "sample":
                self._forget(job)
        self._write_session(session)

    # -- models ------------------------------------------------------------------------------------------------------

    def model(self, model_id: str, owner: str) -> Model:
        """Returns a model of this owner. Raises RequestError."""
        model = self.models.get(model_id)
        if model is None or model.owner != owner:
            raise RequestError(f"there is no model {model_id[:200]!r}", 404)
        return model

    def checkpoint(self, path: str, owner: str, kinds: Sequence[str] = ("weights",)) -> Path:
        """Returns the folder of a checkpoint by its tinker:// path. Raises RequestError."""
        match = re.fullmatch(r"tinker://([^/]+)/([a-z_]+)/([^/]+)", path)
        model = self.models.get(match[1]) if match and match[2] in kinds else None
        name = f"{match[2]}/{match[3]}" if match else ""
        if model is None or model.owner != owner or name not in self.store.checkpoints(model.id):
            raise RequestError(f"there is no checkpoint {path[:200]!r} of {' or '.join(kinds)}", 404)
        return self.store.model(model.id) / name

    def remove_checkpoint(self, model_id: str, name: str) -> None:
        """Remove a checkpoint KIND/NAME: at once for clients, and from the disk before the next command."""
        self.store.remove_checkpoint(model_id, name)
        self._removed.append(self.store.model(model_id) / name)

    def _check_base(self, name: str | None) -> None:
        if name is not None and name.partition(":")[0] != self.served.name:
            raise RequestError(f"base_model {name!r} is not served; this server has {self.served.name!r}", 404)

    def create_model(self, request: Any, owner: str) -> JsonObject:
        """Begin a training run of the base model."""
        self._check_base(request.base_model)
        rank, most = request.lora_config.rank if request.lora_config else 0, self.served.rank
        if not (rank == 0 if most is None else 1 <= rank <= most):
            has = "trains all weights: rank=0" if most is None else f"has adapters of rank 1 to {most}"
            raise RequestError(f"lora_config.rank={rank}: this server {has} (actor.lora.rank)")
        origin = {"lora": request.lora_config.model_dump() if rank else None, "source": None, "optimizer": False}
        return self._new_model(request, owner, origin)

    def load_new(self, request: Any, owner: str) -> JsonObject:
        """Begin a training run with a checkpoint."""
        self._check_base(request.base_model)
        folder = self.checkpoint(request.path, owner)
        lora = self.model(folder.parents[1].name, owner).origin["lora"]
        origin = {"lora": lora, "source": str(folder), "optimizer": request.optimizer}
        return self._new_model(request, owner, origin)

    def _new_model(self, request: Any, owner: str, origin: JsonObject) -> JsonObject:
        """Returns a future that is complete: what the client asks of the model later runs after the command that makes it."""
        session = self.session(request.session_id or "", owner)
        model_id = f"{session.id}:train:{request.model_seq_id or 0}"
        origin["user_metadata"] = request.user_metadata
        model = self.models.get(model_id) or Model(model_id, owner, session.id, origin)
        if model.origin != origin:
            raise RequestError(f"{model_id} exists, and began otherwise; use a new model_seq_id")
        if model_id not in self.models:
            self._check_memory()
            self.store.create_model(model_id, {"owner": owner, "session": session.id, "origin": origin})
            self.models[model_id] = model  # after the disk, which may be full
            self._restore(model)
            if origin["source"] is not None:
                self._take_snapshot(model, 0)  # the checkpoint may be removed
            self._arrival.notify()
        return {"request_id": f"{model_id}:new", "model_id": model_id}

    def add_request(self, path: str, content: bytes, owner: str) -> JsonObject:
        """Queue a request of a model, which was sent to `path`. The same one again has the same future.

        One that is wrong keeps its place in the order: its answer is the error. Raises RequestError where no model expects it.
        """
        body = path.encode() + b"\n" + content
        place = wire.place_of(path, content)
        if place is None:
            kind, request = self._read(body)  # raises, or is the first request of a new model
            if kind != "load":
                raise RequestError(f"{path} needs model_id and seq_id")
            with self.lock:
                return self.load_new(request, owner)
        with self.lock:
            model, seq = self.model(place[0], owner), place[1]
            self.session(model.session, owner)
        job = self._read_job(model, seq, body)  # without the lock: a body may be large
        with self.lock:
            if not 1 <= seq <= model.next_seq + MAX_AHEAD:
                raise RequestError(f"seq_id {seq} is out of order: {model.id} expects {model.next_seq}")
            if seq >= model.next_seq and seq not in model.waiting:
                self._check_room()
                self._restore(model)
                self.store.write(numbered(self.store.model(model.id) / "requests", seq), body)
                self.jobs[job.id] = model.waiting[seq] = job
                while model.next_seq in model.waiting:
                    self._ready.append(model.waiting.pop(model.next_seq))
                    model.next_seq += 1
                self._arrival.notify()
        return {"request_id": job.id, "model_id": model.id}

    def _check_memory(self) -> None:
        loaded = sum(model.is_loaded for model in self.models.values())
        if loaded >= self.config.max_models:
            remedy = "close a session, or wait until one is over"
            raise RequestError(f"{loaded} models are in memory (service.max_models); {remedy}", 429)

    def _check_room(self) -> None:
        waiting = len(self._ready) + len(self._samples) + sum(len(model.waiting) for model in self.models.values())
        if waiting >= self.config.max_queued:
            raise RequestError(f"{waiting} requests are waiting (service.max_queued); come again later", 429)

    def _read(self, body: bytes) -> tuple[str, Any]:
        return wire.read_request(body, self.served.vocab_size, self.served.max_tokens)

    def _read_job(self, model: Model, seq: int, body: bytes) -> Job:
        try:
            kind, request = self._read(body)
        except RequestError as error:
            kind, request = "refused", str(error)
        return Job(f"{model.id}:{seq}", model.owner, kind, request, model, seq)

    def list_checkpoints(self, model: Model) -> JsonObject:
        """Returns a model's checkpoints, the oldest first."""
        found = []
        for name, about in self.store.checkpoints(model.id).items():
            one = {"checkpoint_id": name, "checkpoint_type": CHECKPOINT_KINDS[name.partition("/")[0]]}
            one |= {"tinker_path": f"tinker://{model.id}/{name}", "size_bytes": about["size"]}
            one["user_metadata"] = about["user_metadata"]
            one["expires_at"] = about["expires"] and datetime.fromtimestamp(about["expires"], UTC).isoformat()
            found.append({**one, "time": datetime.fromtimestamp(about["time"], UTC).isoformat()})
        return {"checkpoints": sorted(found, key=lambda one: one["time"])}

    # -- samples -----------------------------------------------------------------------------------------------------

    def sampler(self, sampler_id: str, owner: str) -> SamplingSession:
        """Returns a sampling session of this owner. Raises RequestError."""
        sampler = self.samplers.get(sampler_id)
        if sampler is None or sampler.owner != owner:
            raise RequestError(f"there is no sampling session {sampler_id[:200]!r}", 404)
        return sampler

    def _add_sampler(
        self, session: Session, number: str, path: str | None, folder: Path | None, place: str
    ) -> SamplingSession:
        name = f"{session.id}:sample:{number}"
        new = SamplingSession(name, session.owner, session.id, path, folder, place)
        sampler = self.samplers.setdefault(name, new)
        if sampler.folder != folder:
            raise RequestError(f"{name} exists with other weights; use a new sampling_session_seq_id")
        content = {"owner": session.owner, "session": session.id, "path": path, "folder": folder and str(folder)}
        content["place"] = sampler.place
        self.store.create_sampler(name, content)
        return sampler

    def create_sampler(self, request: Any, owner: str) -> JsonObject:
        """Begin a sampling session of the base model, or of a checkpoint for samplers."""
        session, path = self.session(request.session_id, owner), request.model_path
        self._check_base(request.base_model)
        folder = None if path is None else self.checkpoint(path, owner, ("sampler_weights",))
        earlier = sum(one.session == session.id and ":created:" in one.place for one in self.samplers.values())
        sampler = self._add_sampler(
            session, str(request.sampling_session_seq_id), path, folder, f"sample:created:{earlier}"
        )
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    def sample(self, request: Any, owner: str, body: bytes) -> JsonObject:
        """Queue a sampling request."""
        sampler = self.sampler(request.sampling_session_id, owner)
        self.session(sampler.session, owner)
        request_id = f"{sampler.id}:{request.seq_id}"
        if request_id not in self.jobs:
            self._check_room()
            job = self._read_sample(sampler, request)
            self.store.write(numbered(self.store.folder / "samplers" / sampler.id, request.seq_id), body)
            self._queue_sample(job)
            self._arrival.notify()
        ids = [f"{request_id}:{index}" for index in range(request.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    def _read_sample(self, sampler: SamplingSession, request: Any) -> Job:
        """Raises RequestError."""
        # A seed alone decides; without one, the client's own numbers do: the same client has the same samples.
        has_seed, seq = request.sampling_params.seed is not None, request.seq_id
        place = (self.served.seed, *(() if has_seed else (sampler.place, seq)))
        read = wire.read_sample(request, self.served.vocab_size, self.served.max_tokens, place)
        return Job(f"{sampler.id}:{seq}", sampler.owner, "sample", read, sampler, seq)

    def _queue_sample(self, job: Job) -> None:
        self.jobs[job.id] = job
        self._samples.append(job)

    # -- answers -----------------------------------------------------------------------------------------------------

    async def retrieve(self, request_id: str, owner: str) -> Response:
        """Wait for an answer, for a while. Raises RequestError."""
        with self.lock:
            job = self.jobs.get(request_id)
            if job is None or job.owner != owner:
                return self._stored_answer(request_id, owner)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(job.done.wait(), POLL_S)
        if job.answer is None:
            return JSONResponse({"type": "try_again", "request_id": job.id, "queue_state": "active"}, 408)
        if job.kind == "sample":
            self._forget_samples(job)
        return Response(job.answer[1], media_type=job.answer[0])

    def _forget_samples(self, job: Job) -> None:
        """Remove requests whose answers were fetched a while ago. A kill may come before an answer has arrived."""
        with self.lock:
            now = time.monotonic()
            self._fetched[job.id] = now, numbered(self.store.folder / "samplers" / job.target.id, job.seq)
            for name in [name for name, (then, _) in self._fetched.items() if then < now - POLL_S]:
                self._fetched.pop(name)[1].unlink(missing_ok=True)
                if name in self.jobs:
                    self._forget(self.jobs[name])

    def _stored_answer(self, request_id: str, owner: str) -> Response:
        name, _, number = request_id.rpartition(":")
        target = self.models.get(name) or self.samplers.get(name)
        if isinstance(target, Model) and target.owner == owner and number == "new":
            return JSONResponse({"model_id": name})
        if target is None or target.owner != owner or not number.isdecimal():
            raise RequestError(f"there is no request {request_id[:200]!r}", 404)
        path = numbered(self.store.model(name) / "results", int(number))
        if not path.exists():
            raise RequestError(f"the answer to {request_id[:200]} is no longer kept; send the request again", 410)
        content = path.read_bytes()
        return Response(content[1:], media_type=MEDIA[content[:1]])


def digest(token: str) -> str:
    """Returns what is kept of a key."""
    return hashlib.sha256(token.encode()).hexdigest()


def _sample_bytes(sampled: Sampled) -> bytes:
    sequences = [(one.response_ids, one.logprobs, one.finish_reason) for one in sampled.completions]
    return wire.sample_response(sequences, sampled.prompt_logprobs)
