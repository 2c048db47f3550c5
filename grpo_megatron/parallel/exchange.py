"""The sample exchange: rollout layout -> training layout, in two phases. The only data-parallel communication we write.

1. `gather_groups`: a few bytes a sample (prompt, index, reward, lengths) reach every rank. Now every rank can compute
   the same plan, with exact group statistics even where a prompt's samples were drawn on several ranks.
2. `exchange`: tokens and rollout log-probabilities move once, straight to the ranks that will train on them.

Both run on the host over the gloo control group: a step's samples are megabytes, its activations gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.types import GREEDY, Batch, GroupTable, Plan, Sample

COLUMNS = (
    "prompt_index",
    "index",
    "reward",
    "prompt_length",
    "response_length",
    "truncated",
    "holder",
    "step_rewards",
)


def gather_groups(samples: Sequence[Sample], mesh: Mesh) -> GroupTable:
    """Collective: the table of every sample of the step, the same on every rank.

    Ranks of one rollout block hold the same samples; its leader speaks for them. Greedy responses become a column of
    their prompt's rows. Raises RankError on every rank if a (prompt, index) pair was drawn twice.
    """
    mine = [
        (
            s.prompt_index,
            s.index,
            s.reward,
            len(s.prompt.prompt_ids),
            len(s.response_ids),
            s.finish_reason == "length",
            mesh.rank,
            s.steps,
        )
        for s in samples
        if mesh.is_block_leader
    ]
    rows = sorted((row for part in mesh.all_gather(mine) for row in part), key=lambda row: row[:2])
    keys = [row[:2] for row in rows]
    twice = {key for key, following in zip(keys, keys[1:], strict=False) if key == following}
    mesh.agree(f"samples drawn twice: (prompt, index) {sorted(twice)[:10]}" if twice else None)
    greedy = {row[0]: row[2] for row in rows if row[1] == GREEDY}
    rows = [row for row in rows if row[1] != GREEDY]
    columns = zip(*rows, strict=True) if rows else [()] * len(COLUMNS)
    table = GroupTable(**{name: list(column) for name, column in zip(COLUMNS, columns, strict=True)})  # type: ignore[arg-type]
    return replace(
        table,
        step_rewards=table.step_rewards if any(table.step_rewards) else [],
        greedy_reward=[greedy.get(p, float("nan")) for p in table.prompt_index] if greedy else [],
    )


def exchange(samples: Sequence[Sample], table: GroupTable, plan: Plan, mesh: Mesh) -> Batch:
    """Collective: this data-parallel rank's share of the step. Ranks of one replica get the same batch."""
    owner = plan.owner()
    sequences = _move_tokens(samples, table, owner, mesh)
    rows = sorted(row for row, dp_rank in owner.items() if dp_rank == mesh.dp_rank)
    return build_batch(
        rows,
        plan,
        mesh.dp_rank,
        tokens=[sequences[row][0] for row in rows],
        prompt_lengths=[table.prompt_length[row] for row in rows],
        rollout_logprobs=[sequences[row][1] for row in rows],
    )


def build_batch(
    rows: list[int],
    plan: Plan,
    dp_rank: int,
    *,
    tokens: list[Tensor],
    prompt_lengths: list[int],
    rollout_logprobs: list[Tensor],
) -> Batch:
    """Pad `rows` of the plan's table into a Batch. tokens[i] is int64 [prompt + response], its log-probabilities float32."""
    lengths = [len(t) - p for t, p in zip(tokens, prompt_lengths, strict=True)]
    shape = (len(rows), max(lengths, default=1))
    mask = torch.arange(shape[1]) < torch.tensor(lengths, dtype=torch.int64).unsqueeze(1)  # [B, R]
    logprobs = torch.zeros(shape)
    for i in range(len(rows)):
        logprobs[i, : lengths[i]] = rollout_logprobs[i]
    batch = Batch(
        tokens=tokens,
        prompt_lengths=prompt_lengths,
        response_mask=mask.reshape(shape),
        rollout_logprobs=logprobs,
        advantages=torch.zeros(shape),
        token_weights=torch.zeros(shape),
        mini_batches=[],
        rows=rows,
    )
    follow(batch, plan, dp_rank)
    return batch


def follow(batch: Batch, plan: Plan, dp_rank: int) -> None:
    """Take advantages, token weights and schedule from the plan; the batch holds the rows that it gives this rank."""
    local = {row: i for i, row in enumerate(batch.rows)}
    batch.mini_batches = [[[local[row] for row in micro] for micro in mini] for mini in plan.mini_batches[dp_rank]]
    batch.advantages, batch.token_weights = torch.zeros_like(batch.advantages), torch.zeros_like(batch.token_weights)
    for i, row in enumerate(batch.rows):
        length = len(batch.tokens[i]) - batch.prompt_lengths[i]
        advantage = plan.advantages[row]
        batch.advantages[i, :length] = torch.as_tensor(0.0 if advantage is None else advantage, dtype=torch.float32)
        batch.token_weights[i, :length] = plan.token_weights[row]
    batch.token_weights *= batch.response_mask


def gather_rows(values: dict[int, Any], mesh: Mesh) -> dict[int, Any]:
    """Collective: {table row: value} of every data-parallel rank's rows, on every rank. Small values only."""
    parts = mesh.all_gather(values if mesh.is_first_replica_rank else {})
    return {row: value for part in parts for row, value in part.items()}


def _move_tokens(
    samples: Sequence[Sample], table: GroupTable, owner: dict[int, int], mesh: Mesh
) -> dict[int, tuple[Tensor, Tensor]]:
    """Table row -> (tokens, rollout log-probabilities) for every row this rank owns, by one all-to-all.

    A row travels as int32: prompt, response, then the bits of the float32 log-probabilities. Every rank knows every
    size from the table.
    """
    held = {(s.prompt_index, s.index): s for s in samples}
    sizes = [p + 2 * r for p, r in zip(table.prompt_length, table.response_length, strict=True)]
    dp_rank_of = [mesh.dp_rank_of(rank) for rank in range(mesh.world_size)]

    outgoing: list[Tensor] = []
    send_sizes = [0] * mesh.world_size
    for rank in range(mesh.world_size):
        for row in sorted(owner):
            if table.holder[row] == mesh.rank and owner[row] == dp_rank_of[rank]:
                outgoing.append(_encode(held[table.prompt_index[row], table.index[row]]))
                send_sizes[rank] += sizes[row]
    incoming = [
        [row for row in sorted(owner) if table.holder[row] == rank and owner[row] == mesh.dp_rank]
        for rank in range(mesh.world_size)
    ]
    receive_sizes = [sum(sizes[row] for row in rows) for rows in incoming]

    received = torch.empty(sum(receive_sizes), dtype=torch.int32)
    sent = torch.cat(outgoing) if outgoing else torch.empty(0, dtype=torch.int32)
    dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=mesh.control)

    order = [row for rows in incoming for row in rows]
    parts = received.split([sizes[row] for row in order])
    out = {}
    for row, part in zip(order, parts, strict=True):
        tokens = table.prompt_length[row] + table.response_length[row]
        out[row] = (part[:tokens].long(), part[tokens:].clone().view(torch.float32))
    return out


def _encode(sample: Sample) -> Tensor:
    tokens = torch.tensor([*sample.prompt.prompt_ids, *sample.response_ids], dtype=torch.int32)
    return torch.cat([tokens, torch.tensor(sample.rollout_logprobs, dtype=torch.float32).view(torch.int32)])
