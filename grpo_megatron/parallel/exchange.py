"""The sample exchange: rollout layout -> training layout, in two phases.

1. `gather_groups`: a few numbers per sample (prompt, index, reward, lengths, which tokens are in the loss) reach every
   rank. Then every rank can compute the same plan, with exact group statistics even where the samples of one prompt
   were sampled on several ranks.
2. `exchange`: tokens and rollout log-probabilities move once, to the ranks that train on them.

Both run on the host over the gloo control group, between neighbours only (control.py): a step's samples are megabytes per
rank, its activations gigabytes. The work of a rank grows with the samples of the step, plus the number of ranks.

The numbers of phase 1 travel as arrays. The loss mask is sent as spans of tokens, of the rows that have a 0 in it. An
environment writes whole stretches of a response, so a row has few spans. Estimators that work on tokens (`algo/reinforce.py`)
need the spans of every row.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_megatron.parallel.control import Parcel
from grpo_megatron.parallel.mesh import Mesh, RankError
from grpo_megatron.types import BRANCH, GREEDY, Batch, GroupTable, KeptIds, Plan, PromptImage, Sample, TokenSpan

_Rewards = list[tuple[int, float]]
TeacherPrompt = tuple[str, tuple[int, ...], Any]  # Prompt.teacher, .teacher_ids and Sample.scores


@dataclass(frozen=True)
class TablePart:
    """The samples of one rank in phase 1: the table columns that it can fill in. Lists of lists: of rows that have any."""

    numbers: np.ndarray[
        Any, Any
    ]  # int64 [columns, rows]: prompt, index, lengths of prompt and response, truncated, shared
    rewards: np.ndarray[Any, Any]  # float64 [rows]
    step_rewards: dict[int, _Rewards]
    turn_rewards: dict[int, _Rewards]
    loss_spans: dict[int, list[TokenSpan]]  # of rows with a 0 in their mask


def table_part(samples: Sequence[Sample]) -> TablePart:
    """Make the table columns of this rank's samples, for the other ranks."""
    ends = {(s.prompt_index, s.index): s.prompt.prompt_ids for s in samples}
    numbers = [
        (
            *(s.prompt_index, s.index, len(s.prompt.prompt_ids), len(s.response_ids), s.finish_reason == "length"),
            _num_common(s.prompt.prompt_ids, ends[s.prompt_index, s.index % BRANCH]) if s.index >= BRANCH else 0,
        )
        for s in samples
    ]
    return TablePart(
        numbers=np.array(numbers, dtype=np.int64).reshape(len(samples), 6).T,
        rewards=np.array([sample.reward for sample in samples], dtype=np.float64),
        step_rewards={row: sample.steps for row, sample in enumerate(samples) if sample.steps},
        turn_rewards={row: sample.turn_rewards for row, sample in enumerate(samples) if sample.turn_rewards},
        loss_spans={row: _spans(sample.loss_mask) for row, sample in enumerate(samples) if not all(sample.loss_mask)},
    )


def _num_common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Counts the tokens that both begin with."""
    return bisect.bisect_left(range(1, min(len(first), len(second)) + 1), True, key=lambda n: first[:n] != second[:n])


def gather_groups(samples: Sequence[Sample], mesh: Mesh) -> GroupTable:
    """Collective: the table of every sample of the step, the same on every rank.

    Ranks of one engine replica hold the same samples; only its leader sends them. Greedy responses become a column of
    their prompt's rows. Raises RankError on every rank if a (prompt, index) pair was sampled twice.
    """
    parts = mesh.all_gather(table_part(samples if mesh.is_replica_leader else []))
    if twice := drawn_twice(parts):  # on every rank: all have the same parts
        raise RankError(f"samples sampled twice: (prompt, index) {twice[:10]}")
    return merge_parts(parts)


def with_reward_parts(samples: Sequence[Sample], table: GroupTable, names: Sequence[str], mesh: Mesh) -> GroupTable:
    """Collective: the table with the numbers `names` that the reward function reports of each sample (GDPO).

    A sample without one, whose gate is closed for instance, has 0. Raises ValueError at a name that no sample has.
    """
    reported = gather_samples({(one.prompt_index, one.index): one.reward_metrics for one in samples}, mesh)
    rows = [reported[key] for key in zip(table.prompt_index, table.index, strict=True)]
    known = {name for of_sample in rows for name in of_sample}
    if rows and (absent := [name for name in names if name not in known]):
        raise ValueError(
            f"algorithm.gdpo_reward_keys: no sample of this step has {' or '.join(map(repr, absent))}; the reward reports"
            f" {', '.join(sorted(known)) or 'nothing but its score'}"
        )
    return replace(table, reward_parts=[[of_sample.get(name, 0.0) for name in names] for of_sample in rows])


def set_ages(samples: Sequence[Sample], batch: Batch, table: GroupTable, step: int, mesh: Mesh) -> None:
    """Collective: set how many steps ago each token of the batch was sampled (A-3PO)."""
    spans = {}
    for one in samples:
        whole = [(len(one.response_ids), one.version)]
        spans[one.prompt_index, one.index] = [(part.end, part.version) for part in one.segments] or whole
    sampled = gather_samples(spans, mesh)
    batch.ages = torch.zeros_like(batch.rollout_logprobs)
    for i, row in enumerate(batch.rows):
        start = 0
        for end, version in sampled[table.prompt_index[row], table.index[row]]:
            batch.ages[i, start:end] = max(0, step - version)
            start = end


def drawn_twice(parts: Sequence[TablePart]) -> list[tuple[int, int]]:
    """The (prompt, index) pairs that are in `parts` more than once, in order."""
    pairs, counts = np.unique(np.concatenate([part.numbers[:2] for part in parts], axis=1), axis=1, return_counts=True)
    return [(int(prompt), int(index)) for prompt, index in pairs[:, counts > 1].T]


def merge_parts(parts: Sequence[TablePart]) -> GroupTable:
    """The table of the samples of all ranks; `parts` are in rank order."""
    numbers, rewards = np.concatenate([p.numbers for p in parts], axis=1), np.concatenate([p.rewards for p in parts])
    starts = [0, *itertools.accumulate(len(part.rewards) for part in parts)]
    holder = np.repeat(np.arange(len(parts)), np.diff(starts))
    greedy = numbers[1] == GREEDY
    greedy_reward = dict(zip(numbers[0, greedy].tolist(), rewards[greedy].tolist(), strict=True))
    order = np.lexsort((numbers[1], numbers[0]))
    order = order[~greedy[order]]
    prompts, index, prompt_lengths, lengths, truncated, shared = (column[order].tolist() for column in numbers)
    place = {position: row for row, position in enumerate(order.tolist())}
    steps, turns, masked = (
        {
            place[start + row]: values
            for start, part in zip(starts, parts, strict=False)
            for row, values in getattr(part, name).items()
            if start + row in place
        }
        for name in ("step_rewards", "turn_rewards", "loss_spans")
    )
    rows = range(len(order))
    whole: list[list[TokenSpan]] = [[(0, length)] if length else [] for length in lengths] if masked else []
    return GroupTable(
        prompt_index=prompts,
        index=index,
        reward=rewards[order].tolist(),
        prompt_length=prompt_lengths,
        response_length=lengths,
        truncated=[bool(value) for value in truncated],
        holder=holder[order].tolist(),
        shared_length=shared if any(number >= BRANCH for number in index) else [],
        step_rewards=[steps.get(row, []) for row in rows] if steps else [],
        turn_rewards=[turns.get(row, []) for row in rows] if turns else [],
        greedy_reward=[greedy_reward.get(p, float("nan")) for p in prompts] if greedy_reward else [],
        loss_spans=[masked.get(row, whole[row]) for row in rows] if masked else [],
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
        routes=same_width([sequences[row][2] for row in rows], [len(sequences[row][0]) for row in rows]),
        images=[sequences[row][3] for row in rows],
        teacher_prompts=[sequences[row][4] for row in rows],
        kept=[sequences[row][5] for row in rows],
    )


def same_width(routes: list[Tensor | None], lengths: list[int]) -> list[Tensor] | None:
    """The routes of all rows, unknown in rows without any. None: no row has any."""
    known = next((tensor for tensor in routes if tensor is not None), None)
    if known is None:
        return None
    unknown = known.new_full((max(lengths), known.shape[1]), -1)
    return [unknown[:length] if own is None else own for own, length in zip(routes, lengths, strict=True)]


def flat_ids(kept: Sequence[KeptIds]) -> np.ndarray[Any, Any]:
    """The ids of `Sample.kept` in one column, int32: how many each token has, then all ids. Without ids it is empty."""
    parts = [np.empty(0, dtype=np.int32) if ids is None else ids for ids in kept]
    return np.concatenate([np.array([len(ids) for ids in parts], dtype=np.int32), *parts])


def split_ids(flat: np.ndarray[Any, Any]) -> list[KeptIds]:
    """Undoes `flat_ids`. Tokens have their ids one after the other, so the counts end where they sum to the rest."""
    sums = np.arange(1, len(flat) + 1) + np.cumsum(flat)
    count = int(np.flatnonzero(sums == len(flat))[0]) + 1 if len(flat) else 0
    return list(np.split(flat[count:], np.cumsum(flat[:count])[:-1])) if count else []


def all_kept(kept: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor] | None:
    """The column of each row, zeros in rows without one (`Batch.kept`). None: no row has any."""
    if not any(len(ids) for ids in kept):
        return None
    return [ids if len(ids) else ids.new_zeros(length) for ids, length in zip(kept, lengths, strict=True)]


def build_batch(
    rows: list[int],
    plan: Plan,
    dp_rank: int,
    *,
    tokens: list[Tensor],
    prompt_lengths: list[int],
    rollout_logprobs: list[Tensor],
    loss_spans: list[list[TokenSpan]] | None = None,
    routes: list[Tensor] | None = None,
    images: Sequence[tuple[PromptImage, ...]] = (),
    teacher_prompts: Sequence[TeacherPrompt] = (),
    kept: Sequence[Tensor] = (),
) -> Batch:
    """Make a padded Batch of `rows`, which are rows of the plan's table.

    tokens[i] is int64 [prompt + response], rollout_logprobs[i] float32 [response]. `loss_spans[i]` are the response
    tokens in the loss; None: all of every row. `images[i]` are those of the row's prompt. `teacher_prompts[i]`: see Batch.
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
        images=list(images) if any(images) else [],
        routes=routes,
        recorded_routes={},
        teacher_prompts=list(teacher_prompts),
        kept=all_kept(kept, lengths),
    )
    apply_plan(batch, plan, dp_rank)
    return batch


def apply_plan(batch: Batch, plan: Plan, dp_rank: int) -> None:
    """Set the batch's advantages, token weights and mini-batches from the plan. The batch has `dp_rank`'s rows.

    The weights are 0 before the plan has any (`algo.plan.weigh`).
    """
    batch_row = {row: i for i, row in enumerate(batch.rows)}
    batch.mini_batches = [[[batch_row[row] for row in micro] for micro in mini] for mini in plan.mini_batches[dp_rank]]
    batch.num_forward_only, batch.shares_prompts = plan.num_forward_only, plan.shares_prompts
    batch.advantages, batch.token_weights = torch.zeros_like(batch.advantages), torch.zeros_like(batch.token_weights)
    for i, row in enumerate(batch.rows):
        length = len(batch.tokens[i]) - batch.prompt_lengths[i]
        advantage = plan.advantages[row]
        batch.advantages[i, :length] = torch.as_tensor(0.0 if advantage is None else advantage, dtype=torch.float32)
        batch.token_weights[i, :length] = plan.token_weights[row] if plan.token_weights else 0.0
    batch.advantages *= batch.loss_mask
    batch.token_weights *= batch.loss_mask


def apply_observations(batch: Batch, table: GroupTable, weights: Sequence[float]) -> None:
    """Set the weights of tokens that an environment wrote; `weights` has one per table row (algo.plan.observation_weights)."""
    observed = batch.response_mask.float()
    for i, row in enumerate(batch.rows):
        for start, end in table.spans_of(row):
            observed[i, start:end] = 0.0
        observed[i] *= weights[row]
    batch.observation_weights = observed


def apply_experts(batch: Batch, table: GroupTable, weights: Sequence[float]) -> None:
    """Set the weights of tokens that an expert wrote; `weights` has one per table row (algo.chord.expert_weights)."""
    batch.expert_weights = torch.zeros_like(batch.token_weights)
    for i, row in enumerate(batch.rows):
        for start, end in table.expert_spans[row]:
            batch.expert_weights[i, start:end] = weights[row]


def gather_rows(values: dict[int, Any], mesh: Mesh) -> dict[int, Any]:
    """Collective: {table row: value} of every data-parallel rank's rows, on every rank. Small values only."""
    return _merged(mesh.all_gather(values if mesh.is_replica_reporter else {}))


def gather_samples(values: dict[tuple[int, int], Any], mesh: Mesh) -> dict[tuple[int, int], Any]:
    """Collective: {(prompt, index): value} of every engine's samples, on every rank. Small values only."""
    return _merged(mesh.all_gather(values if mesh.is_replica_leader else {}))


def _merged(parts: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
    return {key: value for part in parts for key, value in part.items()}


def _move_tokens(
    samples: Sequence[Sample], table: GroupTable, owner: dict[int, int], mesh: Mesh
) -> dict[int, tuple[Tensor, Tensor, Tensor | None, tuple[PromptImage, ...], TeacherPrompt, Tensor]]:
    """Table row -> (tokens, rollout log-probabilities, routes or None, images, teacher, kept ids) of the rows of this rank.

    A row travels as int32: prompt, response, the bits of the float32 log-probabilities, the size and the numbers of its kept
    ids (`flat_ids`), the width of its routes (0: none), the bytes of one, and their bits. Every rank knows the other sizes from
    the table. Between two ranks the rows travel in one parcel, in increasing order. Their images follow, the pixels of each
    different one once, and teachers with their prompts. Collective.
    """
    sample_of = {(sample.prompt_index, sample.index): sample for sample in samples}
    outgoing, incoming = moves(table, owner, mesh.rank, mesh.dp_rank)
    # A row's images are decoded whenever they are read and nobody holds them.
    held = [sample.prompt.images for sample in samples if outgoing]
    parcels = []
    for dp_rank, rows in outgoing.items():
        sent = {row: sample_of[table.prompt_index[row], table.index[row]] for row in rows}
        numbers = np.concatenate([_encode(sample) for sample in sent.values()])
        taught = {
            row: (sample.prompt.teacher, sample.prompt.teacher_ids, sample.scores)
            for row, sample in sent.items()
            if sample.prompt.teacher
        }
        content = numbers, _images(sent), taught
        parcels.append(Parcel(tuple(mesh.ranks_of_replica(dp_rank)), mesh.rank, content))
    del held
    sequences = {}
    for parcel in mesh.route(parcels):
        rows, start, (numbers, images, taught) = incoming.pop(parcel.source), 0, parcel.content
        for row in rows:
            middle = start + table.prompt_length[row] + table.response_length[row]
            end = middle + table.response_length[row]
            tokens, logprobs = numbers[start:middle], numbers[middle:end]
            start, end = end + 1, end + 1 + int(numbers[end])
            kept = numbers[start:end]
            (width, itemsize), start = numbers[end : end + 2].tolist(), end + 2
            routes = None
            if width:
                size = len(tokens) * width * itemsize
                bits = numbers[start:].view(np.int8)[:size].view(f"i{itemsize}").reshape(len(tokens), width)
                routes, start = torch.from_numpy(bits.copy()), start + -(-size // 4)
            sequences[row] = (
                torch.from_numpy(tokens.astype(np.int64)),
                torch.from_numpy(logprobs.view(np.float32).copy()),
                routes,
                images.get(row, ()),
                taught.get(row, ("", (), None)),
                torch.from_numpy(kept.copy()),
            )
        assert start == len(numbers), f"rank {parcel.source} sent {len(numbers)} numbers, not {start}"
    assert not incoming, f"nothing came from the ranks {sorted(incoming)}"
    return sequences


def moves(
    table: GroupTable, owner: dict[int, int], rank: int, dp_rank: int
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """The rows that `rank` holds, by the dp rank that trains on them, and those that `dp_rank` trains on, by holder."""
    outgoing: dict[int, list[int]] = {}
    incoming: dict[int, list[int]] = {}
    for row in sorted(owner):
        if table.holder[row] == rank:
            outgoing.setdefault(owner[row], []).append(row)
        if owner[row] == dp_rank:
            incoming.setdefault(table.holder[row], []).append(row)
    return outgoing, incoming


def _images(samples: dict[int, Sample]) -> dict[int, tuple[PromptImage, ...]]:
    """The images of rows that have any. Equal pixels are one object, which pickling writes once."""
    pixels: dict[str, bytes] = {}
    return {
        row: tuple(replace(one, pixels=pixels.setdefault(one.digest, one.pixels)) for one in sample.prompt.images)
        for row, sample in samples.items()
        if sample.prompt.images
    }


def _encode(sample: Sample) -> np.ndarray[Any, Any]:
    tokens = np.array([*sample.prompt.prompt_ids, *sample.response_ids], dtype=np.int32)
    logprobs = np.array(sample.rollout_logprobs, dtype=np.float32).view(np.int32)
    ids = flat_ids(sample.kept)
    logprobs = np.concatenate([logprobs, np.array([len(ids)], dtype=np.int32), ids])
    if (routes := sample.routes) is None:
        return np.concatenate([tokens, logprobs, np.zeros(2, dtype=np.int32)])
    shape = np.array([routes.shape[1], routes.itemsize], dtype=np.int32)
    whole = np.pad(routes, ((0, len(tokens) - len(routes)), (0, 0)), constant_values=-1).view(np.int8).ravel()
    return np.concatenate([tokens, logprobs, shape, np.pad(whole, (0, -len(whole) % 4)).view(np.int32)])
