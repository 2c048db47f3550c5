"""The supervised warm-up before GRPO: the same `Policy.update` with the negative log-likelihood as its loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from grpo_megatron.algo.losses import LossInputs, policy_losses, total_loss
from grpo_megatron.algo.plan import supervised_plan
from grpo_megatron.config import ActorConfig, SftConfig
from grpo_megatron.data.prompts import SupervisedExample
from grpo_megatron.data.sampler import Sampler
from grpo_megatron.models.loss_pass import LossFunction, MetricSums
from grpo_megatron.models.policy import Policy
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.exchange import build_batch
from grpo_megatron.types import Batch

NUM_NOTES = 10  # lines of progress per warm-up
WARMUP_FOLDER = "warmup"  # in the output folder: the model after the warm-up, which GRPO and its reference start from


def warm_up(
    policy: Policy,
    rows: Sequence[SupervisedExample],
    sft: SftConfig,
    actor: ActorConfig,
    note: Callable[[str], None],
) -> None:
    """`sft.steps` supervised updates, rows in file order. Sets its own optimizer. Collective.

    `note(text)` shows progress, about ten times.
    """
    policy.set_optimizer(sft.optim, sft.steps)
    sampler = Sampler(rows, sft.train_batch_size, shuffle=False)
    loss = supervised_loss(actor)
    for step in range(sft.steps):
        metrics = Metrics()
        with metrics.phase("step"):
            batch = _batch(sampler.batch(step), actor, policy)
            sums, constants = policy.update(batch, loss)
        record_update(metrics, sums, constants, policy.mesh.is_first_replica_rank)
        reduced = metrics.reduce(policy.mesh.all_gather)
        if (step + 1) % max(1, sft.steps // NUM_NOTES) == 0 or step + 1 == sft.steps:
            note(
                f"warm-up {step + 1:5d}/{sft.steps}  loss {reduced['actor/pg_loss']:.4f}  "
                f"lr {reduced['actor/lr']:.2e}  {reduced['timing_s/step']:.2f} s/step"
            )


def supervised_loss(actor: ActorConfig) -> LossFunction:
    """The mean negative log-likelihood, without an entropy bonus."""
    plain = actor.model_copy(update={"entropy_coeff": 0.0})

    def loss(inputs: LossInputs) -> tuple[torch.Tensor, MetricSums]:
        return total_loss(inputs, plain, policy_losses.get("sft"), None)

    return loss


def record_update(metrics: Metrics, sums: Sequence[MetricSums], constants: dict[str, float], contributes: bool) -> None:
    """Record what `Policy.update` returned: token means, and sums averaged over the optimizer steps.

    `sums` has one dict per optimizer step. `contributes` is true on one rank per replica.
    """
    local = metrics.when(contributes)
    for step_sums in sums:
        for name, part in step_sums.items():
            if part.num_tokens is None:
                local.sum(name, part.total / len(sums))
            else:
                local.mean(name, part.total, part.num_tokens)
    for name, value in constants.items():
        metrics.constant(name, value)


def _batch(examples: Sequence[SupervisedExample], actor: ActorConfig, policy: Policy) -> Batch:
    """This data-parallel rank's share. Every rank has all examples, so nothing is sent."""
    lengths = [(len(prompt), len(response)) for prompt, response in examples]
    num_loss_tokens = [response.num_loss_tokens for _, response in examples]
    plan = supervised_plan(lengths, actor, policy.mesh.dp, num_loss_tokens)
    rows = plan.rows(policy.mesh.dp_rank)
    return build_batch(
        rows,
        plan,
        policy.mesh.dp_rank,
        tokens=[torch.tensor([*examples[row][0], *examples[row][1].ids]) for row in rows],
        prompt_lengths=[len(examples[row][0]) for row in rows],
        rollout_logprobs=[torch.zeros(len(examples[row][1])) for row in rows],
        loss_spans=[examples[row][1].loss_spans for row in rows],
    )
