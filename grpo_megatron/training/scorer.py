"""Scorer: one reward model of a run. What it says of all samples of a step, on every rank, and the metrics of that.

Rows are balanced over the data-parallel ranks by length, as for an update. The main model's metrics are `reward_model/...`, those
of `reward_models.NAME` are `reward_model/NAME/...`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

from grpo_megatron.algo.plan import supervised_plan
from grpo_megatron.algo.scores import ModelScores, process_scores, ranking_accuracy
from grpo_megatron.config import ActorConfig, ScoringModel
from grpo_megatron.data.steps import Decode, step_ends
from grpo_megatron.models.reward_model import SequenceScorer, StepScorer
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.exchange import exchange, gather_rows
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.types import Batch, GroupTable, Sample


class Scorer(abc.ABC):
    """`name` is "" for the main model."""

    def __init__(self, name: str, config: ScoringModel, actor: ActorConfig) -> None:
        self.prefix, self.config, self.actor = f"reward_model/{name}".rstrip("/"), config, actor

    @abc.abstractmethod
    def score(self, samples: Sequence[Sample], table: GroupTable) -> ModelScores:
        """Collective: the scores of all rows, on every rank."""

    def record(self, metrics: Metrics, scores: ModelScores, pairs: Sequence[tuple[int, int]]) -> None:
        """Record what every rank computes alike, without communication. `pairs`: (better, worse) rows by the rule's rewards."""
        known = [value for value in scores.values if value == value]
        if known:
            metrics.constant(f"{self.prefix}/score/mean", sum(known) / len(known))
        if pairs:
            metrics.constant(f"{self.prefix}/agreement", ranking_accuracy(scores.values, pairs))


class OutcomeScorer(Scorer):
    """One score per response."""

    def __init__(self, name: str, config: ScoringModel, model: SequenceScorer, actor: ActorConfig) -> None:
        super().__init__(name, config, actor)
        self.model = model

    def score(self, samples: Sequence[Sample], table: GroupTable) -> ModelScores:
        batch = _batch(samples, table, self.actor, self.model.mesh)
        scores = gather_rows(dict(zip(batch.rows, self.model.score(batch).tolist(), strict=True)), self.model.mesh)
        return ModelScores([scores[row] for row in range(len(table))], self.config.coefficient)


class ProcessScorer(Scorer):
    """One score per step. `decode`: token ids -> text, without special tokens."""

    def __init__(self, name: str, config: ScoringModel, model: StepScorer, actor: ActorConfig, decode: Decode) -> None:
        super().__init__(name, config, actor)
        self.model, self.decode = model, decode

    def score(self, samples: Sequence[Sample], table: GroupTable) -> ModelScores:
        mesh = self.model.mesh
        batch = _batch(samples, table, self.actor, mesh)
        ends = [
            step_ends(tokens[prompt:].tolist(), self.decode, self.config.step_separator)
            for tokens, prompt in zip(batch.tokens, batch.prompt_lengths, strict=True)
        ]
        scores = self.model.score_steps(batch, ends).tolist()
        steps = {
            row: list(zip(row_ends, row_scores, strict=False))
            for row, row_ends, row_scores in zip(batch.rows, ends, scores, strict=True)
        }
        gathered = gather_rows(steps, mesh)
        return process_scores([gathered[row] for row in range(len(table))], self.config.coefficient)

    def record(self, metrics: Metrics, scores: ModelScores, pairs: Sequence[tuple[int, int]]) -> None:
        super().record(metrics, scores, pairs)
        assert scores.steps is not None
        steps = [probability for row in scores.steps for _, probability in row]
        if steps:
            metrics.constant(f"{self.prefix}/step_score/mean", sum(steps) / len(steps))
            metrics.constant(f"{self.prefix}/steps/mean", len(steps) / len(scores.steps))


def _batch(samples: Sequence[Sample], table: GroupTable, actor: ActorConfig, mesh: Mesh) -> Batch:
    """This replica's share of the rows, whole sequences. A response without a token is scored too, at its prompt's end."""
    lengths = [(0, p + r) for p, r in zip(table.prompt_length, table.response_length, strict=True)]
    return exchange(samples, table, supervised_plan(lengths, actor, mesh.dp), mesh)
