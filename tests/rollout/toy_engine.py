"""A user's own engine: transformers on the CPU, one rank per engine. The package does not refer to it.

`rollout.engine: tests.rollout.toy_engine:ToyEngine` is all that a config needs. `rollout.engine_options.journal` names a
file that gets one line per call of the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_megatron.config import RolloutConfig, Section
from grpo_megatron.rollout.engine import Completion, EngineSetup, Request, RolloutEngine, load_verified
from grpo_megatron.sync.digest import slice_digest
from grpo_megatron.types import WeightBucket


class ToyOptions(Section):
    journal: Path
    verbosity: int = 1


class ToyEngine(RolloutEngine):
    """Recomputes the whole prefix for each token: correct, and slow."""

    Options = ToyOptions
    requires = {"transformers": "transformers"}  # noqa: RUF012

    @classmethod
    def problems(cls, rollout: RolloutConfig, options: ToyOptions) -> Iterator[str]:
        if rollout.tensor_model_parallel_size > 1:
            yield f"rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: ToyEngine has one rank; set 1"

    def __init__(self, setup: EngineSetup) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(setup.model_path)
        self._model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, setup.dtype)).eval()
        self._mesh, self._options, self._tensors = setup.mesh, setup.options, setup.tensors
        self._max_model_len, self._eos_token_ids = setup.max_model_len, setup.eos_token_ids
        self._version: int | None = None
        self._queue: dict[str, Request] = {}
        self._note(f"build {setup.max_model_len} {setup.eos_token_ids}")

    def _note(self, line: str) -> None:
        with self._options.journal.open("a") as file:
            file.write(line + "\n")

    @property
    def version(self) -> int | None:
        return self._version

    @torch.no_grad()
    def load_weights(self, stream: Iterator[WeightBucket], version: int) -> None:
        self._version = None
        self._mesh.agree(load_verified(stream, self._tensors.tensors, self._load))
        self._version = version
        self._note(f"load {version}")

    def _load(self, bucket: WeightBucket) -> None:
        parameters = self._model.state_dict()
        for name, tensor in bucket:
            parameters[name].copy_(tensor)

    def digests(self) -> dict[str, int]:
        parameters = self._model.state_dict()
        return {name: int(slice_digest(parameters[name], tensor, 0)) for name, tensor in self._tensors.tensors.items()}

    def submit(self, request_id: str, request: Request, version: int) -> None:
        self.require(version)
        self._queue[request_id] = request

    def poll(self) -> list[tuple[str, Completion]]:
        self._note(f"poll {len(self._queue)} {self._version}")
        finished = [(request_id, self._complete(request)) for request_id, request in self._queue.items()]
        self._queue = {}
        return finished

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            del self._queue[request_id]

    @property
    def num_unfinished(self) -> int:
        return len(self._queue)

    @torch.no_grad()
    def _complete(self, request: Request) -> Completion:
        generator = torch.Generator().manual_seed(request.seed)
        stops = {*self._eos_token_ids, *request.stop_token_ids}
        ids, logprobs = list(request.prompt_ids), []
        assert len(ids) + request.max_tokens <= self._max_model_len
        while len(logprobs) < request.max_tokens:
            logits = self._model(torch.tensor([ids])).logits[0, -1].float()
            logp = (logits / (request.temperature or 1.0)).log_softmax(0)
            token = int(logp.exp().multinomial(1, generator=generator) if request.temperature else logp.argmax())
            ids.append(token)
            logprobs.append(float(logp[token]))
            if token in stops:
                return Completion(ids[len(request.prompt_ids) :], logprobs, "stop")
        return Completion(ids[len(request.prompt_ids) :], logprobs, "length")

    @torch.no_grad()
    def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        if self._version is None:
            raise RuntimeError("the engine has no weights")
        rows = []
        for ids in sequences:
            logp = self._model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
            rows.append(logp.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())
        return rows

    def sleep(self) -> None:
        self._version = None
        self._note("sleep")

    def wake_weights(self) -> None:
        self._note("wake weights")

    def wake_kv_cache(self) -> None:
        self._note("wake kv cache")

    def shutdown(self) -> None:
        self._note("shutdown")


class Unfinished(RolloutEngine):
    """A class that lacks its methods."""


def not_a_class() -> None: ...
