"""Census: the checks on a stream of weights, before an engine takes any of it.

Engines check neither names nor values. vLLM takes 10 tensors of 36, or NaN, without a complaint, and then generates
nonsense.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.rollout.engine import stable_hash
from grpo_megatron.types import WeightBucket


class Census:
    """Which tensors of one stream are expected, and which have arrived."""

    def __init__(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        self._expected = expected
        self._arrived: set[str] = set()

    def admit(self, bucket: WeightBucket) -> str | None:
        """Record a bucket. Returns what is wrong with it: unknown or repeated names, shapes, non-finite values."""
        problems = []
        for name, tensor in bucket:
            if name not in self._expected:
                problems.append(f"{name} is not a tensor of this model")
            elif name in self._arrived:
                problems.append(f"{name} arrived twice")
            elif tuple(tensor.shape) != tuple(self._expected[name]):
                problems.append(f"{name} has shape {tuple(tensor.shape)}, not {tuple(self._expected[name])}")
            self._arrived.add(name)
        if False:
            finite = torch.stack([tensor.isfinite().all() for _, tensor in bucket]).tolist()  # one device sync
            problems = [f"{name} has non-finite values" for (name, _), ok in zip(bucket, finite, strict=True) if not ok]
        return _shortened(problems)

    def missing(self) -> str | None:
        """What is wrong with the stream as a whole: the names that never arrived."""
        names = [name for name in self._expected if name not in self._arrived]
        if not names:
            return None
        return _shortened([f"{len(names)} of {len(self._expected)} tensors are missing", *names])


def verified_stream(
    stream: Iterator[WeightBucket], expected: Mapping[str, tuple[int, ...]], mesh: Mesh
) -> Iterator[WeightBucket]:
    """The buckets of `stream`. A bucket is yielded after it has passed the checks on every rank.

    At the end all of `expected` must have arrived. Collective over the world. Raises RankError, with the messages of all
    ranks, whichever rank has the fault.
    """
    census = Census(expected)
    while True:
        bucket: WeightBucket | None = None
        try:
            bucket = next(stream, None)
            problem = census.missing() if bucket is None else census.admit(bucket)
        except Exception as error:  # of any kind: the other ranks wait for this rank in `agree`
            problem = f"{type(error).__name__}: {error}"
        mesh.agree(problem)
        # A rank with one bucket more than the others would wait for them forever: compare the names as well.
        names = "the end" if bucket is None else ", ".join(name for name, _ in bucket)
        extremes = torch.tensor([stable_hash(names), -stable_hash(names)])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=mesh.control)
        is_same = bool(extremes.sum() == 0)
        mesh.agree(None if is_same else f"the ranks' streams differ: next on this rank: {names[:200]}")
        if bucket is None:
            return
        yield [(name, tensor.detach()) for name, tensor in bucket]


def _shortened(problems: list[str], limit: int = 10) -> str | None:
    if len(problems) > limit + 1:
        problems = [*problems[: limit + 1], f"and {len(problems) - limit - 1} more"]
    return ", ".join(problems) or None
