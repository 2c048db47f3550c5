"""What the ranks of the tests of a trained scalar head run. A layout is that of `reward_ranks`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models.gradients import named_gradients
from tests.models.policy_ranks import Layout
from tests.models.reward_ranks import scalar, whole

Row = tuple[list[int], list[int], list[tuple[int, float]]]  # prompt, response, (scored token, advantage)


def build(folder: Path, kind: Any, layout: Layout, **megatron: Any) -> Any:
    from grpo_megatron.models.heads.scalar import response_tokens

    return scalar(folder, kind, layout, places=response_tokens, megatron=megatron)


def batch_of(rows: list[Row], paired: bool, policy: Any) -> Any:
    """The plan's batch of this replica, as a step of the trainer makes it."""
    from grpo_megatron.algo.plan import make_plan
    from grpo_megatron.config import AlgorithmConfig
    from grpo_megatron.parallel.exchange import exchange, gather_groups
    from grpo_megatron.types import Prompt, Sample

    samples = []
    for i, (prompt, response, labels) in enumerate(rows):
        mask = [int(token in dict(labels)) for token in range(len(response))]
        about = Prompt(str(i), tuple(prompt), "", "", "", "")
        group, index = divmod(i, 2) if paired else (i, 0)
        steps = [(token, float(label > 0)) for token, label in labels]
        sample = Sample(about, group, index, response, [0.0] * len(response), "stop", 0, loss_mask=mask, steps=steps)
        sample.reward = max(labels[0][1], 0.0)
        samples.append(sample)
    mesh = policy.mesh
    mine = [sample for sample in samples if sample.prompt_index % mesh.num_rollout_blocks == mesh.rollout_block]
    table = gather_groups(mine, mesh)
    estimator = "preference" if paired else "step_labels"
    config = policy.actor.model_copy(
        update={"loss_mode": "bradley_terry", "loss_agg_mode": "seq-mean-token-mean"}
        if paired
        else {"loss_mode": "step_labels"}
    )
    algorithm = AlgorithmConfig(source="file", adv_estimator=estimator)
    plan = make_plan(table, algorithm, config, dp=mesh.dp, train_batch_size=len(rows), max_response_length=50)
    return exchange(mine, table, plan, mesh)


def loss_of(paired: bool) -> Any:
    from grpo_megatron.algo.losses import policy_losses, total_loss
    from grpo_megatron.config import ActorConfig

    config = ActorConfig(use_kl_loss=False)
    mode = policy_losses.get("bradley_terry" if paired else "step_labels")
    return lambda inputs: total_loss(inputs, config, mode, None)


def update(folder: Path, rows: list[Row], paired: bool, layout: Layout, target: Path | None = None) -> dict[str, Any]:
    """Whole gradients and this rank's loss of one backward pass. With `target`: an update, and the folder it is saved as."""
    kind = "outcome" if paired else "process"
    policy = build(folder, kind, layout, use_distributed_optimizer=False)
    batch = batch_of(rows, paired, policy)
    sums: list[Any] = []
    for micro_batches in batch.mini_batches:
        policy.backward(batch, micro_batches, loss_of(paired), sums)
    out: dict[str, Any] = {"gradients": whole(policy, named_gradients(policy))}
    first = policy.mesh.is_first_replica_rank
    out["metrics"] = {name: float(part.total) if first else 0.0 for name, part in (sums[0] if sums else {}).items()}
    if target is not None:
        policy = build(folder, kind, layout)
        batch = batch_of(rows, paired, policy)
        policy.update(batch, loss_of(paired))
        policy.save_hf(target, folder)
        out["scores"] = dict(zip(batch.rows, policy.logprobs(batch), strict=True))
    return out
