"""The critic's part of a plan: mini-batches and token weights of its own, on the rows that the policy's plan gives each rank."""

from __future__ import annotations

from dataclasses import replace

from grpo_megatron.algo.packing import add_packed
from grpo_megatron.algo.plan import groups_of_mini_batches, row_weights
from grpo_megatron.algo.shaping import dupo_copies
from grpo_megatron.config import ActorConfig, AlgorithmConfig, CriticConfig
from grpo_megatron.types import GroupTable, Plan


def critic_plan(
    plan: Plan,
    table: GroupTable,
    algorithm: AlgorithmConfig,
    actor: ActorConfig,
    critic: CriticConfig,
    *,
    train_batch_size: int,
    max_response_length: int,
) -> Plan:
    """`plan` with the critic's own mini-batches and token weights. Every row stays on its rank."""
    copies = dupo_copies(table) if algorithm.dupo else [1] * len(table)
    mini_batches = plan.mini_batches
    if critic.ppo_mini_batch_size is not None:
        owner, lengths, counts = (
            plan.owner(),
            table.sequence_lengths(),
            table.num_kept_tokens or table.num_loss_tokens(),
        )
        mini_batches = [[] for _ in plan.mini_batches]
        for groups in groups_of_mini_batches(table, copies, critic.mini_batch_size(actor, train_batch_size)):
            rows = [row for group in groups for row in group if row in owner and counts[row]]
            of_ranks = [[[row] for row in rows if owner[row] == rank] for rank in range(len(mini_batches))]
            add_packed(mini_batches, of_ranks, lengths, actor)
    weighting = actor.model_copy(update={"loss_agg_mode": critic.loss_agg_mode})
    weights = row_weights(mini_batches, table, copies, weighting, max_response_length)
    return replace(plan, token_weights=weights, mini_batches=mini_batches, num_forward_only=[])
