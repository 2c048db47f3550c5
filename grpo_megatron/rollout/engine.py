"""RolloutEngine: the interface between the trainer and a rollout engine, with the request and completion types.

Each rank holds one engine object. `rollout_tp` neighbouring ranks form a block that serves the same requests together;
blocks never wait for each other to generate. Lengths are tokens, log-probabilities are natural logarithms.

The life of an engine within a step:

    wake_weights() -> load_weights(stream, step) -> wake_kv_cache() -> generate(requests, step) ... -> sleep()

`generate` draws a whole list. `stream` does so too, and gives each response as soon as it is complete. A caller whose
requests depend on earlier responses submits them one by one, and polls for what has finished in one step of the engine:

    submit(id, request, step) ... -> poll() -> [(id, completion), ...]

To add an engine, write a subclass and name it in the config: `rollout.engine: my.module:MyEngine`. Nothing in this package
has to change. `vllm.py` is the example.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from grpo_megatron.config import RolloutConfig, Section

if TYPE_CHECKING:  # an engine class is read before torch is loaded
    from grpo_megatron.device import Device
    from grpo_megatron.parallel.mesh import Mesh
    from grpo_megatron.rollout.stop import StopTexts
    from grpo_megatron.sync.tensors import EngineTensors
    from grpo_megatron.types import WeightBucket


@dataclass(frozen=True)
class Request:
    """One response to draw. Only `seed` decides the draws: not the other requests, their order, or the rank."""

    prompt_ids: tuple[int, ...]
    seed: int
    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    stop_token_ids: tuple[int, ...] = ()  # in addition to the engine's own end-of-sequence tokens
    stop: StopTexts | None = None  # the response ends with the token that completes one of these texts
    num_written: int = 0  # the last so many tokens of the prompt are the response so far: a stop text may begin there

    @property
    def written(self) -> tuple[int, ...]:
        """The response so far."""
        return self.prompt_ids[len(self.prompt_ids) - self.num_written :]


@dataclass(frozen=True)
class Completion:
    """One response. `logprobs[t]` belongs to `response_ids[t]`, under the distribution that it was drawn from: after
    temperature, top_p and top_k. The token that stopped the response, or completed a stop text, is its last one."""

    response_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop" | "length"


class NoOptions(Section):
    """The section of an engine without options of its own."""


class RolloutEngine(ABC):
    """One rank's engine. Methods that draw or compute are collective over a block, all others over the world.

    All ranks of a block make the same calls of `generate`, `submit`, `poll`, `abort` and `logprobs` in the same order.

    The class attributes and `problems` are read before any rank starts, also on a machine without the engine's packages:
    the module of an engine class must not import them at its top.
    """

    Options: ClassVar[type[Section]] = NoOptions  # the type of the section `rollout.engine_options`
    requires: ClassVar[Mapping[str, str]] = {}  # package to import -> what `pip install` calls it
    reads_shards: ClassVar[bool] = (
        False  # True: of each tensor it reads only its rank's part, `engine_tensors` (models/)
    )

    @classmethod
    def problems(cls, rollout: RolloutConfig, options: Any) -> Iterator[str]:
        """Settings of the `rollout` section that this engine does not support: key, value and remedy, one line each."""
        yield from ()

    @abstractmethod
    def __init__(
        self,
        model_path: Path | str,
        rollout: RolloutConfig,
        mesh: Mesh,
        device: Device,
        *,
        options: Any,
        dtype: str,
        max_model_len: int,
        eos_token_ids: list[int],
        tensors: EngineTensors,
    ) -> None:
        """Built on every rank at the same point, after the process group.

        `model_path` need only hold a config.json: weights come from `load_weights`. `options` is a validated `Options`.
        `max_model_len` bounds prompt plus response. `eos_token_ids` end a response. `dtype` is "float32" or "bfloat16".
        `tensors` has every Hugging Face tensor of a complete weight stream, and the parts of them that are filled.
        """

    @property
    @abstractmethod
    def version(self) -> int | None:
        """The version of the last complete `load_weights`. None: the weights are unusable."""

    @abstractmethod
    def load_weights(self, stream: Iterator[WeightBucket], version: int) -> None:
        """Replace all weights. Reads `stream` to its end, whatever happens: other ranks may depend on it.

        Tensors have their whole shape. Where `reads_shards`, only this rank's part of each has contents. Raises RankError
        on every rank if anything is wrong on any rank, unfinished requests included; `version` is then None.
        """

    def digests(self) -> Mapping[str, int] | None:
        """Name -> digest of this rank's part of the tensor in the engine's own memory (`sync.digest.part_digest`).

        Called after `load_weights`. A tensor that was not loaded is absent. None: the engine cannot tell.
        """
        return None

    @abstractmethod
    def submit(self, request_id: str, request: Request, version: int) -> None:
        """Queue a request. It is served by the following calls of `poll`, together with all others.

        Raises RuntimeError as `require` does, and ValueError for a request that cannot be served exactly, or for an id
        that is still unfinished. Nothing is queued then.
        """

    @abstractmethod
    def poll(self) -> list[tuple[str, Completion]]:
        """Run one step of the engine. Returns what has finished in it, in order of submission: often nothing.

        Returns at once when nothing is unfinished. After an exception the engine is unusable: `version` is None.
        """

    @abstractmethod
    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget unfinished requests; they get no completion. Raises ValueError for an id that is not unfinished."""

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """How many requests are submitted, and neither finished nor aborted."""

    def cache_statistics(self) -> tuple[int, int]:
        """(prompt tokens, those of them found in the prefix cache) of the requests that finished since the last call."""
        return 0, 0

    def require(self, version: int) -> None:
        """Raise RuntimeError at once, instead of hanging, unless the engine can draw from the weights of `version`."""
        if version != self.version:
            raise RuntimeError(f"samples are wanted from weights of version {version}, the engine has {self.version}")

    def generate(self, requests: Sequence[Request], version: int) -> list[Completion]:
        """Completions in the order of `requests`. Raises as `stream` does."""
        finished = dict(pair for step in self.stream(requests, version) for pair in step)
        return [finished[number] for number in range(len(requests))]

    def stream(self, requests: Sequence[Request], version: int) -> Iterator[list[tuple[int, Completion]]]:
        """One list per step of the engine: (index in `requests`, its completion) of what has finished in this step.

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
    def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probabilities at temperature 1 of the tokens 1, 2, ... of each sequence, given the tokens before them."""

    @abstractmethod
    def sleep(self) -> None:
        """Free the device memory. The weights are lost: `version` becomes None. RuntimeError: requests are unfinished."""

    @abstractmethod
    def wake_weights(self) -> None:
        """Allocate the weights again. Their contents are undefined until `load_weights`."""

    @abstractmethod
    def wake_kv_cache(self) -> None:
        """Allocate the key-value cache again, after `load_weights`."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release everything. The engine cannot be used afterwards."""


def sample_seed(run_seed: int, step: int, prompt_uid: str, sample_index: int) -> int:
    """Seed in [0, 2**63) of one sample's draws. It does not depend on the rank, nor on what else is drawn.

    A stable hash: Python's own changes between processes. CPU generators keep only the low 32 bits, which are uniform.
    """
    return stable_hash(json.dumps([run_seed, step, prompt_uid, sample_index]))


def stable_hash(text: str) -> int:
    """A hash in [0, 2**63) that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
