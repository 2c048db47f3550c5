"""The GPUs that a plan knows by name: usable memory, peaks and bandwidths of one of them, SXM parts on nodes of eight.

`usable_gib` is the total memory that CUDA reports to a program (torch: "GPU 0 has a total capacity of ..."). It is less
than the memory in the product's name. Drivers differ by 0.1 GiB; the smallest published report is taken:

    h100-80   79.11   vllm-project/vllm issue 27508
    h200     139.80   out-of-memory reports of several projects (139.80 and 139.81)
    b200     178.35   pytorch/ao pull request 4002
    a100-80   79.14   out-of-memory reports of several projects (79.14 to 79.33)
    a100-40   39.38   out-of-memory reports of several projects (39.38 to 39.56)
    l40-48    44.40   QwenLM/Qwen3-VL issue 2097
    h20-96    95.00   out-of-memory reports of several projects (95.00 and 95.22)

Peaks are those of NVIDIA's data sheets, without sparsity. B200's memory bandwidth is the one that its driver reports
(pytorch/ao pull request 4002). NVLink, host link and network are per GPU and direction; the network is that of the DGX
systems: one card of 400 Gbit/s per GPU, for A100 and L40 200 Gbit/s. L40s have no NVLink: their PCIe link stands for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from grpo_megatron.transformer_engine import Version

LARGEST_GIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """One device. Bytes and FLOP per second are peaks; the fractions below that are achieved."""

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


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100-80", 79.11, 989.0, 3.35e12, 450e9, 64e9),
        Gpu("h200", 139.80, 989.0, 4.8e12, 450e9, 64e9),
        Gpu("b200", 178.35, 2250.0, 7.67e12, 900e9, 64e9, capability=(10, 0)),
        Gpu("a100-80", 79.14, 312.0, 2.039e12, 300e9, 32e9, 25e9, (8, 0)),
        Gpu("a100-40", 39.38, 312.0, 1.555e12, 300e9, 32e9, 25e9, (8, 0)),
        Gpu("l40-48", 44.40, 181.0, 0.864e12, 32e9, 32e9, 25e9, (8, 9)),
        Gpu("h20-96", 95.00, 148.0, 4.0e12, 450e9, 64e9),
    )
}
REFERENCE = "h100-80"  # whose peaks a device has that is given in GiB


def find_gpu(text: str) -> Gpu:
    """A GPU by name, or by GiB of memory, with the peaks of REFERENCE. Raises ValueError.

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
        raise ValueError(f"{text!r} is neither one of {', '.join(GPUS)} nor GiB above 0 and up to {LARGEST_GIB:,}")
    return replace(GPUS[REFERENCE], name=f"{gib:g} GiB", usable_gib=gib)


# -- The fractions of the peaks that the cost model counts on ----------------------------------------------------------
# Fractions of a GPU's peaks that the cost model counts on, and fixed times. All are estimates; none was measured here.
#
# They were set once, so that the phases of one published run come out (70B on 64 H100, the only dense one with a breakdown:
# generation 84 s, log-probabilities 18 s, update 28 s). They are the same for every model and GPU:
#
#     MATMUL, HALF_TOKENS   of the bf16 peak, in a micro-batch of many tokens; half of it in one of HALF_TOKENS tokens.
#                           Megatron-LM's pretraining reaches 0.41 to 0.48 on H100, bubbles and communication included
#     EXPERTS, HALF_WIDTH   a mixture of experts reaches half of this where a rank has 768 rows of an expert, since its
#                           products are small; half of EXPERTS with HALF_WIDTH rows, where tensor parallelism cuts experts
#     MEMORY                of the memory's bandwidth, where decoding reads weights and cache
#     LINK, NETWORK, HOST   large messages over NVLink, the network and the host link
#     ENGINE_STEP_S         host work of the engine per decoding step; SAMPLE_S more for each sequence
#     REDUCE_S              latency of one all-reduce of a decoding step within a node, and NETWORK_REDUCE_S between nodes
#     SWITCH_S              waking the engine, resetting its cache, and putting it to sleep (published: 1.6 to 2)
#
# docs/layouts.md says by how much the estimate misses other published step times.

MATMUL = 0.46
EXPERTS = 0.307
HALF_WIDTH = 256
HALF_TOKENS = 1024
FP8_SPEEDUP = 1.3  # of a whole pass; published steps get 15 to 25 % shorter
MEMORY = 0.7
LINK = 0.75
NETWORK = 0.75
HOST = 0.4
ENGINE_STEP_S = 9e-3
SAMPLE_S = 20e-6
REDUCE_S = 20e-6
NETWORK_REDUCE_S = 60e-6
SWITCH_S = 2.0
