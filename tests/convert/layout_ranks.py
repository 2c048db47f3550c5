"""What the ranks of the converter's tests run."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.models.policy_ranks import build, loss
from tests.tiny import make_batch, make_sequences


def loaded(pairs: list[tuple[Path, Path]], tp: int, pp: int, ep: int = 1) -> list[dict[str, torch.Tensor]] | None:
    """The gathered Hugging Face tensors of each (Hugging Face folder, checkpoint), on rank 0.

    The model is built and filled with NaN, then Megatron-Core's own loader loads the checkpoint.
    """
    from megatron.core import dist_checkpointing

    from grpo_megatron.config import MegatronConfig
    from grpo_megatron.device import Device
    from grpo_megatron.models.build import build_model
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.state import METADATA
    from grpo_megatron.models.weights import global_parameters, hf_weights, stage_owners, unwrapped
    from grpo_megatron.parallel.mesh import build_mesh

    device = Device("cpu")
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    if ep > 1:
        sizes["expert_model_parallel_size"] = ep
    mesh = build_mesh(device, tp=tp, pp=pp, rollout_tp=1, **({"ep": ep} if ep > 1 else {}))
    results = []
    for folder, checkpoint in pairs:
        arch = read_architecture(folder)
        model = build_model(arch, MegatronConfig.model_validate(sizes), "float32", device)
        with torch.no_grad():
            for parameter in global_parameters(model).values():
                parameter.fill_(torch.nan)
        with device.megatron():
            wanted = unwrapped(model).sharded_state_dict(metadata=METADATA)
            state = dist_checkpointing.load({"model": wanted}, str(checkpoint))
            missing, unexpected = unwrapped(model).load_state_dict(state["model"], strict=False)
        assert not [name for name in [*missing, *unexpected] if "_extra_state" not in name]
        assert all(parameter.isfinite().all() for parameter in global_parameters(model).values())
        stages = stage_owners(model, arch, mesh)
        results.append({n: t.clone() for bucket in hf_weights(model, arch, mesh, 1 << 20, stages) for n, t in bucket})
    return results if mesh.rank == 0 else None


def trained(folder: Path, step: Path, tp: int, pp: int, dtype: str) -> dict[str, torch.Tensor]:
    """The weights after one update. They are saved as a training checkpoint in `step`/state."""
    import torch.distributed as dist

    from grpo_megatron.models import state

    policy = build(folder, tp, pp, False, dtype=dtype)
    policy.update(make_batch(make_sequences(), [[[0, 1], [2], [], [3, 4, 5]]]), loss)
    if policy.mesh.rank == 0:
        (step / "state").mkdir(parents=True)
    dist.barrier()
    state.save_sharded(policy, step / "state")
    return {n: t.clone() for bucket in policy.hf_weights(1) for n, t in bucket}


def started(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The weights at the start of training, for each `model.dtype`."""
    out = {}
    for dtype in ("float32", "bfloat16"):
        policy = build(folder, 1, 1, False, dtype=dtype)
        out[dtype] = {n: t.clone() for bucket in policy.hf_weights(1) for n, t in bucket}
    return out
