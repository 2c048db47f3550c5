"""Weights of a model in a layout: its parameters by name, what a weight sync needs of them, and `hf_weights`.

The float32 buffers of a model (its constants) travel beside its parameters. DeepSeek-V3 chooses experts by score + bias. A
bias that is rounded to bfloat16 chooses others wherever two sums are closer than the rounding. The plan of a weight sync has
one dtype, so the biases travel apart. They are small.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.models.architecture import ENGINE_VOCABULARY_MULTIPLE, Architecture
from grpo_megatron.models.families import table_of
from grpo_megatron.models.weights.table import (
    QKV,
    GateUp,
    HeadsNorm,
    Replicated,
    Vocabulary,
    WeightRow,
    expand_table,
    is_delta_channels,
)
from grpo_megatron.parallel.mesh import Grid, Mesh, all_gather_values
from grpo_megatron.sync.plan import EngineTensors, Interval, SyncParameter, SyncTensor
from grpo_megatron.sync.weight_sync import SyncModel, WeightSync
from grpo_megatron.types import WeightBucket

CONSTANTS = (".router.expert_bias",)  # buffers with a row in the weight table
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
# Transformer Engine fuses a norm into the linear layer that follows. Only the name of the tensor differs.
TE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}


class WeightsError(ValueError):
    """A Hugging Face folder that cannot be read, or tensors that are not the model's. The message names wrong tensors."""

    tells_what_to_do = True  # the command line prints it without a traceback


# -- the parameters of a rank ------------------------------------------------------------------------------------------


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside DDP and Float16Module."""
    while hasattr(model, "module"):
        model = model.module  # type: ignore[assignment]
    return model


def global_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every parameter of this rank, and every constant, by its global Megatron name in the local layer spec.

    Layer numbers are global. They come from each layer's own `layer_number`, so uneven stages need no offset. Expert
    numbers are global too, from each layer's own `local_expert_indices`.
    """
    inner = unwrapped(model)
    layers: Any = inner.decoder.layers  # type: ignore[union-attr]
    parameters: dict[str, Tensor] = {}
    constants = ((name, buffer) for name, buffer in inner.named_buffers() if name.endswith(CONSTANTS))
    for name, parameter in (*inner.named_parameters(), *constants):
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            layer = layers[int(parts[2])]
            parts[2] = str(layer.layer_number - 1)
            if parts[3:5] == ["mlp", "experts"]:
                parts[5:] = _global_expert(parts[5:], layer.mlp.local_expert_indices)
        whole = ".".join(parts)
        for local, fused in TE_NAMES.items():
            whole = whole.removesuffix(fused) + local if whole.endswith(fused) else whole
        parameters[whole] = parameter
    return parameters


def _global_expert(parts: list[str], indices: list[int]) -> list[str]:
    """The rest of a name after `mlp.experts.`, in the form of sequential experts, with the expert's global number.

    Sequential experts are named local_experts.0.linear_fc1.weight, grouped ones linear_fc1.weight0.
    """
    if parts[0] == "local_experts":
        return [parts[0], str(indices[int(parts[1])]), *parts[2:]]
    linear, weight = parts
    return ["local_experts", str(indices[int(weight.removeprefix("weight"))]), linear, "weight"]


def dequantized(parameter: Tensor) -> Tensor:
    """The parameter's values as an ordinary tensor. Only a parameter stored in FP8 (`fp8.param_gather`) is converted."""
    from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor

    return dequantize_fp8_tensor(parameter) if is_float8tensor(parameter) else parameter.detach()


def served(parameter: Tensor) -> Tensor:
    """The values that the model multiplies by, as an ordinary tensor. Those of an adapted weight are merged now."""
    adapted: Any = getattr(parameter, "adapted", None)  # set by models/lora/layers.py
    return dequantized(parameter.detach()) if adapted is None else adapted.served()  # type: ignore[no-any-return]


@torch.no_grad()
def set_parameter(parameter: Tensor, values: Tensor) -> None:
    """Set a parameter's values. If it is stored in FP8, also set its exact values, which the optimizer copies to float32."""
    parameter.copy_(values)
    get_exact = getattr(parameter, "get_high_precision_init_val", None)
    if get_exact is not None and (exact := get_exact()) is not None:
        exact.copy_(values)


def model_rows(arch: Architecture) -> dict[str, WeightRow]:
    """Global Megatron name -> row, for the whole model, in stream order: embedding, layers, final norm, head."""
    return {row.megatron: row for row in expand_table(table_of(arch), arch)}


def stage_owners(model: torch.nn.Module, arch: Architecture, mesh: Mesh) -> dict[str, int]:
    """Collective: Megatron name -> the first pipeline stage that has it."""
    names_of_stage: list[str] = []
    for names in all_gather_values(list(global_parameters(model)), mesh.ep_group):
        names_of_stage += names
    owners: dict[str, int] = {}
    for stage, names in enumerate(all_gather_values(names_of_stage, mesh.pp_group)):
        for name in names:
            owners.setdefault(name, stage)
    missing = [name for name in model_rows(arch) if name not in owners]
    if missing:
        raise WeightsError(f"no pipeline stage holds {', '.join(missing[:10])} ({len(missing)} in all)")
    return owners


# -- what the weight sync knows of a model -----------------------------------------------------------------------------


def stages_of_parameters(arch: Architecture, layers: Sequence[int]) -> dict[str, int]:
    """Megatron name -> pipeline stage, for stages with these numbers of layers. `stage_owners` asks the ranks instead."""
    of_layer = [stage for stage, count in enumerate(layers) for _ in range(count)]
    out = {}
    for name in model_rows(arch):
        if ".layers." in name:
            out[name] = of_layer[int(name.split(".")[2])]
        else:
            out[name] = 0 if "embedding" in name or name.startswith("visual.") else len(layers) - 1
    return {**out, HEAD: len(layers) - 1}


def sync_parameters(
    arch: Architecture, grid: Grid, stage_of: Mapping[str, int], rows: Iterable[WeightRow] | None = None
) -> list[SyncParameter]:
    """All parameters of the model, in the order of its table, without its constants. `stage_of`: Megatron name -> stage.

    A tied embedding is on the head's stage too. (A critic has no head.) `rows`: of other parameters.
    """
    head_stage = stage_of.get(HEAD, 0) if arch.tied else 0
    copies = {EMBEDDING: (head_stage,)} if head_stage > 0 else {}
    return [
        SyncParameter(
            name=row.megatron,
            tensors=tuple(SyncTensor(n, s, row.axis) for n, s in zip(row.hf, row.hf_shapes(arch), strict=True)),
            stages=(stage_of[row.megatron], *copies.get(row.megatron, ())),
            ep_rank=row.ep_rank(arch, grid.ep),
            shards=tuple(row.slices(arch, tp_rank, grid.tp) for tp_rank in range(grid.tp)),
        )
        for row in (model_rows(arch).values() if rows is None else rows)
        if not row.is_constant
    ]


def engine_tensors(arch: Architecture, rollout_tp: int, *, reads_shards: bool, rollout_ep: int = 1) -> EngineTensors:
    """The tensors that an engine of `rollout_tp` ranks gets, and the part of each that each rank reads.

    `reads_shards`: the parts that vLLM reads. Linear layers are cut evenly. Key-value heads are shared by several ranks if
    there are more ranks than heads. The vocabulary is padded to a multiple of 64 first, so that the last rank has fewer
    tokens, or none. With `rollout_ep` (1 or `rollout_tp`), a rank reads neighbouring experts whole, and nothing of the
    others; and it stacks the experts of a layer. Of a gated delta net's q, k and v in one tensor it reads everything, and keeps
    its part of each; and of the biases after the sum over the ranks of an expert only the first rank keeps anything. Without
    `reads_shards`, every rank reads everything, one by one.
    """
    tensors: dict[str, SyncTensor] = {}
    spans: dict[str, tuple[Interval, ...]] = {}
    stacks: dict[str, str] = {}
    kept: dict[str, tuple[tuple[Interval, ...], ...]] = {}
    for row in model_rows(arch).values():
        for index, (name, shape) in enumerate(zip(row.hf, row.hf_shapes(arch), strict=True)):
            tensor = tensors[name] = SyncTensor(name, shape, row.axis)
            module, numbered, kind = name.partition(f".experts.{row.expert}.")
            if row.expert is not None and arch.linear_bias and isinstance(row, GateUp):  # vLLM has their rows in turn
                kind = "gate_up_proj" + kind[kind.index(".") :]
            if numbered and reads_shards:
                stacks[name] = f"{module}.experts.{kind}"
            if reads_shards and rollout_tp > 1 and is_delta_channels(row, index):
                kept[name] = tuple(_delta_intervals(arch, rank, rollout_tp) for rank in range(rollout_tp))
            elif numbered and reads_shards and rollout_ep == 1 and isinstance(row, Replicated):  # a bias after a sum
                kept[name] = (((0, tensor.length),), *[()] * (rollout_tp - 1))
            if not reads_shards or name in kept:
                spans[name] = ((0, tensor.length),) * rollout_tp
            elif row.expert is not None and rollout_ep > 1:
                owner = row.ep_rank(arch, rollout_tp)
                spans[name] = tuple((0, tensor.length if rank == owner else 0) for rank in range(rollout_tp))
            else:
                spans[name] = tuple(_span(row, index, tensor.length, arch, r, rollout_tp) for r in range(rollout_tp))
    return EngineTensors(tensors, spans, stacks, kept)


def _delta_intervals(arch: Architecture, rank: int, ranks: int) -> tuple[Interval, ...]:
    """Returns an engine rank's channels of q, of k, and of v of a gated delta net."""
    assert arch.delta is not None
    sizes = (arch.delta.key_size, arch.delta.key_size, arch.delta.value_size)
    first = itertools.accumulate(sizes[:2], initial=0)
    return tuple((a + n * rank // ranks, a + n * (rank + 1) // ranks) for a, n in zip(first, sizes, strict=True))


def _span(row: WeightRow, index: int, length: int, arch: Architecture, rank: int, ranks: int) -> Interval:
    if isinstance(row, (Replicated, HeadsNorm)):
        return 0, length
    if isinstance(row, Vocabulary):
        size = -(-length // ENGINE_VOCABULARY_MULTIPLE) * ENGINE_VOCABULARY_MULTIPLE // ranks
        return min(rank * size, length), min((rank + 1) * size, length)
    if isinstance(row, QKV) and index > 0 and arch.num_query_groups < ranks and not arch.post_norms:
        head = rank // (ranks // arch.num_query_groups)
        return head * arch.head_dim, (head + 1) * arch.head_dim
    size = length // ranks
    return rank * size, (rank + 1) * size


# -- streams -----------------------------------------------------------------------------------------------------------


def new_weight_sync(
    arch: Architecture, mesh: Mesh, stage_of: Mapping[str, int], tensors: EngineTensors, **options: Any
) -> WeightSync:
    """Plan a sync of the model's layout to engines that read `tensors`. `options`: see WeightSync. Collective."""
    rows, constants = model_rows(arch), dict[int, list[tuple[str, SyncTensor]]]()
    for row in rows.values():
        if row.is_constant:
            tensor = SyncTensor(row.hf[0], row.hf_shapes(arch)[0], 0)
            constants.setdefault(stage_of[row.megatron], []).append((row.megatron, tensor))
    parameters = sync_parameters(arch, options.get("grid") or mesh.grid(), stage_of)
    shapes = {name: row.local_shape(arch, mesh.tp) for name, row in rows.items()}
    return WeightSync(SyncModel(parameters, shapes, constants, served), mesh, tensors, **options)


def sent_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return this rank's parameters as a sync reads them: the head by the embedding's name, too, where it is tied."""
    parameters = global_parameters(model)
    return {EMBEDDING: parameters[HEAD], **parameters} if HEAD in parameters else parameters


def hf_weights(
    model: torch.nn.Module, arch: Architecture, mesh: Mesh, bucket_megabytes: int, stage_of: Mapping[str, int]
) -> Iterator[WeightBucket]:
    """Yield every Hugging Face tensor, complete, on every rank. Collective. Raises RankError.

    `bucket_megabytes`: of all buffers of a rank together. `stage_of`: Megatron name -> stage (`stage_owners`). Tensors may
    share their memory with the model or with a later bucket: copy what is kept.
    """
    config: Any = unwrapped(model).config
    device = next(model.parameters()).device
    tensors, dtype = engine_tensors(arch, mesh.rollout_tp, reads_shards=False), config.params_dtype
    options: dict[str, Any] = {"dtype": dtype, "device": device, "bucket_megabytes": bucket_megabytes}
    yield from new_weight_sync(arch, mesh, stage_of, tensors, **options).stream(sent_parameters(model), version=0)
