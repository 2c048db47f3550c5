"""Reward models in the loop: they reward the samples of each step. One may be trained after each outer iteration.

Iterative GRPO, DeepSeekMath, arXiv:2402.03300, algorithm 1. Metrics are `reward_model/...`, and `reward_model/NAME/...` of
`reward_models.NAME`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.algo.losses import LossInputs, MetricSum
from grpo_megatron.algo.plan import scoring_plan
from grpo_megatron.algo.reward_models import (
    ModelScores,
    combined,
    pairwise_loss,
    process_scores,
    ranked_pairs,
    ranking_accuracy,
)
from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import ActorConfig, Config, RewardModelConfig, ScoringModel
from grpo_megatron.data.prompts import Decode, step_ends
from grpo_megatron.data.sampler import Sampler
from grpo_megatron.device import Device
from grpo_megatron.models.forward import LossFunction, MetricSums
from grpo_megatron.models.heads.reward_folder import RewardFolder
from grpo_megatron.models.heads.scalar import FrozenScalar, ScalarPolicy, ScalarReader, last_token
from grpo_megatron.parallel.exchange import build_batch, exchange, gather_rows
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.storage.run_files import PAIRS_FILE, REWARD_MODEL_FOLDER
from grpo_megatron.training.checkpoint import TrainedModel
from grpo_megatron.types import Batch, GroupTable, Plan, Sample


class Scorer:
    """One reward model: its scores of all samples of a step, on every rank, and the metrics of them.

    `name` is "" for the main model. `decode`: token ids -> text, without special tokens; set for a process reward model, which
    has one score per step.
    """

    def __init__(
        self, name: str, config: ScoringModel, model: ScalarReader, actor: ActorConfig, decode: Decode | None = None
    ) -> None:
        self.prefix, self.config, self.model, self.actor = f"reward_model/{name}".rstrip("/"), config, model, actor
        self.decode = decode

    def score(self, samples: Sequence[Sample], table: GroupTable) -> ModelScores:
        """Compute one score per response, or per step, on every rank.

        Rows are balanced over the ranks by length. Collective.
        """
        # A response without a token is scored too, at its prompt's end.
        mesh = self.model.mesh
        batch = exchange(samples, table, scoring_plan(table.sequence_lengths(), self.actor, mesh.dp), mesh)
        local = self.model.numbers(batch)[:, 0].tolist() if self.decode is None else self._steps(batch, self.decode)
        gathered = gather_rows(dict(zip(batch.rows, local, strict=True)), mesh)
        scores: list[Any] = [gathered[row] for row in range(len(table))]
        if self.decode is None:
            return ModelScores(scores, self.config.coefficient)
        return process_scores(scores, self.config.coefficient)

    def _steps(self, batch: Batch, decode: Decode) -> list[list[tuple[int, float]]]:
        """Returns (last token of the step in the response, its score) of every step, by row."""
        rows = list(zip(batch.tokens, batch.prompt_lengths, strict=True))
        ends = [step_ends(tokens[start:].tolist(), decode, self.config.step_separator) for tokens, start in rows]
        places = [[start + end for end in of_row] for (_, start), of_row in zip(rows, ends, strict=True)]
        scores = self.model.numbers(batch, places).tolist()
        return [list(zip(of_row, values, strict=False)) for of_row, values in zip(ends, scores, strict=True)]

    def record(self, metrics: Metrics, scores: ModelScores, pairs: Sequence[tuple[int, int]]) -> None:
        """Record what every rank computes alike, without communication. `pairs`: (better, worse) rows by the rule's rewards."""
        known = [value for value in scores.values if value == value]
        if known:
            metrics.constant(f"{self.prefix}/score/mean", sum(known) / len(known))
        if pairs:
            metrics.constant(f"{self.prefix}/agreement", ranking_accuracy(scores.values, pairs))
        steps = [probability for row in scores.steps or () for _, probability in row]
        if scores.steps is not None and steps:
            metrics.constant(f"{self.prefix}/step_score/mean", sum(steps) / len(steps))
            metrics.constant(f"{self.prefix}/steps/mean", len(steps) / len(scores.steps))


class FrozenReward:
    """Rewards from one or more models, whose weighted sum replaces the rule's reward or is added to it."""

    trained: Sequence[TrainedModel] = ()  # that learn, and are in checkpoints

    def __init__(self, config: RewardModelConfig, scorers: Sequence[Scorer]) -> None:
        self.config, self.scorers = config, scorers

    def reward(self, step: int, samples: Sequence[Sample], table: GroupTable, metrics: Metrics) -> GroupTable:
        """Returns the table with the models' rewards. Collective; `step` is not used."""
        labels = table.raw_reward or table.reward
        pairs = pairs_of(table, labels, self.config.max_pairs_per_group)
        with metrics.phase("reward_model"):
            scores = [scorer.score(samples, table) for scorer in self.scorers]
        for scorer, of_model in zip(self.scorers, scores, strict=True):
            scorer.record(metrics, of_model, pairs)
        if known := [label for label in labels if label == label]:
            metrics.constant("reward_model/rule_reward/mean", sum(known) / len(known))
        return combined(table, scores, adds_rule=self.config.combine == "add")

    def learn(self, step: int, metrics: Metrics) -> None:
        """Do nothing: the models are frozen."""


class LearningReward(TrainedModel, FrozenReward):
    """The reward model of iterative GRPO, beside frozen ones. Its learning-rate schedule covers the run of `total_steps`.

    The labels come from the rule-based reward: of two samples of one prompt, the one with the higher reward is preferred.
    Every step adds its pairs. After `iteration_steps` steps the model is trained on the collected pairs, with 10 % replay of
    earlier ones. The paper does not say which: here they come from a bounded uniform sample of all earlier pairs. Every
    rank has the same pairs and makes the same batches.
    """

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
        self.trained = [self]
        self.history = PairHistory(config.history_size, seed)
        self.fresh = self._new_pairs()

    def _new_pairs(self) -> PairHistory:
        """Returns an empty collection for the pairs of one iteration: as many as its updates can use."""
        return PairHistory(self.config.steps * self.config.train_batch_size, self.seed)

    def reward(self, step: int, samples: Sequence[Sample], table: GroupTable, metrics: Metrics) -> GroupTable:
        """Add the step's pairs, labelled by the rewards of `table`; return the table with the model's rewards. Collective.

        Before `start_iteration` the table is returned unchanged.
        """
        labels = table.raw_reward or table.reward
        pairs = _gather_pairs(samples, table, pairs_of(table, labels, self.config.max_pairs_per_group), self.mesh)
        self.fresh.add(pairs)
        metrics.constant("reward_model/pairs", len(pairs))
        if step // self.iteration_steps < self.config.start_iteration:
            return table
        return super().reward(step, samples, table, metrics)

    def learn(self, step: int, metrics: Metrics) -> None:
        """Train on the pairs of an outer iteration, after its last step, and on the history; then add them to the history.

        Collective. Nothing is trained if there is no fresh pair: for each prompt all rewards were equal.
        """
        config, fresh, history = self.config, self.fresh.pairs, self.history.pairs
        updates = []
        with metrics.phase("update_reward_model"), self.model.in_use():
            for update in range(config.steps if fresh else 0):
                pairs = mixed_batch(
                    fresh,
                    history,
                    size=config.train_batch_size,
                    replay_ratio=config.replay_ratio,
                    seed=self.seed,
                    iteration=step // self.iteration_steps,
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
        """Returns the schedule of the model, and both collections of pairs."""
        return {"model": self.model.state(), "history": self.history.state(), "fresh": self.fresh.state()}

    def restore(self, content: Any) -> None:
        """Restore what `content` has returned."""
        self.model.load_state(content["model"])
        self.history.load_state(content["history"])
        self.fresh.load_state(content["fresh"])


def build_reward_model(config: Config, checked: Checked, mesh: Mesh, device: Device) -> FrozenReward | None:
    """Build frozen reward models, or one that is trained after each outer iteration beside frozen ones; None without.

    Collective.
    """
    section, actor, dtype = config.reward_model, config.actor, config.model.dtype

    def frozen(name: str, model: ScoringModel, folder: RewardFolder) -> Scorer:
        decode = checked.decode if folder.kind == "process" else None
        return Scorer(name, model, FrozenScalar(folder, dtype, actor, mesh, device), actor, decode)

    others = [frozen(name, config.reward_models[name], folder) for name, folder in checked.reward_folders.items()]
    main, iteration_steps = checked.reward_folder, config.algorithm.iteration_steps
    if main is None:
        return FrozenReward(section, others) if others else None
    if iteration_steps is None:
        return FrozenReward(section, [frozen("", section, main), *others])
    return LearningReward(
        section,
        ScalarPolicy(main, dtype, actor, mesh, device, places=last_token(main), optim=section.optim),
        actor,
        others,
        iteration_steps=iteration_steps,
        total_steps=config.trainer.total_training_steps,
        seed=config.trainer.seed,
    )


# -- The update --------------------------------------------------------------------------------------------------------


def update_pairs(model: ScalarPolicy, batch: Batch, num_pairs: int) -> dict[str, float]:
    """Make one optimizer step on the batch (see `pair_loss`). Collective; the same metrics on every rank.

    Like `Policy.update`, skips the step if the gradient on any rank is not finite. Raises TooManySkippedSteps.
    """
    sums, constants = model.update(batch, pair_loss(num_pairs))
    local = [float(part.total) for part in sums[0].values()] or [0.0, 0.0, 0.0]
    totals = model.mesh.total(local if model.mesh.is_replica_reporter else [0.0, 0.0, 0.0])
    metrics = {name: total / num_pairs for name, total in zip(("loss", "accuracy", "margin"), totals, strict=True)}
    metrics["grad_norm"] = constants.get("actor/grad_norm", math.inf)
    return {f"reward_model/{name}": value for name, value in metrics.items()}


def pair_loss(num_pairs: int) -> LossFunction:
    """Returns the loss: -log sigmoid(chosen - rejected), summed over pairs and divided by `num_pairs`, those of all ranks.

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


# -- Pairs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PreferencePair:
    """Two responses to one prompt, as whole sequences: int32 [prompt + response]."""

    prompt_length: int
    chosen: Tensor
    rejected: Tensor

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)


def pairs_of(table: GroupTable, labels: Sequence[float], limit: int | None) -> list[tuple[int, int]]:
    """Returns the (chosen, rejected) rows of every group. Rows without a response are left out."""
    return [
        pair
        for group in table.groups()
        for pair in ranked_pairs(labels, [row for row in group if table.response_length[row]], limit)
    ]


def _gather_pairs(
    samples: Sequence[Sample], table: GroupTable, pairs: Sequence[tuple[int, int]], mesh: Mesh
) -> list[PreferencePair]:
    """Returns the tokens of the rows in `pairs`, gathered on every rank from the ranks that hold them. Collective."""
    local_samples = {(sample.prompt_index, sample.index): sample for sample in samples}
    local_tokens = {}
    for row in sorted({row for pair in pairs for row in pair}):
        if table.holder[row] == mesh.rank:
            sample = local_samples[table.prompt_index[row], table.index[row]]
            tokens = torch.tensor([*sample.prompt.prompt_ids, *sample.response_ids], dtype=torch.int32)
            local_tokens[row] = tokens.numpy()
    gathered = {row: torch.as_tensor(array) for part in mesh.all_gather(local_tokens) for row, array in part.items()}
    return [PreferencePair(table.prompt_length[best], gathered[best], gathered[worst]) for best, worst in pairs]


class PairHistory:
    """At most `size` pairs: a uniform sample of all pairs that were ever added.

    Pair number i has the key random(seed, i), and the pairs with the smallest keys are kept. So it does not matter how
    the pairs are divided over calls of `add`, nor whether the run stops between them.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self.num_seen = 0
        self._kept: list[tuple[int, PreferencePair]] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def pairs(self) -> list[PreferencePair]:
        """The pairs in the order in which they were added."""
        return [pair for _, pair in self._kept]

    def add(self, pairs: Sequence[PreferencePair]) -> None:
        """Take new pairs, which count on from the earlier ones."""
        candidates = [*self._kept, *enumerate(pairs, self.num_seen)]
        self.num_seen += len(pairs)
        candidates.sort(key=lambda entry: random.Random(f"{self.seed}/{entry[0]}").random())
        self._kept = sorted(candidates[: self.size], key=lambda entry: entry[0])

    def state(self) -> dict[str, Any]:
        """Returns plain numbers, which JSON can hold."""
        kept = [[i, pair.prompt_length, pair.chosen.tolist(), pair.rejected.tolist()] for i, pair in self._kept]
        return {"num_seen": self.num_seen, "kept": kept}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` has returned."""
        self.num_seen = state["num_seen"]
        self._kept = []
        for number, prompt_length, *sequences in state["kept"]:
            chosen, rejected = (torch.tensor(tokens, dtype=torch.int32) for tokens in sequences)
            self._kept.append((number, PreferencePair(prompt_length, chosen, rejected)))


def mixed_batch(
    fresh: Sequence[PreferencePair],
    history: Sequence[PreferencePair],
    *,
    size: int,
    replay_ratio: float,
    seed: int,
    iteration: int,
    step: int,
) -> list[PreferencePair]:
    """Returns the pairs of update number `step` of an outer iteration: a pure function of its arguments.

    Each epoch over the fresh pairs has a new order and uses every pair once. Replayed pairs come from `history`
    without replacement; over many updates they are `replay_ratio` of all pairs, at any batch size. With few fresh pairs
    the batch is smaller than `size`. A pair is twice in one batch only if an epoch ends inside the batch.
    """
    ratio = replay_ratio if history else 0.0
    size = min(size, max(1, int(len(fresh) / (1 - ratio))))
    replayed_before, replayed_after = math.floor(step * size * ratio), math.floor((step + 1) * size * ratio)
    start, end = step * size - replayed_before, (step + 1) * size - replayed_after
    drawn = Sampler(fresh, size, seed=seed + 1_000_003 * iteration).items_from(start, end - start)
    keys = random.Random(f"{seed}/{iteration}/{step}")
    shuffled = sorted((keys.random(), i) for i in range(len(history)))
    return drawn + [history[i] for _, i in shuffled[: replayed_after - replayed_before]]


def pair_batch(pairs: Sequence[PreferencePair], actor: ActorConfig, dp_rank: int, dp: int) -> Batch:
    """Returns this replica's pairs as one mini-batch. Rows 2i (chosen) and 2i + 1 (rejected) share a micro-batch.

    A pair is planned as one unit, as long as its two sequences together. `actor` gives the limits of a micro-batch.
    """
    limit = actor.ppo_micro_batch_size_per_gpu  # in sequences; None: no limit
    if limit is not None:
        actor = actor.model_copy(update={"ppo_micro_batch_size_per_gpu": max(1, limit // 2)})
    pair_plan = scoring_plan([len(pair) for pair in pairs], actor, dp)
    plan = Plan(
        advantages=[0.0] * (2 * len(pairs)),
        token_weights=[0.0] * (2 * len(pairs)),
        mini_batches=[[[_rows(micro) for micro in mini] for mini in minis] for minis in pair_plan.mini_batches],
    )
    local_pairs = sorted(pair for pair, owner in pair_plan.owner().items() if owner == dp_rank)
    tokens, prompt_lengths = [], []
    for pair in (pairs[i] for i in local_pairs):
        tokens += [pair.chosen.long(), pair.rejected.long()]
        prompt_lengths += [pair.prompt_length, pair.prompt_length]
    return build_batch(
        _rows(local_pairs),
        plan,
        dp_rank,
        tokens=tokens,
        prompt_lengths=prompt_lengths,
        rollout_logprobs=[torch.zeros(len(t) - p) for t, p in zip(tokens, prompt_lengths, strict=True)],
    )


def _rows(pair_numbers: Sequence[int]) -> list[int]:
    """Returns the two rows of each pair: 2i (chosen) and 2i + 1 (rejected)."""
    return [row for number in pair_numbers for row in (2 * number, 2 * number + 1)]
