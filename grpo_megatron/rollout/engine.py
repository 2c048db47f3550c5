"""What the trainer asks of a rollout engine, and the checks that every engine owes before it takes new weights.

Each rank holds one engine object. `rollout_tp` neighbouring ranks form a block that answers the same requests together;
blocks never wait for each other to generate. Lengths are tokens, log-probabilities natural logarithms.

The life of an engine within a step:

    wake_weights() -> load_weights(stream, step) -> wake_kv_cache() -> generate(requests, step) ... -> sleep()
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.types import WeightBucket


@dataclass(frozen=True)
class Request:
    """One response to draw. `seed` alone decides the draws: not the batch, its order, or the rank (see sample_seed)."""

    prompt_ids: tuple[int, ...]
    seed: int
    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    stop_token_ids: tuple[int, ...] = ()  # besides the engine's own end-of-sequence tokens


@dataclass(frozen=True)
class Completion:
    """One response. `logprobs[t]` is of `response_ids[t]` under the distribution it was drawn from: temperature, top_p and
    top_k applied. The token that stopped the response, if one did, is the last of `response_ids` and has its logprob."""

    response_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop" | "length"


class RolloutEngine(Protocol):
    """Every method but `logprobs` and `generate` is collective over the world; those two are collective over a block."""

    @property
    def version(self) -> int | None:
        """What the last complete `load_weights` was called with; None: the weights are unusable."""

    def load_weights(self, stream: Iterator[WeightBucket], version: int) -> None:
        """Replace every weight, or none that can be sampled from. Drains `stream` in lock step with all ranks.

        Raises RankError on every rank when anything is wrong on any; then `version` is None.
        """

    def generate(self, requests: list[Request], version: int) -> list[Completion]:
        """Completions in the order of `requests`, which are the same on all ranks of a block.

        Raises RuntimeError at once, rather than hang, when asleep or when the weights are not those of `version`.
        """

    def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probabilities at temperature 1 of the tokens 1, 2, ... of each sequence, given those before them."""

    def sleep(self) -> None:
        """Give the device memory back. Forgets the weights: `version` becomes None."""

    def wake_weights(self) -> None:
        """Take the memory of the weights again; what it holds is garbage until `load_weights`."""

    def wake_kv_cache(self) -> None:
        """Take the memory of the key-value cache again, after `load_weights`."""

    def shutdown(self) -> None:
        """Release everything. The engine cannot be used afterwards."""


def sample_seed(run_seed: int, step: int, prompt_uid: str, sample_index: int) -> int:
    """Seed in [0, 2**63) of one sample's draws: the same wherever and beside whatever it is drawn.

    A stable hash (Python's own changes between processes). CPU generators keep only its low 32 bits; they are uniform.
    """
    return _digest(json.dumps([run_seed, step, prompt_uid, sample_index]))


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Census:
    """Which tensors of one push are due, and which have arrived. Engines check no names and no values of their own:
    a push of 10 tensors of 36, or of NaN, is taken without a word and answered with nonsense."""

    def __init__(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        self._expected = expected
        self._arrived: set[str] = set()

    def admit(self, bucket: WeightBucket) -> str | None:
        """Count a bucket in. Returns what is wrong with it: unknown or repeated names, shapes, non-finite values."""
        problems = []
        for name, tensor in bucket:
            if name not in self._expected:
                problems.append(f"{name} is not a tensor of this model")
            elif name in self._arrived:
                problems.append(f"{name} arrived twice")
            elif tuple(tensor.shape) != tuple(self._expected[name]):
                problems.append(f"{name} has shape {tuple(tensor.shape)}, not {tuple(self._expected[name])}")
            self._arrived.add(name)
        if not problems and bucket:
            finite = torch.stack([tensor.isfinite().all() for _, tensor in bucket]).tolist()  # one device sync
            problems = [f"{name} has non-finite values" for (name, _), ok in zip(bucket, finite, strict=True) if not ok]
        return _abridged(problems)

    def missing(self) -> str | None:
        """What is wrong with the push as a whole: the names that never arrived."""
        names = [name for name in self._expected if name not in self._arrived]
        return _abridged([f"{len(names)} of {len(self._expected)} tensors are missing", *names]) if names else None


def checked(
    stream: Iterator[WeightBucket], expected: Mapping[str, tuple[int, ...]], mesh: Mesh
) -> Iterator[WeightBucket]:
    """The stream's buckets, each known to be fit on every rank before any rank gets it; at the end, all of `expected`.

    Collective over the world. Raises RankError with the messages of all ranks, whichever rank the fault is on.
    """
    census = Census(expected)
    while True:
        bucket: WeightBucket | None = None
        try:
            bucket = next(stream, None)
            problem = census.missing() if bucket is None else census.admit(bucket)
        except Exception as error:  # whatever it is, the other ranks wait to hear of it
            problem = f"{type(error).__name__}: {error}"
        mesh.agree(problem)
        # A rank with one bucket more than the others would wait for them alone: agree on the names as well.
        names = "the end" if bucket is None else ", ".join(name for name, _ in bucket)
        extremes = torch.tensor([_digest(names), -_digest(names)])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=mesh.control)
        mesh.agree(None if extremes.sum() == 0 else f"the ranks' streams differ: here comes {names[:200]}")
        if bucket is None:
            return
        yield [(name, tensor.detach()) for name, tensor in bucket]


def _abridged(problems: list[str], limit: int = 10) -> str | None:
    if len(problems) > limit + 1:
        problems = [*problems[: limit + 1], f"and {len(problems) - limit - 1} more"]
    return ", ".join(problems) or None
