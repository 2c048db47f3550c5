"""The policy in bfloat16 on one GPU: against transformers on the same GPU, and against float32.

Not run on a GPU yet. Bounds for dense models in bf16, as for engine and policy: mean |difference| of the log-probabilities
0.012, k3 1e-3, mean exp|difference| 1.02. Two programs that round at different points cannot be closer than rounding:
bfloat16 has a relative step of 2**-8 = 0.004.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import conftest, training_ranks
from tests.gpu.building import mean_error, worst_angle

LOCAL, TE = {"transformer_impl": "local"}, {"transformer_impl": "transformer_engine"}


@pytest.fixture(scope="module")
def exact_and_local(medium: Path) -> list[dict[str, Any]]:
    """Log-probabilities and gradients of local layers in float32 and in bf16."""
    dtypes = ["float32", "bfloat16"]
    (results,) = conftest.run(training_ranks.in_each_dtype, folder=medium, megatron=LOCAL, dtypes=dtypes)
    return list(results)


@pytest.mark.parametrize("layers", ["local", "transformer_engine"])
def test_policy_equals_transformers(medium: Path, record_figure: Callable[..., None], layers: str) -> None:
    """As near to transformers in bf16 as bf16 allows, and at most twice as far from the exact values as transformers is."""
    if layers == "transformer_engine":
        conftest.needs_transformer_engine()
    (got,) = conftest.run(training_ranks.against_transformers, folder=medium, megatron={"transformer_impl": layers})
    for name in ("layers", "tokens", "mean", "max", "k3", "mult_prob_error", "own_error", "their_error", "spread"):
        record_figure(name, got[name])
    assert got["layers"] == ("ColumnParallelLinear" if layers == "local" else "TELayerNormColumnParallelLinear")
    assert got["tokens"] > 1000 and got["spread"] > 0.05  # the tokens differ, so that a shift by one would show
    assert got["mean"] <= 0.012
    assert got["k3"] <= 1e-3
    assert got["mult_prob_error"] <= 1.02
    assert got["own_error"] <= 2 * got["their_error"] + 1e-3


@pytest.mark.parametrize(("layers", "dtype"), [("local", "float32"), ("transformer_engine", "bfloat16")])
def test_a_model_that_reads_images_equals_transformers(
    reads_images: Path, record_figure: Callable[..., None], layers: str, dtype: str
) -> None:
    """In bf16 at most twice as far from float32 as transformers is on a CPU. A float32 convolution may be TF32: 2**-11."""
    if layers == "transformer_engine":
        conftest.needs_transformer_engine()
    megatron = {"transformer_impl": layers}
    (got,) = conftest.run(
        training_ranks.images_against_transformers, folder=reads_images, megatron=megatron, dtype=dtype
    )
    for name in ("layers", "own_error", "their_error", "spread", "cosine"):
        record_figure(name, got[name])
    assert got["layers"] == ("ColumnParallelLinear" if layers == "local" else "TELayerNormColumnParallelLinear")
    assert got["spread"] > 0.05
    assert got["own_error"] <= (1e-3 if dtype == "float32" else 2 * got["their_error"] + 1e-3)
    assert got["cosine"] >= (0.999 if dtype == "float32" else 0.98), got["name"]


def test_local_layers_in_bf16_follow_float32(
    exact_and_local: list[dict[str, Any]], record_figure: Callable[..., None]
) -> None:
    exact, local = exact_and_local
    error, (cosine, name) = mean_error(local, exact), worst_angle(local["gradients"], exact["gradients"])
    record_figure("log-probabilities, mean error", error)
    record_figure("gradients' least cosine", cosine)
    assert local["layers"] == "ColumnParallelLinear"
    assert error <= 0.02
    assert cosine >= 0.98, name


def test_transformer_engine_in_bf16_is_as_exact_as_local_layers(
    medium: Path, request: pytest.FixtureRequest, record_figure: Callable[..., None]
) -> None:
    """Its error against float32 is at most twice that of the local layers. Its gradients have the same direction."""
    conftest.needs_transformer_engine()
    (te,) = conftest.run(training_ranks.logprobs_and_gradients, folder=medium, megatron=TE, dtype="bfloat16")
    exact, local = request.getfixturevalue("exact_and_local")  # not before the reason to skip
    assert te["layers"] == "TELayerNormColumnParallelLinear"
    errors = mean_error(te, exact), mean_error(local, exact)
    cosine, name = worst_angle(te["gradients"], local["gradients"])
    record_figure("mean error of TE, of local layers", errors)
    record_figure("gradients' least cosine", cosine)
    assert errors[0] <= 2 * errors[1] + 1e-3
    assert cosine >= 0.98, name


@pytest.mark.parametrize("layers", ["local", "transformer_engine"])
def test_a_merged_weight_lives_for_one_layer(medium: Path, record_figure: Callable[..., None], layers: str) -> None:
    """It is merged once forward and once backward, and no node keeps it (TE's LayerNormLinear stores it)."""
    if layers == "transformer_engine":
        conftest.needs_transformer_engine()
    got, *others = (
        conftest.run(training_ranks.with_adapters, folder=medium, megatron=megatron)[0]
        for megatron in ([LOCAL] if layers == "local" else [TE, LOCAL])
    )
    record_figure("merges per micro-batch", got["merges"])
    record_figure("merged weights at a time, at most", got["alive"])
    assert got["merges"] == 2 and got["alive"] <= 2
    for other in others:
        cosine, name = worst_angle(got["gradients"], other["gradients"])
        record_figure("gradients' least cosine", cosine)
        assert cosine >= 0.98, name


def test_a_row_has_the_same_bits_alone_and_among_others(medium: Path, record_figure: Callable[..., None]) -> None:
    """`actor.megatron.batch_invariant`: Megatron-Core's own kernels, and flash-attn."""
    conftest.needs_transformer_engine()
    pytest.importorskip("flash_attn")
    megatron = {**TE, "batch_invariant": True}
    (got,) = conftest.run(training_ranks.alone_and_together, folder=medium, megatron=megatron)
    record_figure("largest difference", got["worst"])
    assert got["layers"] == "TELayerNormColumnParallelLinear"
    assert got["worst"] == 0.0


# -- the optimizer ----------------------------------------------------------------------------------------------------


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
    for name in ("optimizer", "saved_tensors", "difference"):
        record_figure(name, got[name])
    assert got["state"] and got["saved_tensors"] > 0
    assert got["weights"]


def test_resume_with_transformer_engines_layers(
    medium: Path, tmp_path: Path, record_figure: Callable[..., None]
) -> None:
    """The restored state is bitwise the same. The next updates may differ: the kernels add in no fixed order."""
    conftest.needs_transformer_engine()
    (got,) = conftest.run(training_ranks.resumed, folder=medium, checkpoint=tmp_path / "saved", megatron=TE)
    record_figure("optimizer", got["optimizer"])
    record_figure("later weights differ by", got["difference"])
    assert got["optimizer"].startswith("transformer_engine")
    assert got["state"]
    assert got["difference"] <= 4e-3  # two updates of at most 1e-3, in opposite directions
