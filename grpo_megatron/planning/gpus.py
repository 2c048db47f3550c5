"""The GPUs that a plan accepts by name: usable memory, peaks, bandwidths, and the shares of them that are reached.

Peaks are those of NVIDIA's data sheets, without sparsity. NVLink, host link and network are per GPU and direction. The
network is that of the DGX systems: one card of 400 Gbit/s per GPU, for A100 and L40 200 Gbit/s. L40s have no NVLink: their
PCIe link stands for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from grpo_megatron.transformer_engine import Version

LARGEST_GIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """One device. Bytes and FLOP per second are peaks.

    `usable_gib`: the total memory that CUDA reports to a program (torch: "GPU 0 has a total capacity of ..."), less than
    the memory in the product's name. Drivers differ by 0.1 GiB; the smallest published report is taken.
    """

    name: str
    usable_gib: float
    tflops: float  # bf16, dense
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    host_bytes_per_s: float
    network_bytes_per_s: float = 50e9
    capability: Version = (9, 0)
    remark: str = ""  # how a name that stands for several sizes was understood

    @property
    def usable_bytes(self) -> float:
        return self.usable_gib * 2**30


GPUS = {  # with the source of the usable memory
    gpu.name: gpu
    for gpu in (
        Gpu("h100-80", 79.11, 989.0, 3.35e12, 450e9, 64e9),  # vllm-project/vllm issue 27508
        Gpu("h200", 139.80, 989.0, 4.8e12, 450e9, 64e9),  # out-of-memory reports: 139.80 and 139.81
        # pytorch/ao pull request 4002, which has the driver's memory bandwidth, too
        Gpu("b200", 178.35, 2250.0, 7.67e12, 900e9, 64e9, capability=(10, 0)),
        Gpu("a100-80", 79.14, 312.0, 2.039e12, 300e9, 32e9, 25e9, (8, 0)),  # out-of-memory reports: 79.14 to 79.33
        Gpu("a100-40", 39.38, 312.0, 1.555e12, 300e9, 32e9, 25e9, (8, 0)),  # out-of-memory reports: 39.38 to 39.56
        Gpu("l40-48", 44.40, 181.0, 0.864e12, 32e9, 32e9, 25e9, (8, 9)),  # QwenLM/Qwen3-VL issue 2097
        Gpu("h20-96", 95.00, 148.0, 4.0e12, 450e9, 64e9),  # out-of-memory reports: 95.00 and 95.22
    )
}
REFERENCE = "h100-80"  # a device that is given in GiB has its peaks


def find_gpu(text: str) -> Gpu:
    """Returns a GPU by name, or by GiB of memory with the peaks of REFERENCE. Raises ValueError.

    The size may be left out. Where there are several, the first one of GPUS is taken, and `remark` says so.
    """
    name = text.lower()
    named = [gpu for gpu in GPUS.values() if name in (gpu.name, gpu.name.partition("-")[0])]
    if len(named) > 1:
        others = " and ".join(f"{gpu.name} has {gpu.name.partition('-')[2]} GB" for gpu in named[1:])
        return replace(named[0], remark=f"{name}: taken as {named[0].name}; {others}")
    if named:
        return named[0]
    number = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?", text.strip(), re.IGNORECASE)
    gib = float(text) if number else 0.0
    if not 0 < gib <= LARGEST_GIB:
        raise ValueError(f"it is neither one of {', '.join(GPUS)} nor GiB above 0 and up to {LARGEST_GIB:,}")
    return replace(GPUS[REFERENCE], name=f"{gib:g} GiB", usable_gib=gib)


# -- The cost model's constants: shares of a GPU's peaks, and fixed seconds --------------------------------------------
# All are estimates; none was measured here. They were set once, so that the phases of one published run come out (70B on
# 64 H100, the only dense one with a breakdown: generation 84 s, log-probabilities 18 s, update 28 s), and are the same for
# every model and GPU. docs/layouts.md says by how much the estimate misses other published step times.

MATMUL = 0.46  # of the bf16 peak, in a large micro-batch. Megatron-LM's pretraining: 0.41 to 0.48 on H100, all included
HALF_TOKENS = 1024  # tokens of a micro-batch that reaches half of MATMUL
EXPERTS = 0.307  # as MATMUL, of a mixture of experts, whose products are small
HALF_WIDTH = 256  # rows of an expert on a rank that reach half of EXPERTS. Tensor parallelism divides the rows
FP8_SPEEDUP = 1.3  # of a full pass; published steps get 15 to 25 % shorter
MEMORY = 0.7  # of the memory's bandwidth, where decoding reads weights and cache
LINK, NETWORK, HOST = 0.75, 0.75, 0.4  # of NVLink, the network and the host link, for large messages
ENGINE_STEP_S = 9e-3  # the engine's host work per decoding step
SAMPLE_S = 20e-6  # more of it for each sequence
REDUCE_S = 20e-6  # latency of one all-reduce of a decoding step within a node
NETWORK_REDUCE_S = 60e-6  # the same between nodes
SWITCH_S = 2.0  # waking the engine, resetting its cache, putting it to sleep (published: 1.6 to 2)


@dataclass(frozen=True)
class PlannedMachine:
    """GPUs on nodes, and the seconds that bytes need between them."""

    gpu: Gpu
    world_size: int
    per_node: int = 8

    def link(self, neighbours: int) -> float:
        """Returns the bytes per second and GPU within a group of `neighbours` consecutive ranks."""
        if neighbours <= self.per_node:
            return self.gpu.nvlink_bytes_per_s * LINK
        return self.gpu.network_bytes_per_s * NETWORK

    def read_seconds(self, size: float) -> float:
        """Returns the seconds to read `size` bytes from the GPU's memory."""
        return size / (self.gpu.memory_bytes_per_s * MEMORY)

    def host_seconds(self, size: float) -> float:
        """Returns the seconds to copy `size` bytes to the host or back."""
        return size / (self.gpu.host_bytes_per_s * HOST)
