"""The backbone: any layout gives the same log-probabilities, gradients and weights, and transformers agrees.

Bounds are relative to a tensor's largest entry. Another packing adds the same terms in another order, so its gradients
differ by float32 rounding (2**-24 = 6e-8 per operation). Measured against transformers in float64, the worst parameter of
every packing is off by 1.7e-6 to 2.7e-6, and that of transformers in float32 by 1.8e-6. EXACT is twice that, so two packings
differ by at most 2 EXACT. A lost token, one of these 123, would change the sum by 1/123.

Shared prompts against transformers in float64, over the layouts: the norm of the gradient's error is 0.83 to 1.21 times that
of whole rows (measured; 5e-7 to 1.0e-6 of the gradient's norm), and no element is off by more than 2.9e-7.

The updates are on a batch with tokens outside the loss (`tiny.make_batch(masked=True)`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_megatron.algo.losses import policy_losses, total_loss
from grpo_megatron.config import ActorConfig
from grpo_megatron.models.layers import modules
from tests import tiny
from tests.models.policies import (
    LAYOUTS,
    Layout,
    Tensors,
    build,
    close,
    close_rows,
    hand_built_loss,
    local_batch,
    loss,
    named_gradients,
    stream,
    transformers_backward,
    whole,
)
from tests.worlds import ranks

PAIRS = tiny.make_sequences(6)
TWO_PROMPTS = [(PAIRS[0 if row < 3 else 3][0], response) for row, (_, response) in enumerate(PAIRS)]
TWO_PROMPTS[1] = ([*TWO_PROMPTS[1][0][:-1], 9], TWO_PROMPTS[1][1])  # its prompt begins as that of the row before
EXACT = 5e-6
UPDATED = (
    "qwen3",
    "qwen2-tied",
    "gemma3",
)  # q/k norms; biases, and an embedding that two pipeline stages share; windows
SPREAD_NORMS = "olmo2"  # q/k norms over the heads of all tensor-parallel ranks: in the layouts that differ for them
ALL_UPDATED = (*UPDATED, SPREAD_NORMS)


def layouts(*of_every_run: str) -> list[Any]:
    """All layouts. `make soak` has those that are not `of_every_run`."""
    names = (name for name in LAYOUTS if "EP" not in name)
    return [pytest.param(name, marks=[] if name in of_every_run else [pytest.mark.soak]) for name in names]


# -- the ranks ---------------------------------------------------------------------------------------------------------


@ranks()
def logprobs(folders: dict[str, Path], layout: Layout) -> Tensors:
    """Family -> log-probabilities, in micro-batches of different sizes, one of them empty."""
    batch = tiny.make_batch(PAIRS, [[[0, 1], [2], [], [3, 4, 5]]])
    return {family: build(folder, layout).logprobs(batch) for family, folder in folders.items()}


@ranks()
def updates(folders: dict[str, Path], layout: Layout, micro: int = 2) -> dict[tuple[str, bool], dict[str, Any]]:
    """(family, distributed optimizer?) -> what `update` gives. The passes themselves are checked in one family."""
    first = next(iter(folders))
    return {
        (family, distributed): update(folder, PAIRS, layout, micro, distributed, distributed and family == first)
        for family, folder in folders.items()
        for distributed in (False, True)
    }


def update(
    folder: Path, pairs: Any, layout: Layout, micro: int, distributed: bool, checks_passes: bool = False
) -> dict[str, Any]:
    """Gradients before an optimizer step and weights after it, as whole Hugging Face tensors; the gradient norm.

    The batch has tokens outside the loss, and a row without a loss token. With plain DDP every rank has the whole summed
    gradient; with the distributed optimizer only a part of it.
    """
    policy = build(folder, layout, megatron={"use_distributed_optimizer": distributed})
    batch = local_batch(pairs, policy.mesh, micro, masked=True)
    [micros] = batch.mini_batches
    found: dict[str, Any] = {} if distributed else {"packings": both_packings(policy, micro)}
    step = policy.optim_step

    def record_and_step(*arguments: Any) -> float:
        found["gradients"] = whole(policy, named_gradients(policy))
        return step(*arguments)

    with mock.patch.object(policy, "optim_step", record_and_step):
        found["sums"], metrics = policy.update(batch, loss)
    found |= {"weights": stream(policy), "norm": metrics["actor/grad_norm"]}
    if checks_passes:
        found["folded"] = folded(policy, local_batch(pairs, policy.mesh, micro, masked=True))
        batch = local_batch(pairs, policy.mesh, micro, masked=True)
        batch.mini_batches = [[[], *micros]]
        found["without backward"] = without_backward(policy, batch)
        found["shared prompts"] = shared_prompts(policy, micro)
    return found


def both_packings(policy: Any, micro: int) -> dict[bool, Tensors]:
    """Two prompts for all rows: shares its prompts? -> the gradients, as whole Hugging Face tensors."""
    batch, found = local_batch(TWO_PROMPTS, policy.mesh, micro, masked=True), {}
    for batch.shares_prompts in (False, True):
        policy.forward_backward(batch, batch.mini_batches[0], loss)
        found[batch.shares_prompts] = whole(policy, named_gradients(policy))
    return found


def folded(policy: Any, batch: Any) -> dict[str, bool]:
    """Old log-probabilities of a pass before the update, and of the update's own forward pass: are their bits the same?"""
    (micros,) = batch.mini_batches
    batch.old_logprobs = before = policy.logprobs(batch)
    separate = policy.forward_backward(batch, micros, loss)
    gradients = named_gradients(policy)
    batch.old_logprobs = None
    own = policy.forward_backward(batch, micros, loss)
    gradients_equal = all(torch.equal(g, gradients[name]) for name, g in named_gradients(policy).items())
    policy.optim_step()
    return {
        "step": not torch.equal(policy.logprobs(batch), before),
        "logprobs": torch.equal(policy.from_last_stage(own.host_logprobs()), before),
        "gradients": gradients_equal,
        "metrics": all(torch.equal(part.total, separate.sums[name].total) for name, part in own.sums.items()),
    }


def without_backward(policy: Any, batch: Any) -> dict[str, bool]:
    """The last micro-batch has no advantage, and no backward pass: do gradients, metrics, log-probabilities stay?"""
    (micros,) = batch.mini_batches
    batch.advantages[micros[-1]] = 0.0
    results = []
    for count in (0, 1):
        passed = policy.forward_backward(batch, micros, policy_loss, count)
        results.append((named_gradients(policy), passed.sums, policy.from_last_stage(passed.host_logprobs())))
    (gradients, metrics, before), (fewer, same, after) = results
    return {
        "gradients": all(torch.equal(g, fewer[name]) for name, g in gradients.items()),
        "metrics": all(torch.allclose(part.total, same[name].total, rtol=1e-6) for name, part in metrics.items()),
        "counts": [part.num_tokens for part in metrics.values()] == [same[name].num_tokens for name in metrics],
        "logprobs": torch.equal(before, after),
    }


def policy_loss(inputs: Any) -> Any:
    return total_loss(inputs, ActorConfig(), policy_losses.get("vanilla"), None)


def shared_prompts(policy: Any, micro: int) -> dict[str, float]:
    """Two prompts for all rows: largest differences of shared prompts to plain packs, gradients relative to their tensor's."""
    batch, results = local_batch(TWO_PROMPTS, policy.mesh, micro, masked=True), []
    [micros] = batch.mini_batches
    for batch.shares_prompts in (False, True):
        with mock.patch.object(modules, "QUERY_BLOCK", 16):  # the responses are short
            sizes = [pack.tokens.numel() for pack in policy.packs(batch, micros)]
            before = policy.logprobs(batch)
            policy.forward_backward(batch, micros, loss)
        results.append((named_gradients(policy), before, sum(sizes)))
    (gradients, plain, all_tokens), (shared, tree, fewer) = results
    errors = [(g - shared[name]).abs().max() / g.abs().max() for name, g in gradients.items() if g.abs().max() > 0]
    return {"gradients": max(errors).item(), "logprobs": (plain - tree).abs().max().item(), "saved": all_tokens - fewer}


# -- the tests ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: tiny.make_model(root / family, family) for family in tiny.FAMILIES}


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, list[torch.Tensor]]:
    return {family: tiny.transformers_logprobs(folder, PAIRS) for family, folder in models.items()}


@pytest.mark.parametrize("layout", layouts("1", "TP2xPP2+SP"))
def test_logprobs_of_every_family_equal_transformers(models: dict[str, Path], expected: Any, layout: str) -> None:
    for results in logprobs(LAYOUTS[layout].world, folders=models, layout=LAYOUTS[layout]):
        for family, got in results.items():
            close_rows(got, expected[family], family)


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[tuple[str, bool], dict]:
    return updates(1, folders={family: models[family] for family in ALL_UPDATED}, layout=LAYOUTS["1"])[0]


@pytest.fixture(scope="module")
def by_hand(models: dict[str, Path]) -> dict[str, Tensors]:
    """The gradients by transformers in float64 and by the formulas over the loss tokens alone, one response at a time."""
    found = {}
    batch = tiny.make_batch(PAIRS, [], masked=True)
    assert 0 < int(batch.loss_mask.sum()) < int(batch.response_mask.sum())
    for family in ALL_UPDATED:
        model = AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.float64)
        for row, (prompt, response) in enumerate(PAIRS):
            in_loss = batch.loss_mask[row].nonzero().squeeze(1)
            assert (len(in_loss) == 0) == (row == 4)
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]  # [response, vocabulary]
            log_p = logits.log_softmax(-1)[in_loss]
            entropy = -(log_p.exp() * log_p).sum(-1)
            logprobs = log_p.gather(1, torch.tensor(response)[in_loss].unsqueeze(1)).squeeze(1)
            columns = (batch.old_logprobs, batch.ref_logprobs, batch.advantages, batch.token_weights)
            old, ref, advantages, weights = (column[row][in_loss].double() for column in columns)
            (weights * hand_built_loss(logprobs, entropy, old, ref, advantages)).sum().backward()
        found[family] = {name: parameter.grad for name, parameter in model.named_parameters()}
    return found


@pytest.fixture(scope="module")
def with_two_prompts(models: dict[str, Path]) -> dict[str, Tensors]:
    """The gradients by transformers in float64, where all rows have one of two prompts."""
    passed = {f: transformers_backward(models[f], TWO_PROMPTS, torch.float64, masked=True) for f in UPDATED}
    return {family: {name: p.grad for name, p in model.named_parameters()} for family, model in passed.items()}


def shared_prompts_are_exact(packings: dict[bool, Tensors], want: Tensors) -> None:
    """Every element within 1e-6 of whole rows' and of float64, and the whole gradient as near to float64 as theirs."""
    plain, shared = packings[False], packings[True]
    near(shared, plain)
    near(shared, want)
    errors = [sum((got[name] - want[name]).square().sum() for name in want).sqrt() for got in (plain, shared)]
    assert 0 < errors[1] <= 1.5 * errors[0], errors


def near(got: Tensors, want: Tensors) -> None:
    """Every element within 1e-6; the largest is 0.2."""
    assert got.keys() >= want.keys()
    worst = {name: (got[name] - want[name]).abs().max().item() for name in want}
    assert max(worst.values()) <= 1e-6, max(worst, key=lambda name: worst[name])
    assert max(gradient.abs().max() for gradient in want.values()) > 0.1


@pytest.mark.parametrize("family", ALL_UPDATED)
def test_gradients_equal_those_of_a_hand_built_loss_without_the_masked_tokens(
    alone: Any, by_hand: dict[str, Tensors], family: str
) -> None:
    """Tokens outside the loss, those of observations, are read by the model alone."""
    (sums,) = alone[family, False]["sums"]
    assert all(metric.total.isfinite() for metric in sums.values())
    assert sums["actor/entropy"].num_tokens == tiny.make_batch(PAIRS, [], masked=True).loss_mask.sum()
    near(alone[family, False]["gradients"], by_hand[family])


@pytest.mark.parametrize("layout", layouts("TP2xPP2+SP"))
def test_gradients_and_weights_do_not_depend_on_the_layout(
    models: dict[str, Path], alone: Any, by_hand: Any, with_two_prompts: Any, layout: str
) -> None:
    """The norm too: it decides the clipping. Only the norm shows a shard that is counted twice or not at all."""
    names = ALL_UPDATED if layout in ("TP2", "TP2xPP2+SP") else UPDATED
    folders = {family: models[family] for family in names}
    for results in updates(LAYOUTS[layout].world, folders=folders, layout=LAYOUTS[layout]):
        for (family, distributed), got in results.items():
            want = alone[family, distributed]
            if not distributed:
                close(got["gradients"], want["gradients"], 1e-5)
                near(got["gradients"], by_hand[family])
                if family in UPDATED:
                    shared_prompts_are_exact(got["packings"], with_two_prompts[family])
            close(got["weights"], want["weights"], 1e-5)
            assert got["norm"] == pytest.approx(want["norm"], rel=2 * EXACT)
            if "shared prompts" not in got:  # all layouts have one family with it
                continue
            shared = got["shared prompts"]
            assert shared["gradients"] <= 2 * EXACT and shared["logprobs"] <= 1e-5, shared
            assert shared["saved"] > 0 or layout.startswith("DP2")  # rank 1 of DP2 has rows that share no prompt
            assert all(got["folded"].values()) and all(got["without backward"].values()), family


@pytest.mark.parametrize("micro", [*(pytest.param(micro, marks=pytest.mark.soak) for micro in (1, 3)), 6])
def test_micro_batches_and_packing_change_nothing(
    models: dict[str, Path], alone: Any, by_hand: Any, with_two_prompts: Any, micro: int
) -> None:
    [results] = updates(1, folders={family: models[family] for family in UPDATED}, layout=LAYOUTS["1"], micro=micro)
    for key, got in results.items():
        near(got["gradients"], by_hand[key[0]])
        close(got["gradients"], alone[key]["gradients"], 2 * EXACT)
        close(got["weights"], alone[key]["weights"], 2 * EXACT)
        if micro > 1 and not key[1]:
            shared_prompts_are_exact(got["packings"], with_two_prompts[key[0]])
