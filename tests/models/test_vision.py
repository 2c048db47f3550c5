"""Models that read images, over layouts, against transformers with embeddings and positions (tests/vision.py).

Rows with 1, 0, 2 and 1 images of four sizes, and an `<|image_pad|>` in every response, which is an ordinary token. The bounds are
those of test_layouts.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny, vision, worlds
from tests.models import policy_ranks, vision_ranks
from tests.models.vision_ranks import PAIRS, ROWS

pytestmark = [pytest.mark.slow, pytest.mark.both_stacks]
EXACT = 1e-5
TRAINED = {"vision": {"freeze_tower": False, "freeze_merger": False}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision")
    return {family: vision.make_model(root / family, family) for family in vision.TOWERS}


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, tuple[list[torch.Tensor], dict[str, torch.Tensor]]]:
    """Family -> log-probabilities of each row, gradients by the names in files."""
    return {family: oracle(folder) for family, folder in models.items()}


def oracle(folder: Path) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    from torch.nn.functional import pad

    from grpo_megatron.algo.losses import LossInputs

    model, batch = vision.load(folder), tiny.make_batch(PAIRS, [])
    width, logprobs, entropies = batch.response_mask.shape[1], [], []
    for prompt, images, response in ROWS:
        log_p = vision.logits(model, [*prompt, *response], images)[len(prompt) - 1 : -1].log_softmax(-1)
        padding = (0, width - len(response))
        logprobs.append(pad(log_p.gather(1, torch.tensor(response).unsqueeze(1)).squeeze(1), padding))
        entropies.append(pad(-(log_p.exp() * log_p).sum(-1), padding))
    names = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "token_weights")
    given = {name: getattr(batch, name) for name in names}
    inputs = LossInputs(logprobs=torch.stack(logprobs), entropy=torch.stack(entropies), mask=batch.loss_mask, **given)
    policy_ranks.loss(inputs)[0].backward()
    gradients = {vision.in_file(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [row.detach() for row in logprobs], gradients


def close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Relative to each tensor's largest entry."""
    for name, tensor in got.items():
        worst = ((tensor - want[name]).abs().max() / want[name].abs().max()).item()
        assert worst <= EXACT, f"{name}: {worst}"


OF_EVERY_RUN = [("qwen2_5_vl", "1"), ("qwen2_vl", "1"), ("qwen2_5_vl", "TP2xPP2+SP"), ("qwen2_5_vl", "TP2")]
IN_THE_SOAK = [("qwen2_5_vl", name) for name in ("TP2+SP", "PP2", "DP2", "DP2xTP2")]
IN_THE_SOAK += [("qwen2_vl", name) for name in ("TP2", "TP2+SP", "PP2", "DP2")]


@pytest.mark.parametrize(
    ("family", "layout"), [*OF_EVERY_RUN, *(pytest.param(*case, marks=pytest.mark.soak) for case in IN_THE_SOAK)]
)
def test_logprobs_and_gradients_equal_transformers(
    models: dict[str, Path], expected: dict[str, Any], family: str, layout: str
) -> None:
    """The tower is trained. Its gradients are whole on the first stage, and in the norm once. TP2 recomputes."""
    shape = policy_ranks.LAYOUTS[layout]
    logprobs, gradients = expected[family]
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    given: dict[str, Any] = {"folder": models[family], "layout": shape, "recompute": layout == "TP2", **TRAINED}
    for result in worlds.run(vision_ranks.gradients, shape[0], **given):
        for row, got in result["logprobs"].items():
            torch.testing.assert_close(
                got[: len(PAIRS[row][1])], logprobs[row][: len(PAIRS[row][1])], rtol=0, atol=1e-5
            )
        for packing in result["packings"].values():
            assert packing.keys() == gradients.keys()
            close(packing, gradients)
        assert result["norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_what_is_frozen_stays_and_is_computed_once(models: dict[str, Path]) -> None:
    """A frozen tower computes each of the four images once for three passes, a trained one at every pass."""
    (found,) = worlds.run(vision_ranks.freezing, 1, folder=models["qwen2_5_vl"])
    first = vision.load(models["qwen2_5_vl"]).state_dict()
    before = {vision.in_file(name): tensor for name, tensor in first.items()}
    for (tower, merger), result in found.items():
        assert any(".merger." in name for name in result["trained"]) == (not merger)
        assert any(".merger." not in name for name in result["trained"]) == (not tower)
        assert result["computed"] == (4 if tower and merger else 12)
        torch.testing.assert_close(result["before"], found[True, True]["before"], rtol=0, atol=0)
        for name, tensor in result["weights"].items():
            is_frozen = name.startswith("visual.") and (merger if ".merger." in name else tower)
            assert torch.equal(tensor, before[name]) == is_frozen, name
    # The log-probabilities after the update are those of the new weights, also of the tower's.
    model = vision.load(models["qwen2_5_vl"])
    model.load_state_dict({name: found[False, False]["weights"][vision.in_file(name)] for name in first})
    for row, (prompt, images, response) in enumerate(ROWS):
        want = vision.logprobs(model, prompt, images, response).detach()
        torch.testing.assert_close(found[False, False]["after"][row, : len(response)], want, rtol=0, atol=1e-5)


def test_a_reference_off_the_device_keeps_its_features(models: dict[str, Path]) -> None:
    assert worlds.run(vision_ranks.reference, 1, folder=models["qwen2_vl"]) == [4]


def test_the_tower_has_its_own_learning_rate(models: dict[str, Path]) -> None:
    """A hundredth of the others' at every step of the schedule: warm-up to the maximum, then a line to a tenth of it."""
    (found,) = worlds.run(vision_ranks.rates, 1, folder=models["qwen2_5_vl"])
    assert found["others"] == pytest.approx([1e-2, 5.5e-3, 1e-3])
    assert found["tower"] == pytest.approx([rate / 100 for rate in found["others"]])


def test_bfloat16_keeps_the_angles_of_the_tower_in_float32(models: dict[str, Path], expected: dict[str, Any]) -> None:
    (found,) = worlds.run(vision_ranks.low_precision, 1, folder=models["qwen2_5_vl"])
    assert found["types"] == ({torch.bfloat16}, {torch.float32})
    for row, (_, response) in enumerate(PAIRS):
        want = expected["qwen2_5_vl"][0][row][: len(response)]
        assert (found["logprobs"][row, : len(response)] - want).abs().mean() < 0.1  # 0.03 (measured)


@pytest.mark.parametrize("mode", ["merged", "split"])
def test_adapters_of_the_decoder_learn_beside_a_frozen_tower(
    models: dict[str, Path], expected: dict[str, Any], mode: str
) -> None:
    """In every layout the same, with recomputed layers, whose gradients a frozen embedding would lose without a word."""
    results = [
        worlds.run(vision_ranks.lora, layout[0], folder=models["qwen2_5_vl"], layout=layout, mode=mode)[0]
        for layout in (policy_ranks.LAYOUTS[name] for name in ("1", "TP2+SP", "PP2"))
    ]
    for result in results:
        for row, (_, response) in enumerate(PAIRS):
            want = expected["qwen2_5_vl"][0][row][: len(response)]
            torch.testing.assert_close(result["before"][row, : len(response)], want, rtol=0, atol=1e-5)
        assert all(name.endswith(("lora_a", "lora_b")) and name.startswith("decoder.") for name in result["names"])
        assert result["norm"] == pytest.approx(results[0]["norm"], rel=1e-5) and result["norm"] > 0
        torch.testing.assert_close(result["after"], results[0]["after"], rtol=0, atol=1e-4)
    model = vision.load(models["qwen2_5_vl"])
    model.load_state_dict({n: results[0]["weights"][vision.in_file(n)] for n in model.state_dict()})
    for row, (prompt, images, response) in enumerate(ROWS):
        want = vision.logprobs(model, prompt, images, response).detach()
        torch.testing.assert_close(results[0]["after"][row, : len(response)], want, rtol=0, atol=1e-5)


def test_a_checkpoint_goes_through_changes_of_layout(models: dict[str, Path], tmp_path: Path) -> None:
    """Three updates with a trained tower: each in another layout, from the checkpoint of the one before, or on one rank."""
    weights = []
    for number, names in enumerate((("1", "1", "1"), ("TP2+SP", "PP2", "DP2xTP2"))):
        load = None
        for step, name in enumerate(names):
            layout, save = policy_ranks.LAYOUTS[name], tmp_path / f"{number}-{step}"
            arguments: dict[str, Any] = {"folder": models["qwen2_5_vl"], "layout": layout, "load": load, "save": save}
            (result, *_) = worlds.run(vision_ranks.checkpoint, layout[0], **arguments)
            load = save
        weights.append(result)
    before = vision.load(models["qwen2_5_vl"]).state_dict()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=2e-5, msg=name)
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, weights[0][vision.in_file(name)])}
    assert changed == before.keys()


@pytest.mark.parametrize("layout", [pytest.param("1", marks=pytest.mark.soak), "TP2+SP", "PP2"])
def test_the_transformers_engine_computes_what_the_policy_does(models: dict[str, Path], layout: str) -> None:
    """After each of three syncs of a policy whose tower is trained. Draws are those of each request alone."""
    shape = policy_ranks.LAYOUTS[layout]
    for result in worlds.run(vision_ranks.serve, shape[0], folder=models["qwen2_5_vl"], layout=shape):
        assert max(result["differences"]) <= 1e-5
        model = vision.load(models["qwen2_5_vl"])
        model.load_state_dict({n: result["weights"][vision.in_file(n)] for n in model.state_dict()})
        for prompt, images, response, logprobs in [*result["draws"], result["continued"]]:
            want = vision.logprobs(model, prompt, images, response).detach()
            torch.testing.assert_close(torch.tensor(logprobs), want, rtol=0, atol=1e-5)
        draws = [response for _, _, response, _ in result["draws"]]
        assert draws[0] != draws[-1]  # equal text and seed, another image
