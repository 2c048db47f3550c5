"""Vocabulary-parallel log-probabilities and entropy against plain torch on the whole vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.worlds import ranks

N, HIDDEN, VOCAB = 11, 16, 37


def inputs(scale: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(N, HIDDEN, generator=generator),
        "weight": scale * torch.randn(VOCAB, HIDDEN, generator=generator),
        "targets": torch.randint(0, VOCAB, (N,), generator=generator),
        "grad": torch.randn(2, N, generator=generator),
    }


def kept_ids(is_cut: bool) -> list[list[int]]:
    """The ids of each target: all of them, or 1 to 5 with the target's own, in no order; target 3 has the full vocabulary."""
    targets = inputs(1.0)["targets"].tolist()
    sets = [sorted({target, *range(target % 7, target % 7 + i % 5)}, reverse=True) for i, target in enumerate(targets)]
    return [sets[i] if is_cut and i != 3 else [] for i in range(N)]


def whole(scale: float, temperature: float, is_cut: bool = False) -> dict[str, torch.Tensor]:
    """The definition, in float64: a softmax over the logits of the kept ids alone."""
    given = inputs(scale)
    hidden = given["hidden"].double().requires_grad_()
    weight = given["weight"].double().requires_grad_()
    logprobs, entropy, squares = (torch.zeros(N, dtype=torch.float64) for _ in range(3))
    for i, (logits, ids) in enumerate(zip(hidden @ weight.T / temperature, kept_ids(is_cut), strict=True)):
        ids = ids or list(range(VOCAB))
        logp = logits[ids].log_softmax(0)
        logprobs[i], entropy[i] = logp[ids.index(int(given["targets"][i]))], -(logp.exp() * logp).sum()
        squares[i] = (2 * logp.detach()).exp().sum()
    (given["grad"].double() * torch.stack([logprobs, entropy])).sum().backward()
    return {
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "squares": squares,
        "hidden": hidden.grad,
        "weight": weight.grad,
    }  # type: ignore[dict-item]


@ranks()
def parallel(tp: int, chunk: int, scale: float, temperature: float, is_cut: bool = False) -> dict[str, torch.Tensor]:
    """On `tp` ranks, each with its rows of the padded weight. Padding rows are huge, so that using one would show."""
    import torch.distributed as dist

    from grpo_megatron.device import Device
    from grpo_megatron.models.layers.head import KeptTargets, vocab_parallel_logprobs, vocab_parallel_squares
    from grpo_megatron.parallel.mesh import build_mesh

    mesh = build_mesh(Device("cpu"), tp=tp, pp=1, rollout_tp=1)
    given, sets = inputs(scale), kept_ids(is_cut)
    counts, ids = torch.tensor([len(own) for own in sets]), torch.tensor([id for own in sets for id in own])
    padded = -(-VOCAB // (8 * tp)) * 8 * tp
    weight = torch.cat([given["weight"], torch.full((padded - VOCAB, HIDDEN), 1e4)]).chunk(tp)[mesh.tp_rank]
    weight = weight.clone().requires_grad_()
    hidden = given["hidden"].requires_grad_()
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "tp_rank": mesh.tp_rank, "group": mesh.tp_group, "chunk": chunk}
    sizes["temperature"], kept = temperature, KeptTargets.of(counts, ids, torch.device("cpu")) if is_cut else None
    logprobs, entropy = vocab_parallel_logprobs(hidden, weight, given["targets"], **sizes, kept=kept)
    (given["grad"][0] @ logprobs + given["grad"][1] @ entropy).backward()
    assert hidden.grad is not None and weight.grad is not None
    dist.all_reduce(hidden.grad, group=mesh.tp_group)
    gathered: list[Any] = [None] * tp
    dist.all_gather_object(gathered, weight.grad)
    whole_weight = torch.cat(gathered)
    return {
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "squares": vocab_parallel_squares(hidden, weight, **sizes, kept=kept),
        "hidden": hidden.grad,
        "weight": whole_weight[:VOCAB],
        "padding": whole_weight[VOCAB:],
    }


@pytest.mark.parametrize(("tp", "chunk"), [(1, 4), (2, 4), (2, 1024), (4, 3)])
@pytest.mark.parametrize(
    ("scale", "temperature", "is_cut"), [(1.0, 1.0, False), (1.0, 0.7, False), (250.0, 1.0, False), (1.0, 0.7, True)]
)
def test_equals_the_definition(tp: int, chunk: int, scale: float, temperature: float, is_cut: bool) -> None:
    """scale 250: logits around +-1000, where exp without the maximum subtracted overflows."""
    want = whole(scale, temperature, is_cut)
    for got in parallel(tp, tp=tp, chunk=chunk, scale=scale, temperature=temperature, is_cut=is_cut):
        tolerance = 1e-6 if scale == 1 else 1e-4  # softmax of float32 logits near 1000 is exact to 1e-4
        for name in ("logprobs", "entropy", "squares", "hidden", "weight"):
            size = max(4 * scale, want[name].abs().max().item())  # float32 logits are exact to 6e-8 of their size
            torch.testing.assert_close(got[name].double(), want[name], rtol=0, atol=tolerance * size, msg=name)
        assert (got["padding"] == 0).all()
        assert (got["logprobs"] <= 0).all()
        # Summed over the vocabulary, the gradients of logprobs (onehot - p) and of the entropy are 0.
        assert (got["weight"].sum(0).abs() <= 10 * tolerance * max(1.0, got["weight"].abs().max())).all()


@ranks(2)
def cancelled() -> dict[bool, torch.Tensor]:
    """DDP's `main_grad`? -> the gradient of bfloat16 rows of three micro-batches of two chunks, whose terms sum to 0.

    The chunks' tokens are (a, b), (c, -a); (-b, d), (e, -e); (-c, -d), (f, -f), where -a has a's upstream gradients, negated.
    """
    from grpo_megatron.device import Device
    from grpo_megatron.models.layers.head import vocab_parallel_logprobs
    from grpo_megatron.parallel.mesh import build_mesh

    mesh = build_mesh(Device("cpu"), tp=2, pp=1, rollout_tp=1)
    given, tokens = inputs(1.0), torch.tensor([0, 1, 2, 0, 1, 3, 4, 4, 2, 3, 5, 5])
    upstream = given["grad"][:, tokens] * torch.tensor([1, 1, 1, -1, -1, 1, 1, -1, -1, -1, 1, -1])
    weight = torch.nn.functional.pad(given["weight"], (0, 0, 0, 48 - VOCAB)).chunk(2)[mesh.tp_rank].bfloat16()
    found = {}
    for has_buffer in (False, True):
        rows: Any = torch.nn.Parameter(weight)
        total = rows.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        if not has_buffer:
            del rows.main_grad
        for part in (slice(0, 4), slice(4, 8), slice(8, 12)):
            states, targets = given["hidden"][tokens[part]].bfloat16(), given["targets"][tokens[part]]
            sizes: dict[str, Any] = {"vocab_size": VOCAB, "tp_rank": mesh.tp_rank, "group": mesh.tp_group, "chunk": 2}
            values = vocab_parallel_logprobs(states, rows, targets, **sizes)
            (upstream[:, part] * torch.stack(values)).sum().backward()
            if not has_buffer:
                total += rows.grad
            assert getattr(rows, "grad_added_to_main_grad", False) is has_buffer
            rows.grad = None
        found[has_buffer] = total
    return found


def test_chunks_of_a_bfloat16_gradient_are_not_rounded() -> None:
    """A rounded chunk is off by up to 2**-9 of its entries, of which the largest are about 3; float32 by 2**-24.

    Without DDP's buffer a micro-batch's sum is rounded, and so they do not cancel.
    """
    for found in cancelled():
        assert found[True].abs().max() <= 1e-6
        assert found[False].abs().max() > 2**-12
