"""The cost model: one case by hand, which way it moves, and published steps; the table of GPUs.

A model of one layer would hide its terms, so 70B is taken: N = 70.55e9 + 1.05e9 (embedding and head both count), 80 layers,
h 8192. 1,024 samples of 1,000 + 1,000 tokens on 64 H100, tp 8 x pp 2 x dp 4, micro-batches of 4,000 tokens:

    FLOP         6 N T + 6 x 128 x 64 x 80 x sum(s^2)
    fraction     0.46 x 4,000 / 5,024
    per rank     2,048,000 / 4 tokens = 512,000, in 128 micro-batches: bubble 129 / 128
    tp           512,000 x 40 layers x 4 x 8,192 x 2 bytes x 7/8 over 0.75 x 450 GB/s, three times for an update
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from grpo_megatron.config import LoraConfig
from grpo_megatron.models.flops import active_parameters, peak_tflops, tower_parameters
from grpo_megatron.planning.cost import (
    LoraSize,
    Workload,
    generation_seconds,
    gradient_seconds,
    pass_seconds,
    scoring_seconds,
    step_seconds,
    update_seconds,
)
from grpo_megatron.planning.gpus import (
    ENGINE_STEP_S,
    GPUS,
    MEMORY,
    REDUCE_S,
    REFERENCE,
    SAMPLE_S,
    PlannedMachine,
    find_gpu,
)
from grpo_megatron.planning.layout import Layout
from tests.planning import published

H100 = PlannedMachine(GPUS["h100-80"], 64)
WORK = Workload(
    arch=published.architecture("Llama-3.1-70B"),
    samples=1024,
    samples_per_prompt=8,
    prompt_tokens=1000,
    response_tokens=1000,
    longest_response=2000,
    scoring_passes=1.0,
)
LAYOUT = Layout(tp=8, pp=2, rollout_tp=8, tokens=4000)


def test_a_pass_by_hand() -> None:
    active = active_parameters(WORK.arch)
    assert active == pytest.approx(70.55e9, rel=0.001)
    flops = 6 * active * 2_048_000 + 6 * 128 * 64 * 80 * 1024 * 2000**2
    compute = flops / (64 * 989e12 * 0.46 * 4000 / 5024)
    exchange = 512_000 * 40 * 4 * 8192 * 2 * 7 / 8 / (0.75 * 450e9)
    expected = (compute + 3 * exchange) * 129 / 128
    assert pass_seconds(WORK, LAYOUT, H100, backward=True) == pytest.approx(expected)
    expected = (compute / 3 + exchange) * 129 / 128
    assert pass_seconds(WORK, LAYOUT, H100, backward=False) == pytest.approx(expected)


def test_adapters_by_hand() -> None:
    """A layer of 70B has 855,638,016 adapted weights; merging at rank 8 takes the time of 9.6 bytes for each, twice."""
    arch = WORK.arch
    size = LoraSize.of(LoraConfig.model_validate({"rank": 8}), arch)
    assert size is not None and (size.layers, size.adapted) == (560, 80 * 855_638_016)
    assert size.trained == 80 * 8 * (2 * 16_384 + 2 * (8192 + 1024) + 3 * (8192 + 28_672))
    merged, split = (replace(WORK, lora=replace(size, is_merged=value)) for value in (True, False))
    plain = pass_seconds(WORK, LAYOUT, H100, backward=True)
    merging = 2 * 128 * 9.6 * size.adapted / 16 / (3.35e12 * MEMORY) * 129 / 128
    assert pass_seconds(merged, LAYOUT, H100, backward=True) == pytest.approx(plain + merging)
    exchange = 3 * 512_000 * 40 * 4 * 8192 * 2 * 7 / 8 / (0.75 * 450e9) * 129 / 128
    without_dw = 2 / 3 * (plain - exchange) + exchange
    assert pass_seconds(split, LAYOUT, H100, backward=True) == pytest.approx(without_dw)
    assert pass_seconds(split, LAYOUT, H100, backward=False) == pass_seconds(WORK, LAYOUT, H100, backward=False)
    assert gradient_seconds(split, LAYOUT, H100) < gradient_seconds(WORK, LAYOUT, H100) / 500


def test_rows_of_an_expert_are_in_the_passes_alone() -> None:
    """512 of them beside 1,024 samples: half as much again in each pass, and nothing in generation."""
    mixed, longer = replace(WORK, expert_rows=512), replace(WORK, samples=1536)
    for backward in (True, False):
        assert pass_seconds(mixed, LAYOUT, H100, backward=backward) == pass_seconds(
            longer, LAYOUT, H100, backward=backward
        )
    assert generation_seconds(mixed, LAYOUT, H100, 1e9) == generation_seconds(WORK, LAYOUT, H100, 1e9)


def test_images_by_hand() -> None:
    """Qwen2.5-VL-7B, 250 image tokens per prompt: on all of 8 tensor-parallel ranks of stage 0, if the tower is trained."""
    arch = published.architecture("Qwen2.5-VL-7B-Instruct")
    work = replace(WORK, arch=arch, image_tokens=250, frozen=676_550_144)
    assert work.num_trained == 8_292_166_656 - 676_550_144 and work.num_sent == 8_292_166_656
    trained = replace(work, trains_tower=True, frozen=0)
    tower = 1024 * 250 * tower_parameters(arch) / 4  # of a replica's samples
    for backward, times in ((True, 6), (False, 2)):
        seconds = times * tower / (989e12 * 0.46 * 4000 / 5024) * 129 / 128
        more = pass_seconds(trained, LAYOUT, H100, backward=backward) - pass_seconds(
            work, LAYOUT, H100, backward=backward
        )
        assert more == pytest.approx(seconds)
    text = replace(work, image_tokens=0)
    prompts = 2 * tower_parameters(arch) * 16 * 250 / (8 * 989e12 * 0.46)  # each once, by an engine of 8 ranks
    more = generation_seconds(work, LAYOUT, H100, 1e9) - generation_seconds(text, LAYOUT, H100, 1e9)
    assert more == pytest.approx(prompts)
    decoder = replace(text, arch=replace(arch, vision=None))  # decoding reads no tower
    assert generation_seconds(text, LAYOUT, H100, 1e9) == generation_seconds(decoder, LAYOUT, H100, 1e9)


def test_decoding_by_hand() -> None:
    """8 engines of 128 samples, all at once: 2,000 steps at 64 sequences on average. 40 KiB of cache per token and rank."""
    weights = 2 * WORK.arch.num_parameters() / 8
    cache = 64 * 1500 * 40960
    memory = (weights + cache) / (0.7 * 3.35e12)
    reduce = 160 * (REDUCE_S + 2 * 64 * 8192 * 2 * 7 / 8 / (0.75 * 450e9))
    step = memory + reduce + ENGINE_STEP_S + 64 * SAMPLE_S
    prompts = 2 * active_parameters(WORK.arch) * 16 * 1000 / (8 * 989e12 * 0.46)
    assert generation_seconds(WORK, LAYOUT, H100, 1e9) == pytest.approx(2000 * step + prompts)


@pytest.mark.parametrize(
    ("layout", "part", "is_faster"),
    [
        (replace(LAYOUT, recompute=True), "update", False),
        (replace(LAYOUT, offload_optimizer=True), "update", False),
        (replace(LAYOUT, offload_reference=True), "score", False),
        (replace(LAYOUT, tokens=16000), "update", True),
        (replace(LAYOUT, tp=2), "update", True),  # fewer bytes between ranks
        (replace(LAYOUT, rollout_tp=1), "sync", False),  # a whole model into each rank
        (replace(LAYOUT, rollout_tp=16), "generate", False),  # over the network
    ],
)
def test_a_layout_changes_its_part_of_the_step(layout: Layout, part: str, is_faster: bool) -> None:
    before, after = (getattr(step_seconds(WORK, which, H100, 1e6), part) for which in (LAYOUT, layout))
    assert (after < before) == is_faster and after != before


def test_what_does_not_happen_costs_nothing() -> None:
    none = replace(WORK, scoring_passes=0.0)
    assert scoring_seconds(none, LAYOUT, H100) == 0
    supervised = step_seconds(replace(none, generates=False), LAYOUT, H100, 0)
    assert (supervised.generate, supervised.score, supervised.sync) == (0, 0, 0) and supervised.update > 0
    assert supervised.step == supervised.update


def test_gradients_hide_behind_the_backward_pass() -> None:
    hidden = replace(WORK, overlaps_gradients=True)
    assert update_seconds(hidden, LAYOUT, H100) < update_seconds(WORK, LAYOUT, H100)
    critic = replace(WORK, critic_share=1.0)
    assert update_seconds(critic, LAYOUT, H100) == pytest.approx(2 * update_seconds(WORK, LAYOUT, H100))


def test_a_small_cache_makes_samples_wait() -> None:
    wide, narrow = (generation_seconds(WORK, LAYOUT, H100, tokens) for tokens in (1e6, 1e4))
    assert narrow > 2 * wide


# -- published steps: the table in docs/layouts.md is what the model says today, and the rows stay in bounds

PAGE = Path(__file__).resolve().parents[2] / "docs" / "layouts.md"
WHOLE, PART = 0.16, 0.62  # the largest misses; without the sync of 70B, which is another mechanism


def test_the_table_of_the_page_is_what_the_model_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    missing = [row for row in published.rows() if row not in text]
    assert not missing, "in docs/layouts.md write:\n" + "\n".join(published.rows())


@pytest.mark.parametrize("step", published.STEPS, ids=lambda step: step.model)
def test_published_steps_are_met_within_bounds(step: published.PublishedStep) -> None:
    estimate = step.estimated()
    assert abs(estimate.step / step.seconds - 1) < WHOLE
    for name, seconds in step.phases.items():
        if name != "sync":
            assert abs(getattr(estimate, name) / seconds - 1) < PART, name


def test_the_order_of_published_runs_is_kept() -> None:
    """The slower of two published runs is the slower one of their estimates, unless they are within 30 % of each other."""
    for one in published.STEPS:
        for other in published.STEPS:
            if one.seconds > 1.3 * other.seconds:
                assert one.estimated().step > other.estimated().step, (one.model, other.model)


# -- the table of GPUs, and the option --gpu


def test_usable_memory_is_less_than_the_name_says() -> None:
    """The product's GB are 10^9 bytes at least; drivers keep 1 to 3 % of the GiB."""
    named = {"h100-80": 80, "h200": 141, "b200": 192, "a100-80": 80, "a100-40": 40, "l40-48": 48, "h20-96": 96}
    assert set(named) == set(GPUS)
    for name, size in named.items():
        assert 0.92 * size < GPUS[name].usable_gib < size


def test_peaks_are_those_of_the_mfu() -> None:
    for name, gpu in GPUS.items():
        assert gpu.tflops == peak_tflops(f"NVIDIA {name.partition('-')[0].upper()}")


def test_a_gpu_by_name_or_by_gib() -> None:
    assert find_gpu("H100-80") is find_gpu("h100") is GPUS["h100-80"]
    assert find_gpu("A100") == replace(GPUS["a100-80"], remark="a100: taken as a100-80; a100-40 has 40 GB")
    assert find_gpu("a100-40") is GPUS["a100-40"] and not find_gpu("h100").remark
    other = find_gpu("62.5")
    assert (other.usable_gib, other.tflops, other.name) == (62.5, GPUS[REFERENCE].tflops, "62.5 GiB")


@pytest.mark.parametrize("text", ["h300", "0", "-80", "nan", "inf", "1e9", "", "80 GB"])
def test_what_is_no_gpu(text: str) -> None:
    with pytest.raises(ValueError, match="is neither one of h100-80, h200, b200"):
        find_gpu(text)
