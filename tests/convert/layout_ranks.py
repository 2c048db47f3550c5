"""What the ranks of the converter's tests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.models.policy_ranks import build, loss
from tests.tiny import make_batch, make_sequences


def loaded(pairs: list[tuple[Path, Path]], tp: int, pp: int, ep: int = 1) -> list[dict[str, torch.Tensor]] | None:
    """The gathered Hugging Face tensors of each (Hugging Face folder, checkpoint), on rank 0.

    The model is built and filled with NaN, then Megatron-Core's own loader loads the checkpoint, in the place and with the
    metadata of Megatron-LM's load_checkpoint.
    """
    from megatron.core import dist_checkpointing, parallel_state

    from grpo_megatron.config import MegatronConfig
    from grpo_megatron.device import Device
    from grpo_megatron.models.build import build_model
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.weights.load import global_parameters, hf_weights, stage_owners, unwrapped
    from grpo_megatron.parallel.mesh import build_mesh

    device = Device("cpu")
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    if ep > 1:
        sizes["expert_model_parallel_size"] = ep
    mesh = build_mesh(device, tp=tp, pp=pp, rollout_tp=1, **({"ep": ep} if ep > 1 else {}))
    results = []
    for folder, load in pairs:
        assert (load / "latest_checkpointed_iteration.txt").read_text() == "release"
        checkpoint = str(load / "release")
        assert dist_checkpointing.check_is_distributed_checkpoint(checkpoint)
        common = dist_checkpointing.load_common_state_dict(checkpoint)
        assert common["iteration"] == 0 and common["checkpoint_version"] == 3.0
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
        arch = read_architecture(folder)
        model = build_model(arch, MegatronConfig.model_validate(sizes), "float32", device)
        with torch.no_grad():
            for parameter in global_parameters(model).values():
                parameter.fill_(torch.nan)
        with device.megatron():
            metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
            wanted = unwrapped(model).sharded_state_dict(metadata=metadata)
            state = dist_checkpointing.load({"model": wanted}, checkpoint)
            missing, unexpected = unwrapped(model).load_state_dict(state["model"], strict=False)
        assert_describes(common["args"], unwrapped(model).config)
        assert not [name for name in [*missing, *unexpected] if "_extra_state" not in name]
        assert all(parameter.isfinite().all() for parameter in global_parameters(model).values())
        stages = stage_owners(model, arch, mesh)
        results.append({n: t.clone() for bucket in hf_weights(model, arch, mesh, 1 << 20, stages) for n, t in bucket})
    return results if mesh.rank == 0 else None


SAME_NAMES = (  # of Megatron-LM's arguments and of Megatron-Core's TransformerConfig
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "normalization"),
    *("add_bias_linear", "add_qkv_bias", "qk_layernorm", "attention_dropout", "hidden_dropout"),
)
SAME_OF_EXPERTS = (
    *("moe_ffn_hidden_size", "moe_layer_freq", "moe_router_topk", "moe_router_pre_softmax"),
    *("moe_shared_expert_intermediate_size", "moe_router_score_function", "moe_router_enable_expert_bias"),
    *("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk"),
)
SAME_OF_LATENTS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def assert_describes(args: Any, config: Any) -> None:
    """The arguments in common.pt are those of the model that the checkpoint loads into."""
    names = [*SAME_NAMES, *(SAME_OF_EXPERTS if config.num_moe_experts else ["ffn_hidden_size"])]
    names += SAME_OF_LATENTS if config.multi_latent_attention else []
    for name in names:
        assert getattr(args, name) == getattr(config, name), name
    assert getattr(args, "num_experts", None) == config.num_moe_experts
    assert args.norm_epsilon == config.layernorm_epsilon and args.swiglu == config.gated_linear_unit


def trained(folder: Path, step: Path, tp: int, pp: int, dtype: str) -> dict[str, torch.Tensor]:
    """The weights after one update. They are saved as a training checkpoint in `step`/state."""
    import torch.distributed as dist

    from grpo_megatron.models.weights import sharded_state

    policy = build(folder, tp, pp, False, dtype=dtype)
    policy.update(make_batch(make_sequences(), [[[0, 1], [2], [], [3, 4, 5]]]), loss)
    if policy.mesh.rank == 0:
        (step / "state").mkdir(parents=True)
    dist.barrier()
    sharded_state.save_sharded(policy, step / "state")
    return {n: t.clone() for bucket in policy.hf_weights(1) for n, t in bucket}


def started(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The weights at the start of training, for each `model.dtype`."""
    out = {}
    for dtype in ("float32", "bfloat16"):
        policy = build(folder, 1, 1, False, dtype=dtype)
        out[dtype] = {n: t.clone() for bucket in policy.hf_weights(1) for n, t in bucket}
    return out
