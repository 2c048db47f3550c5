"""What a device holds besides the tensors of a run: CUDA's context, NCCL's buffers, and what an engine keeps while it sleeps.

All sizes are estimates from sources and published reports. Compared with no GPU yet.

    CUDA context    with torch alone 0.3 GiB (pytorch issue 107667). Assumed: 0.2 more for the kernels of Transformer Engine,
                    cuDNN and vLLM, which are loaded at their first call, and cuBLAS's workspace
    NCCL buffers    a connection has buffers for three protocols: 0.5 + 4.7 + 4 MiB (LL, LL128, NCCL_BUFFSIZE) are received
                    into, and sending takes 2 MiB. A ring has one connection per channel; an 8 x H100 node has 24 rings. A
                    communicator that sends and receives has connections on 32 channels to each peer of its node: 7 peers
                    took 3.3 GB at the first message (NCCL issue 1685). Peers on other nodes share one buffer
    all-reduce      of vLLM 0.32 with an engine of several GPUs of one node (custom_all_reduce.py, all_reduce_utils.py): 8 MiB
                    of messages, 8 MiB of addresses, 16 MiB to reduce and scatter, and up to 64 MiB of symmetric memory
    CUDA graphs     of the engine; they stay while it sleeps. vLLM reports 0.21 GiB for a model of 1B (pull request 11349) and
                    0.36 GiB for a larger one. While the engine is awake they are part of its share (from vLLM 0.21 on)
"""

from __future__ import annotations

from grpo_megatron.config import Config
from grpo_megatron.models.architecture import Architecture

_MIB = 2**20
CONTEXT = 512 * _MIB
CONNECTION = 12 * _MIB  # 10 MiB received into, 2 MiB to send
RING_CHANNELS, PEER_CHANNELS = 24, 32
ALL_REDUCE = 96 * _MIB
GRAPHS = 512 * _MIB
LARGEST_ALL_REDUCE = 8  # GPUs of an engine that use these buffers
RESERVED_PARTS = ("CUDA context", "NCCL buffers", "all-reduce", "CUDA graphs")


def reserved_bytes(config: Config, arch: Architecture, world_size: int) -> dict[str, float]:
    """Bytes of each of RESERVED_PARTS on one rank, while its engine sleeps."""
    rollout = config.rollout
    size = rollout.tensor_model_parallel_size if config.colocates else 1
    has_buffers = 1 < size <= min(LARGEST_ALL_REDUCE, config.trainer.n_gpus_per_node)
    has_graphs = config.colocates and not rollout.enforce_eager
    rings = num_communicators(config, arch, world_size) * RING_CHANNELS
    channels = rings + num_node_peers(config, world_size) * PEER_CHANNELS
    sizes = (CONTEXT, channels * CONNECTION, ALL_REDUCE if has_buffers else 0, GRAPHS if has_graphs else 0)
    return dict(zip(RESERVED_PARTS, map(float, sizes), strict=True))


def num_communicators(config: Config, arch: Architecture, world_size: int) -> int:
    """Groups of more than one rank in which a rank reduces or gathers over NCCL."""
    megatron = config.actor.megatron
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    ep = megatron.expert_model_parallel_size if arch.num_experts else 1
    replicas = world_size // (tp * pp)
    groups = {
        "world": world_size,
        "tensor": tp,
        "pipeline": pp,
        "context": megatron.context_parallel_size,
        "data": replicas,
        "tied embeddings": 2 if arch.tied and pp > 1 else 1,
        "experts": tp * ep if arch.num_experts else 1,
        "experts' data": replicas // ep if arch.num_experts else 1,
        "gradient norm": world_size if megatron.use_distributed_optimizer else tp * pp,
        "engine": config.rollout.tensor_model_parallel_size if config.colocates else 1,
    }
    return sum(size > 1 for size in groups.values())


def num_node_peers(config: Config, world_size: int) -> int:
    """Ranks of the own node to which a rank has connections of its own: in the weight sync, and between experts."""
    megatron = config.actor.megatron
    tp, ep = megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size
    per_node = min(config.trainer.n_gpus_per_node, world_size)
    holds_all = tp in (1, config.rollout.tensor_model_parallel_size) and ep == 1
    syncs = config.colocates and not (holds_all and megatron.pipeline_model_parallel_size == 1)
    return (per_node - 1 if syncs else 0) + min(ep, per_node) - 1
