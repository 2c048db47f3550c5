"""Reward models in the loop: they reward the samples of each step. One may be trained after each outer iteration.

Iterative GRPO (DeepSeekMath, arXiv:2402.03300, algorithm 1). The labels come from the rule-based reward: of two samples
of one prompt, the one with the higher reward is preferred. Every step adds its pairs. After `iteration_steps` steps the
model is trained further on the collected pairs, with replay of earlier ones.

The main model's metrics are `reward_model/...`, those of `reward_models.NAME` are `reward_model/NAME/...`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.algo.losses import LossInputs, MetricSum
from grpo_megatron.algo.plan import scoring_plan
from grpo_megatron.algo.scores import (
    ModelScores,
    combined,
    pairwise_loss,
    process_scores,
    ranked_pairs,
    ranking_accuracy,
)
from grpo_megatron.config import ActorConfig, RewardModelConfig, ScoringModel
from grpo_megatron.data.prompts import Decode, step_ends
from grpo_megatron.models.forward import LossFunction, MetricSums
from grpo_megatron.models.heads.scalar import ScalarPolicy, ScalarReader
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.exchange import exchange, gather_rows
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.storage.run_files import PAIRS_FILE, REWARD_MODEL_FOLDER
from grpo_megatron.training.beside.model import NoModel, TrainedModel
from grpo_megatron.training.beside.preferences import PairHistory, PreferencePair, mixed_batch, pair_batch
from grpo_megatron.types import Batch, GroupTable, Sample


class Scorer:
    """One reward model: its scores of all samples of a step, on every rank, and the metrics of them.

    `name` is "" for the main model. Rows are balanced over the data-parallel ranks by length, as for an update.
    """

    def __init__(self, name: str, config: ScoringModel, model: ScalarReader, actor: ActorConfig) -> None:
        self.prefix, self.config, self.model, self.actor = f"reward_model/{name}".rstrip("/"), config, model, actor

    def score(self, samples: Sequence[Sample], table: GroupTable) -> ModelScores:
        """Collective: one score per response, on every rank."""
        batch = self._batch(samples, table)
        scores = self._gathered(batch, self.model.numbers(batch)[:, 0].tolist(), len(table))
        return ModelScores(scores, self.config.coefficient)

    def record(self, metrics: Metrics, scores: ModelScores, pairs: Sequence[tuple[int, int]]) -> None:
        """Record what every rank computes alike, without communication. `pairs`: (better, worse) rows by the rule's rewards."""
        known = [value for value in scores.values if value == value]
        if known:
            metrics.constant(f"{self.prefix}/score/mean", sum(known) / len(known))
        if pairs:
            metrics.constant(f"{self.prefix}/agreement", ranking_accuracy(scores.values, pairs))

    def _batch(self, samples: Sequence[Sample], table: GroupTable) -> Batch:
        """This replica's share of the rows. A response without a token is scored too, at its prompt's end."""
        mesh = self.model.mesh
        return exchange(samples, table, scoring_plan(table.sequence_lengths(), self.actor, mesh.dp), mesh)

    def _gathered(self, batch: Batch, of_rows: Sequence[Any], num_rows: int) -> list[Any]:
        gathered = gather_rows(dict(zip(batch.rows, of_rows, strict=True)), self.model.mesh)
        return [gathered[row] for row in range(num_rows)]


class ProcessScorer(Scorer):
    """A process reward model: one score per step. `decode`: token ids -> text, without special tokens."""

    def __init__(
        self, name: str, config: ScoringModel, model: ScalarReader, actor: ActorConfig, decode: Decode
    ) -> None:
        super().__init__(name, config, model, actor)
        self.decode = decode

    def score(self, samples: Sequence[Sample], table: GroupTable) -> ModelScores:
        """Collective: the scores of all steps of all rows, on every rank."""
        batch = self._batch(samples, table)
        rows = list(zip(batch.tokens, batch.prompt_lengths, strict=True))
        separator = self.config.step_separator
        ends = [step_ends(tokens[prompt:].tolist(), self.decode, separator) for tokens, prompt in rows]
        places = [[prompt + end for end in of_row] for (_, prompt), of_row in zip(rows, ends, strict=True)]
        scores = self.model.numbers(batch, places).tolist()
        steps = [list(zip(of_row, values, strict=False)) for of_row, values in zip(ends, scores, strict=True)]
        return process_scores(self._gathered(batch, steps, len(table)), self.config.coefficient)

    def record(self, metrics: Metrics, scores: ModelScores, pairs: Sequence[tuple[int, int]]) -> None:
        """Also the mean probability of a step, and the mean number of steps."""
        super().record(metrics, scores, pairs)
        assert scores.steps is not None
        steps = [probability for row in scores.steps for _, probability in row]
        if steps:
            metrics.constant(f"{self.prefix}/step_score/mean", sum(steps) / len(steps))
            metrics.constant(f"{self.prefix}/steps/mean", len(steps) / len(scores.steps))


class NoRewardModel(NoModel):
    """Used without a reward model: the rule-based rewards stay as they are."""

    def reward(self, step: int, samples: Sequence[Sample], table: GroupTable, metrics: Metrics) -> GroupTable:
        """The table as it is."""
        return table

    def learn(self, step: int, metrics: Metrics) -> None:
        """Does nothing."""


class FrozenReward(NoRewardModel):
    """Rewards from one or more models, whose weighted sum replaces the rule's reward or is added to it."""

    def __init__(self, config: RewardModelConfig, scorers: Sequence[Scorer]) -> None:
        self.config, self.scorers = config, scorers

    def reward(self, step: int, samples: Sequence[Sample], table: GroupTable, metrics: Metrics) -> GroupTable:
        """The table with the models' rewards. Collective; `step` is not used."""
        labels = table.raw_reward or table.reward
        pairs = pairs_of(table, labels, self.config.max_pairs_per_group)
        with metrics.phase("reward_model"):
            scores = [scorer.score(samples, table) for scorer in self.scorers]
        for scorer, of_model in zip(self.scorers, scores, strict=True):
            scorer.record(metrics, of_model, pairs)
        if known := [label for label in labels if label == label]:
            metrics.constant("reward_model/rule_reward/mean", sum(known) / len(known))
        return combined(table, scores, adds_rule=self.config.combine == "add")


class LearningReward(TrainedModel, FrozenReward):
    """The reward model of iterative GRPO, beside frozen ones. Its learning-rate schedule covers the run of `total_steps`."""

    folder_name, file_name = REWARD_MODEL_FOLDER, PAIRS_FILE

    def __init__(
        self,
        config: RewardModelConfig,
        model: ScalarPolicy,
        actor: ActorConfig,
        others: Sequence[Scorer] = (),
        *,
        iteration_steps: int,
        total_steps: int,
        seed: int,
    ) -> None:
        super().__init__(config, [Scorer("", config, model, actor), *others])
        self.model, self.actor, self.mesh = model, actor, model.mesh
        self.iteration_steps, self.seed = iteration_steps, seed
        num_updates = config.num_updates(total_steps, iteration_steps)
        model.set_optimizer(config.optim, max(1, num_updates), period=config.steps)
        model.offload()
        self.history = PairHistory(config.history_size, seed)
        self.fresh = self._new_pairs()

    def _new_pairs(self) -> PairHistory:
        """An empty collection for the pairs of one iteration: as many as its updates can use."""
        return PairHistory(self.config.steps * self.config.train_batch_size, self.seed)

    def reward(self, step: int, samples: Sequence[Sample], table: GroupTable, metrics: Metrics) -> GroupTable:
        """Add the step's pairs, labelled by the rewards of `table`; return the table with the model's rewards. Collective.

        Before `start_iteration` the table is returned unchanged.
        """
        labels = table.raw_reward or table.reward
        pairs = gather_pairs(samples, table, pairs_of(table, labels, self.config.max_pairs_per_group), self.mesh)
        self.fresh.add(pairs)
        metrics.constant("reward_model/pairs", len(pairs))
        if step // self.iteration_steps < self.config.start_iteration:
            return table
        return super().reward(step, samples, table, metrics)

    def learn(self, step: int, metrics: Metrics) -> None:
        """After the last step of an outer iteration: train on its pairs and the history, then add them to the history.

        Collective. Nothing is trained if there is no fresh pair: for each prompt all rewards were equal.
        """
        config, fresh, history = self.config, self.fresh.pairs, self.history.pairs
        iteration = step // self.iteration_steps
        updates = []
        with metrics.phase("update_reward_model"), self.model.in_use():
            for update in range(config.steps if fresh else 0):
                pairs = mixed_batch(
                    fresh,
                    history,
                    size=config.train_batch_size,
                    replay_ratio=config.replay_ratio,
                    seed=self.seed,
                    iteration=iteration,
                    step=update,
                )
                batch = pair_batch(pairs, self.actor, self.mesh.dp_rank, self.mesh.dp)
                updates.append(update_pairs(self.model, batch, len(pairs)))
        self.history.add(fresh)
        self.fresh = self._new_pairs()
        for name in updates[0] if updates else ():
            values = [metric_values[name] for metric_values in updates]
            metrics.constant(name, sum(values) / len(values))
            metrics.constant(f"{name}/first", values[0])
            metrics.constant(f"{name}/last", values[-1])

    def content(self) -> Any:
        """The schedule of the model, and both collections of pairs."""
        return {"model": self.model.state(), "history": self.history.state(), "fresh": self.fresh.state()}

    def restore(self, content: Any) -> None:
        """The inverse of `content`."""
        self.model.load_state(content["model"])
        self.history.load_state(content["history"])
        self.fresh.load_state(content["fresh"])


def update_pairs(model: ScalarPolicy, batch: Batch, num_pairs: int) -> dict[str, float]:
    """One optimizer step on the batch's one mini-batch (see `pair_loss`). Collective; the same metrics on every rank.

    Like `Policy.update`, skips the step if the gradient on any rank is not finite. Raises TooManySkippedSteps.
    """
    sums, constants = model.update(batch, pair_loss(num_pairs))
    local = [float(part.total) for part in sums[0].values()] or [0.0, 0.0, 0.0]
    totals = model.mesh.total(local if model.mesh.is_first_replica_rank else [0.0, 0.0, 0.0])
    metrics = {name: total / num_pairs for name, total in zip(("loss", "accuracy", "margin"), totals, strict=True)}
    metrics["grad_norm"] = constants.get("actor/grad_norm", math.inf)
    return {f"reward_model/{name}": value for name, value in metrics.items()}


def pair_loss(num_pairs: int) -> LossFunction:
    """-log sigmoid(chosen - rejected), summed over pairs and divided by `num_pairs`, which counts the pairs of all ranks.

    The divisor is fixed before batching, so the layout cannot change the gradient. Rows 2i (chosen) and 2i + 1 (rejected)
    are neighbours in one micro-batch. The metrics are sums over pairs: loss, correct pairs, margins.
    """

    def loss(inputs: LossInputs) -> tuple[Tensor, MetricSums]:
        scores = inputs.logprobs[:, 0]
        chosen, rejected = scores[0::2], scores[1::2]
        losses = pairwise_loss(chosen, rejected)
        margins = (chosen - rejected).detach().double()
        correct = (margins > 0).double() + 0.5 * (margins == 0).double()
        sums = {"loss": losses.detach().double(), "correct": correct, "margin": margins}
        return losses.sum() / num_pairs, {name: MetricSum(values.sum(), None) for name, values in sums.items()}

    return loss


def pairs_of(table: GroupTable, labels: Sequence[float], limit: int | None) -> list[tuple[int, int]]:
    """(chosen, rejected) rows of every group. Rows without a response are left out."""
    return [
        pair
        for group in table.groups()
        for pair in ranked_pairs(labels, [row for row in group if table.response_length[row]], limit)
    ]


def gather_pairs(
    samples: Sequence[Sample], table: GroupTable, pairs: Sequence[tuple[int, int]], mesh: Mesh
) -> list[PreferencePair]:
    """Collective: the tokens of the rows in `pairs`, gathered on every rank from the ranks that hold them."""
    local_samples = {(sample.prompt_index, sample.index): sample for sample in samples}
    local_tokens = {}
    for row in sorted({row for pair in pairs for row in pair}):
        if table.holder[row] != mesh.rank:
            continue
        sample = local_samples[table.prompt_index[row], table.index[row]]
        local_tokens[row] = torch.tensor([*sample.prompt.prompt_ids, *sample.response_ids], dtype=torch.int32).numpy()
    tokens = {row: torch.as_tensor(array) for part in mesh.all_gather(local_tokens) for row, array in part.items()}
    return [PreferencePair(table.prompt_length[best], tokens[best], tokens[worst]) for best, worst in pairs]
