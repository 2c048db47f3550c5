"""The backbone: any layout gives the same log-probabilities, gradients and weights, and transformers agrees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import tiny, worlds
from tests.models import ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: tiny.make_model(root / family, family) for family in tiny.FAMILIES}


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("layout", ranks.LAYOUTS)
def test_logprobs_equal_transformers(models: dict[str, Path], family: str, layout: str) -> None:
    pairs = tiny.make_sequences(6)
    expected = tiny.transformers_logprobs(models[family], pairs)
    shape = ranks.LAYOUTS[layout]
    for got in worlds.run(ranks.logprobs, shape[0], folder=models[family], pairs=pairs, layout=shape):
        for row, want in enumerate(expected):
            torch.testing.assert_close(got[row, : len(want)], want, rtol=0, atol=1e-5)
            assert (got[row, len(want) :] == 0).all()


def close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float) -> None:
    """Relative to each tensor's largest entry: an element near zero has no relative precision of its own."""
    assert got.keys() == want.keys()
    for name in want:
        scale = want[name].abs().max()
        assert scale > 0, name
        worst = ((got[name] - want[name]).abs().max() / scale).item()
        assert worst <= tolerance, f"{name}: {worst}"


@pytest.fixture(scope="module", params=["qwen3", "qwen2-tied"])
def reference_update(request: pytest.FixtureRequest, models: dict[str, Path]) -> tuple[Path, dict]:
    folder = models[request.param]
    pairs = tiny.make_sequences(6)
    result = worlds.run(ranks.update, 1, folder=folder, pairs=pairs, layout=ranks.LAYOUTS["1"], micro=2)[0]
    return folder, result


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("layout", [name for name in ranks.LAYOUTS if name != "1"])
def test_gradients_and_weights_do_not_depend_on_the_layout(
    reference_update: tuple[Path, dict], layout: str, distributed: bool
) -> None:
    folder, want = reference_update
    shape = ranks.LAYOUTS[layout]
    pairs = tiny.make_sequences(6)
    results = worlds.run(
        ranks.update, shape[0], folder=folder, pairs=pairs, layout=shape, micro=2, distributed=distributed
    )
    for got in results:
        if not distributed:
            close(got["gradients"], want["gradients"], 1e-5)
        close(got["weights"], want["weights"], 1e-5)
        assert got["norms"] == pytest.approx(want["norms"], rel=1e-6)


@pytest.mark.parametrize("micro", [1, 3, 6])
def test_micro_batches_and_packing_change_nothing(reference_update: tuple[Path, dict], micro: int) -> None:
    folder, want = reference_update
    pairs = tiny.make_sequences(6)
    got = worlds.run(ranks.update, 1, folder=folder, pairs=pairs, layout=ranks.LAYOUTS["1"], micro=micro)[0]
    close(got["gradients"], want["gradients"], 1e-6)
    close(got["weights"], want["weights"], 1e-6)
