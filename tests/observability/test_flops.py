"""FLOP and MFU: PEERS V16, Qwen2.5-7B's shape and one sequence of 1000 tokens.

layers: 28 * (3*3584*18944 + 3584*(2*28*128 + 2*4*128)) = 28 * (203 685 888 + 29 360 128) = 6 525 288 448
embedding and head: 2*152064*3584 = 1 089 994 752                                       N = 7 615 283 200
6 N T = 4.56916992e13;  6*128*28*28*1000^2 = 6.02112e11;  together 4.62938112e13
In 0.1 s on one H100: 462.938 TFLOP/s = .4681 of 989, .2339 of 1979.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from grpo_megatron.config import Config
from grpo_megatron.observability.flops import (
    ModelShape,
    flops_per_pass,
    linear_flops_per_pass,
    mfu,
    mfu_metrics,
    peak_tflops,
    peaks,
)

QWEN_7B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
SHAPE = ModelShape.from_hf(QWEN_7B)


def test_v16() -> None:
    assert SHAPE.head_dim == 128
    assert SHAPE.num_parameters == 7_615_283_200
    assert flops_per_pass(SHAPE, [1000]) == pytest.approx(4.62938112e13, rel=1e-12)
    assert flops_per_pass(SHAPE, [1000], forward_only=True) == pytest.approx(4.62938112e13 / 3, rel=1e-12)
    assert mfu(flops_per_pass(SHAPE, [1000]), 0.1, 1, 989.0) == pytest.approx(0.4681, abs=5e-5)
    assert mfu(flops_per_pass(SHAPE, [1000]), 0.1, 1, 1979.0) == pytest.approx(0.2339, abs=5e-5)


def test_attention_counts_squares_of_sequences_not_of_the_batch() -> None:
    """[600, 400]: same 6 N T, squares 360 000 + 160 000 = 520 000 instead of 1 000 000."""
    assert flops_per_pass(SHAPE, [1000]) - flops_per_pass(SHAPE, [600, 400]) == 6 * 128 * 28 * 28 * 480_000
    assert flops_per_pass(SHAPE, []) == 0


def test_fp8_is_measured_against_the_ideal_time_of_both_precisions() -> None:
    """Linears of 1000 tokens: 6 * 6 525 288 448 * 1000 = 3.91517307e13 at 1979, the other 7.1420805e12 at 989:
    19.783593 + 7.221517 = 27.005110 ms of 100 ms."""
    flops, linear = flops_per_pass(SHAPE, [1000]), linear_flops_per_pass(SHAPE, [1000])
    assert linear == 6 * 6_525_288_448 * 1000
    assert mfu(flops, 0.1, 1, 989.0, fp8_flops=linear, fp8_peak=1979.0) == pytest.approx(0.27005110, abs=1e-7)


def test_shapes_with_an_explicit_head_size_and_without_key_value_heads() -> None:
    qwen3 = SimpleNamespace(to_dict=lambda: {**QWEN_7B, "head_dim": 64})
    assert ModelShape.from_hf(qwen3).head_dim == 64
    assert ModelShape.from_hf({**QWEN_7B, "num_key_value_heads": None}).num_kv_heads == 28


def test_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="num_experts=128: FLOP are counted for dense models only"):
        ModelShape.from_hf({**QWEN_7B, "num_experts": 128})


@pytest.mark.parametrize(
    ("name", "bf16", "fp8"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0, 1979.0),
        ("NVIDIA H200", 989.0, 1979.0),
        ("NVIDIA H20", 148.0, 296.0),
        ("NVIDIA A100-SXM4-80GB", 312.0, None),
        ("NVIDIA L40S", 362.0, 724.0),
        ("NVIDIA L40", 181.0, 362.0),
        ("NVIDIA L20", 119.5, 239.0),
        ("NVIDIA B200", 2250.0, 4500.0),
        ("NVIDIA GB200", 2500.0, 5000.0),
        ("AMD Instinct MI300X", 1307.0, 2614.0),
        ("NVIDIA GeForce RTX 4090", None, None),
        ("cpu", None, None),
    ],
)
def test_peaks(name: str, bf16: float | None, fp8: float | None) -> None:
    assert (peak_tflops(name), peak_tflops(name, "fp8")) == (bf16, fp8)


def test_peaks_follow_the_precision() -> None:
    h100, model = "NVIDIA H100 80GB HBM3", {"model": {"path": "m"}, "data": {"train_files": ["t"]}}
    assert peaks(Config.model_validate(model), h100, 8) == {"peak": 989.0, "fp8_peak": None, "fp8_share": 1.0}
    fp8 = {"recipe": "blockwise", "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 3}
    precise = Config.model_validate({**model, "actor": {"megatron": {"fp8": fp8}}})
    assert peaks(precise, h100, 8) == {"peak": 989.0, "fp8_peak": 1979.0, "fp8_share": 0.5}
    given = Config.model_validate({**precise.model_dump(), "trainer": {"peak_tflops": 700.0}})
    assert peaks(given, h100, 8) == {"peak": 700.0, "fp8_peak": None, "fp8_share": 0.5}


def test_mfu_metrics() -> None:
    """Two epochs in 0.2 s on two devices is half of V16's rate; the forward third in 0.05 s is 154.3127 each."""
    timings = {"timing_s/update_actor": 0.2, "timing_s/old_log_prob": 0.05}
    known = mfu_metrics(timings, SHAPE, [1000], num_devices=2, peak=989.0, num_epochs=2)
    assert known == {
        "perf/tflops/actor": pytest.approx(231.469056),
        "perf/mfu/actor": pytest.approx(231.469056 / 989),
        "perf/tflops/actor_infer": pytest.approx(154.312704),
        "perf/mfu/actor_infer": pytest.approx(154.312704 / 989),
        "perf/peak_tflops": 989.0,
    }
    assert set(mfu_metrics(timings, SHAPE, [1000], num_devices=2, peak=None)) == {
        "perf/tflops/actor",
        "perf/tflops/actor_infer",
    }
    fp8 = mfu_metrics(timings, SHAPE, [1000], num_devices=2, peak=989.0, fp8_peak=1979.0, fp8_share=0.5, num_epochs=2)
    linear = 0.5 * 2 * linear_flops_per_pass(SHAPE, [1000])
    ideal = (2 * flops_per_pass(SHAPE, [1000]) - linear) / 989 + linear / 1979
    assert fp8["perf/mfu/actor"] == pytest.approx(ideal / (1e12 * 0.2 * 2)) and fp8["perf/peak_tflops_fp8"] == 1979.0
    assert mfu_metrics({"timing_s/update_actor": 0.0}, SHAPE, [1000], num_devices=2, peak=989.0) == {}
