"""The optimizer on one GPU (Transformer Engine's, if installed): resume and offload. Not run on a GPU yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu import conftest, training_ranks
from tests.gpu.building import ON_CPU


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
def test_a_resumed_run_is_bitwise_the_same(
    medium: Path, tmp_path: Path, record_figure: Callable[..., None], distributed: bool
) -> None:
    """The state, and the weights two updates later. With local layers, whose kernels can be made deterministic."""
    megatron = {
        "transformer_impl": "local",
        "use_distributed_optimizer": distributed,
        "override_transformer_config": {"deterministic_mode": True},
    }
    (got,) = conftest.run(training_ranks.resumed, folder=medium, checkpoint=tmp_path / "saved", megatron=megatron)
    record_figure("optimizer", got["optimizer"])
    record_figure("tensors in its state", got["saved_tensors"])
    record_figure("later weights differ by", got["difference"])
    assert got["state"] and got["saved_tensors"] > 0
    assert got["weights"]


def test_an_offloaded_optimizer_frees_its_memory(medium: Path, record_figure: Callable[..., None]) -> None:
    (got,) = conftest.run(training_ranks.offloaded, folder=medium)
    record_figure("freed", got["freed"], "MiB")
    record_figure("states and gradients", got["held"], "MiB")
    record_figure("offload", got["offload_s"], "s")
    record_figure("onload", got["onload_s"], "s")
    assert ON_CPU or got["freed"] >= 0.95 * got["held"]
    assert got["finite"]
