"""PassThrough: a table of the config that is passed to another package unread, and the check of its names.

The names are read from the source files of the installed package. Nothing is imported: importing Megatron-Core or vLLM
takes seconds, and an error about a wrong name should not wait for it. If the package is not installed, no name is
reported as unknown.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PassThrough:
    """`key` is the table's name in the config. `sources` maps a file of `package` to the class whose annotated fields
    are the allowed names. `owned` maps each name that this program sets itself, or refuses, to the user's remedy; a name
    with a dot is a key of a table: `compilation_config.backend`."""

    key: str
    package: str
    sources: Mapping[str, str]
    owned: Mapping[str, str]

    def problems(self, given: Mapping[str, Any]) -> Iterator[str]:
        """Yields a line for each name that this program sets itself, or that the package does not have."""
        for name, value in self.owned_by(given).items():
            yield f"{self.key}.{name}={value!r} cannot be set here: {self.owned[name]}"
        names = [str(name) for name in given if name not in self.owned]
        known = _fields(self.package, self.sources) if names else set()
        for name in names:
            if known and name not in known:
                close = difflib.get_close_matches(name, sorted(known), n=1)
                hint = f"did you mean {close[0]!r}?" if close else "take it out"
                owner = next(iter(self.sources.values()))
                yield f"unknown key {f'{self.key}.{name}'!r}: {owner} of {self.package} has no such field; {hint}"

    def owned_by(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the given names that are in `owned`, and their values."""
        values_of_names = {}
        for name in self.owned:
            table, _, key = name.rpartition(".")
            values = given.get(table) if table else given
            if isinstance(values, Mapping) and key in values:
                values_of_names[name] = values[key]
        return values_of_names


def _fields(package: str, sources: Mapping[str, str]) -> set[str]:
    """Reads the annotated fields of the classes, {file: class}. Empty if the package or one of the classes is not found."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # raised for the parent package
        return set()
    if spec is None or not spec.submodule_search_locations:
        return set()
    folder = Path(next(iter(spec.submodule_search_locations)))
    names: set[str] = set()
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
        names |= fields
    return names


# -- The table `actor.megatron.override_transformer_config`: which of its keys may go to Megatron-Core -----------------

_MODEL = "it is read from config.json; change the model"
_LOSS = (
    "the token weights include every denominator, so Megatron-Core must sum the loss and not divide it; leave it out"
)
_NEVER = "this program does not support it; leave it out"
_STAGES = "cut uneven stages by num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
_LOADED = "weights are always loaded; leave it out"

# What to do instead of setting a field of TransformerConfig that this program sets itself -> these fields
_REMEDIES = {
    _MODEL: "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization"
    " layernorm_epsilon add_bias_linear add_qkv_bias qk_layernorm gated_linear_unit activation_func num_moe_experts"
    " multi_latent_attention window_size window_attn_skip_freq rotary_interleaved softmax_scale layernorm_zero_centered_gamma"
    " moe_router_topk moe_router_pre_softmax moe_ffn_hidden_size moe_router_score_function moe_router_num_groups"
    " moe_router_group_topk moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_layer_freq"
    " moe_shared_expert_intermediate_size",
    "set model.dtype": "params_dtype pipeline_dtype bf16 fp16",
    _LOSS: "calculate_per_token_loss grad_scale_func finalize_model_grads_func moe_aux_loss_coeff moe_z_loss_coeff"
    " moe_router_load_balancing_type",
    _NEVER: "virtual_pipeline_model_parallel_size hybrid_context_parallel fp4 fp4_recipe fp4_param fp8_quantizer_factory"
    " variable_seq_lengths moe_token_dispatcher_type no_sync_func test_mode",
    _STAGES: "pipeline_model_parallel_layout account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
    _LOADED: "perform_initialization use_cpu_initialization init_model_with_meta_device",
    "the routers' biases stay as they were loaded; leave it out": "moe_router_bias_update_rate",
    "set actor.megatron.fp8.recipe (and .format)": "fp8",
    "set actor.megatron.fp8.param_gather": "fp8_param",
    "the layers of actor.megatron.transformer_impl decide it; leave it out": "moe_grouped_gemm moe_use_legacy_grouped_gemm",
}
OWNED_BY_TRAINING = {name: remedy for remedy, names in _REMEDIES.items() for name in names.split()}
for _name in (
    *("fp8_recipe", "fp8_wgrad", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo"),
    *("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
):
    OWNED_BY_TRAINING[_name] = f"set actor.megatron.fp8.{_name.removeprefix('fp8_')}"
for _name in (
    *("transformer_impl", "context_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("expert_model_parallel_size", "sequence_parallel"),
):
    OWNED_BY_TRAINING[_name] = f"set actor.megatron.{_name}"
DROPOUTS = ("hidden_dropout", "attention_dropout")


def transformer_problems(override: dict[str, Any]) -> Iterator[str]:
    """Yields what is wrong with `actor.megatron.override_transformer_config`."""
    table = PassThrough(
        "actor.megatron.override_transformer_config",
        "megatron.core",
        {
            "transformer/transformer_config.py": "TransformerConfig",
            "model_parallel_config.py": "ModelParallelConfig",  # its base
        },
        OWNED_BY_TRAINING,
    )
    yield from table.problems(override)
    for name in DROPOUTS:
        if override.get(name, 0) != 0:
            yield (
                f"{table.key}.{name}={override[name]}: a policy with dropout cannot be compared with its own rollouts;"
                " leave it out (it is 0)"
            )
