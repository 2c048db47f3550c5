"""Scorer: one reward model of a run. What it says of all samples of a step, on every rank, and the metrics of that.

Rows are balanced over the data-parallel ranks by length, as for an update. The main model's metrics are `reward_model/...`, those
of `reward_models.NAME` are `reward_model/NAME/...`.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from grpo_megatron.algo.plan import supervised_plan
from grpo_megatron.algo.scores import ModelScores, combined, process_scores, ranked_pairs, ranking_accuracy
from grpo_megatron.config import ActorConfig, RewardModelConfig, ScoringModel
from grpo_megatron.data.scored import Decode, step_ends
from grpo_megatron.models.heads.scalar import RewardModel, SequenceScorer, StepScorer
from grpo_megatron.models.weights.sharded_state import Writes
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.exchange import exchange, gather_rows
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.storage.run_files import PAIRS_FILE, REWARD_MODEL_FOLDER
from grpo_megatron.training.beside.folder import load_beside, save_beside
from grpo_megatron.training.beside.preferences import PairHistory, PreferencePair, mixed_batch, pair_batch
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


# -- The reward model in the loop: it rewards the samples of each step, and is trained on them after each outer iteratio
# Iterative GRPO (DeepSeekMath, arXiv:2402.03300, algorithm 1). The labels come from the rule-based reward: of two samples
# of one prompt, the one with the higher reward is preferred. Every step adds its pairs. After `iteration_steps` steps the
# model is trained further on the collected pairs, with replay of earlier ones.


class NoRewardModel:
    """Used without a reward model: the rule-based rewards stay as they are."""

    def reward(self, step: int, samples: Sequence[Sample], table: GroupTable, metrics: Metrics) -> GroupTable:
        return table

    def learn(self, step: int, metrics: Metrics) -> None: ...

    def save(self, folder: Path, writes: Writes | None = None) -> None: ...

    def load(self, folder: Path, *, same_world: bool) -> None: ...

    def save_hf(self, target: Path, tokenizer_path: Path) -> None: ...


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


class LearningReward(FrozenReward):
    """The reward model of iterative GRPO, beside frozen ones. Its learning-rate schedule covers the run of `total_steps`."""

    def __init__(
        self,
        config: RewardModelConfig,
        model: RewardModel,
        actor: ActorConfig,
        others: Sequence[Scorer] = (),
        *,
        iteration_steps: int,
        total_steps: int,
        seed: int,
    ) -> None:
        super().__init__(config, [OutcomeScorer("", config, model, actor), *others])
        self.model, self.actor, self.mesh = model, actor, model.mesh
        self.iteration_steps, self.seed = iteration_steps, seed
        num_updates = config.num_updates(total_steps, iteration_steps)
        model.set_optimizer(config.optim, max(1, num_updates), period=config.steps)
        model.offload()
        self.history = PairHistory(config.history_size, seed)
        self.fresh = self._new_pairs()

    @contextlib.contextmanager
    def _learning(self) -> Iterator[None]:
        """Inside, the optimizer's state is on the device, even if `actor.megatron.offload_optimizer` is set."""
        self.model.onload()
        yield
        self.model.offload()

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
        with metrics.phase("update_reward_model"), self._learning():
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
                updates.append(self.model.update_pairs(batch, len(pairs)))
        self.history.add(fresh)
        self.fresh = self._new_pairs()
        for name in updates[0] if updates else ():
            values = [metric_values[name] for metric_values in updates]
            metrics.constant(name, sum(values) / len(values))
            metrics.constant(f"{name}/first", values[0])
            metrics.constant(f"{name}/last", values[-1])

    def save(self, folder: Path, writes: Writes | None = None) -> None:
        """Collective: model, optimizer and pairs into a new folder inside the existing `folder`. Raises RankError."""
        target = folder / REWARD_MODEL_FOLDER
        content = {"model": self.model.state(), "history": self.history.state(), "fresh": self.fresh.state()}
        save_beside(self.model, target, PAIRS_FILE, content, self._learning(), writes)

    def load(self, folder: Path, *, same_world: bool) -> None:
        """Collective: the inverse of `save`, in any layout."""
        target = folder / REWARD_MODEL_FOLDER
        content = load_beside(self.model, target, PAIRS_FILE, self._learning(), same_world=same_world)
        self.model.load_state(content["model"])
        self.history.load_state(content["history"])
        self.fresh.load_state(content["fresh"])

    def save_hf(self, target: Path, tokenizer_path: Path) -> None:
        """Collective: write the model as a Hugging Face folder, which `reward_model.path` accepts."""
        self.model.save_hf(target, tokenizer_path)


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
