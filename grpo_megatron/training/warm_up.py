"""The supervised warm-up before GRPO: the same `Policy.update`, with the negative log-likelihood as its loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from grpo_megatron.algo.losses import LossInputs, policy_losses, total_loss
from grpo_megatron.algo.plan import supervised_plan
from grpo_megatron.config import ActorConfig, SftConfig
from grpo_megatron.data.sampler import Sampler
from grpo_megatron.models.policy import LossFunction, MetricSums, Policy
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.exchange import build_batch
from grpo_megatron.types import Batch

SupervisedExample = tuple[list[int], list[int]]  # prompt ids, response ids with the end-of-sequence token


def warm_up(
    policy: Policy,
    rows: Sequence[SupervisedExample],
    sft: SftConfig,
    actor: ActorConfig,
    report: Callable[[int, dict[str, float]], None],
) -> None:
    """`sft.steps` supervised updates, rows in file order. Collective. `report(step, metrics)` after each."""
    policy.set_optimizer(sft.optim, sft.steps)
    sampler = Sampler(rows, sft.train_batch_size, shuffle=False)
    loss = supervised_loss(actor)
    for step in range(sft.steps):
        metrics = Metrics()
        with metrics.phase("step"):
            batch = _batch(sampler.batch(step), actor, policy)
            sums, constants = policy.update(batch, loss)
        record_update(metrics, sums, constants, policy.mesh.is_first_replica_rank)
        report(step, metrics.reduce(policy.mesh.all_gather))


def supervised_loss(actor: ActorConfig) -> LossFunction:
    plain = actor.model_copy(update={"entropy_coeff": 0.0})

    def loss(inputs: LossInputs) -> tuple[torch.Tensor, MetricSums]:
        return total_loss(inputs, plain, policy_losses.get("sft"), None)

    return loss


def record_update(metrics: Metrics, sums: Sequence[MetricSums], constants: dict[str, float], contributes: bool) -> None:
    """An update's sums, one dict an optimizer step, into the step's metrics: token means, and means over the steps."""
    mine = metrics.when(contributes)
    for one in sums:
        for name, part in one.items():
            if part.num_tokens is None:
                mine.sum(name, part.total / len(sums))
            else:
                mine.mean(name, part.total, part.num_tokens)
    for name, value in constants.items():
        metrics.constant(name, value)


def _batch(pairs: Sequence[SupervisedExample], actor: ActorConfig, policy: Policy) -> Batch:
    """Every rank has all rows: its own share is cut out, nothing is sent."""
    plan = supervised_plan([(len(p), len(r)) for p, r in pairs], actor, policy.mesh.dp)
    rows = sorted(row for row, dp_rank in plan.owner().items() if dp_rank == policy.mesh.dp_rank)
    return build_batch(
        rows,
        plan,
        policy.mesh.dp_rank,
        tokens=[torch.tensor([*pairs[row][0], *pairs[row][1]]) for row in rows],
        prompt_lengths=[len(pairs[row][0]) for row in rows],
        rollout_logprobs=[torch.zeros(len(pairs[row][1])) for row in rows],
    )
