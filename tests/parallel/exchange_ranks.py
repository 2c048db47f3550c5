"""What the ranks of the exchange tests run."""

from __future__ import annotations

import math
import random
from typing import Any

from grpo_megatron.types import Prompt, Sample


def draw(num_prompts: int, n: int) -> list[Sample]:
    """All samples of a step, determined by (prompt, index) alone."""
    samples = []
    for p in range(num_prompts):
        prompt = Prompt(f"t/{p}", tuple(range(1, 2 + p)), "", "", "t", "r")
        for i in range(n):
            rng = random.Random(f"{p}/{i}")
            length = rng.randint(1, 9)
            ids = [rng.randint(0, 50000) for _ in range(length)]
            logprobs = [-rng.random() for _ in ids]
            sample = Sample(prompt, p, i, ids, logprobs, rng.choice(["stop", "length"]), version=0)
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
    mine = everything[cut[block] : cut[block + 1]]  # splits groups wherever the cut falls
    table = gather_groups(mine, mesh)
    actor = ActorConfig(ppo_mini_batch_size=2, ppo_max_token_len_per_gpu=40)
    plan = make_plan(table, AlgorithmConfig(), actor, dp=mesh.dp, train_batch_size=num_prompts, max_response_length=9)
    batch = exchange(mine, table, plan, mesh)
    owner = plan.owner()
    rows = sorted(row for row, dp_rank in owner.items() if dp_rank == mesh.dp_rank)
    return {
        "dp_rank": mesh.dp_rank,
        "holders": len(set(table.holder)),
        "advantages": plan.advantages,
        "rows": rows,
        "sequences": {row: batch.tokens[i].tolist() for i, row in enumerate(rows)},
        "logprobs": {row: batch.rollout_logprobs[i][batch.response_mask[i]].tolist() for i, row in enumerate(rows)},
        "batch_advantages": {row: batch.advantages[i][batch.response_mask[i]].tolist() for i, row in enumerate(rows)},
        "schedule": batch.mini_batches,
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
