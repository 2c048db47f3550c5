"""Ranks of tests/models/test_head_kernel.py. `python -m tests.models.head_ranks MODEL FILE` writes all results.

Triton's interpreter runs the kernels on the CPU. TRITON_INTERPRET=1 must be set before anything imports Triton, which vLLM
does in the fork server of tests/worlds.py. So this is a process of its own, and its ranks are forked from it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from grpo_megatron.device import Device
from grpo_megatron.models.build import vocab_parallel_logprobs
from grpo_megatron.models.layers import head_kernel
from grpo_megatron.models.layers.spec import Kernels
from grpo_megatron.parallel.mesh import build_mesh
from tests import worlds
from tests.models import engine_ranks, policy_ranks
from tests.tiny import make_sequences

HIDDEN, CHUNK, BLOCK = 16, 4, 16
Case = tuple[str, float, int, int, str]  # type, temperature, tokens, vocabulary, outputs with a gradient
CASES: list[Case] = [
    ("float32", 1.0, 9, 37, "both"),  # 37 columns are 3 blocks, the last of which has 5
    ("float32", 0.7, 5, 16, "both"),  # 1 block; on two ranks the vocabulary is cut in two halves of a block
    ("float32", 1.0, 3, 7, "logprobs"),  # on two ranks the second has padding only
    ("float32", 1.0, 3, 33, "entropy"),
    ("bfloat16", 0.7, 6, 37, "both"),
]


def inputs(case: Case, tp: int, rank: int) -> tuple[torch.Tensor, ...]:
    """Hidden states, this rank's rows of the padded weight, targets, upstream gradients. Padding rows are huge."""
    dtype, _, tokens, vocabulary, _ = case
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(getattr(torch, dtype))
    weight = torch.randn(vocabulary, HIDDEN, generator=generator) / HIDDEN**0.5
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    upstream = torch.randn(2, tokens, generator=generator)
    padding = torch.full((-vocabulary % (8 * tp), HIDDEN), 1e4)
    weight = torch.cat([weight, padding]).to(hidden.dtype).chunk(tp)[rank].clone()
    return hidden.requires_grad_(), weight.requires_grad_(), targets, upstream


def both_ways(tp: int) -> dict[tuple[Case, bool], dict[str, torch.Tensor]]:
    """Values and gradients of every case, by torch (False) and by the kernels (True)."""
    mesh = build_mesh(Device("cpu"), tp=tp, pp=1, rollout_tp=1)
    out = {}
    for case, is_fused in itertools.product(CASES, (False, True)):
        _, temperature, _, vocabulary, which = case
        hidden, weight, targets, upstream = inputs(case, tp, mesh.tp_rank)
        sizes = {"vocab_size": vocabulary, "tp_rank": mesh.tp_rank, "group": mesh.tp_group, "chunk": CHUNK}
        logprobs, entropy = vocab_parallel_logprobs(
            hidden, weight, targets, temperature=temperature, is_fused=is_fused, **sizes
        )
        loss = {"logprobs": upstream[0] @ logprobs, "entropy": upstream[1] @ entropy}
        (sum(loss.values()) if which == "both" else loss[which]).backward()
        assert hidden.grad is not None and weight.grad is not None
        got = {"logprobs": logprobs, "entropy": entropy, "hidden": hidden.grad, "weight": weight.grad}
        out[case, is_fused] = {name: tensor.detach() for name, tensor in got.items()}
    return out


def on_logits() -> dict[str, Any]:
    """The kernels alone: rows without a finite maximum to start from, columns of probability 0, results in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(6, 53, generator=generator)
    logits[:, 40:] = -torch.inf  # a block and a half
    logits[1] *= 300  # exp without the maximum subtracted would overflow
    logits[2, :16] = -torch.inf  # a whole block, before any other
    logits[3, 7] = torch.nan
    columns = torch.tensor([0, 39, 17, 2, -1, 53])  # the last two belong to other ranks
    out: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        given = logits.to(dtype)
        statistics = head_kernel.row_statistics(given, columns, 0.7)
        lse, entropy = statistics[0] + statistics[1].log(), statistics[1].log() - statistics[2] / statistics[1]
        upstream = torch.randn(2, 6, generator=generator)
        gradient = given.clone()
        head_kernel.write_gradient(gradient, columns, lse, entropy, *upstream, 0.7)
        out[str(dtype)] = given, columns, statistics, lse, entropy, upstream, gradient
    return out


def updates(folder: Path, pairs: Any) -> tuple[dict[str, Any], dict[str, Any], int]:
    """An update of a policy built without and with the kernels, and how often the forward kernel was called."""
    layout = policy_ranks.LAYOUTS["TP2+SP"]
    plain = policy_ranks.update(folder, pairs, layout, 2, True)
    with (
        engine_ranks.chosen(Kernels(fused_head=True)),
        mock.patch.object(head_kernel, "row_statistics", wraps=head_kernel.row_statistics) as kernel,
    ):
        fused = policy_ranks.update(folder, pairs, layout, 2, True)
    return plain, fused, kernel.call_count


def main(folder: str, path: str) -> None:
    with (
        mock.patch.object(worlds, "_context", lambda: multiprocessing.get_context("fork")),
        mock.patch.object(head_kernel, "BLOCK", BLOCK),
    ):
        results = {tp: worlds.run(both_ways, tp, tp=tp) for tp in (1, 2)}
        updated = worlds.run(updates, 2, folder=Path(folder), pairs=make_sequences(3, longest=8))
        torch.save({"ranks": results, "updates": updated, "logits": on_logits()}, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
