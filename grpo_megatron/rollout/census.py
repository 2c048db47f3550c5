"""Census: the checks on a stream of weights, before an engine takes any of it.

Engines do not check names. vLLM takes 10 tensors of 36 without a complaint, and then generates nonsense. Values are
checked where they are complete: by the attestation (sync/attest.py), and by evaluation on the tensors that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from grpo_megatron.sync.attest import shortened
from grpo_megatron.sync.tensors import SyncTensor
from grpo_megatron.types import WeightBucket


class Census:
    """Which tensors of one stream are expected, and which have arrived."""

    def __init__(self, expected: Mapping[str, SyncTensor]) -> None:
        self._expected = expected
        self._arrived: set[str] = set()

    def admit(self, bucket: WeightBucket) -> str | None:
        """Record a bucket. Returns what is wrong with it: unknown or repeated names, and shapes."""
        problems = []
        for name, tensor in bucket:
            if name not in self._expected:
                problems.append(f"{name} is not a tensor of this model")
            elif name in self._arrived:
                problems.append(f"{name} arrived twice")
            elif tuple(tensor.shape) != self._expected[name].shape:
                problems.append(f"{name} has shape {tuple(tensor.shape)}, not {self._expected[name].shape}")
            self._arrived.add(name)
        return shortened(problems) or None

    def missing(self) -> str | None:
        """What is wrong with the stream as a whole: the names that never arrived."""
        names = [name for name in self._expected if name not in self._arrived]
        if not names:
            return None
        return shortened([f"{len(names)} of {len(self._expected)} tensors are missing", *names])


def load_verified(
    stream: Iterator[WeightBucket],
    expected: Mapping[str, SyncTensor],
    load: Callable[[WeightBucket], str | None],
    problem: str | None = None,
) -> str | None:
    """Read `stream` to its end, and `load` every bucket up to the first problem. Returns the first problem, or None.

    `load` returns what went wrong, or None. `problem`: of this rank, known before; nothing is loaded then. Never raises,
    and never stops early: the other ranks may wait for what this rank's stream sends them. Not collective; the caller
    lets the ranks agree on their problems after their streams.
    """
    census = Census(expected)
    try:
        for bucket in stream:
            problem = problem or census.admit(bucket)
            if problem is None:
                problem = load([(name, tensor.detach()) for name, tensor in bucket])
    except Exception as error:  # of any kind: the other ranks wait for this rank
        return problem or f"{type(error).__name__}: {error}"
    return problem or census.missing()
