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

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import tiny, worlds
from tests.models import policy_ranks
from tests.models.gradients import transformers_backward

PAIRS = tiny.make_sequences(6)
EXACT = 5e-6
UPDATED = ("qwen3", "qwen2-tied")  # q/k norms; biases, and an embedding that two pipeline stages share
SPREAD_NORMS = "olmo2"  # q/k norms over the heads of all tensor-parallel ranks: in the layouts that differ for them


def layouts(*of_every_run: str) -> list[Any]:
    """All layouts. `make soak` has those that are not `of_every_run`."""
    soak = [pytest.mark.soak]
    return [pytest.param(name, marks=[] if name in of_every_run else soak) for name in policy_ranks.LAYOUTS]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: tiny.make_model(root / family, family) for family in tiny.FAMILIES}


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, list[torch.Tensor]]:
    return {family: tiny.transformers_logprobs(folder, PAIRS) for family, folder in models.items()}


@pytest.mark.parametrize("layout", layouts("1", "TP2xPP2+SP"))
def test_logprobs_of_every_family_equal_transformers(
    models: dict[str, Path], expected: dict[str, list[torch.Tensor]], layout: str
) -> None:
    shape = policy_ranks.LAYOUTS[layout]
    for results in worlds.run(policy_ranks.logprobs, shape[0], folders=models, pairs=PAIRS, layout=shape):
        for family, got in results.items():
            for row, want in enumerate(expected[family]):
                torch.testing.assert_close(got[row, : len(want)], want, rtol=0, atol=1e-5, msg=f"{family} row {row}")
                assert (got[row, len(want) :] == 0).all()


def close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float) -> None:
    """Relative to each tensor's largest entry: the relative error of an element near zero says nothing."""
    assert got.keys() == want.keys()
    for name in want:
        scale = want[name].abs().max()
        assert scale > 0, name
        worst = ((got[name] - want[name]).abs().max() / scale).item()
        assert worst <= tolerance, f"{name}: {worst}"


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[tuple[str, bool], dict]:
    folders = {family: models[family] for family in (*UPDATED, SPREAD_NORMS)}
    return worlds.run(policy_ranks.updates, 1, folders=folders, pairs=PAIRS, layout=policy_ranks.LAYOUTS["1"], micro=2)[
        0
    ]


@pytest.fixture(scope="module")
def by_hand(models: dict[str, Path]) -> dict[str, dict[str, torch.Tensor]]:
    """The gradients by transformers in float64 and by the formulas over the loss tokens alone, one response at a time."""
    found = {}
    batch = tiny.make_batch(PAIRS, [], masked=True)
    assert 0 < int(batch.loss_mask.sum()) < int(batch.response_mask.sum())
    for family in (*UPDATED, SPREAD_NORMS):
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
            (weights * policy_ranks.hand_built_loss(logprobs, entropy, old, ref, advantages)).sum().backward()
        found[family] = {name: parameter.grad for name, parameter in model.named_parameters()}
    return found


@pytest.fixture(scope="module")
def with_two_prompts(models: dict[str, Path]) -> dict[str, dict[str, torch.Tensor]]:
    """The gradients by transformers in float64, where all rows have one of two prompts."""
    pairs = policy_ranks.with_two_prompts(PAIRS)
    found = {}
    for family in UPDATED:
        model = transformers_backward(models[family], pairs, policy_ranks.loss, torch.float64, masked=True)
        found[family] = {name: parameter.grad for name, parameter in model.named_parameters()}
    return found


def shared_prompts_are_exact(packings: dict[bool, dict[str, torch.Tensor]], want: dict[str, torch.Tensor]) -> None:
    """Every element within 1e-6 of whole rows' and of float64, and the whole gradient as near to float64 as theirs."""
    plain, shared = packings[False], packings[True]
    near(shared, plain)
    near(shared, want)
    errors = [sum((got[name] - want[name]).square().sum() for name in want).sqrt() for got in (plain, shared)]
    assert 0 < errors[1] <= 1.5 * errors[0], errors


def near(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Every element within 1e-6; the largest is 0.2."""
    assert got.keys() >= want.keys()
    worst = {name: (got[name] - want[name]).abs().max().item() for name in want}
    assert max(worst.values()) <= 1e-6, max(worst, key=lambda name: worst[name])
    assert max(gradient.abs().max() for gradient in want.values()) > 0.1


@pytest.mark.parametrize("family", (*UPDATED, SPREAD_NORMS))
def test_gradients_equal_those_of_a_hand_built_loss_without_the_masked_tokens(
    alone: dict[tuple[str, bool], dict], by_hand: dict[str, dict[str, torch.Tensor]], family: str
) -> None:
    """Tokens outside the loss, those of observations, are read by the model alone."""
    (sums,) = alone[family, False]["sums"]
    assert all(metric.total.isfinite() for metric in sums.values())
    assert sums["actor/entropy"].num_tokens == tiny.make_batch(PAIRS, [], masked=True).loss_mask.sum()
    near(alone[family, False]["gradients"], by_hand[family])


@pytest.mark.parametrize("layout", layouts("PP2", "TP2xPP2+SP"))
def test_gradients_and_weights_do_not_depend_on_the_layout(
    models: dict[str, Path],
    alone: dict[tuple[str, bool], dict],
    by_hand: dict[str, dict[str, torch.Tensor]],
    with_two_prompts: dict[str, dict[str, torch.Tensor]],
    layout: str,
) -> None:
    """The norm too: it decides the clipping. Only the norm shows a shard that is counted twice or not at all."""
    shape = policy_ranks.LAYOUTS[layout]
    names = (*UPDATED, SPREAD_NORMS) if layout in ("TP2", "TP2xPP2+SP") else UPDATED
    folders = {family: models[family] for family in names}
    for results in worlds.run(policy_ranks.updates, shape[0], folders=folders, pairs=PAIRS, layout=shape, micro=2):
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


@pytest.mark.parametrize("micro", [1, pytest.param(3, marks=pytest.mark.soak), 6])
def test_micro_batches_and_packing_change_nothing(
    models: dict[str, Path],
    alone: dict[tuple[str, bool], dict],
    by_hand: dict[str, dict[str, torch.Tensor]],
    with_two_prompts: dict[str, dict[str, torch.Tensor]],
    micro: int,
) -> None:
    folders = {family: models[family] for family in UPDATED}
    results = worlds.run(
        policy_ranks.updates, 1, folders=folders, pairs=PAIRS, layout=policy_ranks.LAYOUTS["1"], micro=micro
    )[0]
    for key, got in results.items():
        near(got["gradients"], by_hand[key[0]])
        close(got["gradients"], alone[key]["gradients"], 2 * EXACT)
        close(got["weights"], alone[key]["weights"], 2 * EXACT)
        if micro > 1 and not key[1]:
            shared_prompts_are_exact(got["packings"], with_two_prompts[key[0]])
