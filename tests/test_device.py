"""device.py: freed memory is used again without page faults, unless the user has set the limits; what makes a run repeatable."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from grpo_megatron.device import Device
from grpo_megatron.processes.variables import TE_NONDETERMINISM

# 40 MiB: above the 32 MiB up to which glibc learns by itself what to keep. Kept, the ten blocks are one: a tenth of the faults.
SCRIPT = """
import resource
from grpo_megatron.device import keep_freed_memory

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        bytearray(40 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = page_faults()
is_kept = keep_freed_memory()
print(is_kept, 3 * page_faults() < before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
@pytest.mark.parametrize(
    ("variables", "expected"), [({}, "True True"), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, "False False")]
)
def test_freed_memory_is_used_again(variables: dict[str, str], expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment | variables, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected


# -- on a GPU, which a Device of kind "cuda" stands for ----------------------------------------------------------------


@pytest.fixture
def gpu() -> Device:
    device = Device("cpu")
    device.kind = "cuda"
    return device


@pytest.mark.parametrize("value", ["0", "1"])
def test_training_is_deterministic_and_the_engine_is_left_alone(gpu: Device, value: str) -> None:
    """Operations of vLLM that have no deterministic kernel must not raise: the mode ends with training's context."""
    with mock.patch.dict(os.environ, {TE_NONDETERMINISM: value}):
        with gpu.megatron(), gpu.megatron():
            assert torch.are_deterministic_algorithms_enabled() is (value == "0")
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert torch.utils.deterministic.fill_uninitialized_memory is (value == "1")  # type: ignore[attr-defined]
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def test_memory_in_use_on_the_device_is_reported_beside_torchs_peaks(gpu: Device) -> None:
    cuda = SimpleNamespace(
        mem_get_info=lambda device: (30 * 2**30, 80 * 2**30),
        max_memory_allocated=lambda device: 70 * 2**30,
        max_memory_reserved=lambda device: 72 * 2**30,
    )
    with mock.patch("grpo_megatron.device.torch.cuda", cuda):
        memory = gpu.memory_gib()
    assert memory["perf/device_memory_used_gb"] == 50 and memory["perf/max_memory_allocated_gb"] == 70
    assert "perf/device_memory_used_gb" not in Device("cpu").memory_gib()
