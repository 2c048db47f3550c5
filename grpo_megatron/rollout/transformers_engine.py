"""TransformersEngine: transformers' modules as a RolloutEngine on the CPU. For small models it is faster than vLLM.

vLLM on CPU spends some 4 ms per step on its scheduler and on Python for each token (measured with 64 sequences); the step of a
model of 0.4 M parameters takes 1.5 ms. This engine has a static list of rows instead of pages, computes a prompt once for all
of its samples, and draws with one uniform number per token. Larger models are faster in vLLM, whose kernels have packed weights.

Every rank holds the whole model and serves its own requests. There is no tensor parallelism, no quantisation and no GPU path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from pydantic import Field

from grpo_megatron.config import ConfigError, RolloutConfig, Section
from grpo_megatron.device import Device
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.rollout.census import load_verified
from grpo_megatron.rollout.engine import Completion, Request
from grpo_megatron.rollout.engine_state import StatefulEngine
from grpo_megatron.rollout.transformers_batch import RunningBatch
from grpo_megatron.rollout.transformers_cache import aligned
from grpo_megatron.rollout.transformers_model import RowModel
from grpo_megatron.sync.digest import part_digest
from grpo_megatron.sync.tensors import EngineTensors
from grpo_megatron.types import WeightBucket


class TransformersOptions(Section):
    """`rollout.engine_options` of this engine."""

    kv_cache_gib: float = Field(1.0, gt=0, le=4096)  # most memory for keys and values on one rank


class TransformersEngine(StatefulEngine):
    """`rollout.engine: transformers`. Raises ConfigError for a model or a device that it cannot serve."""

    Options = TransformersOptions
    requires = {"transformers": "transformers"}  # noqa: RUF012 - declared as ClassVar in the base class

    @classmethod
    def problems(cls, rollout: RolloutConfig, options: TransformersOptions) -> Iterator[str]:
        """See RolloutEngine."""
        if (tp := rollout.tensor_model_parallel_size) > 1:
            yield (
                f"rollout.tensor_model_parallel_size={tp} with rollout.engine=transformers: this engine has the whole model"
                " on each rank; set rollout.tensor_model_parallel_size=1 (actor.megatron's may be larger), or"
                " rollout.engine=vllm"
            )
        if rollout.quantization is not None:
            yield (
                f"rollout.quantization={rollout.quantization} with rollout.engine=transformers: this engine computes in"
                " model.dtype; leave rollout.quantization out, or set rollout.engine=vllm"
            )
        if rollout.engine_kwargs:
            yield (
                f"rollout.engine_kwargs={rollout.engine_kwargs} with rollout.engine=transformers: they are arguments of"
                " vllm.LLM; leave them out"
            )

    def __init__(
        self,
        model_path: Path | str,
        rollout: RolloutConfig,
        mesh: Mesh,
        device: Device,
        *,
        options: TransformersOptions,
        dtype: str,
        max_model_len: int,
        eos_token_ids: list[int],
        tensors: EngineTensors,
    ) -> None:
        if device.is_cuda:
            raise ConfigError(
                "rollout.engine=transformers has no GPU path; set rollout.engine=vllm or trainer.device=cpu"
            )
        self._mesh, self._tensors, self._max_model_len = mesh, tensors, max_model_len
        with device.preserve_rng():  # transformers draws initial weights
            self._model = RowModel(model_path, dtype)
        self._weights: dict[str, torch.Tensor] = self._model.module.state_dict()
        if unknown := [name for name in tensors.tensors if name not in self._weights]:
            raise ConfigError(
                f"rollout.engine=transformers: transformers' model has no tensor {unknown[0]!r} (and {len(unknown) - 1}"
                " more): it keeps this architecture's weights in another form; set rollout.engine=vllm"
            )
        self._max_tokens = rollout.max_num_batched_tokens
        max_rows = min(rollout.max_num_seqs, self._num_rows(options))
        self._queue = RunningBatch(self._model, max_rows, self._max_tokens, eos_token_ids)
        self._version: int | None = None
        self._can_sleep = rollout.free_cache_engine
        self._asleep: set[str] = set()  # of {"weights", "kv_cache"}
        self._broken: str | None = None  # why this engine can never work again

    def _num_rows(self, options: TransformersOptions) -> int:
        """How many rows of the largest length fit into the cache."""
        with torch.inference_mode():
            token_bytes = self._model.prefill([[0]])[1].token_bytes()
        row_bytes = token_bytes * aligned(self._max_model_len)
        rows = int(options.kv_cache_gib * 2**30) // row_bytes
        if not rows:
            raise ConfigError(
                f"rollout.engine_options.kv_cache_gib={options.kv_cache_gib:g}: one sequence of {self._max_model_len} tokens"
                f" needs {token_bytes} bytes x {aligned(self._max_model_len)} = {row_bytes / 2**30:.3g} GiB; set at least"
                " that"
            )
        return rows

    # -- weights -------------------------------------------------------------------------------------------------------

    def load_weights(self, stream: Iterator[WeightBucket], version: int) -> None:
        """See RolloutEngine. Collective over the world."""
        self._version = None
        self._mesh.agree(load_verified(stream, self._tensors.tensors, self._load, self._unloadable()))
        self._version = version

    @torch.no_grad()
    def _load(self, bucket: WeightBucket) -> None:
        for name, tensor in bucket:
            self._weights[name].copy_(tensor)

    def digests(self) -> dict[str, int]:
        """See RolloutEngine. The live memory of every parameter, which is whole on each rank."""
        self._require_weights()
        digests = [part_digest(self._weights[name], tensor, 0) for name, tensor in self._tensors.tensors.items()]
        return dict(zip(self._tensors.tensors, torch.stack(digests).tolist(), strict=True))

    # -- generation ----------------------------------------------------------------------------------------------------

    def submit(self, request_id: str, request: Request, version: int) -> None:
        """See RolloutEngine."""
        self.require(version)
        self._require_new(request_id)
        if not 1 <= len(request.prompt_ids) <= self._max_model_len - request.max_tokens:
            raise ValueError(
                f"a prompt of {len(request.prompt_ids)} tokens with max_tokens {request.max_tokens} does not fit"
                f" max_model_len {self._max_model_len} (or is empty)"
            )
        self._require_vocabulary([*request.prompt_ids, *request.stop_token_ids])
        self._queue.add(request_id, request)

    def poll(self) -> list[tuple[str, Completion]]:
        """See RolloutEngine. Touches none of the host's random generators."""
        self._require_ready()
        if not self._queue:
            return []
        with self._breaking(), torch.inference_mode():
            return self._queue.step()

    def abort(self, request_ids: Sequence[str]) -> None:
        """See RolloutEngine."""
        self._require_unbroken()
        self._require_known(request_ids)
        with self._breaking(), torch.inference_mode():
            self._queue.abort(request_ids)

    def cache_statistics(self) -> tuple[int, int]:
        """See RolloutEngine. A prompt is shared by requests that join in the same step."""
        return self._queue.cache_statistics()

    @torch.inference_mode()
    def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """See RolloutEngine."""
        self._require_ready()
        self._require_idle("logprobs")
        for ids in sequences:
            self._require_length(ids)
            self._require_vocabulary(ids)
        rows: list[list[float]] = []
        per_pass = max(1, self._max_tokens // aligned(self._max_model_len))
        for first in range(0, len(sequences), per_pass):
            rows += self._model.logprobs(sequences[first : first + per_pass])
        return rows

    def _require_vocabulary(self, ids: Sequence[int]) -> None:
        if not 0 <= min(ids) <= max(ids) < self._model.vocab_size:
            raise ValueError(
                f"token ids {min(ids)} to {max(ids)} are outside the vocabulary of {self._model.vocab_size}"
            )

    # -- memory --------------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """See RolloutEngine. On the CPU no memory is freed, but the same calls raise errors until waking."""
        if not self._can_sleep or self._asleep:
            return
        self._require_idle("sleep")
        self._version = None
        self._asleep = {"weights", "kv_cache"}

    def wake_weights(self) -> None:
        """See RolloutEngine."""
        self._asleep.discard("weights")

    def wake_kv_cache(self) -> None:
        """See RolloutEngine."""
        if "weights" in self._asleep:
            raise RuntimeError("wake_kv_cache before wake_weights: the weights must be loaded in between")
        self._asleep.discard("kv_cache")

    def shutdown(self) -> None:
        """See RolloutEngine. May be called twice."""
        self._version, self._broken = None, "the engine has been shut down"
        self._queue = RunningBatch(self._model, 1, 1, ())  # frees the cache
