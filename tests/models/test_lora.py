"""LoRA: PEFT on transformers agrees, in every layout, and what is served is what is trained.

The reference is PEFT's own forward and backward pass over transformers' model, with all factors random (B, too: with zeros,
A would have no gradient). Bounds are relative to a tensor's largest entry.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny, worlds
from tests.models import lora_ranks
from tests.models.gradients import transformers_backward
from tests.models.policy_ranks import loss

PAIRS = tiny.make_sequences(6)
ALL = {"rank": 3, "alpha": 5.0}
SOME = {
    "rank": 3,
    "alpha": 5.0,
    "target_modules": ["q_proj", "v_proj", "down_proj", "up_proj"],
    "exclude_modules": ["layers.1.mlp.up_proj"],
}
FAMILIES = {"llama2": ALL, "qwen2": SOME, "qwen3": ALL}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: tiny.make_model(root / family, family) for family in FAMILIES}


def peft_model(folder: Path, lora: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """transformers' model after one backward pass with PEFT's adapters, and their random factors by PEFT's names."""
    import peft

    settings = {
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "target_modules": lora.get("target_modules", "all-linear"),
    }
    settings["exclude_modules"] = lora.get("exclude_modules")
    values: dict[str, torch.Tensor] = {}

    def adapt(model: Any) -> None:
        wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
        generator = torch.Generator().manual_seed(5)
        for name, parameter in sorted(wrapped.named_parameters()):
            if parameter.requires_grad:
                parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
                values[name.replace(".default", "")] = parameter.detach().clone()

    return transformers_backward(folder, PAIRS, loss, adapt=adapt), values


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, Any]:
    return {family: peft_model(models[family], lora) for family, lora in FAMILIES.items()}


def check(result: dict[str, Any], model: Any, values: dict[str, torch.Tensor], folder: Path) -> None:
    for row, (_, response) in enumerate(PAIRS):
        got, want = result["logprobs"][row], model.expected_logprobs[row, : len(response)]
        torch.testing.assert_close(got[: len(response)], want, rtol=0, atol=1e-5)
    gradients = {
        f"base_model.model.{name.replace('.default', '')}": p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    assert gradients.keys() == values.keys() == result["gradients"].keys()
    for name, want in gradients.items():
        error = (result["gradients"][name] - want).abs().max() / want.abs().max()
        assert error < 1e-5, f"{name}: {error:.1e}"
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    assert result["norm"] == pytest.approx(norm, rel=1e-5)
    assert torch.equal(result["first"], result["base"])  # B is zero at first
    assert not torch.equal(result["logprobs"], result["base"])


@pytest.mark.parametrize("layout", ["1", "TP2", "TP2+SP", "PP2", "DP2", "TP4+SP"])
def test_values_and_gradients_equal_peft(models: dict[str, Path], expected: dict[str, Any], layout: str) -> None:
    shape = lora_ranks.LAYOUTS[layout]
    cases = [(family, {**lora, "mode": mode}, {}) for family, lora in FAMILIES.items() for mode in ("merged", "split")]
    values = {family: expected[family][1] for family in FAMILIES}
    for results in worlds.run(
        lora_ranks.passes, shape[0], folders=models, layout=shape, pairs=PAIRS, values=values, cases=cases
    ):
        for (family, _, _), result in zip(cases, results, strict=True):
            check(result, *expected[family], models[family])
