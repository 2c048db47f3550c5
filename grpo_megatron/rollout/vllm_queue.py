"""VllmQueue: the requests that vLLM's engine serves, fed and stepped from outside.

`LLM.generate` is the same loop around the same calls (`add_request`, `step`), but it returns only when all requests have
finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_megatron.rollout.engine import Completion


@dataclass(frozen=True)
class _Entry:
    """One unfinished request. `number` counts the submissions."""

    number: int


class VllmQueue:
    """The requests of a vllm.LLMEngine. A call that raises leaves vLLM in an unknown state."""

    def __init__(self, engine: Any) -> None:
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._engine, self._tokens_input = engine, tokens_input
        self._final_only = RequestOutputKind.FINAL_ONLY
        self._entries: dict[str, _Entry] = {}
        self._num_submitted = 0
        self._queried_tokens = self._cached_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def add(self, request_id: str, prompt_ids: Sequence[int], params: Any) -> None:
        """`params`: vllm.SamplingParams of this request alone, with logprobs=0 and flat_logprobs."""
        params.output_kind = self._final_only
        self._engine.add_request(request_id, self._tokens_input(list(prompt_ids)), params)
        self._entries[request_id] = _Entry(self._num_submitted)
        self._num_submitted += 1

    def step(self) -> list[tuple[str, Completion]]:
        """One step of the engine; what has finished in it, in order of submission."""
        finished: list[tuple[int, str, Completion]] = []
        for output in self._engine.step():
            entry = self._entries.pop(output.request_id)
            self._queried_tokens += len(output.prompt_token_ids)
            self._cached_tokens += output.num_cached_tokens
            finished.append((entry.number, output.request_id, _completion(output.outputs[0])))
        return [(request_id, completion) for _, request_id, completion in sorted(finished, key=lambda f: f[0])]

    def abort(self, request_ids: Sequence[str]) -> None:
        """Of unfinished requests."""
        self._engine.abort_request(list(request_ids))
        for request_id in request_ids:
            del self._entries[request_id]

    def cache_statistics(self) -> tuple[int, int]:
        """See RolloutEngine.cache_statistics."""
        counts = self._queried_tokens, self._cached_tokens
        self._queried_tokens = self._cached_tokens = 0
        return counts


def _completion(output: Any) -> Completion:
    response_ids, logprobs = list(output.token_ids), list(output.logprobs.logprobs)
    if output.finish_reason not in ("stop", "length") or len(logprobs) != len(response_ids):
        raise RuntimeError(
            f"vLLM did not finish a response: finish_reason {output.finish_reason!r}, {len(response_ids)} tokens, "
            f"{len(logprobs)} logprobs"
        )
    return Completion(response_ids, logprobs, output.finish_reason)
