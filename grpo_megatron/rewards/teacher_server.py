"""A teacher behind an OpenAI-compatible server that returns prompt log-probabilities, such as `vllm serve`.

    POST url/completions   {"prompt": [ids of prompt and response], "max_tokens": 1, "prompt_logprobs": k}

The reply has, for every token of the prompt, the log-probabilities of that token and of the k best. vLLM computes them at
temperature 1, whatever the request says, so the rollout must have temperature 1, too. The sampled token costs one place of the
server's context. Token ids are sent, and text never.

The tail of k best tokens is 1 less their sum, with the digits that are left of it: at least TAIL, or the probability of the
response's own token where that is not among them.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from grpo_megatron.config import TeacherConfig
from grpo_megatron.processes.endpoint import EndpointError, key_of, post_json

TAIL = 1e-7  # probabilities are float32 in the reply
BYTES_PER_ENTRY = 256  # of the reply: one id with its log-probability, rank and text
PROBES = 32  # tokens that are compared before a run
ROUNDING = (
    0.1  # nats between log-probabilities of the same weights, the mean of PROBES tokens: bfloat16 in other batches
)


class ServerScores(NamedTuple):
    """The scores of a response: log-probabilities [r], and `top` [r (2 k + 1)] (types.TeacherScores), empty for k = 0."""

    logprobs: array[float]  # of float32
    top: array[float]


def teacher_server(name: str, teacher: TeacherConfig, num_ids: int) -> TeacherServer:
    """Returns the client of a teacher of the config. Raises ValueError if its key is not in the environment."""
    assert teacher.url is not None and teacher.model is not None, "checks refuse it"
    return TeacherServer(
        name,
        teacher.url,
        teacher.model,
        num_ids=num_ids,
        key=key_of(teacher.api_key_env, f"teachers.{name}.api_key_env"),
        timeout_s=teacher.timeout_s,
        retries=teacher.retries,
        num_requests=teacher.num_requests,
    )


class ServerError(Exception):
    """A row that the server did not score, and why. Names the teacher and its address."""


class TeacherServer:
    """The client of one teacher. `num_ids` is the policy's vocabulary; `num_requests` are sent at a time, each by a thread."""

    def __init__(
        self,
        name: str,
        url: str,
        model: str,
        *,
        num_ids: int,
        key: str | None = None,
        timeout_s: float = 600.0,
        retries: int = 3,
        num_requests: int = 16,
    ) -> None:
        self.name, self.url, self.model, self.num_ids = name, url.rstrip("/") + "/completions", model, num_ids
        self.key, self.timeout_s, self.retries = key, timeout_s, retries
        self._threads = ThreadPoolExecutor(num_requests)

    def score(self, rows: Sequence[tuple[list[int], list[int]]], top_k: int) -> list[ServerScores | ServerError]:
        """Returns the scores of each (prompt, response), or why it has none. `top_k` 0: of the response's tokens alone."""
        return [future.result() for future in [self.start(row, top_k) for row in rows]]

    def start(self, row: tuple[list[int], list[int]], top_k: int) -> Future[ServerScores | ServerError]:
        """Starts `score` of one row. Returns at once."""
        return self._threads.submit(self._score, *row, top_k)

    def close(self) -> None:
        """Gives up the rows whose request has not been sent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _score(self, prompt: list[int], response: list[int], top_k: int) -> ServerScores | ServerError:
        try:
            return self._scores(self._entries([*prompt, *response], top_k)[len(prompt) :], response, top_k)
        except ServerError as error:
            return error

    def check(self, top_k: int, decode: Callable[[int], str]) -> None:
        """Scores tokens of the whole vocabulary, and compares their texts with `decode(id)`. Raises ServerError.

        It also shows a wrong model name, and a server that returns fewer than `top_k` or no log-probabilities.
        """
        ids = [1 + index * (self.num_ids - 1) // (PROBES + 1) for index in range(PROBES)]
        entries = self._entries(ids, top_k)
        self._scores(entries[1:], ids[1:], top_k)
        for token, entry in zip(ids[1:], entries[1:], strict=True):
            text, expected = entry[str(token)].get("decoded_token"), decode(token)
            if isinstance(text, str) and expected.isascii() and expected.isalnum() and text.strip() != expected.strip():
                raise ServerError(
                    f"{self._teacher()}: token {token} is {text!r} there and {expected!r} in the policy's tokenizer; a teacher"
                    " must have the policy's tokenizer"
                )

    def identity(self) -> dict[str, Any]:
        """Returns which weights are served, for a checkpoint: model, version, log-probabilities of fixed tokens.

        Raises ServerError.
        """
        ids = list(range(1, PROBES + 1))
        scores = self._scores(self._entries(ids, 0)[1:], ids[1:], 0)
        logprobs = [round(value, 4) for value in scores.logprobs]
        try:
            root = self.url.removesuffix("/completions").removesuffix("/v1")
            version = json.loads(post_json(f"{root}/version", None, {}, 0, self.timeout_s, self.key).data)["version"]
        except (EndpointError, ValueError, LookupError, TypeError):  # vLLM's address, which others need not have
            version = "unknown"
        digest = hashlib.sha256(json.dumps([version, logprobs]).encode()).hexdigest()
        return {"size": PROBES, "sha256": digest, "version": str(version), "logprobs": logprobs}

    def _teacher(self) -> str:
        return f"teachers.{self.name} (model {self.model!r} at {self.url})"

    def _entries(self, ids: list[int], top_k: int) -> list[dict[str, Any]]:
        """Returns the log-probabilities of every token by id; of the first one there are none."""
        body = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k}
        limit = (1 << 20) + len(ids) * (top_k + 1) * BYTES_PER_ENTRY
        try:
            reply = post_json(
                self.url, json.dumps(body).encode(), {}, self.retries, self.timeout_s, self.key, limit=limit
            )
        except EndpointError as error:
            reason = f": {' '.join(error.reason.split())}" if error.reason else ""
            models = self.url.removesuffix("completions") + "models"
            raise ServerError(f"{self._teacher()}: {error}{reason}; {models} lists what a server there has") from None
        try:
            entries = json.loads(reply.data)["choices"][0]["prompt_logprobs"]
            entries = [{}, *({key: dict(value) for key, value in entry.items()} for entry in entries[1:])]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            entries = []
        if len(entries) != len(ids):
            raise ServerError(
                f"{self._teacher()}: the reply has log-probabilities of {len(entries)} of {len(ids)} tokens; it begins with"
                f" {reply.data[:200]!r}; a server must return prompt_logprobs, as `vllm serve` does"
            )
        return entries

    def _scores(self, entries: list[dict[str, Any]], response: list[int], top_k: int) -> ServerScores:
        """Raises ServerError for entries without the numbers."""
        logprobs, top = array("f"), array("f")
        for position, (token, entry) in enumerate(zip(response, entries, strict=True)):
            try:
                found = {int(key): float(value["logprob"]) for key, value in entry.items()}
                logprobs.append(found[token])
            except (ValueError, LookupError, TypeError):
                raise ServerError(
                    f"{self._teacher()}: the reply has no log-probability of token {token}, number {position} of a response"
                ) from None
            if any(not value <= 1e-4 for value in found.values()):
                raise ServerError(
                    f"{self._teacher()}: the reply has a log-probability that is no number below 0 at token {position}"
                )
            best = sorted(
                ((value, key) for key, value in found.items() if key < self.num_ids),
                key=lambda pair: (-pair[0], pair[1]),
            )
            best = best[:top_k]
            others = math.exp(found[token]) if token not in {key for _, key in best} else 0.0
            tail = math.log(max(1.0 - math.fsum(math.exp(value) for value, _ in best), others, TAIL))
            missing = top_k - len(best)
            ids, values = [float(key) for _, key in best], [value for value, _ in best]
            if top_k:
                top.extend([*ids, *[-1.0] * missing, *values, *[-math.inf] * missing, tail])
        return ServerScores(logprobs, top)


def identity_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yields how a server differs from the one whose `identity` was recorded before."""
    if before["version"] != now["version"]:
        yield f"is a server of version {now['version']}, and was one of {before['version']}"
    pairs = zip(before["logprobs"], now["logprobs"], strict=True)
    apart = math.fsum(abs(one - other) for one, other in pairs) / len(now["logprobs"])
    if apart > ROUNDING:
        yield f"has other weights: the log-probabilities of {PROBES} fixed tokens are {apart:.2f} nats apart, above {ROUNDING}"
