"""Distillation: the definitions on dense float64 distributions against the output head, transformers against models.

The head is float32. Values and gradients are those of float64 within 1e-6, as for log-probabilities (test_logprobs.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from grpo_megatron.algo.distillation import LEAST_LOGPROB, Divergence, with_teachers
from grpo_megatron.config import ActorConfig
from grpo_megatron.models.families import read_architecture
from grpo_megatron.models.policy import Reference
from grpo_megatron.training import correction
from grpo_megatron.training.correction import build_loss
from grpo_megatron.types import TeacherScores
from tests import tiny
from tests.models.policies import (
    ENTROPY_COEF,
    KL_COEF,
    LAYOUTS,
    Layout,
    Tensors,
    _NoFloat32,
    build,
    hand_built_loss,
    local_batch,
    named_gradients,
    share,
    whole,
)
from tests.models.test_layouts import near
from tests.worlds import ranks

KINDS = ("forward", "reverse", "jsd")
BETA = 0.3


def dense_divergence(kind: str, logp: torch.Tensor, logq: torch.Tensor, k: int, num_ids: int) -> torch.Tensor:
    """The definition, from log-probabilities of all tokens [N, V] and [N, V']; k best of the first `num_ids`, or all, 0."""
    if k == 0:
        logq = logq[:, : logp.shape[1]].log_softmax(1)  # the teacher's further rows have no part
        logq = torch.nn.functional.pad(logq, (0, logp.shape[1] - logq.shape[1]), value=LEAST_LOGPROB)
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

N, HIDDEN, VOCAB, TEACHER_HIDDEN = 11, 16, 37, 24
MORE, FEWER = 41, 17  # rows of the teacher's vocabulary; 17 on 4 ranks: none on the second
CASES = [
    (kind, k, temperature, rows, scale)
    for kind in KINDS
    for k, temperature, scale in [(0, 0.7, 1.0), (1, 1.0, 1.0), (8, 1.3, 1.0), (0, 1.0, 12.0), (8, 1.0, 12.0)]
    for rows in ((MORE, FEWER) if scale == 1.0 else (MORE,))
]


def head_inputs(rows: int, scale: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"hidden": (N, HIDDEN), "weight": (VOCAB, HIDDEN), "upstream": (3, N)}
    sizes |= {"states": (N, TEACHER_HIDDEN), "head": (rows, TEACHER_HIDDEN)}
    given = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    given["weight"], given["head"] = scale * given["weight"] / 2, scale * given["head"] / 3
    return given | {"targets": torch.randint(0, VOCAB, (N,), generator=generator)}


def dense_head(kind: str, k: int, temperature: float, rows: int, scale: float) -> dict[str, torch.Tensor]:
    given = {name: part if name == "targets" else part.double() for name, part in head_inputs(rows, scale).items()}
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

    for kind, k, temperature, num_rows, scale in cases:
        given = head_inputs(num_rows, scale)
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
                slope = (
                    200.0 if case[-2] == FEWER else 4 * case[-1]
                )  # sums of log p + 87.3, of ids that the teacher lacks
                bound = (1e-6 if case[-1] == 1 else 1e-5) * max(slope, want[name].abs().max().item())
                torch.testing.assert_close(got[name].double(), want[name], rtol=0, atol=bound, msg=f"{case} {name}")


@pytest.mark.parametrize("tp", [1, 2])
def test_the_policy_as_its_own_teacher_has_a_divergence_of_exactly_0(tp: int) -> None:
    for results in parallel_head(tp, tp=tp, chunk=4, cases=CASES, is_equal=True):
        for case, got in zip(CASES, results, strict=True):
            assert not any(got[name].any() for name in ("divergence", "hidden", "weight")), case
            assert (got["agreement"] == 1).all(), case


class Largest(TorchDispatchMode):
    """Records the largest tensor that an operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else [result]:
            self.numel = max(self.numel, part.numel() if isinstance(part, torch.Tensor) else 0)
        return result


@ranks(1)
def largest_tensors(tokens: int, vocabulary: int, chunk: int) -> dict[int, int]:
    """k -> numbers of the largest tensor of scoring, forward and backward."""
    import torch.distributed as dist

    from grpo_megatron.device import Device
    from grpo_megatron.models.layers import divergence as head
    from grpo_megatron.parallel.mesh import build_mesh

    build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)
    results = {}
    for k in (0, 8):
        states, weight = torch.randn(tokens, 4), torch.randn(vocabulary, 4, requires_grad=True)
        sizes: dict[str, Any] = {"vocab_size": vocabulary, "tp_rank": 0, "group": dist.group.WORLD, "chunk": chunk}
        targets = torch.arange(tokens)
        with Largest() as largest:
            if k:
                top = head.vocab_parallel_top(states, weight.detach(), targets, k, vocabulary, **sizes)[2]
                soft = head.SoftTargets(Divergence("jsd"), top=top)
            else:
                of_teacher = head.TeacherStates(0, tokens, states, weight.detach())
                soft = head.SoftTargets(Divergence("jsd"), states=[of_teacher])
            _, _, values, _ = head.vocab_parallel_divergence(states, weight, targets, soft, **sizes)
            values.sum().backward()
        results[k] = largest.numel
    return results


def test_no_tensor_is_larger_than_a_chunk_of_logits() -> None:
    [numels] = largest_tensors(tokens=64, vocabulary=500, chunk=8)
    assert set(numels.values()) == {8 * 500}


# -- models of two teachers in the policy's layout, against transformers in float64 ------------------------------------
# Rows have one of two teachers of other families and sizes, or none; the second reads a longer prompt.

PAIRS = [
    (prompt, response)
    for (prompt, _), (_, response) in zip(tiny.make_sequences(2) * 3, tiny.make_sequences(6), strict=True)
]
TEACHER_OF = [0, 1, -1, 0, 1, 0]
CONTEXT: list[list[int]] = [[], [3, 5, 7, 9]]
TEMPERATURES = (0.7, 1.0, 1.3)
Case = tuple[str, int, float, float]  # objective, k, temperature, discount
OBJECTIVES: list[Case] = [  # each pair of objective, k and temperature
    *((kind, k, TEMPERATURES[(i + j) % 3], 0.0) for i, kind in enumerate(KINDS) for j, k in enumerate((0, 1, 8))),
    *(("sampled", 0, t, discount) for t, discount in zip(TEMPERATURES, (0.0, 0.5, 1.0), strict=True)),
]
ACTOR = {"use_kl_loss": True, "kl_loss_coef": KL_COEF, "kl_loss_type": "low_var_kl", "entropy_coeff": ENTROPY_COEF}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The policy and its teachers, the first of which has more rows of padding."""
    root = tmp_path_factory.mktemp("models")
    sizes: list[dict[str, Any]] = [{}, {"hidden_size": 192, "vocab_size": 111, "num_hidden_layers": 6}, {"seed": 2}]
    names = ("qwen2", "qwen3", "llama3")
    return [tiny.make_model(root / name, name, **changes) for name, changes in zip(names, sizes, strict=True)]


def weights_of_teachers(batch: Any, rows: list[int]) -> torch.Tensor:
    """Another weight in each row; of all tokens, so that micro-batches and ranks do not matter."""
    number = sum(len(response) for _, response in PAIRS)
    weights = torch.tensor([(TEACHER_OF[row] >= 0) * (0.5 + 0.1 * row) / number for row in rows])
    return weights[:, None] * batch.loss_mask


def scores_of(
    policy: Any,
    teachers: list[Any],
    folders: list[Path],
    batch: Any,
    rows: list[int],
    case: Case,
    context: list[list[int]],
) -> Any:
    """The scores of `rows`, as a run computes them."""
    kind, k, temperature, _ = case
    scores = TeacherScores(
        [TEACHER_OF[row] for row in rows], weights_of_teachers(batch, rows), torch.zeros(batch.loss_mask.shape)
    )
    distributions: list[Any] = [None] * len(rows)
    for number, (teacher, folder) in enumerate(zip(teachers, folders, strict=True)):
        local = [i for i, row in enumerate(rows) if TEACHER_OF[row] == number]
        pairs = [(context[number] + PAIRS[rows[i]][0], PAIRS[rows[i]][1]) for i in local]
        own = tiny.make_batch(pairs, [[list(range(len(local)))]] if local else [])
        if kind == "sampled":
            logprobs = teacher.logprobs(own, temperature)
        else:
            logprobs, parts = teacher.distribution(own, k, policy.arch.vocab_size, temperature)
            for i, part in zip(local, parts, strict=False):
                distributions[i] = part
        scores.logprobs[local, : logprobs.shape[1]] = logprobs
        scores.heads.append(policy.teacher_head(folder, teacher.arch, torch.float32))
    if kind != "sampled" and policy.mesh.is_last_stage:
        scores.kl, scores.beta = kind, BETA
        scores.top, scores.states = ([], distributions) if k == 0 else (distributions, [])
    return scores


def permuted(scores: Any) -> None:
    """The scores of another row of the teacher, cut or repeated to the row's length."""
    scores.logprobs = scores.logprobs.roll(3, 0)
    for parts in (scores.top, scores.states):
        if parts:
            length = len(parts[0])
            parts[0] = parts[3][torch.arange(length) % len(parts[3])]


FAULTS: dict[str, tuple[Case, Callable[[Any], None]]] = {
    "the other direction": (("forward", 8, 1.3, 0.0), lambda scores: setattr(scores, "kl", "reverse")),
    "the other mixture": (("jsd", 0, 1.3, 0.0), lambda scores: setattr(scores, "beta", 1 - scores.beta)),
    "permuted best tokens": (("reverse", 8, 0.7, 0.0), permuted),
    "permuted states": (("forward", 0, 0.7, 0.0), permuted),
    "permuted scores": (("sampled", 0, 0.7, 0.0), permuted),
    "a denominator per micro-batch": (("forward", 1, 1.0, 0.0), lambda scores: scores.weights.mul_(6)),
    "teacher at another temperature": (("reverse", 1, 1.3, 0.0), lambda scores: None),
    "stale prompt": (("sampled", 0, 1.3, 1.0), lambda scores: None),
    "gradient through the policy's scores": (("sampled", 0, 1.0, 0.5), lambda scores: None),
}


def live(inputs: Any, names: Any, discount: float) -> Any:
    """`with_teachers` as others had it: the log-probabilities of the difference are not detached."""
    given, metrics = with_teachers(inputs, names, discount)
    extra = inputs.logprobs - inputs.logprobs.detach()
    return replace(given, advantages=given.advantages - 3 * extra * (inputs.teacher_weights != 0)), metrics


@ranks()
def gradients(
    folders: list[Path], layout: Layout, micro: int, is_shared: bool, cases: list[tuple[Case, str]]
) -> dict[tuple[Case, str], Tensors]:
    """(case, fault) -> gradients as whole Hugging Face tensors."""
    policy = build(folders[0], layout, megatron={"use_distributed_optimizer": False})
    parts = policy.actor, policy.mesh, policy.device
    teachers = [Reference.load(folder, "float32", read_architecture(folder), *parts) for folder in folders[1:]]
    rows, results = share(len(PAIRS), policy.mesh.dp_rank, policy.mesh.dp), {}
    for case, fault in cases:
        batch = local_batch(PAIRS, policy.mesh, micro, masked=True)
        batch.shares_prompts, policy.temperature = is_shared, case[2]
        as_scored = (*case[:2], 1.0, case[3]) if fault == "teacher at another temperature" else case
        context = [[], []] if fault == "stale prompt" else CONTEXT
        batch.teacher = scores_of(policy, teachers, folders[1:], batch, rows, as_scored, context)
        if fault:
            FAULTS[fault][1](batch.teacher)
        loss = build_loss(ActorConfig.model_validate(ACTOR), teachers=("a", "b"), discount=case[3])
        is_live = fault == "gradient through the policy's scores"
        with mock.patch.object(correction, "with_teachers", live if is_live else with_teachers):
            policy.forward_backward(batch, batch.mini_batches[0], loss)
        results[case, fault] = whole(policy, named_gradients(policy))
    return results


@pytest.fixture(scope="module")
def wanted(folders: list[Path]) -> dict[Case, Tensors]:
    """The gradients by transformers, from the definitions."""
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for folder in folders]
    batch, results = tiny.make_batch(PAIRS, [], masked=True), {}
    weights = weights_of_teachers(batch, list(range(len(PAIRS))))
    columns = (batch.old_logprobs, batch.ref_logprobs, batch.advantages, batch.token_weights, weights)
    for case in OBJECTIVES:
        for row, (prompt, response) in enumerate(PAIRS):
            in_loss, number = batch.loss_mask[row].nonzero().squeeze(1), TEACHER_OF[row]
            old, ref, advantages, w, w_teacher = (column[row][in_loss].double() for column in columns)
            logp = dense(models[0], prompt, response, case[2])[in_loss]
            targets = torch.tensor(response)[in_loss].unsqueeze(1)
            logprobs, entropy = logp.gather(1, targets).squeeze(1), -(logp.exp() * logp).sum(1)
            term = torch.zeros(())
            if number >= 0:
                with torch.no_grad():
                    logq = dense(models[1 + number], CONTEXT[number] + prompt, response, case[2])[in_loss]
                if case[0] == "sampled":
                    d = (logq.gather(1, targets).squeeze(1) - old).tolist()
                    sums = [sum(case[3] ** (s - t) * d[s] for s in range(t, len(d))) for t in range(len(d))]
                    advantages = advantages + w_teacher / w * torch.tensor(sums, dtype=torch.float64)
                else:
                    term = (w_teacher * dense_divergence(case[0], logp, logq, case[1], 101)).sum()
            ((w * hand_built_loss(logprobs, entropy, old, ref, advantages)).sum() + term).backward()
        results[case] = {name: parameter.grad for name, parameter in models[0].named_parameters()}
        models[0].zero_grad(set_to_none=True)
    return results  # type: ignore[return-value]


def dense(model: Any, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    with _NoFloat32():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(1)


@pytest.mark.parametrize(
    ("layout", "micro", "is_shared"),
    [
        ("1", 1, False),
        ("1", 6, True),
        ("TP2xPP2+SP", 3, True),
        *(
            pytest.param(name, 2, False, marks=pytest.mark.soak)
            for name in ("DP2", "TP2", "TP2+SP", "PP2", "DP2xTP2", "TP4")
        ),
    ],
)
def test_gradients_equal_transformers(
    folders: list[Path], wanted: dict[Case, Tensors], layout: str, micro: int, is_shared: bool
) -> None:
    parts = {"folders": folders, "layout": LAYOUTS[layout], "micro": micro, "is_shared": is_shared}
    for results in gradients(LAYOUTS[layout].world, cases=[(case, "") for case in OBJECTIVES], **parts):
        for (case, _), got in results.items():
            near(got, wanted[case])


@ranks()
def own_teacher(folder: Path, layout: Layout, is_shared: bool) -> dict[str, float]:
    """The largest gradients where the reference of the policy is its teacher, in the micro-batches of the update."""
    policy, results = build(folder, layout, temperature=0.7), {}
    teacher = Reference.load(folder, "float32", policy.arch, policy.actor, policy.mesh, policy.device, temperature=0.7)
    for kind, k in (("sampled", 0), ("forward", 0), ("forward", 8), ("reverse", 1), ("jsd", 0)):
        batch = local_batch(PAIRS, policy.mesh, 2)
        batch.shares_prompts, batch.old_logprobs, batch.advantages = is_shared, None, 0 * batch.advantages
        scores = TeacherScores([0] * len(batch), batch.token_weights, teacher.logprobs(batch))
        if kind != "sampled":
            scores.logprobs, parts = teacher.distribution(batch, k, policy.arch.vocab_size)
            scores = replace(scores, kl=kind, **{"top" if k else "states": parts})
            scores.heads = [policy.teacher_head(folder, policy.arch, torch.float32)]
        batch.teacher = scores
        loss = build_loss(ActorConfig.model_validate({"use_kl_loss": False}), teachers=("a",), discount=0.9)
        sums = policy.forward_backward(batch, batch.mini_batches[0], loss).sums
        largest = [part.abs().max().item() for part in named_gradients(policy).values()]
        terms = [sums[name].total.item() for name in sums if name.startswith("distillation/") and "agree" not in name]
        results[f"{kind} {k}"] = max(map(abs, (*largest, *terms)))
    return results


@pytest.mark.parametrize(
    ("layout", "is_shared"), [("1", True), pytest.param("DP2", False, marks=pytest.mark.soak), ("TP2xPP2+SP", True)]
)
def test_a_teacher_that_is_the_policy_has_no_gradient(folders: list[Path], layout: str, is_shared: bool) -> None:
    for results in own_teacher(LAYOUTS[layout].world, folder=folders[0], layout=LAYOUTS[layout], is_shared=is_shared):
        assert set(results.values()) == {0.0}, results


def test_faults_of_other_trainers_are_noticed(folders: list[Path], wanted: dict[Case, Tensors]) -> None:
    """Swapped KL directions, scores at another temperature or of another prompt or row, denominators, gradients."""
    cases = [(case, fault) for fault, (case, _) in FAULTS.items()]
    [results] = gradients(1, folders=folders, layout=LAYOUTS["1"], micro=6, is_shared=False, cases=cases)
    for (case, fault), got in results.items():
        worst = max((got[name] - part).abs().max().item() for name, part in wanted[case].items())
        assert worst > 1e-4, f"{fault}: {worst}"  # a hundred times the bound
