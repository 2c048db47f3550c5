"""FLOP and MFU by hand, of Qwen2.5-7B and one sequence of 1000 tokens, and of two mixtures of experts.

layers: 28 * (3*3584*18944 + 3584*(2*28*128 + 2*4*128)) = 28 * (203 685 888 + 29 360 128) = 6 525 288 448
embedding and head: 2*152064*3584 = 1 089 994 752                                       N = 7 615 283 200
6 N T = 4.56916992e13;  6*128*28*28*1000^2 = 6.02112e11;  together 4.62938112e13
In 0.1 s on one H100: 462.938 TFLOP/s = .4681 of 989, .2339 of 1979.

Active parameters of Qwen3-30B-A3B (published: 30.5 B, of which 3.3 B active): 48 layers, 8 of 128 experts of 768
    a layer: attention 2048*(2*32*128 + 2*4*128) = 18 874 368, experts 8*3*2048*768 = 37 748 736, router 2048*128 = 262 144
    linears 48 * 56 623 104 = 2 717 908 992, routers 12 582 912, ends 2*151936*2048 = 622 329 856, together 3 352 821 760
Active parameters of Mixtral-8x7B (published: 46.7 B, of which 12.9 B active): 32 layers, 2 of 8 experts of 14336
    a layer: attention 4096*(2*32*128 + 2*8*128) = 41 943 040, experts 2*3*4096*14336 = 352 321 536, router 4096*8 = 32 768
    linears 32 * 394 264 576 = 12 616 466 432, routers 1 048 576, ends 2*32000*4096 = 262 144 000, together 12 879 659 008
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_megatron.config import Config
from grpo_megatron.models.families import architecture_of
from grpo_megatron.models.flops import (
    active_parameters,
    flops_per_pass,
    linear_flops_per_pass,
    linear_parameters,
    mfu,
    mfu_metrics,
    peak_tflops,
    peaks,
    sequence_cost,
    tower_parameters,
)
from tests.files import published_config
from tests.planning import published

QWEN_7B = published.architecture("Qwen2-7B")


def test_a_dense_model() -> None:
    assert active_parameters(QWEN_7B) == 7_615_283_200
    assert flops_per_pass(QWEN_7B, [1000]) == pytest.approx(4.62938112e13, rel=1e-12)
    assert flops_per_pass(QWEN_7B, [1000], forward_only=True) == pytest.approx(4.62938112e13 / 3, rel=1e-12)
    assert mfu(flops_per_pass(QWEN_7B, [1000]), 0.1, 1, 989.0) == pytest.approx(0.4681, abs=5e-5)
    assert mfu(flops_per_pass(QWEN_7B, [1000]), 0.1, 1, 1979.0) == pytest.approx(0.2339, abs=5e-5)


def test_fp8_is_measured_against_the_ideal_time_of_both_precisions() -> None:
    """Linears of 1000 tokens: 6 * 6 525 288 448 * 1000 = 3.91517307e13 at 1979, the other 7.1420805e12 at 989:
    19.783593 + 7.221517 = 27.005110 ms of 100 ms."""
    flops, linear = flops_per_pass(QWEN_7B, [1000]), linear_flops_per_pass(QWEN_7B, [1000])
    assert linear == 6 * 6_525_288_448 * 1000
    assert mfu(flops, 0.1, 1, 989.0, fp8_flops=linear, fp8_peak=1979.0) == pytest.approx(0.27005110, abs=1e-7)


@pytest.mark.parametrize(
    ("name", "stated", "active", "linear"),
    [
        ("Qwen3-30B-A3B", (30.5e9, 3.3e9), 3_352_821_760, 2_717_908_992),
        ("Mixtral-8x7B-v0.1", (46.7e9, 12.9e9), 12_879_659_008, 12_616_466_432),
    ],
)
def test_a_mixture_of_experts_counts_what_a_token_passes_through(
    name: str, stated: tuple[float, float], active: int, linear: int
) -> None:
    """By hand in the header; the published counts, which have one decimal, agree. The router does not run in FP8."""
    arch = published.architecture(name)
    assert (arch.num_parameters(), active_parameters(arch)) == pytest.approx(stated, abs=0.06e9)
    assert (active_parameters(arch), linear_parameters(arch)) == (active, linear)
    attention = 6 * 128 * 32 * arch.num_layers * (600**2 + 400**2)
    assert flops_per_pass(arch, [600, 400]) == 6 * active * 1000 + attention
    assert linear_flops_per_pass(arch, [600, 400]) == 6 * linear * 1000


def test_pairs_within_a_window_count() -> None:
    """Mistral-7B: 32 layers of 32 heads of 128, with a window of 4096. 10,000 tokens see 4096 (20,000 - 4096) pairs, twice."""
    arch = published.architecture("Mistral-7B-v0.1")
    for tokens, pairs in ((4000, 4000**2), (10_000, 4096 * 15_904)):
        attention = 6 * 128 * 32 * 32 * pairs
        assert flops_per_pass(arch, [tokens]) == 6 * active_parameters(arch) * tokens + attention
    cost = sequence_cost(replace(arch, full_layers=tuple(range(16))))
    assert cost.attention(10_000) == 128 * 32 * 16 * (10_000**2 + 4096 * 15_904)


def test_a_dense_model_is_all_active() -> None:
    """A dense model whose head size is not h / H: all its parameters are active, and only the norms are not counted."""
    arch = architecture_of({**published_config("Qwen3-30B-A3B"), "model_type": "qwen3", "num_hidden_layers": 2})
    assert (arch.head_dim, arch.ffn_hidden_size, arch.num_experts) == (128, 6144, 0)
    norms = 2 * (2 * 2048 + 2 * 128) + 2048  # of a layer: two of h, two of d for queries and keys; one of h at the end
    assert active_parameters(arch) == arch.num_parameters() - norms


def test_images_add_the_towers_flop() -> None:
    """Qwen2.5-VL-7B's tower per token: 4 patches through 32 layers of 4 * 1280^2 + 3 * 1280 * 3420 = 19 686 400, after
    6 * 14^2 * 1280 = 1 505 280 each; then the merger's 5120^2 + 5120 * 3584 = 44 564 480. Together 2 570 444 800.

    Of 1,000 tokens 300 are images, in 0.1 s on one device: 2 * 2 570 444 800 * 300 = 1.542 TFLOP forward.
    """
    arch = published.architecture("Qwen2.5-VL-7B-Instruct")
    assert tower_parameters(arch) == 4 * (32 * 19_686_400 + 1_505_280) + 44_564_480 == 2_570_444_800
    # Qwen3-VL-8B's: 27 layers of 4 * 1152^2 + 2 * 1152 * 4304 after 6 * 16^2 * 1152; four mergers of 4608^2 + 4608 * 4096
    third = published.architecture("Qwen3-VL-8B-Instruct")
    assert tower_parameters(third) == 4 * (27 * 15_224_832 + 1_769_472) + 4 * 40_108_032
    assert tower_parameters(QWEN_7B) == 0 and active_parameters(arch) == active_parameters(QWEN_7B)
    timings = {"timing_s/update_actor": 0.1, "timing_s/old_log_prob": 0.1}
    plain, frozen, trained = (
        mfu_metrics(timings, arch, [1000], num_devices=1, peak=None, image_tokens=images, trains_tower=trains)
        for images, trains in ((0, False), (300, False), (300, True))
    )
    for name, times in (("actor", 3), ("actor_infer", 1)):
        before, tower = plain[f"perf/tflops/{name}"], 15.4226688
        assert frozen[f"perf/tflops/{name}"] == pytest.approx(before + tower)
        assert trained[f"perf/tflops/{name}"] == pytest.approx(before + times * tower)


@pytest.mark.parametrize(
    ("name", "bf16", "fp8"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0, 1979.0),
        ("NVIDIA H200", 989.0, 1979.0),
        ("NVIDIA H20", 148.0, 296.0),
        ("NVIDIA A100-SXM4-80GB", 312.0, None),
        ("NVIDIA L40S", 362.0, 724.0),
        ("AMD Instinct MI300X", 1307.0, 2614.0),
        ("NVIDIA GeForce RTX 4090", None, None),
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
    known = mfu_metrics(timings, QWEN_7B, [1000], num_devices=2, peak=989.0, num_epochs=2)
    assert known == {
        "perf/tflops/actor": pytest.approx(231.469056),
        "perf/mfu/actor": pytest.approx(231.469056 / 989),
        "perf/tflops/actor_infer": pytest.approx(154.312704),
        "perf/mfu/actor_infer": pytest.approx(154.312704 / 989),
        "perf/peak_tflops": 989.0,
    }
    assert set(mfu_metrics(timings, QWEN_7B, [1000], num_devices=2, peak=None)) == {
        "perf/tflops/actor",
        "perf/tflops/actor_infer",
    }
    # A second sequence without a backward pass adds a third; the pass for old log-probabilities has both.
    two = mfu_metrics(timings, QWEN_7B, [1000] * 2, num_devices=2, peak=None, num_epochs=2, forward_only_lengths=[1000])
    assert two["perf/tflops/actor"] == pytest.approx(231.469056 * 4 / 3)
    assert two["perf/tflops/actor_infer"] == pytest.approx(154.312704 * 2)
    fp8 = mfu_metrics(timings, QWEN_7B, [1000], num_devices=2, peak=989.0, fp8_peak=1979.0, fp8_share=0.5, num_epochs=2)
    linear = 0.5 * 2 * linear_flops_per_pass(QWEN_7B, [1000])
    ideal = (2 * flops_per_pass(QWEN_7B, [1000]) - linear) / 989 + linear / 1979
    assert fp8["perf/mfu/actor"] == pytest.approx(ideal / (1e12 * 0.2 * 2)) and fp8["perf/peak_tflops_fp8"] == 1979.0
    assert mfu_metrics({"timing_s/update_actor": 0.0}, QWEN_7B, [1000], num_devices=2, peak=989.0) == {}
