"""The table of GPUs, and the option --gpu."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_megatron.models.flops import peak_tflops
from grpo_megatron.planning.gpus import GPUS, REFERENCE, find_gpu


def test_usable_memory_is_less_than_the_name_says() -> None:
    """The product's GB are 10^9 bytes at least; drivers keep 1 to 3 % of the GiB."""
    named = {"h100-80": 80, "h200": 141, "b200": 192, "a100-80": 80, "a100-40": 40, "h20-96": 96}
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
