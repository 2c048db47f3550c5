"""The two pass-through tables of the config: which keys may go to Megatron-Core and to vLLM, and which are not theirs.

Names are read from the installed sources, not imported: importing either takes seconds, and a wrong name should not
wait for it. Without the package installed nothing is known to be wrong.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MODEL = "it is read from config.json; change the model"
_LOSS = "token weights hold every denominator, so Megatron must sum and never divide; leave it out"
_NEVER = "this program does not support it; leave it out"
_STAGES = "cut uneven stages by num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
_LOADED = "weights are always loaded; leave it out"

# TransformerConfig fields that this program sets, and what to do instead
OWNED_BY_TRAINING: dict[str, str] = {
    **dict.fromkeys(("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"), _MODEL),
    **dict.fromkeys(("num_query_groups", "kv_channels"), _MODEL),
    **dict.fromkeys(("normalization", "layernorm_epsilon", "add_bias_linear", "add_qkv_bias", "qk_layernorm"), _MODEL),
    **dict.fromkeys(("gated_linear_unit", "activation_func", "num_moe_experts", "multi_latent_attention"), _MODEL),
    **dict.fromkeys(("window_size", "rotary_interleaved", "softmax_scale", "layernorm_zero_centered_gamma"), _MODEL),
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), "set model.dtype"),
    **dict.fromkeys(("calculate_per_token_loss", "grad_scale_func", "finalize_model_grads_func"), _LOSS),
    **dict.fromkeys(("virtual_pipeline_model_parallel_size", "hybrid_context_parallel"), _NEVER),
    **dict.fromkeys(("fp4", "fp4_recipe", "fp4_param", "fp8_quantizer_factory"), _NEVER),
    **dict.fromkeys(("variable_seq_lengths", "moe_token_dispatcher_type", "no_sync_func", "test_mode"), _NEVER),
    **dict.fromkeys(("pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split"), _STAGES),
    "account_for_loss_in_pipeline_split": _STAGES,
    **dict.fromkeys(("moe_router_topk", "moe_router_pre_softmax", "moe_ffn_hidden_size"), _MODEL),
    **dict.fromkeys(("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type"), _LOSS),
    "perform_initialization": _LOADED,
    "use_cpu_initialization": _LOADED,
    "init_model_with_meta_device": _LOADED,
    "transformer_impl": "set actor.megatron.transformer_impl",
    "context_parallel_size": "set actor.megatron.context_parallel_size",
    "fp8": "set actor.megatron.fp8.recipe (and .format)",
    "fp8_param": "set actor.megatron.fp8.param_gather",
    **{
        name: f"set actor.megatron.fp8.{name.removeprefix('fp8_')}"
        for name in (
            *("fp8_recipe", "fp8_wgrad", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo"),
            *("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
        )
    },
    "tensor_model_parallel_size": "set actor.megatron.tensor_model_parallel_size",
    "pipeline_model_parallel_size": "set actor.megatron.pipeline_model_parallel_size",
    "expert_model_parallel_size": "set actor.megatron.expert_model_parallel_size",
    "sequence_parallel": "set actor.megatron.sequence_parallel",
}
DROPOUTS = ("hidden_dropout", "attention_dropout")

_CONTRACT = "the trainer depends on its own value; leave it out"

# vllm.LLM arguments that this program sets, and what to do instead
OWNED_BY_ROLLOUT: dict[str, str] = {
    **dict.fromkeys(("load_format", "skip_tokenizer_init", "weight_transfer_config", "generation_config"), _CONTRACT),
    **dict.fromkeys(("distributed_executor_backend", "logprobs_mode", "runner", "worker_cls"), _CONTRACT),
    **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel"), _NEVER),
    "enable_sleep_mode": "set rollout.free_cache_engine",
    "model": "set model.path",
    "tokenizer": "set model.tokenizer_path",
    "dtype": "set model.dtype",
    "max_model_len": "it is data.max_prompt_length + data.max_response_length",
    **{
        name: f"set rollout.{name}"
        for name in ("seed", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "enforce_eager")
    },
    "quantization": "set rollout.quantization",
    "enable_prefix_caching": "set rollout.enable_prefix_caching",
    "tensor_parallel_size": "set rollout.tensor_model_parallel_size",
}


def transformer_problems(override: dict[str, Any]) -> Iterator[str]:
    """What is wrong with `actor.megatron.override_transformer_config`."""
    table = "actor.megatron.override_transformer_config"
    yield from _owned(table, override, OWNED_BY_TRAINING)
    for name in DROPOUTS:
        if override.get(name, 0) != 0:
            yield (
                f"{table}.{name}={override[name]}: a policy that drops units cannot be compared with its own rollouts;"
                " leave it out (it is 0)"
            )
    sources = {
        "transformer/transformer_config.py": "TransformerConfig",
        "model_parallel_config.py": "ModelParallelConfig",  # its base
    }
    yield from _unknown(table, override, "megatron.core", sources, OWNED_BY_TRAINING)


def engine_problems(kwargs: dict[str, Any]) -> Iterator[str]:
    """What is wrong with `rollout.engine_kwargs`."""
    table = "rollout.engine_kwargs"
    yield from _owned(table, kwargs, OWNED_BY_ROLLOUT)
    yield from _unknown(table, kwargs, "vllm", {"engine/arg_utils.py": "EngineArgs"}, OWNED_BY_ROLLOUT)


def _owned(table: str, given: dict[str, Any], owned: dict[str, str]) -> Iterator[str]:
    for name in given:
        if name in owned:
            yield f"{table}.{name}={given[name]!r} cannot be set here: {owned[name]}"


def _unknown(
    table: str, given: dict[str, Any], package: str, sources: dict[str, str], owned: dict[str, str]
) -> Iterator[str]:
    names = [str(name) for name in given if name not in owned]
    if not names:
        return
    known = _fields(package, sources)
    for name in names:
        if known and name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {close[0]!r}?" if close else "take it out"
            owner = next(iter(sources.values()))
            yield f"unknown key {f'{table}.{name}'!r}: {owner} of {package} has no such field; {hint}"


def _fields(package: str, sources: dict[str, str]) -> set[str]:
    """Annotated fields of the classes, {file: class}. Empty when a source is not as expected."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # of the parent package
        return set()
    if spec is None or not spec.submodule_search_locations:
        return set()
    folder = Path(next(iter(spec.submodule_search_locations)))
    found: set[str] = set()
    for file, name in sources.items():
        try:
            tree = ast.parse((folder / file).read_text(encoding="utf-8"))
        except (OSError, SyntaxError):
            return set()
        bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        targets = [node.target for body in bodies for node in body if isinstance(node, ast.AnnAssign)]
        fields = {target.id for target in targets if isinstance(target, ast.Name)}
        if not fields:
            return set()
        found |= fields
    return found
