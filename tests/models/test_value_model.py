"""The critic: values and gradients equal those of transformers' token classification, in every layout of the policy."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_megatron.algo.ppo import value_loss
from grpo_megatron.models.heads.scalar import ValueModel
from tests import tiny
from tests.models.policies import (
    LAYOUTS,
    Layout,
    Tensors,
    close,
    close_rows,
    local_batch,
    named_gradients,
    same,
    scalar,
    stream,
    whole_scalar,
    world,
)
from tests.models.test_reward_model import CLASSIFIERS
from tests.worlds import ranks

PAIRS = tiny.make_sequences(6)
pytestmark = pytest.mark.slow
CLIPRANGE = 0.5  # the default of critic.cliprange_value


def build(folder: Path, layout: Layout, *, offload: bool = False, dtype: str = "float32", **megatron: Any) -> Any:
    options: dict[str, Any] = {"model_class": ValueModel, "dtype": dtype, "offload": offload, "megatron": megatron}
    return scalar(folder, "value", layout, **options)


def make_batch(mesh: Any = None) -> Any:
    """Some tokens are outside the loss. `values` are where no test's critic is, so that some errors are clipped."""
    batch = tiny.make_batch(PAIRS, [], masked=True) if mesh is None else local_batch(PAIRS, mesh, 2, masked=True)
    batch.values = torch.nan_to_num(batch.old_logprobs + 4.6)
    batch.returns = torch.nan_to_num(batch.ref_logprobs + 4.6) + batch.advantages
    return batch


@ranks()
def values_of(folders: dict[str, Path], layout: Layout) -> Tensors:
    """Family -> values, in micro-batches of different sizes, one of them empty."""
    batch = tiny.make_batch(PAIRS, [[[0, 1], [2], [], [3, 4, 5]]])
    return {family: build(folder, layout).numbers(batch) for family, folder in folders.items()}


@ranks()
def updated(folder: Path, layout: Layout) -> dict[str, Any]:
    """Gradients of one backward pass; then values, metrics and weights of two updates, with and without offloading."""
    model = build(folder, layout, use_distributed_optimizer=False)  # leaves whole gradients on every rank
    batch = make_batch(model.mesh)
    model.forward_backward(batch, batch.mini_batches[0], functools.partial(value_loss, cliprange=CLIPRANGE))
    gradients = whole_scalar(model, named_gradients(model))
    return {"gradients": gradients, **trained_offloaded_or_not(folder, batch, layout)}


def trained_offloaded_or_not(folder: Path, batch: Any, layout: Layout, **options: Any) -> dict[str, Any]:
    """What `trained` returns, which must be the same bits with and without offloading."""
    plain, offloaded = (trained(build(folder, layout, offload=offload, **options), batch) for offload in (False, True))
    same(offloaded["weights"], plain["weights"])
    assert torch.equal(plain["values"], offloaded["values"]) and plain["metrics"] == offloaded["metrics"]
    assert offloaded["on_device"] < plain["on_device"] / 20
    return plain


@ranks(2)
def in_bfloat16(folder: Path) -> dict[str, Any]:
    """Two ranks, and weights that are gathered during the next forward pass."""
    batch, overlap = make_batch(world(LAYOUTS["DP2"])[1]), {"overlap_grad_reduce": True, "overlap_param_gather": True}
    return trained_offloaded_or_not(folder, batch, LAYOUTS["DP2"], dtype="bfloat16", **overlap)


def trained(model: Any, batch: Any) -> dict[str, Any]:
    for _ in range(2):
        first = model.numbers(batch)  # reads weights that the last update may have offloaded
        with model.in_use():
            sums, metrics = model.update_values(batch, CLIPRANGE, epochs=1)
    on_device = sum(parameter.untyped_storage().nbytes() for parameter in model.ddp.parameters())
    with model.in_use():
        weights = stream(model)
    totals = {name: (float(part.total), part.num_tokens) for name, part in sums[0].items()}
    return {"values": first, "metrics": metrics, "sums": totals, "weights": weights, "on_device": on_device}


@ranks()
def saved(folder: Path, layout: Layout, target: Path) -> torch.Tensor:
    """Two updates of an offloaded model, then a Hugging Face folder. Returns the values of all rows."""
    model = build(folder, layout, offload=True)
    trained(model, make_batch(model.mesh))
    with model.in_use():
        model.save_hf(target, folder)
    return model.numbers(tiny.make_batch(PAIRS, [[[row] for row in range(len(PAIRS))]]))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("critic")
    changes = {name: changes if name == "mixtral" else {} for name, changes in CLASSIFIERS.items()}  # no padding
    return {name: tiny.make_classifier(root / name, "Token", name, seed=2, **of) for name, of in changes.items()}


def transformers_values(model: Any, pairs: Any) -> list[torch.Tensor]:
    """The logit at the token before each response token."""
    return [model(torch.tensor([p + r])).logits[0, len(p) - 1 : -1, 0] for p, r in pairs]


@pytest.mark.parametrize("layout", ["1", "TP2xPP2+SP"])
def test_values_of_every_kind_equal_transformers(models: dict[str, Path], layout: str) -> None:
    """On every rank. The models cover biases, tied embeddings, llama3 RoPE, q/k norms and experts."""
    with torch.no_grad():
        want = {family: transformers_values(tiny.load_classifier(folder), PAIRS) for family, folder in models.items()}
    for got in values_of(LAYOUTS[layout].world, folders=models, layout=LAYOUTS[layout]):
        for family, rows in got.items():
            assert rows.std() > 0.1
            close_rows(rows, want[family], family)


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[str, Any]:
    return updated(1, folder=models["qwen2"], layout=LAYOUTS["1"])[0]


def test_gradients_equal_those_of_the_loss_over_transformers(models: dict[str, Path], alone: dict[str, Any]) -> None:
    model, batch = tiny.load_classifier(models["qwen2"]), make_batch()
    loss, clipped = torch.zeros(()), 0
    for row, new in enumerate(transformers_values(model, PAIRS)):
        old, target = batch.values[row, : len(new)], batch.returns[row, : len(new)]
        bounded = old + (new - old).clamp(-0.5, 0.5)
        errors = torch.stack([(new - target) ** 2, (bounded - target) ** 2])
        loss = loss + (batch.token_weights[row, : len(new)] * errors.max(0).values).sum() / 2
        clipped += int((errors[1] > errors[0])[batch.loss_mask[row, : len(new)]].sum())
    loss.backward()
    want = {name: parameter.grad for name, parameter in model.named_parameters()}
    close(alone["gradients"], want, 1e-5)
    assert 0 < clipped < int(batch.loss_mask.sum()) / 2


@pytest.mark.parametrize(
    "layout", [*(pytest.param(name, marks=pytest.mark.soak) for name in ("DP2", "TP2+SP")), "TP2xPP2+SP"]
)
def test_the_layout_changes_nothing(models: dict[str, Path], alone: dict[str, Any], layout: str) -> None:
    """Gradients, then the norm, metrics and weights of two updates. Offloading changes no bit of them in any layout."""
    for got in updated(LAYOUTS[layout].world, folder=models["qwen2"], layout=LAYOUTS[layout]):
        close(got["gradients"], alone["gradients"], 1e-5)
        close(got["weights"], alone["weights"], 1e-5)
        assert got["metrics"] == pytest.approx(alone["metrics"], rel=1e-5)


def test_bfloat16_and_overlapped_gathers(models: dict[str, Path], alone: dict[str, Any]) -> None:
    """Offloading changes no bit here either. The head stays float32, so values are near those of float32."""
    for got in in_bfloat16(folder=models["qwen2"]):
        assert got["weights"]["score.weight"].dtype == torch.float32
        assert got["weights"]["model.norm.weight"].dtype == torch.bfloat16
        assert got["metrics"]["critic/grad_norm"] == pytest.approx(alone["metrics"]["critic/grad_norm"], rel=0.05)


def test_a_critic_that_starts_as_a_language_model_is_saved_as_a_token_classifier(tmp_path: Path) -> None:
    """After two updates. transformers and another layout compute the same values from the folder."""
    folder, target = tiny.make_model(tmp_path / "model", "qwen2-tied", num_hidden_layers=2), tmp_path / "critic"
    results = saved(4, folder=folder, layout=LAYOUTS["TP2xPP2+SP"], target=target)
    with torch.no_grad():
        want = transformers_values(tiny.load_classifier(target), PAIRS)
    read = values_of(1, folders={"m": target}, layout=LAYOUTS["1"])
    assert min(expected.abs().max() for expected in want) > 1e-3  # the head is no longer zero
    for got in [*results, read[0]["m"]]:
        close_rows(got, want)
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForTokenClassification"] and len(config["id2label"]) == 1
