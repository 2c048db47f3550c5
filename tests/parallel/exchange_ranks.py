"""What the ranks of the exchange tests run."""

from __future__ import annotations

import errno
import math
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from grpo_megatron.types import Prompt, Sample


def draw(num_prompts: int, n: int) -> list[Sample]:
    """All samples of a step, determined by (prompt, index) alone.

    Sample (0, 1) has no loss token; those of index 2 have a random loss mask, the others one of ones.
    """
    samples = []
    for p in range(num_prompts):
        prompt = Prompt(f"t/{p}", tuple(range(1, 2 + p)), "", f"{p}", "t", "r", question=f"question {p}")
        for i in range(n):
            rng = random.Random(f"{p}/{i}")
            length = rng.randint(1, 9)
            ids = [rng.randint(0, 50000) for _ in range(length)]
            logprobs = [-rng.random() for _ in ids]
            sample = Sample(prompt, p, i, ids, logprobs, rng.choice(["stop", "length"]), version=0)
            sample.text = f"response {p} {i}"
            if (p, i) == (0, 1):
                sample.loss_mask = [0] * length
            elif i == 2:
                sample.loss_mask = [1] + [rng.randint(0, 1) for _ in range(length - 1)]
            sample.reward = math.nan if (p, i) == (1, 0) else rng.choice([0.0, 0.1, 0.7, 1.0])
            samples.append(sample)
    return samples


def roundtrip(tp: int, pp: int, rollout_tp: int, num_prompts: int, n: int, out: Path) -> dict[str, Any]:
    """Also writes the samples into `out`, a rollout file; its folder refuses the file of step 1."""
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
        "refused": write_rollouts(out, held, table, plan, mesh),
        "shown": shown_groups(held, table, plan, batch, mesh),
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


def shown_groups(held: list[Sample], table: Any, plan: Any, batch: Any, mesh: Any) -> list[dict[str, Any]] | None:
    """What rank 0 shows. The policy's log-probabilities are the engine's plus 0.25; a token's text is its id."""
    from types import SimpleNamespace

    from grpo_megatron.training.samples import ShownSamples

    batch.old_logprobs = batch.rollout_logprobs + 0.25
    tokenizer = SimpleNamespace(decode=lambda ids, **options: "".join(f"<{i}>" for i in ids))
    groups = ShownSamples(mesh, tokenizer, is_drawn=True).gather(held, table, plan, batch)
    batch.old_logprobs = None
    return None if groups is None else groups()


def write_rollouts(out: Path, held: list[Sample], table: Any, plan: Any, mesh: Any) -> str:
    """Write step 0, then step 1 on a full disk, then step 2. Returns the message of step 1's failure."""
    from grpo_megatron.observability.metrics import Metrics
    from grpo_megatron.parallel.mesh import RankError
    from grpo_megatron.storage.run_files import rollout_files

    files = rollout_files.RolloutFiles(out, out / "run", mesh, tokenizer=None)
    refused = ""
    with mock.patch.object(rollout_files, "TOKENS_PER_PART", 20):
        files.write(0, Metrics(), held, table, plan)
        try:
            with mock.patch.object(rollout_files, "write_file", full_disk):
                files.write(1, Metrics(), held, table, plan)
        except RankError as error:
            refused = str(error)
        files.write(2, Metrics(), held, table, plan)
    return refused


def full_disk(path: Path, parts: Iterator[str]) -> None:
    """Fails after the first part: the others are on their way to rank 0."""
    next(parts)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


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
