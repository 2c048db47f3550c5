"""RolloutEngine: the interface between the trainer and a rollout engine, with the request and completion types.

Each rank has one engine object. `rollout_tp` neighbouring ranks are one replica of the engine and serve the same requests
together; replicas never wait for each other to generate. Lengths are tokens, log-probabilities are natural logarithms.

To add an engine, write a subclass and name it in the config: `rollout.engine: my.module:MyEngine`. Nothing in this package
has to change. transformers_engine.py is the shorter example.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from grpo_megatron.config import RolloutConfig, Section
from grpo_megatron.sync.plan import EngineTensors, SyncTensor, shortened
from grpo_megatron.types import KeptIds, PromptImage, TokenRoutes, WeightBucket

if TYPE_CHECKING:
    from grpo_megatron.device import Device
    from grpo_megatron.parallel.mesh import Mesh


_CLEANED = ".?!,'tmse "  # last characters of " .", " n't" and the like: the clean-up of a tokenizer removes their space
_MARGIN = 8  # characters that may decode differently at the beginning of a window (parts of a character, a space)


class StopTexts:
    """Texts that end a response. `token_ids`: the texts that are one token of the vocabulary, special tokens too.

    Token t completes a text when it is the first token for which decode(ids[: t + 1]) contains the text. Special tokens are left
    out of the decoded text. Decoding all tokens again after each token would be quadratic, so most tokens are ruled out by
    their own text: the last character of a stop text is always part of the token that completes it. For the others the end of
    the response is decoded. A text found there is confirmed in the full response, because the beginning of a window may decode
    to something else. One tokenizer and no other state: all ranks decide the same.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        assert texts and all(texts), f"an empty stop text is found everywhere: {texts!r}"

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        self.texts, self._tokenizer, vocabulary = tuple(texts), tokenizer, tokenizer.get_vocab()
        known = [text for text in texts if text in vocabulary]
        self.token_ids = tuple(vocabulary[text] for text in known if encode(text) == [vocabulary[text]])
        self._last = {text[-1] for text in texts}
        if self._decode(encode("x .")) != "x .":
            self._last.update(_CLEANED)
        self._may_end_in_bytes = any(not character.isascii() for character in self._last)
        self._longest = max(map(len, texts))
        self._lengths: dict[int, int] = {}  # token id -> characters; 0: it cannot complete a text

    def completed_by(self, response_ids: Sequence[int]) -> bool:
        """Returns True if the last token completes a text. To be called after each token, until it does."""
        token = response_ids[-1]
        if token not in self._lengths:
            text = self._decode([token, token])  # twice: a tokenizer may drop the space that begins the first token
            may_be_part = self._may_end_in_bytes and "\N{REPLACEMENT CHARACTER}" in text
            self._lengths[token] = len(text) if may_be_part or not self._last.isdisjoint(text) else 0
        length = self._lengths[token]
        return length > 0 and self._is_near_end(response_ids, length) and self._is_in(self._decode(response_ids))

    def _is_near_end(self, response_ids: Sequence[int], last_length: int) -> bool:
        """Returns True if the last tokens contain a text. They decode to enough characters for each possible text."""
        length = self._longest + last_length + _MARGIN
        size = self._longest + _MARGIN
        while len(text := self._decode(response_ids[-size:])) < length and size < len(response_ids):
            size *= 2
        return self._is_in(text)

    def _is_in(self, text: str) -> bool:
        return any(stop in text for stop in self.texts)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


@dataclass(frozen=True)
class Truncation:
    """The tokens that one is sampled from, in this order: those with min_p of the likeliest one's probability, of these the
    `top_k` likeliest, of these the fewest that have `top_p` together. `max_kept`: see Completion.kept; 0: it has none.
    """

    top_p: float = 1.0
    top_k: int = -1  # -1: all
    min_p: float = 0.0
    max_kept: int = 0


FULL = Truncation()


def training_truncation(rollout: RolloutConfig) -> Truncation:
    """Returns the truncation of training samples. Tokens that tie with the last one of `top_k` may be kept, too."""
    if rollout.top_k < 1:
        return FULL
    max_kept = rollout.top_k + max(16, rollout.top_k // 4)
    return Truncation(rollout.top_p, rollout.top_k, rollout.min_p, max_kept)


@dataclass(frozen=True)
class Request:
    """One response to sample. Only `seed` decides the tokens: not the other requests, their order, or the rank."""

    prompt_ids: tuple[int, ...]
    seed: int
    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    min_p: float = 0.0
    max_kept: int = 0
    stop_token_ids: tuple[int, ...] = ()  # in addition to the engine's end-of-sequence tokens
    stop: StopTexts | None = None  # the response ends with the token that completes one of these texts
    num_written: int = 0  # the last so many tokens of the prompt are the response so far: a stop text may begin there
    images: tuple[PromptImage, ...] = ()  # of the prompt, in the order of their places

    @property
    def written(self) -> tuple[int, ...]:
        """The response so far."""
        return self.prompt_ids[len(self.prompt_ids) - self.num_written :]

    @property
    def all_stop_token_ids(self) -> tuple[int, ...]:
        """The request's stop tokens, and the stop texts that are one token."""
        return (*self.stop_token_ids, *(self.stop.token_ids if self.stop else ()))


@dataclass(frozen=True)
class Completion:
    """One response. The token that stopped it, or completed a stop text, is its last one."""

    response_ids: list[int]
    logprobs: list[float]  # of each token under the distribution that it was sampled from (temperature and truncation)
    finish_reason: str  # "stop" | "length"
    routes: TokenRoutes = field(default=None, compare=False)  # of prompt and response without the last, unread token
    # of each token; None: `Request.max_kept` ids or more. Empty where `max_kept` is 0
    kept: list[KeptIds] = field(default_factory=list, compare=False)


def continued(known: TokenRoutes, new: TokenRoutes) -> TokenRoutes:
    """Merges the routes of a sequence that has grown: each token keeps those of the engine that first computed it."""
    if known is None or new is None:
        return known if new is None else new
    merged = new.copy()
    merged[: len(known)] = np.where(known >= 0, known, new[: len(known)])
    return merged


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """The parts of an engine. The last two are true only for a class that says so.

    `model_path` needs no more than a config.json: weights come from `load_weights`. `options` is a validated `Options`.
    `max_model_len` bounds prompt plus response. `eos_token_ids` end a response. `tensors` has every Hugging Face tensor of a
    complete weight stream, and the shards of them that are filled.
    """

    rollout: RolloutConfig
    model_path: Path | str
    mesh: Mesh
    device: Device
    options: Any
    dtype: str  # "float32" or "bfloat16"
    max_model_len: int
    eos_token_ids: list[int]
    tensors: EngineTensors
    exact: bool = False  # model.exact
    record_routes: bool = False  # actor.moe.route_replay=engine


class RolloutEngine(ABC):
    """One rank's engine. Methods that generate or compute are collective over a replica, all others over the world.

    All ranks of a replica make the same calls of `generate`, `submit`, `poll`, `abort` and `logprobs` in the same order. In a
    step:

        wake_weights() -> load_weights(stream, step) -> wake_kv_cache() -> generate(requests, step) ... -> sleep()

    `generate` serves a list; `stream` yields each response as soon as it is complete. A caller with requests that depend on
    earlier responses submits them one by one, and polls for those that finish in a step of the engine:

        submit(id, request, step) ... -> poll() -> [(id, completion), ...]

    The class attributes and `problems` are read before any rank starts, also on a machine without the engine's packages:
    the module of an engine class must not import them at its top.
    """

    Options: ClassVar[type[Section]] = Section  # the type of the section `rollout.engine_options`
    requires: ClassVar[Mapping[str, str]] = {}  # package to import -> what `pip install` calls it
    reads_shards: ClassVar[bool] = False  # True: of each tensor it reads only its rank's shard (`engine_tensors`)
    has_exact_rows: ClassVar[bool] = False  # True: it serves `model.exact`
    records_routes: ClassVar[bool] = False  # True: it serves `actor.moe.route_replay=engine`
    serves_experts: ClassVar[bool] = True  # False: no mixture of experts
    returns_kept: ClassVar[bool] = False  # True: it serves `Request.max_kept`, for `rollout.top_k`
    reads_images: ClassVar[bool] = False  # True: it serves models with images; `logprobs` has the argument `images`

    @classmethod
    def problems(cls, rollout: RolloutConfig, options: Any) -> Iterator[str]:
        """Yields settings of the `rollout` section that this engine does not support: key, value and remedy, in one line."""
        yield from ()

    @abstractmethod
    def __init__(self, setup: EngineSetup) -> None:
        """Builds the engine, on every rank at the same point, after the process group."""

    @property
    @abstractmethod
    def version(self) -> int | None:
        """The version of the last complete `load_weights`. None: the weights are unusable."""

    @abstractmethod
    def load_weights(self, stream: Iterator[WeightBucket], version: int) -> None:
        """Replaces all weights. Reads `stream` to its end, whatever happens: other ranks may depend on it.

        Tensors have their full shape. Where `reads_shards`, only this rank's shard of each has contents. Raises RankError
        on every rank if anything is wrong on any rank, unfinished requests included; `version` is then None.
        """

    def digests(self) -> Mapping[str, int] | None:
        """Returns name -> digest of this rank's shard of the tensor in the engine's memory (`sync.digest.slice_digest`).

        Called after `load_weights`. A tensor that was not loaded is absent. None: the engine has no digests.
        """
        return None

    @abstractmethod
    def submit(self, request_id: str, request: Request, version: int) -> None:
        """Queues a request. The following calls of `poll` serve it together with all others.

        Raises RuntimeError as `require` does, and ValueError for a request that cannot be served exactly, or for an id
        that is still unfinished. Nothing is queued then.
        """

    @abstractmethod
    def poll(self) -> list[tuple[str, Completion]]:
        """Runs one step of the engine. Returns what has finished in it, in order of submission: often nothing.

        Returns at once when nothing is unfinished. After an exception the engine is unusable: `version` is None.
        """

    @abstractmethod
    def abort(self, request_ids: Sequence[str]) -> None:
        """Removes unfinished requests; they get no completion. Raises ValueError for an id that is not unfinished."""

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """The number of requests that are submitted, and neither finished nor aborted."""

    def cache_statistics(self) -> tuple[int, int]:
        """Counts (prompt tokens, hits of the prefix cache among them) of the requests that finished since the last call."""
        return 0, 0

    def require(self, version: int) -> None:
        """Raises RuntimeError at once, instead of hanging, unless the engine can sample from the weights of `version`."""
        if version != self.version:
            raise RuntimeError(f"samples are wanted from weights of version {version}, the engine has {self.version}")

    def generate(self, requests: Sequence[Request], version: int) -> list[Completion]:
        """Returns completions in the order of `requests`. Raises as `stream` does."""
        finished = dict(pair for step in self.stream(requests, version) for pair in step)
        return [finished[number] for number in range(len(requests))]

    def stream(self, requests: Sequence[Request], version: int) -> Iterator[list[tuple[int, Completion]]]:
        """Yields one list per step of the engine: (index in `requests`, its completion) of what has finished in this step.

        Raises as `submit` and `poll` do, and RuntimeError while other requests are unfinished. When it is left early, by
        an exception too, nothing stays queued.
        """
        self.require(version)
        if self.num_unfinished:
            raise RuntimeError(f"generate: {self.num_unfinished} submitted requests are unfinished; poll or abort them")
        unfinished: dict[str, int] = {}
        try:
            for number, request in enumerate(requests):
                self.submit(str(number), request, version)
                unfinished[str(number)] = number
            while unfinished:
                yield [(unfinished.pop(request_id), completion) for request_id, completion in self.poll()]
        finally:
            if unfinished and self.version is not None:
                self.abort(list(unfinished))

    @abstractmethod
    def logprobs(self, sequences: list[list[int]], images: Sequence[tuple[PromptImage, ...]] = ()) -> list[list[float]]:
        """Computes log-probabilities at temperature 1 of the tokens 1, 2, ... of each sequence, given those before them.

        `images`: of each sequence; empty: none has any.
        """

    @abstractmethod
    def sleep(self) -> None:
        """Frees the device memory. The weights are lost: `version` becomes None. RuntimeError: requests are unfinished."""

    @abstractmethod
    def wake_weights(self) -> None:
        """Allocates the weights again. Their contents are undefined until `load_weights`."""

    @abstractmethod
    def wake_kv_cache(self) -> None:
        """Allocates the key-value cache again, after `load_weights`."""

    @abstractmethod
    def shutdown(self) -> None:
        """Releases everything. The engine cannot be used afterwards."""


def sample_seed(run_seed: int, step: int, prompt_uid: str, sample_index: int) -> int:
    """Returns the seed in [0, 2**63) of one sample. It does not depend on the rank, nor on the other samples.

    A stable hash: Python's changes between processes. CPU generators keep only the low 32 bits, which are uniform.
    """
    return stable_hash(json.dumps([run_seed, step, prompt_uid, sample_index]))


def stable_hash(text: str) -> int:
    """Hashes a text into [0, 2**63), equally in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


# -- the state of an engine --------------------------------------------------------------------------------------------

BROKEN = "the engine is broken and must be built again"


class StatefulEngine(RolloutEngine):
    """The states of an engine with a queue, and the calls that it refuses in each.

    An engine is asleep or awake, has a complete set of weights or none, and is broken for ever once a call has left its
    queue in an unknown state. The constructor of a subclass sets the attributes that have no value below. `_queue` has `len`,
    `in` for ids, `step`, `abort` and `cache_statistics`.
    """

    _queue: Any
    _max_model_len: int
    _vocab_size: int
    _can_sleep: bool  # rollout.free_cache_engine
    _version: int | None = None
    _asleep: frozenset[str] = frozenset()  # of {"weights", "kv_cache"}
    _broken: str | None = None  # why this engine can never work again

    @abstractmethod
    def _working(self) -> contextlib.AbstractContextManager[Any]:
        """Surrounds every call of the queue that computes or frees something."""

    def _free_memory(self) -> None:
        """Frees the device memory when the engine falls asleep."""

    def _allocate(self, part: str) -> None:
        """Allocates "weights" or "kv_cache" when they wake up."""

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def num_unfinished(self) -> int:
        """The number of unfinished requests; 0 for a broken engine, which will never finish any."""
        return 0 if self._broken is not None else len(self._queue)

    def poll(self) -> list[tuple[str, Completion]]:
        self._require_usable()
        if not self._queue:
            return []
        with self._breaking(), self._working():
            return self._queue.step()  # type: ignore[no-any-return]

    def abort(self, request_ids: Sequence[str]) -> None:
        if self._broken is not None:
            raise RuntimeError(self._broken)
        if unknown := [request_id for request_id in request_ids if request_id not in self._queue]:
            raise ValueError(f"no unfinished request has the id {', '.join(map(repr, unknown))}")
        with self._breaking(), self._working():
            self._queue.abort(request_ids)

    def cache_statistics(self) -> tuple[int, int]:
        return self._queue.cache_statistics()  # type: ignore[no-any-return]

    def sleep(self) -> None:
        """Frees the device memory; nothing if `rollout.free_cache_engine` is off. On CPU only the state changes."""
        if not self._can_sleep or self._asleep:
            return
        self._require_idle("sleep")
        self._version = None
        self._asleep = frozenset({"weights", "kv_cache"})
        self._free_memory()

    def wake_weights(self) -> None:
        self._wake("weights")

    def wake_kv_cache(self) -> None:
        if "weights" in self._asleep:
            raise RuntimeError("wake_kv_cache before wake_weights: the weights must be loaded in between")
        self._wake("kv_cache")

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            self._allocate(part)
            self._asleep -= {part}

    def require(self, version: int) -> None:
        self._require_usable()
        super().require(version)

    def _require_new(self, request_id: str, request: Request) -> None:
        """Raises ValueError for an id that is unfinished, or a request that does not fit the model."""
        if request_id in self._queue:
            raise ValueError(f"request {request_id!r} is submitted already, and unfinished")
        if not 1 <= len(request.prompt_ids) <= self._max_model_len - request.max_tokens:
            raise ValueError(
                f"a prompt of {len(request.prompt_ids)} tokens with max_tokens {request.max_tokens} does not fit"
                f" max_model_len {self._max_model_len} (or is empty)"
            )
        self._require_vocabulary([*request.prompt_ids, *request.all_stop_token_ids])
        self._require_inside(request.images, len(request.prompt_ids))

    def _require_inside(self, images: Sequence[PromptImage], length: int) -> None:
        for image in images:
            if not 0 <= image.first <= length - image.num_tokens:
                last = image.first + image.num_tokens - 1
                raise ValueError(f"an image at the tokens {image.first} to {last} is outside the prompt of {length}")

    def _require_sequences(
        self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[PromptImage, ...]] = ()
    ) -> None:
        """Raises unless the engine is idle, and can compute the log-probabilities of all sequences."""
        self._require_usable()
        self._require_idle("logprobs")
        for ids in sequences:
            if not 1 <= len(ids) < self._max_model_len:
                raise ValueError(
                    f"cannot compute logprobs of {len(ids)} tokens: max_model_len is {self._max_model_len}"
                )
            self._require_vocabulary(ids)
        for ids, sequence_images in zip(sequences, images, strict=False):
            self._require_inside(sequence_images, len(ids))

    def _require_vocabulary(self, ids: Sequence[int]) -> None:
        if not 0 <= min(ids) <= max(ids) < self._vocab_size:
            raise ValueError(f"token ids {min(ids)} to {max(ids)} are outside the vocabulary of {self._vocab_size}")

    def _require_idle(self, call: str) -> None:
        if problem := self._unfinished():
            raise RuntimeError(f"{call}: {problem}")

    def _unfinished(self) -> str | None:
        """Returns why the weights and the cache must stay as they are."""
        count = self.num_unfinished
        return f"{count} submitted requests are unfinished: poll or abort them first" if count else None

    def _unloadable(self) -> str | None:
        """Returns why weights cannot be loaded now."""
        asleep = "the weights are asleep: call wake_weights" if "weights" in self._asleep else None
        return self._broken or asleep or self._unfinished()

    def _require_usable(self, *, awake: bool = True) -> None:
        """Raises unless the engine works, is awake (if `awake`), and has a complete set of weights."""
        if self._broken is not None:
            raise RuntimeError(self._broken)
        if awake and self._asleep:
            raise RuntimeError(f"the engine is asleep ({', '.join(sorted(self._asleep))}): wake it first")
        if self._version is None:
            raise RuntimeError("the engine has no complete set of weights: call load_weights first")

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Surrounds calls that leave the queue in an unknown state when they fail, or are interrupted."""
        try:
            yield
        except BaseException as error:
            self._version = None
            self._broken = f"{BROKEN}: {type(error).__name__}: {error}"
            raise


# -- the checks on a stream of weights, before an engine takes any of it -----------------------------------------------
# Engines do not check names. vLLM takes 10 tensors of 36 without a complaint, and then generates nonsense. Values are
# checked where they are complete: by the attestation (sync/digest.py), and by evaluation on the tensors that it reads.


def load_verified(
    stream: Iterator[WeightBucket],
    expected: Mapping[str, SyncTensor],
    load: Callable[[WeightBucket], str | None],
    problem: str | None = None,
) -> str | None:
    """Reads `stream` to its end, and loads every bucket up to the first problem. Returns the first problem, or None.

    Problems are unknown, repeated and missing names, wrong shapes, and what `load` returns. `problem`: of this rank, from
    before the stream; nothing is loaded then. Never raises, and never stops early: the other ranks may wait for what this
    rank's stream sends them. Not collective; the caller lets the ranks agree on their problems after their streams.
    """
    arrived: set[str] = set()
    try:
        for bucket in stream:
            problem = problem or _wrong_in(bucket, expected, arrived)
            arrived.update(name for name, _ in bucket)
            if problem is None:
                problem = load([(name, tensor.detach()) for name, tensor in bucket])
    except Exception as error:  # of any kind: the other ranks wait for this rank
        return problem or f"{type(error).__name__}: {error}"
    missing = [name for name in expected if name not in arrived]
    if missing and problem is None:
        return shortened([f"{len(missing)} of {len(expected)} tensors are missing", *missing])
    return problem


def _wrong_in(bucket: WeightBucket, expected: Mapping[str, SyncTensor], arrived: set[str]) -> str | None:
    problems = []
    for number, (name, tensor) in enumerate(bucket):
        if name not in expected:
            problems.append(f"{name} is not a tensor of this model")
        elif name in arrived or any(name == other for other, _ in bucket[:number]):
            problems.append(f"{name} arrived twice")
        elif tuple(tensor.shape) != expected[name].shape:
            problems.append(f"{name} has shape {tuple(tensor.shape)}, not {expected[name].shape}")
    return shortened(problems) or None
