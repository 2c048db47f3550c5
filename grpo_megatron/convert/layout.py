"""The layout of a folder that Megatron-LM loads with `--load`, its arguments there, and the places of tensors.

OUT/latest_checkpointed_iteration.txt    "release", or the number of an iteration
OUT/release/                             the distributed checkpoint; iter_0000100/ for an iteration
OUT/release/common.pt                    {"args", "checkpoint_version", "iteration"}
OUT/hf/                                  config.json and tokenizer, for our own readers
"""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.models.architecture import Architecture, megatron_fields
from grpo_megatron.models.weights.stream import TE_NAMES
from grpo_megatron.models.weights.table import Vocabulary, WeightRow

TRACKER_FILE, RELEASE = "latest_checkpointed_iteration.txt", "release"
CHECKPOINT_VERSION = 3.0  # how rows of query, key and value are ordered; 3.0 needs no reordering
VOCAB_MULTIPLE = 128  # Megatron-LM's --make-vocab-size-divisible-by


def tracked_folder(folder: Path) -> Path | None:
    """Returns the checkpoint that the tracker of `folder` names. None: there is no tracker, or it names none."""
    try:
        name = (folder / TRACKER_FILE).read_text()[:40].strip()
    except (OSError, UnicodeDecodeError):
        return None
    if name == RELEASE:
        return folder / RELEASE
    return folder / f"iter_{int(name):07d}" if name.isdecimal() else None


def common_state(arch: Architecture) -> dict[str, Any]:
    """Returns the content of common.pt."""
    return {"args": Namespace(**load_args(arch)), "checkpoint_version": CHECKPOINT_VERSION, "iteration": 0}


def load_args(arch: Architecture) -> dict[str, Any]:
    """Returns the arguments that Megatron-LM takes from a checkpoint with `--use-checkpoint-args`.

    The tokenizer's are not among them: its path is this machine's. Source: load_args_from_checkpoint in
    megatron/training/checkpointing.py of Megatron-LM, as of August 2026.
    """
    args = megatron_fields(arch) | {
        "group_query_attention": arch.latent is None and arch.num_query_groups < arch.num_attention_heads,
        "seq_length": arch.max_position_embeddings,
        "max_position_embeddings": arch.max_position_embeddings,
        "position_embedding_type": "yarn" if arch.rope_yarn is not None and arch.latent is None else "rope",
        "add_position_embedding": False,
        "use_rotary_position_embeddings": True,
        "rotary_base": int(arch.rope_theta),
        "rotary_percent": arch.rotary_share,
        "rotary_interleaved": False,
        "use_rope_scaling": arch.rope_factor is not None,
        "rope_scaling_factor": arch.rope_factor or 8.0,
        "rotary_seq_len_interpolation_factor": int(arch.rope_linear_factor) if arch.rope_linear_factor else None,
        "norm_epsilon": arch.norm_eps,
        "apply_layernorm_1p": False,
        "swiglu": not arch.gelu,
        "squared_relu": False,
        "untie_embeddings_and_output_weights": not arch.tied,
        "padded_vocab_size": -(-arch.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        "make_vocab_size_divisible_by": VOCAB_MULTIPLE,
        "apply_query_key_layer_scaling": False,
        "ckpt_format": "torch_dist",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
    }
    args |= {"num_experts": arch.num_experts, "moe_grouped_gemm": False} if arch.num_experts else {}
    return args | ({"multi_latent_attention": True} if arch.latent is not None else {})


NEVER_RESTORED = (  # arguments that Megatron-LM does not take from a checkpoint
    *("norm_epsilon", "qk_layernorm", "use_rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor"),
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("moe_router_num_groups", "moe_router_group_topk"),
)


def further_options(arch: Architecture) -> str:
    """Returns the options that this model needs in Megatron-LM besides `--load OUT --use-checkpoint-args`."""
    args = load_args(arch)
    if not args["use_rope_scaling"]:
        del args["rope_scaling_factor"]
    options = []
    for name in NEVER_RESTORED:
        value = args.get(name)
        if value is None or value is False:
            continue
        option = f"--{name.replace('_', '-')}"
        options.append(option if value is True else f"{option} {value}")
    return " ".join(options)


def unsupported_there(arch: Architecture) -> str | None:
    """Returns why options alone do not make Megatron-LM build this model, in all versions; None when they do.

    Source: gpt_builders.py and megatron/training of core_v0.16.1, 0.17.1, 0.18.2, 0.19.0 and of August 2026.
    """
    if arch.vision is not None:
        return "a vision tower and M-RoPE: pretrain_gpt.py of Megatron-LM builds neither"
    if arch.local_reason:
        return f"{arch.local_reason}: Megatron-LM needs a layer spec of your own (--spec)"
    if arch.rope_linear_factor is not None and not float(arch.rope_linear_factor).is_integer():
        return (
            f"RoPE scaled linearly by {arch.rope_linear_factor:g}: --rotary-seq-len-interpolation-factor takes integers"
        )
    if arch.rope_linear_factor is not None:
        return "core_v0.16.1 and core_v0.17.1 read --rotary-seq-len-interpolation-factor and do not use it"
    if arch.rope_factor not in (None, 8.0):
        return f"versions up to August 2026 read --rope-scaling-factor and build the model with 8, not {arch.rope_factor:g}"
    if arch.rope_yarn is not None:
        return "YaRN: give its options (--yarn-..., or those of latent attention) yourself"
    return None


# -- the place of a row of the weight table in a distributed checkpoint ------------------------------------------------
# Megatron stacks layers (and experts): decoder.layers.7.mlp.linear_fc2.weight [h, f] is index 7 of the tensor
# decoder.layers.mlp.linear_fc2.weight [layers, h, f]. A norm has the name that Transformer Engine gives it, even when other
# modules have written it. Models whose layers differ (dense ones, then experts) have one tensor per layer instead. Both forms
# can be read.

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class Place:
    """Index `index` along the stacked axes, whose lengths are `stack`, of the tensor `key`."""

    key: str
    index: tuple[int, ...] = ()
    stack: tuple[int, ...] = ()


def whole_shape(row: WeightRow, arch: Architecture) -> tuple[int, ...]:
    """Returns the shape of a row's Megatron tensor over all ranks, without the padding of a vocabulary."""
    return row.hf_shapes(arch)[0] if isinstance(row, Vocabulary) else row.local_shape(arch, 1)


def places(row: WeightRow, arch: Architecture) -> list[Place]:
    """Returns every place where the row may be. The first is the one that the current Megatron-Core writes."""
    layered = _LAYER.match(row.megatron)
    if layered is None:
        return [Place(row.megatron)]
    layer, rest = int(layered[1]), layered[2]
    expert = _EXPERT.match(rest)
    if expert is not None:
        e, rest = int(expert[1]), expert[2]
        stacked = [Place(f"decoder.layers.mlp.experts.experts.{rest}", (layer, e), (arch.num_layers, arch.num_experts))]
        single = [
            Place(f"decoder.layers.{layer}.mlp.experts.experts.{rest}", (e,), (arch.num_experts,)),
            Place(f"decoder.layers.{layer}.mlp.experts.experts.{e}.{rest}"),
        ]
    else:
        names = _names(rest, arch)
        stacked = [Place(f"decoder.layers.{name}", (layer,), (arch.num_layers,)) for name in names]
        single = [Place(f"decoder.layers.{layer}.{name}") for name in names]
    return single if arch.num_dense_layers or arch.delta is not None else [*stacked, *single]


def _names(rest: str, arch: Architecture) -> list[str]:
    """Returns the names of a layer's parameter, that of Transformer Engine's fused modules first.

    Latent attention begins with several linear layers, so the norm before it is not fused. Norms of query heads are not.
    """
    unfused = "self_attention.q_layernorm.weight" if arch.latent is None else "input_layernorm.weight"
    return [TE_NAMES[rest], rest] if rest in TE_NAMES and rest != unfused else [rest]


def written_places(row: WeightRow, arch: Architecture) -> list[Place]:
    """Returns the places where a converted checkpoint stores the row.

    The second norm of an MoE layer is stored under two names: local specs read one of them, Transformer Engine's specs
    the other.
    """
    known = places(row, arch)
    is_norm = row.megatron.endswith(".pre_mlp_layernorm.weight")
    return known[:2] if is_norm and arch.num_experts else known[:1]


def extra_state_keys(rows: list[WeightRow], arch: Architecture) -> list[str]:
    """Keys of the objects that modules read besides their weights: FP8 scales, which are empty after a conversion.

    Local specs read those of the linear layers; Transformer Engine's modules also read the others.
    """
    keys: dict[str, None] = {}
    for row in rows:
        if row.megatron.endswith(".weight") and row.megatron.startswith("decoder."):
            bare = next(p for p in places(row, arch) if not p.key.endswith("layer_norm_weight"))
            keys[_object(bare.key.removesuffix("weight"), bare)] = None
    for layer in range(arch.num_layers):
        if arch.num_dense_layers or arch.delta is not None:
            keys[_object(f"decoder.layers.{layer}.self_attention.core_attention.", Place(""))] = None
        else:
            keys[_object("decoder.layers.self_attention.core_attention.", Place("", (layer,), (arch.num_layers,)))] = (
                None
            )
    return list(keys)


def _object(module: str, place: Place) -> str:
    index = ".".join(map(str, place.index or (0,)))
    return f"{module}_extra_state/shard_{index}_{'.'.join(map(str, place.stack or (1,)))}"
