"""Divergences from teachers, forward, reverse and Jensen-Shannon, against the definitions on dense float64 distributions.

The head is float32. Values and gradients are those of float64 within 1e-6, as for log-probabilities (test_logprobs.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_megatron.algo.distillation import Divergence
from tests.worlds import ranks

KINDS = ("forward", "reverse", "jsd")
BETA = 0.3


def dense_divergence(kind: str, logp: torch.Tensor, logq: torch.Tensor, k: int, num_ids: int) -> torch.Tensor:
    """The definition, from log-probabilities of all tokens [N, V] and [N, V']; k best of the first `num_ids`, or all, 0."""
    if k == 0:
        logq = logq[:, : logp.shape[1]].log_softmax(1)
    else:
        ids = logq[:, :num_ids].topk(min(k, num_ids), dim=1).indices
        logp, logq = (with_tail(part, ids) for part in (logp, logq))
    p, q = logp.exp(), logq.exp()
    if kind == "forward":
        return (q * (logq - logp)).sum(1)
    if kind == "reverse":
        return (p * (logp - logq)).sum(1)
    log_m = (BETA * q + (1 - BETA) * p).log()
    return (BETA * q * (logq - log_m) + (1 - BETA) * p * (logp - log_m)).sum(1)


def with_tail(logp: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    others = torch.ones_like(logp, dtype=torch.bool).scatter(1, ids, False)
    tail = logp.masked_fill(~others, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([logp.gather(1, ids), tail], dim=1)


# -- the head alone ----------------------------------------------------------------------------------------------------

N, HIDDEN, VOCAB, TEACHER_HIDDEN, TEACHER_VOCAB = 11, 16, 37, 24, 41
CASES = [
    (kind, k, temperature, scale)
    for kind in KINDS
    for k, temperature, scale in [(0, 0.7, 1.0), (1, 1.0, 1.0), (8, 1.3, 1.0), (0, 1.0, 12.0), (8, 1.0, 12.0)]
]


def head_inputs(scale: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"hidden": (N, HIDDEN), "weight": (VOCAB, HIDDEN), "upstream": (3, N)}
    sizes |= {"states": (N, TEACHER_HIDDEN), "head": (TEACHER_VOCAB, TEACHER_HIDDEN)}
    given = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    given["weight"], given["head"] = scale * given["weight"] / 2, scale * given["head"] / 3
    return given | {"targets": torch.randint(0, VOCAB, (N,), generator=generator)}


def dense_head(kind: str, k: int, temperature: float, scale: float) -> dict[str, torch.Tensor]:
    given = {name: part if name == "targets" else part.double() for name, part in head_inputs(scale).items()}
    hidden, weight = (given[name].requires_grad_() for name in ("hidden", "weight"))
    logp = (hidden @ weight.T / temperature).log_softmax(1)
    logq = (given["states"] @ given["head"].T / temperature).log_softmax(1)
    logprobs = logp.gather(1, given["targets"][:, None]).squeeze(1)
    entropy = -(logp.exp() * logp).sum(1)
    divergence = dense_divergence(kind, logp, logq, k, VOCAB)
    (given["upstream"] * torch.stack([logprobs, entropy, divergence])).sum().backward()
    best = logq[:, :VOCAB].argmax(1) == logp.argmax(1)
    values = {"logprobs": logprobs, "entropy": entropy, "divergence": divergence, "agreement": best.double()}
    assert hidden.grad is not None and weight.grad is not None
    return {name: part.detach() for name, part in values.items()} | {"hidden": hidden.grad, "weight": weight.grad}


@ranks()
def parallel_head(tp: int, chunk: int, cases: list[Any], is_equal: bool = False) -> list[dict[str, torch.Tensor]]:
    """On `tp` ranks, each with its rows of the padded weights; targets 3 and 4 have no teacher if k is 8.

    `is_equal`: the teacher is the policy.
    """
    import torch.distributed as dist

    from grpo_megatron.device import Device
    from grpo_megatron.models.layers.divergence import (
        SoftTargets,
        TeacherStates,
        vocab_parallel_divergence,
        vocab_parallel_top,
    )
    from grpo_megatron.models.layers.head import vocab_parallel_logprobs
    from grpo_megatron.parallel.mesh import build_mesh

    mesh, results = build_mesh(Device("cpu"), tp=tp, pp=1, rollout_tp=1), []

    def shard(weight: torch.Tensor) -> torch.Tensor:
        padding = -len(weight) % (8 * tp)
        return torch.cat([weight, torch.full((padding, weight.shape[1]), 1e4)]).chunk(tp)[mesh.tp_rank].clone()

    for kind, k, temperature, scale in cases:
        given = head_inputs(scale)
        if is_equal:
            given["states"], given["head"] = given["hidden"].clone(), given["weight"].clone()
        weight, hidden = shard(given["weight"]).requires_grad_(), given["hidden"].requires_grad_()
        options: dict[str, Any] = {"tp_rank": mesh.tp_rank, "group": mesh.tp_group}
        options |= {"temperature": temperature, "chunk": chunk}
        divergence = Divergence(kind, BETA)
        if k:
            sizes = {"vocab_size": len(given["head"]), **options}
            top = vocab_parallel_top(given["states"], shard(given["head"]), given["targets"], k, VOCAB, **sizes)[2]
            soft = SoftTargets(divergence, top=top)
        else:
            size = len(weight)
            first = min(VOCAB, mesh.tp_rank * size)
            rows = given["head"][first : min(VOCAB, first + size)]
            cut = N if is_equal else 5  # two teachers, with equal heads; a product of fewer rows may have other bits
            soft = SoftTargets(
                divergence,
                states=[TeacherStates(a, b, given["states"][a:b], rows) for a, b in ((0, cut), (cut, N))],
            )
        options |= {"vocab_size": VOCAB}
        values = vocab_parallel_divergence(hidden, weight, given["targets"], soft, **options)
        plain = vocab_parallel_logprobs(hidden, weight, given["targets"], **options)
        assert all(torch.equal(part, other) for part, other in zip(plain, values, strict=False))
        upstream = given["upstream"] * torch.tensor([[0.0], [0.0], [1.0]]) if is_equal else given["upstream"]
        sum(part @ value for part, value in zip(upstream, values, strict=False)).backward()  # type: ignore[union-attr]
        assert hidden.grad is not None and weight.grad is not None
        dist.all_reduce(hidden.grad, group=mesh.tp_group)
        gathered: list[Any] = [None] * tp
        dist.all_gather_object(gathered, weight.grad)
        named = dict(zip(("logprobs", "entropy", "divergence", "agreement"), (v.detach() for v in values), strict=True))
        results.append(named | {"hidden": hidden.grad, "weight": torch.cat(gathered)[:VOCAB]})
    return results


@pytest.mark.parametrize(("tp", "chunk"), [(1, 4), (2, 1024), (4, 3)])
def test_head_equals_the_definition(tp: int, chunk: int) -> None:
    """Scale 12: distributions of which one token has nearly all, so that a tail is 1e-8. On 4 ranks one has padding only."""
    for results in parallel_head(tp, tp=tp, chunk=chunk, cases=CASES):
        for case, got in zip(CASES, results, strict=True):
            want = dense_head(*case)
            for name in got:
                # Of the second scale logits of up to 74 are exact to 4e-6, and slopes of up to 70 times their weights of 24.
                bound = (1e-6 if case[-1] == 1 else 1e-5) * max(4 * case[-1], want[name].abs().max().item())
                torch.testing.assert_close(got[name].double(), want[name], rtol=0, atol=bound, msg=f"{case} {name}")


@pytest.mark.parametrize("tp", [1, 2])
def test_the_policy_as_its_own_teacher_has_a_divergence_of_exactly_0(tp: int) -> None:
    for results in parallel_head(tp, tp=tp, chunk=4, cases=CASES, is_equal=True):
        for case, got in zip(CASES, results, strict=True):
            assert not any(got[name].any() for name in ("divergence", "hidden", "weight")), case
            assert (got["agreement"] == 1).all(), case
