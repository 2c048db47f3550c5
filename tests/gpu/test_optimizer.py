"""The optimizer on one GPU (Transformer Engine's, if installed): resume and offload. Not run on a GPU yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu import conftest, gpu_ranks


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
def test_a_resumed_run_is_bitwise_the_same(
    medium: Path, tmp_path: Path, figure: Callable[[str], None], distributed: bool
) -> None:
    """The state, and the weights two updates later. With local layers, whose kernels can be made deterministic."""
    megatron = {
        "transformer_impl": "local",
        "use_distributed_optimizer": distributed,
        "override_transformer_config": {"deterministic_mode": True},
    }
    (got,) = conftest.run(gpu_ranks.resumed, folder=medium, checkpoint=tmp_path / "saved", megatron=megatron)
    figure(
        f"resume with {got['optimizer']}: {got['saved_tensors']} tensors, later weights differ by {got['difference']:g}"
    )
    assert got["state"] and got["saved_tensors"] > 0
    assert got["weights"]


def test_resume_with_transformer_engines_layers(medium: Path, tmp_path: Path, figure: Callable[[str], None]) -> None:
    """The restored state is bitwise the same. The next updates may differ: the kernels add in no fixed order."""
    conftest.needs_transformer_engine()
    (got,) = conftest.run(
        gpu_ranks.resumed,
        folder=medium,
        checkpoint=tmp_path / "saved",
        megatron={"transformer_impl": "transformer_engine"},
    )
    figure(f"resume with {got['optimizer']} and TE layers: later weights differ by {got['difference']:g}")
    assert got["optimizer"].startswith("transformer_engine")
    assert got["state"]
    assert got["difference"] <= 4e-3  # two updates of at most 1e-3, in opposite directions


def test_an_offloaded_optimizer_frees_its_memory(medium: Path, figure: Callable[[str], None]) -> None:
    (got,) = conftest.run(gpu_ranks.offloaded, folder=medium)
    figure(
        f"optimizer offload: {got['freed']:.2f} of {got['held']:.2f} GiB free, offload {got['offload_s']:.2f} s,"
        f" onload {got['onload_s']:.2f} s"
    )
    assert got["freed"] >= 0.9 * got["held"]
    assert got["finite"]
