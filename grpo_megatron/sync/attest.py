"""Attestation: what an engine must hold, computed from the policy's shards, and the comparison with what it does hold.

Every part of every tensor has one witness among the ranks that hold it. A witness digests its parts; one all-reduce adds
them up to a table [tensors, engine ranks] of what each engine rank must hold, and to the digest of each whole tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_megatron.sync.digest import digest_and_sum
from grpo_megatron.sync.tensors import EngineTensors, Interval, Share, SyncTensor


@dataclass(frozen=True)
class Expected:
    """What a model's weights are. The same on every rank.

    `digests[name]` has one digest per engine rank, of the part that this rank reads. `weights_digest` is that of all
    tensors whole, in hexadecimal: it does not depend on any layout. `non_finite` names tensors with NaN or infinities.
    """

    digests: Mapping[str, list[int]]
    weights_digest: str
    non_finite: list[str]


@torch.no_grad()
def expected_digests(
    shares: Sequence[Share],
    read: Callable[[str], Tensor],
    engine: EngineTensors,
    reduce: Callable[[Tensor], None],
    device: torch.device,
) -> Expected:
    """The digests of all weights. Collective: `reduce` adds an int64 tensor up over all ranks, in place.

    `shares` are those of which this rank is the witness; shares of one parameter are neighbours. `read` gives a
    parameter as this rank keeps it. An error of `read` is raised after `reduce`, because the other ranks wait there.
    Waits for the device twice.
    """
    names = list(engine.tensors)
    row_of = {name: row for row, name in enumerate(names)}
    num_ranks = len(next(iter(engine.spans.values())))
    whole, non_finite = num_ranks, num_ranks + 1  # columns after those of the engine's ranks
    table = torch.zeros(len(names), num_ranks + 2, dtype=torch.int64, device=device)
    try:
        if shares:
            digests, problems = _digest_shares(shares, read)
            _add(table, shares, row_of, lambda share: (*share.engine_ranks, whole), digests)
            _add(table, shares, row_of, lambda share: (non_finite,), problems)
    finally:
        reduce(table)
    rows = table.tolist()
    return Expected(
        digests={name: row[:num_ranks] for name, row in zip(names, rows, strict=True)},
        weights_digest=_combined(names, [row[whole] for row in rows]),
        non_finite=[name for name, row in zip(names, rows, strict=True) if row[non_finite]],
    )


def _digest_shares(shares: Sequence[Share], read: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
    """Per share its digest, and 1 where it has non-finite values. Two int64 tensors [shares]."""
    digests: list[Tensor] = []
    sums: list[Tensor] = []
    for part, share in _parts(shares, read):
        digest, number = digest_and_sum(part, share.tensor, share.start)
        digests.append(digest)
        sums.append(number)
    is_finite = torch.stack(sums).isfinite()
    if not is_finite.all():  # a sum may also have overflowed
        extremes = torch.stack([value for part, _ in _parts(shares, read) for value in torch.aminmax(part)])
        is_finite = extremes.view(-1, 2).isfinite().all(1)  # NaN if any value is NaN
    return torch.stack(digests), (~is_finite).to(torch.int64)


def _parts(shares: Sequence[Share], read: Callable[[str], Tensor]) -> Iterator[tuple[Tensor, Share]]:
    name, parameter = None, torch.empty(0)
    for share in shares:
        if share.parameter != name:
            name, parameter = share.parameter, read(share.parameter)
        yield parameter.narrow(share.tensor.axis, share.local_start, share.stop - share.start), share


def _add(
    table: Tensor,
    shares: Sequence[Share],
    row_of: Mapping[str, int],
    columns_of: Callable[[Share], tuple[int, ...]],
    values: Tensor,
) -> None:
    """Add each share's value to its tensor's row, in the given columns."""
    cells = [(row_of[s.tensor.name], column, index) for index, s in enumerate(shares) for column in columns_of(s)]
    rows, columns, indices = (torch.tensor(values_of, device=table.device) for values_of in zip(*cells, strict=True))
    table.index_put_((rows, columns), values[indices], accumulate=True)


def _combined(names: Sequence[str], digests: Sequence[int]) -> str:
    text = "\n".join(f"{name} {digest}" for name, digest in sorted(zip(names, digests, strict=True)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def compare(
    expected: Expected, held: Mapping[str, int], engine: EngineTensors, engine_rank: int, rank: int
) -> str | None:
    """What is wrong with an engine rank whose memory has the digests `held`: tensors, slices, and global `rank`."""
    wrong = []
    for name in engine.tensors:
        start, stop = engine.spans[name][engine_rank]
        if start < stop and held.get(name) != expected.digests[name][engine_rank]:
            wrong.append(name)
    if not wrong:
        return None
    # Digests depend on values and positions, not on names: they show what was mistaken for what.
    owner = {digests[engine_rank]: name for name, digests in expected.digests.items()}
    problems = []
    for name in wrong:
        origin = owner.get(held[name]) if name in held else None
        reason = f" (it holds {origin})" if origin else "" if name in held else " (not loaded)"
        problems.append(f"{_slice(engine.tensors[name], engine.spans[name][engine_rank])} on rank {rank}{reason}")
    return shortened(["the engine does not hold the weights that were sent", *problems])


def _slice(tensor: SyncTensor, span: Interval) -> str:
    return f"{tensor.name} {'columns' if tensor.axis else 'rows'} {span[0]} to {span[1]}"


def shortened(problems: Sequence[str], limit: int = 10) -> str:
    """A list in one line: a heading and at most `limit` items."""
    if len(problems) > limit + 1:
        problems = [*problems[: limit + 1], f"and {len(problems) - limit - 1} more"]
    return ", ".join(problems)
