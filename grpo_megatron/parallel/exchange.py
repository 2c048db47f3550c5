"""The sample exchange: rollout layout -> training layout, in two phases.

1. `gather_groups`: a few numbers per sample (prompt, index, reward, lengths, which tokens are in the loss) reach every
   rank. Then every rank can compute the same plan, with exact group statistics even where the samples of one prompt
   were drawn on several ranks.
2. `exchange`: tokens and rollout log-probabilities move once, directly to the ranks that train on them.

Both run on the host over the gloo control group: a step's samples are megabytes, its activations gigabytes. The loss
mask is sent in phase 1 as spans of tokens. An environment writes whole stretches of a response, so a row has few spans.
Estimators that work on tokens (`algo/returns.py`) need the spans of every row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.types import GREEDY, Batch, GroupTable, Plan, Sample, TokenSpan


@dataclass(frozen=True)
class _TableRow:
    """One sample in phase 1: the table columns that the rank with the sample can fill in."""

    prompt_index: int
    index: int
    reward: float
    prompt_length: int
    response_length: int
    truncated: bool
    holder: int
    step_rewards: list[tuple[int, float]]
    turn_rewards: list[tuple[int, float]]
    loss_spans: list[TokenSpan]

    @property
    def key(self) -> tuple[int, int]:
        return self.prompt_index, self.index


def gather_groups(samples: Sequence[Sample], mesh: Mesh) -> GroupTable:
    """Collective: the table of every sample of the step, the same on every rank.

    Ranks of one rollout block hold the same samples; only its leader sends them. Greedy responses become a column of
    their prompt's rows. Raises RankError on every rank if a (prompt, index) pair was drawn twice.
    """
    local_rows = [_table_row(sample, mesh.rank) for sample in samples] if mesh.is_block_leader else []
    rows = sorted(itertools.chain.from_iterable(mesh.all_gather(local_rows)), key=lambda row: row.key)
    twice = sorted({row.key for row, following in itertools.pairwise(rows) if row.key == following.key})
    mesh.agree(f"samples drawn twice: (prompt, index) {twice[:10]}" if twice else None)
    greedy_reward = {row.prompt_index: row.reward for row in rows if row.index == GREEDY}
    rows = [row for row in rows if row.index != GREEDY]
    table = GroupTable(**{field.name: [getattr(row, field.name) for row in rows] for field in fields(_TableRow)})
    return replace(
        table,
        step_rewards=table.step_rewards if any(table.step_rewards) else [],
        turn_rewards=table.turn_rewards if any(table.turn_rewards) else [],
        greedy_reward=[greedy_reward.get(p, float("nan")) for p in table.prompt_index] if greedy_reward else [],
        loss_spans=table.loss_spans if table.num_loss_tokens() != table.response_length else [],
    )


def _table_row(sample: Sample, rank: int) -> _TableRow:
    return _TableRow(
        prompt_index=sample.prompt_index,
        index=sample.index,
        reward=sample.reward,
        prompt_length=len(sample.prompt.prompt_ids),
        response_length=len(sample.response_ids),
        truncated=sample.finish_reason == "length",
        holder=rank,
        step_rewards=sample.steps,
        turn_rewards=sample.turn_rewards,
        loss_spans=_spans(sample.loss_mask),
    )


def _spans(mask: Iterable[int]) -> list[TokenSpan]:
    """The runs of ones in `mask`, as [start, end)."""
    spans = []
    start = 0
    for is_in_loss, run in itertools.groupby(mask, key=bool):
        end = start + len(list(run))
        if is_in_loss:
            spans.append((start, end))
        start = end
    return spans


def exchange(samples: Sequence[Sample], table: GroupTable, plan: Plan, mesh: Mesh) -> Batch:
    """Collective: this data-parallel rank's share of the step. Ranks of one replica get the same batch."""
    sequences = _move_tokens(samples, table, plan.owner(), mesh)
    rows = plan.rows(mesh.dp_rank)
    return build_batch(
        rows,
        plan,
        mesh.dp_rank,
        tokens=[sequences[row][0] for row in rows],
        prompt_lengths=[table.prompt_length[row] for row in rows],
        rollout_logprobs=[sequences[row][1] for row in rows],
        loss_spans=[table.spans_of(row) for row in rows],
    )


def build_batch(
    rows: list[int],
    plan: Plan,
    dp_rank: int,
    *,
    tokens: list[Tensor],
    prompt_lengths: list[int],
    rollout_logprobs: list[Tensor],
    loss_spans: list[list[TokenSpan]] | None = None,
) -> Batch:
    """Make a padded Batch of `rows`, which are rows of the plan's table.

    tokens[i] is int64 [prompt + response], rollout_logprobs[i] float32 [response]. `loss_spans[i]` are the response
    tokens in the loss; None: all of every row.
    """
    lengths = [len(t) - p for t, p in zip(tokens, prompt_lengths, strict=True)]
    shape = (len(rows), max(lengths, default=1))
    response_mask = torch.zeros(shape, dtype=torch.bool)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    logprobs = torch.zeros(shape)
    for i, length in enumerate(lengths):
        response_mask[i, :length] = True
        logprobs[i, :length] = rollout_logprobs[i]
        for start, end in [(0, length)] if loss_spans is None else loss_spans[i]:
            loss_mask[i, start:end] = True
    batch = Batch(
        tokens=tokens,
        prompt_lengths=prompt_lengths,
        response_mask=response_mask,
        loss_mask=loss_mask,
        rollout_logprobs=logprobs,
        advantages=torch.zeros(shape),
        token_weights=torch.zeros(shape),
        mini_batches=[],
        rows=rows,
    )
    apply_plan(batch, plan, dp_rank)
    return batch


def apply_plan(batch: Batch, plan: Plan, dp_rank: int) -> None:
    """Set the batch's advantages, token weights and mini-batches from the plan. The batch has `dp_rank`'s rows."""
    batch_row = {row: i for i, row in enumerate(batch.rows)}
    batch.mini_batches = [[[batch_row[row] for row in micro] for micro in mini] for mini in plan.mini_batches[dp_rank]]
    batch.num_forward_only, batch.shares_prompts = plan.num_forward_only, plan.shares_prompts
    batch.advantages, batch.token_weights = torch.zeros_like(batch.advantages), torch.zeros_like(batch.token_weights)
    for i, row in enumerate(batch.rows):
        length = len(batch.tokens[i]) - batch.prompt_lengths[i]
        advantage = plan.advantages[row]
        batch.advantages[i, :length] = torch.as_tensor(0.0 if advantage is None else advantage, dtype=torch.float32)
        batch.token_weights[i, :length] = plan.token_weights[row]
    batch.advantages *= batch.loss_mask
    batch.token_weights *= batch.loss_mask


def gather_rows(values: dict[int, Any], mesh: Mesh) -> dict[int, Any]:
    """Collective: {table row: value} of every data-parallel rank's rows, on every rank. Small values only."""
    parts = mesh.all_gather(values if mesh.is_first_replica_rank else {})
    return {row: value for part in parts for row, value in part.items()}


def _move_tokens(
    samples: Sequence[Sample], table: GroupTable, owner: dict[int, int], mesh: Mesh
) -> dict[int, tuple[Tensor, Tensor]]:
    """Table row -> (tokens, rollout log-probabilities) for every row that this rank trains on, by one all-to-all.

    A row travels as int32: prompt, response, then the bits of the float32 log-probabilities. Every rank knows every
    size from the table. Between two ranks the rows travel in increasing order.
    """
    sample_of = {(sample.prompt_index, sample.index): sample for sample in samples}
    sizes = [p + 2 * r for p, r in zip(table.prompt_length, table.response_length, strict=True)]

    outgoing: list[list[int]] = [[] for _ in range(mesh.dp)]  # rows on this rank, by the dp rank that trains on them
    incoming: list[list[int]] = [[] for _ in range(mesh.world_size)]  # rows this rank trains on, by their holder
    for row in sorted(owner):
        if table.holder[row] == mesh.rank:
            outgoing[owner[row]].append(row)
        if owner[row] == mesh.dp_rank:
            incoming[table.holder[row]].append(row)

    encoded = {row: _encode(sample_of[table.prompt_index[row], table.index[row]]) for rows in outgoing for row in rows}
    to_rank = [outgoing[mesh.dp_rank_of(rank)] for rank in range(mesh.world_size)]
    to_send = [encoded[row] for rows in to_rank for row in rows]
    send_sizes = [sum(sizes[row] for row in rows) for rows in to_rank]
    receive_sizes = [sum(sizes[row] for row in rows) for rows in incoming]
    received = torch.empty(sum(receive_sizes), dtype=torch.int32)
    sent = torch.cat(to_send) if to_send else torch.empty(0, dtype=torch.int32)
    dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=mesh.control)

    received_rows = list(itertools.chain.from_iterable(incoming))
    sequences = {}
    for row, part in zip(received_rows, received.split([sizes[row] for row in received_rows]), strict=True):
        num_tokens = table.prompt_length[row] + table.response_length[row]
        sequences[row] = (part[:num_tokens].long(), part[num_tokens:].clone().view(torch.float32))
    return sequences


def _encode(sample: Sample) -> Tensor:
    tokens = torch.tensor([*sample.prompt.prompt_ids, *sample.response_ids], dtype=torch.int32)
    return torch.cat([tokens, torch.tensor(sample.rollout_logprobs, dtype=torch.float32).view(torch.int32)])
