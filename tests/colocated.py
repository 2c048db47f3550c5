"""A policy and an engine as a Colocation, for the ranks of tests that build both themselves."""

from __future__ import annotations

import functools
from typing import Any


def colocate(
    policy: Any,
    engine: Any,
    tensors: Any = None,
    *,
    dtype: str = "float32",
    max_length: int = 128,
    tolerance: float | None = None,
    bucket_megabytes: int = 1,
    delta: Any = None,
) -> Any:
    """Collective. The engine must read shards, and sleeps afterwards. `tensors`: what it reads; None: no whole experts."""
    from grpo_megatron.models.layers.spec import DTYPES
    from grpo_megatron.models.lora.sync import AdapterCodec
    from grpo_megatron.models.weights.stream import engine_tensors, new_weight_sync
    from grpo_megatron.sync.attest import Probe, Provenance
    from grpo_megatron.sync.weight_sync import FullCodec, PatchCodec
    from grpo_megatron.training.colocation import Colocation

    mesh, lora, vision = policy.mesh, policy.actor.lora, policy.arch.vision
    tensors = tensors or engine_tensors(policy.arch, mesh.rollout_tp, reads_shards=True)
    codec: Any = FullCodec if delta is None else functools.partial(PatchCodec, limits=delta)
    if lora.rank is not None:
        codec = functools.partial(AdapterCodec, arch=policy.arch, lora=lora, stage_of=policy.stage_of)
    options = {"dtype": DTYPES[dtype], "device": policy.device.torch_device, "bucket_megabytes": bucket_megabytes}
    weight_sync = new_weight_sync(policy.arch, mesh, policy.stage_of, tensors, codec=codec, **options)
    image_side = None if vision is None else vision.patch * vision.merge
    probe = Probe(policy.arch.vocab_size, max_length, dtype=dtype, tolerance=tolerance, image_side=image_side)
    return Colocation(policy, engine, weight_sync, probe=probe, provenance=Provenance(mesh, max_staleness=0))
