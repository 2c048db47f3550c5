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
    from grpo_megatron.models.lora.sync import AdapterResharding
    from grpo_megatron.models.weights.stream import Resharding, engine_tensors
    from grpo_megatron.training.colocation import Colocation, Probe, Provenance

    mesh, lora = policy.mesh, policy.actor.lora
    tensors = tensors or engine_tensors(policy.arch, mesh.rollout_tp, reads_shards=True)
    layout = policy.arch, mesh, policy.stage_of, tensors
    options = {"dtype": DTYPES[dtype], "device": policy.device.torch_device, "bucket_megabytes": bucket_megabytes}
    kind: Any = functools.partial(Resharding, delta=delta)
    if lora.rank is not None:
        kind = functools.partial(AdapterResharding, lora=lora)
    resharding = kind(*layout, **options)
    probe = Probe(policy.arch.vocab_size, max_length, dtype=dtype, tolerance=tolerance, vision=policy.arch.vision)
    return Colocation(policy, engine, resharding, probe=probe, provenance=Provenance(mesh, max_staleness=0))
