"""Two GPUs learn as one, and engines over them have the policy's weights. Not run on a GPU yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import conftest, engine_ranks, training_ranks
from tests.gpu.building import mean_error, worst_angle
from tests.rollout.test_second_runner import expected_routes, make_experts

TE = {"transformer_impl": "transformer_engine"}
TP2 = {"tensor_model_parallel_size": 2}


@pytest.fixture(scope="module")
def te(medium: Path) -> dict[str, Any]:
    conftest.needs_transformer_engine()
    return conftest.run(training_ranks.logprobs_and_gradients, folder=medium, megatron=TE, dtype="bfloat16")[0]


@pytest.mark.parametrize("layout", [{}, TP2], ids=["DP2", "TP2"])
def test_two_gpus_learn_as_one(
    medium: Path, request: pytest.FixtureRequest, record_figure: Callable[..., None], layout: dict[str, Any]
) -> None:
    """Every step's loss over NCCL, within 2 percent of one GPU's."""
    conftest.needs_devices(2)
    one = request.getfixturevalue("bf16")
    got = conftest.run(training_ranks.loss_curve, 2, folder=medium, megatron=layout, steps=30)
    pairs = list(zip(got[0]["losses"], one["losses"], strict=True))
    record_figure("last loss of two, of one", pairs[-1])
    record_figure("largest difference", max(abs(a - b) for a, b in pairs))
    assert got[0]["losses"] == got[1]["losses"] and got[0]["finite"]
    assert all(abs(a - b) <= 0.02 * b for a, b in pairs)


@pytest.mark.parametrize("is_parallel", [False, True], ids=["TP2", "TP2+SP"])
def test_copies_on_two_gpus_stay_equal(reads_images: Path, is_parallel: bool) -> None:
    """Bit for bit, although kernels of the tower's backward pass are not deterministic."""
    conftest.needs_devices(2)
    layout = {**TP2, "sequence_parallel": is_parallel}
    first, second = conftest.run(training_ranks.copies, 2, folder=reads_images, megatron=layout, steps=4)
    assert any(name.startswith("module.") and ".visual." in name for name in first)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize(
    ("layout", "rollout_tp"), [({}, 1), (TP2, 2), (TP2, 1)], ids=["DP2", "TP2-engine-TP2", "TP2-two-engines"]
)
def test_engine_on_two_gpus_has_the_policys_weights(
    medium: Path, record_figure: Callable[..., None], layout: dict[str, Any], rollout_tp: int
) -> None:
    conftest.needs_devices(2)
    conftest.needs_vllm()
    rollout = {"tensor_model_parallel_size": rollout_tp, "enforce_eager": True}
    results = conftest.run(engine_ranks.cycles, 2, folder=medium, count=2, tolerance=0.1, megatron=layout, **rollout)
    record_figure("runner", results[0]["runner"])
    record_figure("gap in each cycle, mean", [mean for mean, _ in results[0]["gaps"]])
    for got in results:
        assert max(mean for mean, _ in got["gaps"]) <= 0.012
        assert got["stale"] >= 3 * max(mean for mean, _ in got["gaps"])


@pytest.mark.parametrize("tp", [1, 2])
def test_routes_are_those_of_transformers_in_every_rollout(
    tmp_path: Path, record_figure: Callable[..., None], tp: int
) -> None:
    """In bfloat16, where some choices differ; of 2 of 4 experts, those of another token have half by chance."""
    conftest.needs_gpu("recording routes")
    conftest.needs_devices(tp)
    conftest.needs_vllm()
    folder = make_experts(tmp_path)
    first, *others = conftest.run(engine_ranks.routes, tp, folder=folder, tp=tp)
    sequences, routes, _ = zip(*first["sequences"], strict=True)
    same = [
        (torch.from_numpy(own).view(wanted.shape).long().sort(-1).values == wanted).float().mean().item()
        for own, wanted in zip(routes, expected_routes(folder, list(sequences), 2), strict=True)
    ]
    record_figure("least share of equal choices", min(same))
    record_figure("batches that were scheduled ahead", first["ahead"])
    assert min(same) >= 0.9
    for other in others:
        assert [ids for ids, *_ in other["sequences"]] == list(sequences)


def test_context_parallel_ranks_compute_what_one_does(medium: Path, te: dict[str, Any]) -> None:
    """Two GPUs: log-probabilities and summed gradients of CP 2 against CP 1, in bf16."""
    conftest.needs_devices(2)
    split = {**TE, "context_parallel_size": 2}
    both = conftest.run(training_ranks.logprobs_and_gradients, 2, folder=medium, megatron=split, dtype="bfloat16")
    assert torch.equal(both[0]["logprobs"], both[1]["logprobs"])
    for got in both:
        assert mean_error(got, te) <= 0.02
        cosine, name = worst_angle(got["gradients"], te["gradients"])
        assert cosine >= 0.98, name


def test_a_link_reaches_its_share_of_the_rails(record_figure: Callable[..., None]) -> None:
    """An all-reduce of 256 MB by the preflight's own floor: at least 20 GB/s, and 0.4 of a rail."""
    conftest.needs_devices(2)
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("these GPUs reach each other through the host, which no floor is meant for")
    for rails, problems in conftest.run(training_ranks.links, 2):
        record_figure("GB/s of a rail", rails)
        assert problems == []
