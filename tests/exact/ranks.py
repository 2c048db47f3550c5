"""What the ranks of the tests of `model.exact` run."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.models.policies import actor, loss, world
from tests.tiny import make_batch

TEMPERATURE = 0.7
CASES = (  # biases; a tied and scaled embedding; norms of heads
    *(("qwen2", "float32"), ("qwen2", "bfloat16")),
    *(("llama3", "float32"), ("qwen3", "bfloat16")),
)
PACKINGS = ([[0, 1], [2], [], [3, 4, 5], [6, 7, 8, 9, 10]], [[10, 5, 3, 1], [9, 0, 2, 4, 8], [7], [6]])


def on_layout(folders: dict[str, Path], pairs: Any, layout: Any) -> dict[str, Any]:
    """Of every folder and type: log-probabilities [B, R] in two packings and with shared prompts; gradients of a mini-batch."""
    from grpo_megatron.algo.plan import assign_leaves
    from grpo_megatron.exact.gradients import order_free_norm

    out: dict[str, Any] = {}
    for family, dtype in CASES:
        if family in folders:
            policy = _policy(folders[family], dtype, layout)
            for number, packing in enumerate(PACKINGS):
                out[f"{family} {dtype} {number}"] = policy.logprobs(make_batch(pairs, [packing]))
            policy.actor = policy.actor.model_copy(update={"share_prompts": True})
            out[f"{family} {dtype} shared"] = policy.logprobs(make_batch(pairs, [[[row] for row in range(len(pairs))]]))
            plan = assign_leaves([[[row] for row in range(len(pairs))]], policy.mesh.dp, [0] * len(pairs))
            [micro_batches] = plan.mini_batches[policy.mesh.dp_rank]
            policy.forward_backward(make_batch(pairs, [micro_batches]), micro_batches, loss)
            with order_free_norm():
                out[f"{family} {dtype} norm"] = float(policy.optimizer.get_grad_norm())
            with torch.no_grad():
                for parameter in policy.ddp.parameters():  # so that the stream of weights joins the ranks' shards
                    parameter.copy_(parameter.main_grad)
            out[f"{family} {dtype} gradients"] = {n: t.clone() for bucket in policy.hf_weights(1) for n, t in bucket}
    return out


def both(folders: dict[str, Path], pairs: Any, layout: Any) -> dict[str, Any]:
    """`on_layout`; and responses that the engine samples, with its log-probabilities and the policy's of the same tokens."""
    from grpo_megatron.rollout.engine import Request
    from grpo_megatron.rollout.transformers_engine import RowModel, RunningBatch

    out = on_layout(folders, pairs, layout)
    for family, dtype in CASES:
        folder = folders[family]
        policy = _policy(folder, dtype, layout)
        engine = RowModel(folder, dtype, exact=True)
        weights = engine.module.state_dict()
        for bucket in policy.hf_weights(1):
            for name, tensor in bucket:
                weights[name].copy_(tensor)
        batch, done = RunningBatch(engine, 6, 4096, ()), {}  # six rows for eleven requests: they leave and join
        for number, (prompt, response) in enumerate(pairs):
            length = len(response)
            batch.add(str(number), Request(tuple(prompt), number, length, temperature=TEMPERATURE))
        with torch.inference_mode():
            while batch:
                done |= dict(batch.step())
        drawn = [(prompt, done[str(number)].response_ids) for number, (prompt, _) in enumerate(pairs)]
        out[f"{family} {dtype} sampled"] = [torch.tensor(done[str(n)].logprobs) for n in range(len(pairs))]
        out[f"{family} {dtype} of sampled"] = policy.logprobs(make_batch(drawn, [PACKINGS[0]]))
        with torch.inference_mode(), mock.patch.object(RowModel, "_logits", _at_temperature):
            rows = engine.logprobs([[*prompt, *response] for prompt, response in drawn])
        prefilled = [row[len(prompt) - 1 :] for row, (prompt, _) in zip(rows, drawn, strict=True)]
        out[f"{family} {dtype} prefilled"] = [torch.tensor(row) for row in prefilled]
    return out


def _at_temperature(model: Any, states: torch.Tensor) -> torch.Tensor:
    from grpo_megatron.exact import rowwise

    return rowwise.product(states, model._head.weight).float() / TEMPERATURE


def _policy(folder: Path, dtype: str, layout: Any) -> Any:
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.policy import Policy

    torch.set_num_threads(1)
    device, mesh = world(layout)
    config = actor(layout, logprob_chunk_size=7)
    arch = read_architecture(folder)
    policy = Policy.load(folder, dtype, arch, config, mesh, device, temperature=TEMPERATURE, exact=True)
    policy.set_optimizer(config.optim, 1)
    return policy


def train_with_fault(raw: dict[str, Any], fault: str) -> None:
    """A run in which one side computes something else."""
    from grpo_megatron.exact import layers as exact
    from grpo_megatron.exact import rowwise
    from tests.e2e.run_ranks import train

    def in_a_row(parts: Any) -> torch.Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def rounded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight) + (0 if bias is None else bias)

    def with_other_sums(function: Any, owner: Any, **values: Any) -> Any:
        def call(*args: Any) -> Any:
            with mock.patch.multiple(owner, **values):
                return function(*args)

        return call

    faults = {
        "another tree": (exact._RowProduct, "forward", rowwise, {"tree_sum": in_a_row}),
        "another block": (rowwise, "log_softmax", rowwise, {"block_size": lambda vocab_size: 32}),
        "a rounding more": (exact._ColumnProduct, "forward", rowwise, {"product": rounded}),
    }
    owner, name, changed, values = faults[fault]
    wrapped = with_other_sums(getattr(owner, name), changed, **values)
    with mock.patch.object(owner, name, staticmethod(wrapped) if isinstance(owner, type) else wrapped):
        train(raw)
