"""What the ranks of the correction tests run: exchange and correction step, with log-probabilities from a formula."""

from __future__ import annotations

import random
from typing import Any

from grpo_megatron.types import Prompt, Sample


def draw(num_prompts: int, n: int) -> list[Sample]:
    """Samples whose responses have gaps in the loss mask; only sample (0, 0) has a reward if there is one prompt."""
    samples = []
    for p in range(num_prompts):
        prompt = Prompt(f"t/{p}", (1, 2), "", "", "t", "r")
        for i in range(n):
            rng = random.Random(f"{p}/{i}")
            length = rng.randint(2, 9)
            ids = [rng.randint(0, 99) for _ in range(length)]
            sample = Sample(prompt, p, i, ids, [-rng.random() for _ in ids], "stop", version=0)
            sample.loss_mask = [1] + [int(rng.random() < 0.6) for _ in range(length - 1)]
            # rollout log-probabilities of tokens outside the loss are not read
            sample.rollout_logprobs = [
                logprob if in_loss else 1e3
                for logprob, in_loss in zip(sample.rollout_logprobs, sample.loss_mask, strict=True)
            ]
            if num_prompts > 1 or i == 0:
                sample.reward = rng.choice([0.0, 0.5, 1.0])
            samples.append(sample)
    return samples


def folded(step: Any, batch: Any, mesh: Any) -> dict[str, Any]:
    """The same batch where its old log-probabilities come from the update: the metrics, and what the loss reads."""
    import torch

    from grpo_megatron.config import ActorConfig
    from grpo_megatron.models.forward import loss_inputs
    from grpo_megatron.report.metrics import Metrics
    from grpo_megatron.training.correction import build_loss

    assert step.is_folded
    metrics, old, separate = Metrics(), batch.old_logprobs, batch.correction
    batch.old_logprobs, batch.correction = None, None
    assert step.with_columns(batch, None, metrics) is None
    read: list[Any] = []

    def policy_loss(inputs: Any, actor: Any) -> Any:
        read.append(inputs)
        return inputs.logprobs, {}

    loss = build_loss(ActorConfig(use_kl_loss=False), step.algorithm, policy_loss)
    rows = list(reversed(range(len(batch))))
    loss(loss_inputs(batch, rows, old[rows].requires_grad_(), torch.zeros(old.shape)))
    batch.old_logprobs = old
    step.measure(batch, metrics)
    return {
        "metrics": metrics.reduce(mesh.all_gather),
        "in the loss": torch.equal(read[0].correction[rows], separate) and not read[0].correction.requires_grad,
        "in a dump": torch.equal(batch.correction, separate),
    }


def correct(num_prompts: int, algorithm: dict[str, Any]) -> dict[str, Any]:
    """The plan after the correction step, the reduced metrics, and each local row's tensors at its response tokens."""
    import torch

    from grpo_megatron.algo.plan import assign_rows, weigh
    from grpo_megatron.config import ActorConfig, AlgorithmConfig, DataConfig
    from grpo_megatron.device import Device
    from grpo_megatron.parallel.exchange import apply_plan, exchange, gather_groups
    from grpo_megatron.parallel.mesh import build_mesh
    from grpo_megatron.report.metrics import Metrics
    from grpo_megatron.training.correction import Correction

    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)
    samples = draw(num_prompts, 3)
    held = samples[mesh.rank :: mesh.world_size]
    config, actor = AlgorithmConfig.model_validate(algorithm), ActorConfig(use_kl_loss=False)
    table = gather_groups(held, mesh)
    plan = assign_rows(table, config, actor, dp=mesh.dp, train_batch_size=num_prompts)
    batch = exchange(held, table, plan, mesh)
    width = batch.response_mask.shape[1]
    responses = torch.zeros(len(batch), width)
    for i, (tokens, prompt_length) in enumerate(zip(batch.tokens, batch.prompt_lengths, strict=True)):
        responses[i, : len(tokens) - prompt_length] = tokens[prompt_length:].float()
    batch.old_logprobs = torch.where(batch.response_mask, -(1 + responses.sin()), 0.0)
    batch.ref_logprobs = torch.where(batch.response_mask, -(1 + responses.cos()), 0.0)
    metrics = Metrics()
    step = Correction(config, actor, mesh, DataConfig(train_batch_size=num_prompts, max_response_length=9))
    table = step.with_columns(batch, table, metrics)
    plan = weigh(plan, table, config, actor, max_response_length=9)
    apply_plan(batch, plan, mesh.dp_rank)
    columns = {"loss_mask": batch.loss_mask, "advantages": batch.advantages, "token_weights": batch.token_weights}
    if batch.correction is not None:
        columns["correction"] = batch.correction
    result = {
        "rows": {
            row: {name: column[i][batch.response_mask[i]].tolist() for name, column in columns.items()}
            for i, row in enumerate(batch.rows)
        },
        "advantages": plan.advantages,
        "token_weights": plan.token_weights,
        "num_mini_batches": len(plan.mini_batches[0]),
        "metrics": metrics.reduce(mesh.all_gather),
        "spans": [table.spans_of(row) for row in range(len(table))],
    }
    if step.is_folded:
        result["folded"] = folded(step, batch, mesh)
    return result
