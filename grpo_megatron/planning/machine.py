"""PlannedMachine: GPUs on nodes, and the seconds that bytes need between them."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_megatron.planning import speeds
from grpo_megatron.planning.gpus import Gpu


@dataclass(frozen=True)
class PlannedMachine:
    gpu: Gpu
    world_size: int
    per_node: int = 8

    def link(self, neighbours: int) -> float:
        """Bytes per second and GPU within a group of `neighbours` consecutive ranks."""
        if neighbours <= self.per_node:
            return self.gpu.nvlink_bytes_per_s * speeds.LINK
        return self.gpu.network_bytes_per_s * speeds.NETWORK

    def read_seconds(self, size: float) -> float:
        """Of reading `size` bytes from the GPU's memory."""
        return size / (self.gpu.memory_bytes_per_s * speeds.MEMORY)

    def host_seconds(self, size: float) -> float:
        """Of copying `size` bytes to the host or back."""
        return size / (self.gpu.host_bytes_per_s * speeds.HOST)
