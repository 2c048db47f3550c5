"""VllmQueue: the requests that vLLM's engine serves, fed and stepped from outside.

`LLM.generate` is the same loop around the same calls (`add_request`, `step`), but it returns only when all requests have
finished. vLLM has no tokenizer here: it returns the new tokens of a request with stop texts after each step, and the request
is aborted when one of them completes a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.config import ENGINE_TEMPERATURES
from grpo_megatron.rollout.engine import Completion, Request
from grpo_megatron.rollout.stop import StopTexts


@dataclass
class _Entry:
    """One unfinished request. What it has drawn so far is known only if it has stop texts."""

    number: int  # of its submission
    stop: StopTexts | None
    num_written: int  # tokens of `response_ids` that were part of the prompt
    response_ids: list[int]
    logprobs: list[float] = field(default_factory=list)


class VllmQueue:
    """The requests of a vllm.LLM. When `add`, `step` or `abort` raises, vLLM's state is unknown."""

    def __init__(self, llm: Any, sampling_params: Any, max_model_len: int, eos_token_ids: Sequence[int]) -> None:
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._engine, self._tokens_input = llm.llm_engine, tokens_input
        self._sampling_params, self._kinds = sampling_params, RequestOutputKind
        self._vocab_size: int = llm.model_config.get_vocab_size()
        self._max_model_len, self._eos_token_ids = max_model_len, tuple(eos_token_ids)
        self._entries: dict[str, _Entry] = {}
        self._num_submitted = 0
        self._queried_tokens = self._cached_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def params(self, request: Request) -> Any:
        """vllm.SamplingParams of a request. Raises ValueError for one that vLLM would change."""
        if not 1 <= len(request.prompt_ids) <= self._max_model_len - request.max_tokens:
            raise ValueError(
                f"a prompt of {len(request.prompt_ids)} tokens with max_tokens {request.max_tokens} does not fit "
                f"max_model_len {self._max_model_len} (or is empty)"
            )
        low, high = ENGINE_TEMPERATURES
        if request.temperature != 0 and not low <= request.temperature <= high:
            raise ValueError(f"temperature {request.temperature} is outside vLLM's {low} to {high} (or 0)")
        self.require_vocabulary(request.prompt_ids)
        stop_token_ids = [
            *self._eos_token_ids,
            *request.stop_token_ids,
            *(request.stop.token_ids if request.stop else ()),
        ]
        self.require_vocabulary(stop_token_ids)
        return self._sampling_params(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed,
            stop_token_ids=stop_token_ids,
            logprobs=0,  # of the drawn token only
            flat_logprobs=True,
            detokenize=False,
            output_kind=self._kinds.DELTA if request.stop else self._kinds.FINAL_ONLY,
        )

    def require_vocabulary(self, ids: Sequence[int]) -> None:
        """Raise ValueError for ids outside the vocabulary."""
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            raise ValueError(f"token ids {min(ids)} to {max(ids)} are outside the vocabulary of {self._vocab_size}")

    def add(self, request_id: str, request: Request, params: Any) -> None:
        """`params` are those of the request."""
        self._engine.add_request(request_id, self._tokens_input(list(request.prompt_ids)), params)
        entry = _Entry(self._num_submitted, request.stop, request.num_written, list(request.written))
        self._entries[request_id] = entry
        self._num_submitted += 1

    def step(self) -> list[tuple[str, Completion]]:
        """One step of the engine; what has finished in it, in order of submission."""
        finished: list[tuple[int, str, Completion]] = []
        for output in self._engine.step():
            entry = self._entries[output.request_id]
            completion = _until_stop(entry, output) if entry.stop else _completion(output.outputs[0])
            if completion is not None:
                self._queried_tokens += len(output.prompt_token_ids)
                self._cached_tokens += output.num_cached_tokens
                finished.append((entry.number, output.request_id, completion))
                if not output.finished:
                    self._engine.abort_request([output.request_id])
                del self._entries[output.request_id]
        finished.sort(key=lambda item: item[0])
        return [(request_id, completion) for _, request_id, completion in finished]

    def abort(self, request_ids: Sequence[str]) -> None:
        """Of unfinished requests."""
        self._engine.abort_request(list(request_ids))
        for request_id in request_ids:
            del self._entries[request_id]

    def cache_statistics(self) -> tuple[int, int]:
        """See RolloutEngine."""
        counts = self._queried_tokens, self._cached_tokens
        self._queried_tokens = self._cached_tokens = 0
        return counts


def _until_stop(entry: _Entry, output: Any) -> Completion | None:
    """The completion, up to the token that completes a stop text, once there is one or vLLM has finished."""
    assert entry.stop is not None
    new = output.outputs[0]
    # In vllm 0.26, an output without a new token repeats all earlier logprobs.
    for token, logprob in zip(new.token_ids, new.logprobs.logprobs, strict=True) if new.token_ids else ():
        entry.response_ids.append(token)
        entry.logprobs.append(logprob)
        if entry.stop.completed_by(entry.response_ids):
            return Completion(entry.response_ids[entry.num_written :], entry.logprobs, "stop")
    if not output.finished:
        return None
    return _checked(entry.response_ids[entry.num_written :], entry.logprobs, new.finish_reason)


def _completion(output: Any) -> Completion:
    return _checked(list(output.token_ids), list(output.logprobs.logprobs), output.finish_reason)


def _checked(response_ids: list[int], logprobs: list[float], finish_reason: str | None) -> Completion:
    if finish_reason not in ("stop", "length") or len(logprobs) != len(response_ids):
        raise RuntimeError(
            f"vLLM did not finish a response: finish_reason {finish_reason!r}, {len(response_ids)} tokens, "
            f"{len(logprobs)} logprobs"
        )
    return Completion(response_ids, logprobs, finish_reason)
