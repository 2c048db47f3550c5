"""What the ranks of tests/models/test_vision.py run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import vision
from tests.models import policy_ranks
from tests.models.gradients import named_gradients
from tests.tiny import make_batch

ROWS = vision.make_prompts()
PAIRS = [(prompt, response) for prompt, _, response in ROWS]


def batch_of(mini_batches: Any, rows: list[int] | None = None) -> Any:
    """A Batch of `rows` of ROWS, with their images."""
    rows = list(range(len(ROWS))) if rows is None else rows
    batch = make_batch(PAIRS, mini_batches, rows)
    batch.images = [ROWS[row][1] for row in rows]
    return batch


RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def gradients(folder: Path, layout: Any, *, recompute: bool, **actor: Any) -> dict[str, Any]:
    """Log-probabilities and gradients by name, as whole Hugging Face tensors, of whole rows and of shared prompts."""
    _, tp, pp, sp = layout
    megatron = {"use_distributed_optimizer": False, "override_transformer_config": RECOMPUTE if recompute else {}}
    policy = policy_ranks.build(folder, tp, pp, sp, megatron=megatron, **{"optim": {"clip_grad": 0.5}, **actor})
    mine = policy_ranks.share(len(ROWS), policy.mesh.dp_rank, policy.mesh.dp)
    local = list(range(len(mine)))
    # The last micro-batch has no image; one is empty.
    micros = [[row for row in local if mine[row] != 1], [], [row for row in local if mine[row] == 1]]
    batch = batch_of([micros], mine)
    found: dict[str, Any] = {"logprobs": dict(zip(mine, policy.logprobs(batch), strict=True)), "packings": {}}
    for batch.shares_prompts in (False, True):
        policy.forward_backward(batch, micros, policy_ranks.loss)
        found["packings"][batch.shares_prompts] = _whole(policy)
    features = features_of(policy)
    found["computed"] = None if features is None else features.num_computed
    _, metrics = policy.update(batch, policy_ranks.loss)
    found["norm"] = metrics["actor/grad_norm"]
    return found


def features_of(policy: Any) -> Any:
    """The features of the images on this rank's stage, or None."""
    from grpo_megatron.models.weights.stream import unwrapped

    return unwrapped(policy.model).features


def _whole(policy: Any) -> dict[str, torch.Tensor]:
    """`policy_ranks.whole` of the trained parameters."""
    from unittest import mock

    from grpo_megatron.models.weights import stream

    local, trained = named_gradients(policy), set[str]()
    for names in policy.mesh.all_gather(list(local)):
        trained.update(names)
    rows = {name: row for name, row in stream.model_rows(policy.arch).items() if name in trained}
    with mock.patch.object(stream, "model_rows", lambda arch: rows):
        return policy_ranks.whole(policy, local)


def freezing(folder: Path) -> dict[str, Any]:
    """What is trained, computed and changed, by which parts are frozen; on one rank."""
    found: dict[str, Any] = {}
    for tower in (True, False):
        for merger in (True, False):
            values: dict[str, Any] = {"vision": {"freeze_tower": tower, "freeze_merger": merger}, "optim": {"lr": 1e-2}}
            policy = policy_ranks.build(folder, 1, 1, False, **values)
            batch = batch_of([[[0, 1], [2, 3]]])
            before = policy.logprobs(batch)
            policy.update(batch, policy_ranks.loss)
            weights, after = policy_ranks.stream(policy), policy.logprobs(batch)
            found[tower, merger] = {
                "trained": {name for name in named_gradients(policy) if name.startswith("visual.")},
                "computed": features_of(policy).num_computed,
                "before": before,
                "after": after,
                "weights": weights,
            }
    return found


def reference(folder: Path) -> int:
    """How many images a reference that is off the device between its passes computes in three of them."""
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.policy import Reference

    layout = policy_ranks.LAYOUTS["1"]
    actor, parts = policy_ranks.actor(layout, megatron={"offload_reference": True}), policy_ranks.world(layout)
    model = Reference.load(folder, "float32", read_architecture(folder), actor, parts[1], parts[0])
    batch = batch_of([[[0, 1], [2, 3]]])
    first = model.logprobs(batch)
    assert all(torch.equal(model.logprobs(batch), first) for _ in range(2))
    return int(features_of(model).num_computed)


def rates(folder: Path) -> dict[str, list[float]]:
    """Part of the model -> its learning rates after each of three updates, warmed up and decayed."""
    optim = {"lr": 1e-2, "min_lr": 1e-3, "lr_decay_style": "linear", "lr_warmup_steps": 1}
    values: dict[str, Any] = {"vision": {"freeze_tower": False, "lr": 1e-4}, "optim": optim}
    policy = policy_ranks.build(folder, 1, 1, False, **values)
    policy.set_optimizer(policy.actor.optim, 3)
    out: dict[str, list[float]] = {"tower": [], "others": []}
    for _ in range(3):
        policy.update(batch_of([[[0, 1]]]), policy_ranks.loss)
        seen = {"tower": set(), "others": set()}
        for group in policy.optimizer.param_groups:
            if group["params"]:
                seen["tower" if group["max_lr"] == 1e-4 else "others"].add(group["lr"])
        for part, found in seen.items():
            [rate] = found
            out[part].append(rate)
    return out


def low_precision(folder: Path) -> dict[str, Any]:
    """Log-probabilities in bfloat16, and the types of the tower's parameters and of its other tensors."""
    from grpo_megatron.models.weights.stream import unwrapped

    policy = policy_ranks.build(folder, 1, 1, False, dtype="bfloat16")
    tower: Any = unwrapped(policy.ddp).visual
    others = {value.dtype for module in tower.modules() for value in vars(module).values() if torch.is_tensor(value)}
    parameters = {parameter.dtype for parameter in tower.parameters()}
    return {"logprobs": policy.logprobs(batch_of([[[0, 1, 2, 3]]])), "types": (parameters, others)}


def lora(folder: Path, layout: Any, mode: str) -> dict[str, Any]:
    """An update of adapters, with recomputed layers: norm of the gradient on every stage, log-probabilities after it."""
    _, tp, pp, sp = layout
    values = {"lora": {"rank": 4, "alpha": 32, "mode": mode}, "optim": {"lr": 1e-2, "eps": 1e-4}}
    policy = policy_ranks.build(folder, tp, pp, sp, megatron={"override_transformer_config": RECOMPUTE}, **values)
    batch = batch_of([[[0, 1], [2, 3]]])
    before = policy.logprobs(batch)
    _, metrics = policy.update(batch, policy_ranks.loss)
    held = named_gradients(policy)
    return {
        "before": before,
        "after": policy.logprobs(batch),
        "norm": metrics["actor/grad_norm"],
        "names": set(held),
        "weights": policy_ranks.stream(policy),
    }


def checkpoint(folder: Path, layout: Any, load: Path | None, save: Path) -> dict[str, Any]:
    """Load a checkpoint of any layout, update once, save. The tower is trained."""
    from grpo_megatron.models.weights.sharded_state import load_sharded, save_sharded

    _, tp, pp, sp = layout
    values: dict[str, Any] = {"vision": {"freeze_tower": False, "freeze_merger": False}}
    policy = policy_ranks.build(folder, tp, pp, sp, optim={"lr": 1e-3, "eps": 1e-4}, **values)
    if load is not None:
        load_sharded(policy, load, same_world=False)
    mine = policy_ranks.share(len(ROWS), policy.mesh.dp_rank, policy.mesh.dp)
    policy.update(batch_of([[list(range(len(mine)))]], mine), policy_ranks.loss)
    save_sharded(policy, save)
    return policy_ranks.stream(policy)


def serve(folder: Path, layout: Any) -> dict[str, Any]:
    """The engine `transformers` after a sync of an updated policy: its log-probabilities and the policy's, and its draws."""
    from grpo_megatron.config import RolloutConfig
    from grpo_megatron.models.weights.stream import engine_tensors, new_weight_sync
    from grpo_megatron.rollout.build import build_engine
    from grpo_megatron.rollout.engine import Request

    _, tp, pp, sp = layout
    policy = policy_ranks.build(folder, tp, pp, sp, optim={"lr": 1e-2}, vision={"freeze_tower": False})
    tensors = engine_tensors(policy.arch, 1, reads_shards=False)
    sizes: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "bucket_megabytes": 1}
    weight_sync = new_weight_sync(policy.arch, policy.mesh, policy.stage_of, tensors, **sizes)
    parts = RolloutConfig(engine="transformers"), folder, policy.mesh, policy.device
    limits: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "eos_token_ids": [vision.EOS]}
    engine, batch, found = build_engine(*parts, tensors=tensors, **limits), batch_of([[[0, 1], [2, 3]]]), []
    for version in range(2):
        engine.load_weights(policy.engine_weights(weight_sync, version), version)
        policy.expected_digests(weight_sync)
        got = engine.logprobs([tokens.tolist() for tokens in batch.tokens], batch.images)
        own = policy.logprobs(batch)
        for row, (prompt, response) in enumerate(PAIRS):
            difference = torch.tensor(got[row][len(prompt) - 1 :]) - own[row, : len(response)]
            found.append(difference.abs().max().item())
        policy.update(batch, policy_ranks.loss)
    weights = policy_ranks.stream(policy)
    engine.load_weights(policy.engine_weights(weight_sync, 2), 2)
    requests = [Request(tuple(p), seed, 12, images=images) for p, images, _ in ROWS for seed in (1, 2)]
    requests.append(Request(tuple(ROWS[0][0]), 1, 12, images=(vision.placed(77, ROWS[0][1][0].first),)))
    together = engine.generate(requests, 2)
    alone = [engine.generate([request], 2)[0] for request in requests]
    assert together == alone, "a draw depends on the other requests"
    for outside in (-1, len(ROWS[0][0]) - 3):
        beyond = replace(requests[0], images=(vision.placed(1, outside),))
        with pytest.raises(ValueError, match=f"at the tokens {outside} to {outside + 3} is outside the prompt of 9"):
            engine.submit("beyond", beyond, 2)
    first = replace(requests[0], max_tokens=5)
    begun = engine.generate([first], 2)[0]
    on = replace(first, prompt_ids=(*first.prompt_ids, *begun.response_ids), num_written=5, seed=9, temperature=0.0)
    return {
        "differences": found,
        "draws": [
            (r.prompt_ids, r.images, c.response_ids, c.logprobs) for r, c in zip(requests, together, strict=True)
        ],
        "continued": (on.prompt_ids, on.images, *_drawn(engine.generate([on], 2)[0])),
        "weights": weights,
    }


def _drawn(completion: Any) -> tuple[list[int], list[float]]:
    return completion.response_ids, completion.logprobs
