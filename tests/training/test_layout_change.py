"""A checkpoint goes through six changes of layout, and changed optimizer settings are used in each later update.

Every layout loads what the one before has saved, saves it again at once (weights and Adam's state must be the same bits),
and updates once. Loss, gradient norm and weights must be those of one rank that is never stopped, within 1e-5.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny, worlds
from tests.models.policies import Layout
from tests.stored import same_stored
from tests.training import layout_change_ranks

QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
CHAIN: list[Layout] = [  # the first checkpoint is of one rank
    Layout(2, tp=2, sp=None),
    Layout(2, ep=2),
    Layout(2, pp=2),
    Layout(4, tp=2, pp=2, sp=None),
    Layout(4),
    Layout(4, pp=2, ep=2),
]
PAIRS = tiny.make_sequences(6, longest=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("layouts") / "model", "llama2", num_hidden_layers=2, **QWEN3_MOE)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chain")


@pytest.fixture(scope="module")
def alone(model: Path, out: Path) -> dict[str, Any]:
    """One rank: the run that is never stopped, which leaves the first checkpoint in `out`, and the changed settings."""
    arguments: dict[str, Any] = {"model": model, "pairs": PAIRS, "out": out, "num_updates": 1 + len(CHAIN)}
    (result,) = worlds.run(layout_change_ranks.alone, 1, **arguments)
    return dict(result)


@pytest.mark.slow
def test_six_changes_of_layout(model: Path, out: Path, alone: dict[str, Any]) -> None:
    for done, layout in enumerate(CHAIN, start=1):
        results = worlds.run(
            layout_change_ranks.one_update,
            layout[0],
            model=model,
            pairs=PAIRS,
            out=out,
            layout=layout,
            done=done,
            num_updates=1 + len(CHAIN),
        )
        name = f"checkpoints/step_{done:06d}"
        same_stored(out / name, out / "again" / name)
        want = alone["updates"][done]
        for got in results:
            assert got["lr"] == want["lr"]
            assert got["loss"] == pytest.approx(want["loss"], abs=1e-5), layout
            assert got["norm"] == pytest.approx(want["norm"], rel=1e-5), layout
            assert got["weights"].keys() == want["weights"].keys()
            for tensor_name, tensor in want["weights"].items():
                torch.testing.assert_close(got["weights"][tensor_name], tensor, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_changed_settings_are_used_and_other_mini_batches_keep_the_training_step(alone: dict[str, Any]) -> None:
    """A linear schedule of 2 updates ends at 0. Extended to 5, it falls from 2e-3 to 5e-4: 1 - n/5 of the way at update n.

    Three training steps are done, with 2 updates each: in a schedule of 2, 4 and 1 updates per training step.
    """
    for number, update in enumerate(alone["settings"], start=1):
        is_changed = number > 2
        rate = 5e-4 + 1.5e-3 * (1 - number / 5) if is_changed else 1e-3 * (1 - number / 2)
        for group in update["groups"]:
            assert group["lr"] == pytest.approx(rate, abs=1e-12)
            assert group["betas"] == ((0.8, 0.9) if is_changed else (0.9, 0.999))
            assert group["eps"] == (1e-3 if is_changed else 1e-4)
            assert group["weight_decay"] == pytest.approx((0.1 if is_changed else 0.01) * group["wd_mult"])
        assert update["steps"] == {number}  # Adam's bias correction goes on
        assert any(group["wd_mult"] == 1 for group in update["groups"])
    assert alone["positions"] == [6, 12, 3]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(2), Layout(4, tp=2, sp=None), Layout(4, pp=2, ep=2)])
def test_every_rank_writes_its_share_of_what_megatron_would_gather(model: Path, tmp_path: Path, layout: Layout) -> None:
    """Both kinds of checkpoint have the same tensors, and both readers read both. Older checkpoints are of the second kind."""
    worlds.run(layout_change_ranks.in_both_ways, layout[0], model=model, pairs=PAIRS, out=tmp_path, layout=layout)

    def written(name: str) -> list[int]:
        folder = tmp_path / name / "checkpoints/step_000001/state"
        return [sum(file.stat().st_size for file in folder.glob(f"__{rank}_*.distcp")) for rank in range(layout[0])]

    for name in ("whole", "whole again", "pieces again"):
        same_stored(tmp_path / "pieces/checkpoints/step_000001", tmp_path / name / "checkpoints/step_000001")
    pieces, whole = written("pieces"), written("whole")
    assert layout[2] > 1 or max(pieces) < 1.15 * min(pieces), pieces  # stages differ
    assert max(pieces) < 0.7 * max(whole), (pieces, whole)  # of the last layout's experts each has one holder
