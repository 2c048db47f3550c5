"""What the ranks of the exchange tests run."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from grpo_megatron.types import Prompt, Sample


def draw(num_prompts: int, n: int) -> list[Sample]:
    """All samples of a step, determined by (prompt, index) alone.

    Sample (0, 1) has no loss token; those of index 2 have a random loss mask, the others one of ones.
    """
    samples = []
    for p in range(num_prompts):
        prompt = Prompt(f"t/{p}", tuple(range(1, 2 + p)), "", "", "t", "r")
        for i in range(n):
            rng = random.Random(f"{p}/{i}")
            length = rng.randint(1, 9)
            ids = [rng.randint(0, 50000) for _ in range(length)]
            logprobs = [-rng.random() for _ in ids]
            sample = Sample(prompt, p, i, ids, logprobs, rng.choice(["stop", "length"]), version=0)
            if (p, i) == (0, 1):
                sample.loss_mask = [0] * length
            elif i == 2:
                sample.loss_mask = [1] + [rng.randint(0, 1) for _ in range(length - 1)]
            sample.reward = math.nan if (p, i) == (1, 0) else rng.choice([0.0, 0.1, 0.7, 1.0])
            samples.append(sample)
    return samples


def roundtrip(tp: int, pp: int, rollout_tp: int, num_prompts: int, n: int) -> dict[str, Any]:
    from grpo_megatron.algo.plan import make_plan
    from grpo_megatron.config import ActorConfig, AlgorithmConfig
    from grpo_megatron.device import Device
    from grpo_megatron.parallel.exchange import exchange, gather_groups
    from grpo_megatron.parallel.mesh import build_mesh

    mesh = build_mesh(Device("cpu"), tp=tp, pp=pp, rollout_tp=rollout_tp)
    everything = draw(num_prompts, n)
    blocks, block = mesh.num_rollout_blocks, mesh.rollout_block
    cut = [b * len(everything) // blocks for b in range(blocks + 1)]
    held = everything[cut[block] : cut[block + 1]]  # a cut may fall inside a group
    unmasked = gather_groups([replace(sample, loss_mask=[]) for sample in held], mesh)
    table = gather_groups(held, mesh)
    actor = ActorConfig(ppo_mini_batch_size=2, ppo_max_token_len_per_gpu=40)
    plan = make_plan(table, AlgorithmConfig(), actor, dp=mesh.dp, train_batch_size=num_prompts, max_response_length=9)
    batch = exchange(held, table, plan, mesh)
    rows = batch.rows
    return {
        "dp_rank": mesh.dp_rank,
        "holders": len(set(table.holder)),
        "loss_spans": (unmasked.loss_spans, table.loss_spans),
        "advantages": plan.advantages,
        "rows": rows,
        "sequences": {row: batch.tokens[i].tolist() for i, row in enumerate(rows)},
        "logprobs": {row: batch.rollout_logprobs[i][batch.response_mask[i]].tolist() for i, row in enumerate(rows)},
        "batch_advantages": {row: batch.advantages[i][batch.response_mask[i]].tolist() for i, row in enumerate(rows)},
        "token_weights": {row: batch.token_weights[i][batch.response_mask[i]].tolist() for i, row in enumerate(rows)},
        "loss_masks": {row: batch.loss_mask[i][batch.response_mask[i]].tolist() for i, row in enumerate(rows)},
        "leader": mesh.block_broadcast(mesh.rank),
        "padding": bool((batch.loss_mask & ~batch.response_mask).any()),
        "plan_weights": plan.token_weights,
    }


def drawn_twice() -> str:
    from grpo_megatron.device import Device
    from grpo_megatron.parallel.exchange import gather_groups
    from grpo_megatron.parallel.mesh import RankError, build_mesh

    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)
    try:
        gather_groups(draw(1, 2), mesh)
    except RankError as error:
        return str(error)
    return "accepted"
