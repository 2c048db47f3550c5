"""Teachers behind servers, in the loop: one rank of each replica asks, and the rows without a score leave the loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.algo.distillation import LEAST_LOGPROB
from grpo_megatron.parallel.control import Parcel
from grpo_megatron.parallel.exchange import gather_rows
from grpo_megatron.parallel.mesh import Mesh, RankError
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.rewards.teacher_server import ServerError, ServerScores, TeacherServer
from grpo_megatron.types import Batch, GroupTable


class RemoteTeacher:
    """A teacher that a server computes. It has the methods of a LanguageModel that scores responses.

    The log-probabilities of rows that the server did not score are NaN (see `without_failed`). More of them than
    `max_failed_ratio` of all ranks' rows stop the run with a RankError.
    """

    def __init__(self, server: TeacherServer, mesh: Mesh, max_failed_ratio: float) -> None:
        self.server, self.mesh, self.max_failed_ratio = server, mesh, max_failed_ratio

    def logprobs(self, batch: Batch) -> Tensor:
        """See LanguageModel."""
        return self._score(batch, 0)[0]

    def distribution(self, batch: Batch, top_k: int, num_ids: int) -> tuple[Tensor, list[Tensor | None]]:
        """See LanguageModel."""
        assert top_k > 0 and num_ids == self.server.num_ids, "checks refuse it"
        return self._score(batch, top_k)

    def _score(self, batch: Batch, top_k: int) -> tuple[Tensor, list[Tensor | None]]:
        """Returns the log-probabilities [B, R], and on the last pipeline stage each row's best ids. Collective."""
        mesh, results = self.mesh, list[ServerScores | ServerError]()
        rows = sorted(row for mini in batch.mini_batches for micro in mini for row in micro)
        if mesh.is_replica_reporter:
            known = {row: one for row, (*_, one) in enumerate(batch.teacher_prompts) if one is not None}  # asked before
            asked = [(batch.tokens[row].tolist(), batch.prompt_lengths[row]) for row in rows if row not in known]
            scored = iter(self.server.score([(ids[:length], ids[length:]) for ids, length in asked], top_k))
            results = [known[row] if row in known else next(scored) for row in rows]
        self._stop_at_failures(results)
        parcels = []
        if mesh.is_replica_reporter:
            pairs: list[tuple[Any, Any]] = [(None, None) if isinstance(one, ServerError) else one for one in results]
            ranks, width = mesh.ranks_of_replica(mesh.dp_rank), mesh.tp * mesh.cp
            parcels = [Parcel(tuple(ranks[-width:]), mesh.rank, pairs)]
            parcels += (
                [Parcel(tuple(ranks[:-width]), mesh.rank, [(one, None) for one, _ in pairs])] if mesh.pp > 1 else []
            )
        [parcel] = mesh.route(parcels)
        logprobs, distributions = torch.zeros(batch.response_mask.shape), list[Tensor | None]()
        for row, (numbers, _) in zip(rows, parcel.content, strict=True):
            length = len(batch.tokens[row]) - batch.prompt_lengths[row]
            logprobs[row, :length] = torch.nan if numbers is None else torch.tensor(numbers).clamp(min=LEAST_LOGPROB)
        if top_k and mesh.is_last_stage:
            distributions = [None] * len(batch)
            for row, (_, best) in zip(rows, parcel.content, strict=True):
                if best is not None:
                    distributions[row] = torch.tensor(best).view(-1, 2 * top_k + 1).clamp(min=LEAST_LOGPROB)
        return logprobs, distributions

    def _stop_at_failures(self, results: list[ServerScores | ServerError]) -> None:
        """Compares the share of rows without a score, over all ranks, with `reward.max_failed_ratio`. Collective."""
        problems = [str(one) for one in results if isinstance(one, ServerError)]
        reports = self.mesh.all_gather((len(results), len(problems), problems[0] if problems else ""))
        total, num_failed = sum(report[0] for report in reports), sum(report[1] for report in reports)
        if num_failed > self.max_failed_ratio * total:
            raise RankError(  # on every rank: all have the same reports
                f"{num_failed:,} of {total:,} responses ({100 * num_failed / total:.0f} %) have no score, more than"
                f" reward.max_failed_ratio={self.max_failed_ratio:g} allows; the first failure:"
                f" {next(report[2] for report in reports if report[2])}; repair the server, or raise reward.max_failed_ratio"
            )


def without_failed(batch: Batch, table: GroupTable, mesh: Mesh, metrics: Metrics) -> GroupTable:
    """Takes rows whose teacher has failed out of the loss: their policy loss too, and all denominators. Collective.

    Returns the table with their column `num_kept_tokens`, if there is such a row. A failure is never a score of 0.
    """
    scores = batch.teacher
    assert scores is not None
    has_failed = scores.logprobs.isnan().any(1)
    num_failed = sum(mesh.all_gather(int(has_failed.sum()) if mesh.is_replica_reporter else 0))
    metrics.constant("distillation/failed_ratio", num_failed / max(1, len(table)))
    if not num_failed:
        return table
    batch.loss_mask = batch.loss_mask & ~has_failed[:, None]
    batch.teacher = replace(
        scores,
        index=[-1 if failed else number for failed, number in zip(has_failed.tolist(), scores.index, strict=True)],
        logprobs=scores.logprobs.nan_to_num(0.0),
    )
    kept = gather_rows(dict(zip(batch.rows, batch.loss_mask.sum(1).tolist(), strict=True)), mesh)
    return replace(table, num_kept_tokens=[kept.get(row, 0) for row in range(len(table))])
