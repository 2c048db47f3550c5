"""Linear modules with factors: `attach` gives a loaded model its adapters and freezes everything else.

The module of a weight W0 becomes one of a class below its own, with the parameters `lora_a` and `lora_b` beside `weight`, so
that names, loading and the base's own code stay. A merged forward pass multiplies by round(W0 + s B A), a split one adds
s B (A x) to W0 x.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor

from grpo_megatron.config import LoraConfig
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.lora.merge import merge
from grpo_megatron.models.lora.table import LORA_A, LORA_B, Factor, lora_rows
from grpo_megatron.models.weights.hf_folder import SafetensorsFolder
from grpo_megatron.models.weights.stream import global_parameters, set_parameter, unwrapped
from grpo_megatron.parallel.mesh import Mesh

Factors = dict[str, tuple[Tensor, Tensor]]  # Megatron name of the weight -> lora_a, lora_b of this rank


class Lora:
    """The adapters of one model on this rank.

    `rows`: those of this rank's parameters, by global Megatron name. `reading`: which factors a pass multiplies by.
    """

    def __init__(self, config: LoraConfig, rows: Mapping[str, Factor]) -> None:
        self.config, self.rows = config, dict(rows)
        self.modules: dict[str, _Adapted] = {}  # by the Megatron name of the weight
        self.drops = False
        self.read: Factors | None = None  # in `reading`

    def copies(self) -> Factors:
        """Returns copies of the current factors, for a later `reading`."""
        return {name: (m.lora_a.detach().clone(), m.lora_b.detach().clone()) for name, m in self.modules.items()}

    def stored(self, folder: Path, arch: Architecture, mesh: Mesh) -> Factors:
        """Returns the factors of a PEFT folder, for a later `reading`. No communication. Raises WeightsError."""
        with SafetensorsFolder(folder) as files:
            rows = {name: row.shard(files.slice, arch, mesh.tp_rank, mesh.tp) for name, row in self.rows.items()}
        factors: Factors = {}
        for name, module in self.modules.items():
            pair = (rows[f"{name.removesuffix('weight')}{factor}"] for factor in (LORA_A, LORA_B))
            a, b = (factor.to(module.lora_a) for factor in pair)
            factors[name] = a, b
        return factors

    @torch.no_grad()
    def served_update(self) -> tuple[float, float]:
        """Computes <W - W0, s B A> and |s B A|^2 of the first adapted weight on this rank, where W is the merged weight."""
        for module in self.modules.values():
            base, a, b = module.weight, module.lora_a, module.lora_b
            update = module.adapter.merged(torch.zeros_like(base, dtype=torch.float32), a, b)
            change = (base.float() + update).to(base.dtype).float() - base.float()  # as `merged` rounds
            return float((change * update).sum()), float((update * update).sum())
        return 0.0, 0.0

    @contextlib.contextmanager
    def reading(self, factors: Factors) -> Iterator[None]:
        """Gives the model these factors inside the block; with none it is the base, bit for bit. Not for an update."""
        before, self.read = self.read, factors
        try:
            yield
        finally:
            self.read = before

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Makes passes have `dropout` inside the block."""
        self.drops = True
        try:
            yield
        finally:
            self.drops = False


@dataclass(frozen=True)
class _Adapter:
    """The adapter of one weight. `rows`: for each adapted part, its rows of the weight.

    `sums`: whether the gradients of A and of B are summed over tensor-parallel ranks. A rank has dW of its part of W0. A factor
    that is cut as W0 gets its full gradient from this part. A replicated factor gets a term of the sum: A of a column-parallel
    weight, B of a row-parallel one, and under sequence parallelism both of a replicated weight, whose dW is of local tokens.
    """

    lora: Lora
    name: str
    split_dim: int | None
    rows: list[Any]
    sums: tuple[bool, bool]
    keeps_merged: bool
    is_parallel: bool  # sequence parallelism
    group: Any

    @property
    def scale(self) -> float:
        return self.lora.config.scale

    def parts(self) -> Iterator[tuple[Any, slice]]:
        """For each adapted part: its rows of the weight and of `lora_b`, and its rows of `lora_a`."""
        rank: Any = self.lora.config.rank
        return ((rows, slice(number * rank, (number + 1) * rank)) for number, rows in enumerate(self.rows))

    @torch.no_grad()
    def merged(self, base: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Returns the rank's part of round(W0 + s B A). Rows without an adapter are W0's."""
        out = base.detach().clone()
        for rows, a_rows in self.parts():
            place = out[rows] if isinstance(rows, slice) else None  # a list of rows has no view
            merged = merge(base[rows], a[a_rows], b[rows], self.scale, out=place)
            if place is None:
                out[rows] = merged
        return out


class _Merge(torch.autograd.Function):
    """W = round(W0 + s B A), with dA = s B^T dW and dB = s dW A^T. The rounding counts as the identity. Sums in float32."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, base: Tensor, adapter: _Adapter) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.adapter = adapter
        return adapter.merged(base, a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        adapter, (a, b), scale = ctx.adapter, ctx.saved_tensors, ctx.adapter.scale
        grad_a, grad_b = (torch.zeros_like(factor, dtype=torch.float32) for factor in (a, b))
        for rows, a_rows in adapter.parts():
            grad = grads[0][rows].float()
            grad_a[a_rows] = scale * (b[rows].float().T @ grad)
            grad_b[rows] = scale * (grad @ a[a_rows].float().T)
        for factor, is_summed in zip((grad_a, grad_b), adapter.sums, strict=True):
            if is_summed:
                dist.all_reduce(factor, group=adapter.group)
        return grad_a.to(a.dtype), grad_b.to(b.dtype), None, None


class _Adapted(torch.nn.Module):
    """Stands before a class of linear modules; `_adapted` joins them."""

    adapter: _Adapter
    weight: Tensor
    lora_a: torch.nn.Parameter
    lora_b: torch.nn.Parameter

    def factors(self) -> tuple[Tensor, Tensor] | None:
        """Returns the factors of a pass. None: the base alone."""
        read = self.adapter.lora.read
        return (self.lora_a, self.lora_b) if read is None else read.get(self.adapter.name)

    def served(self) -> Tensor:
        """Returns the merged weight, for an engine or a Hugging Face folder."""
        factors = self.factors()
        return self.weight.detach() if factors is None else self.adapter.merged(self.weight, *factors)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Computes the base's forward pass with the adapter.

        A merged weight is not kept for the backward pass, which merges again, once: it would be a second copy of the model for
        every micro-batch under way. Where all layers are recomputed in full, it lives for one layer anyway.
        """
        adapter, run, factors = self.adapter, super().forward, self.factors()
        if factors is None:
            return run(x, *args, **kwargs)
        if adapter.lora.config.mode == "split":
            output, bias = run(x, *args, **kwargs)
            return output + adapter.scale * self._low_rank(x, *factors), bias
        base = self.weight
        weight = _Merge.apply(*factors, base, adapter)
        place = weight.data_ptr(), weight.shape
        again: list[Tensor] = []  # the weight, from the first to the last time that the backward pass unpacks it
        num_saved = num_unpacked = 0

        def pack(saved: Tensor) -> Tensor | None:
            nonlocal num_saved
            if (saved.data_ptr(), saved.shape) != place:
                return saved
            num_saved += 1  # Transformer Engine saves a weight twice
            return None

        def unpack(saved: Tensor | None) -> Tensor:
            nonlocal num_unpacked
            if saved is not None:
                return saved
            merged = again.pop() if again else adapter.merged(base, *factors)
            num_unpacked += 1
            if num_unpacked % num_saved:
                again.append(merged)
            return merged

        self.__dict__["weight"] = weight  # found before the parameter of this name
        try:
            if adapter.keeps_merged:
                return run(x, *args, **kwargs)
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                output = run(x, *args, **kwargs)
        finally:
            del self.__dict__["weight"]
        _forget(weight, output[0].grad_fn)
        return output

    def _low_rank(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Computes B (A x): x [s, b, inputs of this rank] -> [s, b, outputs of this rank], with Megatron's communication.

        A replicated factor has its full gradient, or, under sequence parallelism, that of local tokens: Megatron sums these.
        """
        adapter = self.adapter
        config, is_parallel = adapter.lora.config, adapter.is_parallel
        if adapter.lora.drops and config.dropout:
            x = F.dropout(x, config.dropout)
        low = x @ a.T
        if adapter.split_dim == 0 and is_parallel:
            low = tensor_parallel.gather_from_sequence_parallel_region(low)
        elif adapter.split_dim == 0:
            low = tensor_parallel.copy_to_tensor_model_parallel_region(low)
        elif adapter.split_dim == 1 and is_parallel:
            low = tensor_parallel.reduce_scatter_to_sequence_parallel_region(low)
        elif adapter.split_dim == 1:
            low = tensor_parallel.reduce_from_tensor_model_parallel_region(low)
        out = low.new_zeros(*low.shape[:-1], len(b))
        for rows, a_rows in adapter.parts():
            out[..., rows] = low[..., a_rows] @ b[rows].T
        return out


def _forget(weight: Tensor, node: Any) -> None:
    """Clears a reference to `weight` beside the saved tensors, in the node of an output or in one of the few before it.

    Transformer Engine's LayerNormLinear stores one, `ctx.weight` (layernorm_linear.py:495 of 2.11), that no backward pass reads.
    """
    nodes = [node]
    for node in itertools.islice(nodes, 8):
        if getattr(node, "weight", None) is weight:
            node.weight = None
        nodes += [before for before, _ in getattr(node, "next_functions", ())]


@functools.cache
def _adapted(base: Any) -> type[_Adapted]:
    return type(f"Adapted{base.__name__}", (_Adapted, base), {})


# -- attaching ---------------------------------------------------------------------------------------------------------


def attach(model: torch.nn.Module, arch: Architecture, config: LoraConfig, mesh: Mesh) -> Lora | None:
    """Give a model that has its weights the adapters of `config`, with initial values, before it is wrapped in DDP.

    All else is frozen, except a scalar head. None, and nothing is changed, without LoRA. No communication.
    Raises WeightsError if `path` cannot be read.
    """
    if config.rank is None:
        return None
    inner: Any = unwrapped(model)
    parameters = global_parameters(model)
    owners = {id(m.weight): m for m in inner.modules() if isinstance(getattr(m, "weight", None), torch.nn.Parameter)}
    rows = lora_rows(arch, config)
    lora = Lora(config, {name: row for name, row in rows.items() if row.base.megatron in parameters})
    for name, parameter in inner.named_parameters():
        if not name.startswith("score."):
            parameter.requires_grad_(False)
    for name, row in lora.rows.items():
        weight = parameters[row.base.megatron]
        module = owners[id(weight)]
        if name.endswith(LORA_A):
            _adapt(module, lora, row, rows[name.removesuffix(LORA_A) + LORA_B], arch, mesh, inner.config)
        factor = torch.nn.Parameter(weight.new_empty(row.local_shape(arch, mesh.tp)))
        set_parameter(factor, initial_factor(row, config, arch, mesh))
        if row.split_dim is not None:  # else the gradient norm would count the first rank's part only
            set_tensor_model_parallel_attributes(factor, True, row.split_dim, 1)
        elif config.mode == "split":
            factor.sequence_parallel = inner.config.sequence_parallel  # type: ignore[attr-defined]
        module.register_parameter(name.rpartition(".")[2], factor)
    if config.path is not None:
        for name, (a, b) in lora.stored(config.path, arch, mesh).items():
            set_parameter(lora.modules[name].lora_a, a)
            set_parameter(lora.modules[name].lora_b, b)
    if getattr(inner, "embedding", None) is not None:
        # Else the first layer's input needs no gradient, and a layer that is recomputed would get none, without an error.
        inner.embedding.register_forward_hook(_require_gradient)
    return lora


def _require_gradient(module: torch.nn.Module, inputs: Any, output: Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_()


def _adapt(
    module: Any, lora: Lora, row_a: Factor, row_b: Factor, arch: Architecture, mesh: Mesh, transformer: Any
) -> None:
    base = row_a.base
    is_local = base.split_dim is None and transformer.sequence_parallel  # the gradient is of local tokens
    sums = (base.split_dim == 0 or is_local, base.split_dim == 1 or is_local) if mesh.tp > 1 else (False, False)
    slices = row_b.slices(arch, mesh.tp_rank, mesh.tp)
    rows: list[Any] = []
    for number in range(len(row_b.targets)):
        runs = [torch.arange(p.stop - p.start) + p.local_start for p in slices if p.tensor == number]
        places = torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)
        rows.append(slice(int(places[0]), int(places[-1]) + 1) if len(runs) == 1 else places.to(module.weight.device))
    keeps_merged = (transformer.recompute_granularity, transformer.recompute_method) == ("full", "uniform")
    flags = keeps_merged, bool(transformer.sequence_parallel)
    module.adapter = _Adapter(lora, base.megatron, base.split_dim, rows, sums, *flags, mesh.tp_group)
    kind: Any = type(module)
    module.__class__ = _adapted(kind)
    for fused in ("gradient_accumulation_fusion", "fuse_wgrad_accumulation"):
        if hasattr(module, fused):  # into a buffer that the weight has no more
            setattr(module, fused, False)
    module.weight.adapted = module
    lora.modules[base.megatron] = module


def initial_factor(row: Factor, config: LoraConfig, arch: Architecture, mesh: Mesh) -> Tensor:
    """Returns this rank's part of a new factor. Each factor is sampled in full, from its name: the same in every layout."""
    full: dict[str, Tensor] = {}
    for name, shape in zip(row.hf, row.hf_shapes(arch), strict=True):
        full[name], bound = torch.zeros(shape), shape[1] ** -0.5
        seed = int.from_bytes(hashlib.sha256(f"{mesh.seed} {name}".encode()).digest()[:7])
        generator = torch.Generator().manual_seed(seed)
        if name.endswith("lora_A.weight") and config.init == "gaussian":
            full[name].normal_(0, 1 / shape[0], generator=generator)
        elif name.endswith("lora_A.weight"):
            full[name].uniform_(-bound, bound, generator=generator)
    return row.shard(full.__getitem__, arch, mesh.tp_rank, mesh.tp)


# -- The factors in a checkpoint: canonical tensors under PEFT's names, which any layout reads -------------------------


def sharded_factors(model: torch.nn.Module, lora: Lora, arch: Architecture, mesh: Mesh) -> dict[str, Any]:
    """Megatron's description of this rank's factors, by the names of the model's own `state_dict`."""
    parameters = global_parameters(model)
    names = {id(parameter): name for name, parameter in unwrapped(model).named_parameters()}
    return {names[id(parameters[name])]: _entry(row, parameters[name], arch, mesh) for name, row in lora.rows.items()}


def _entry(row: Factor, parameter: Tensor, arch: Architecture, mesh: Mesh) -> ShardedTensorFactory:
    slices, shapes = row.slices(arch, mesh.tp_rank, mesh.tp), row.hf_shapes(arch)
    replica = (0, mesh.tp_rank if row.split_dim is None else 0, mesh.dp_rank)

    def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        found = []
        for shard in slices:
            part = tensor.narrow(row.axis, shard.local_start, shard.stop - shard.start)
            shown, shape = row.hf[shard.tensor], shapes[shard.tensor]
            offset = (0,) * row.axis + (shard.start,) + (0,) * (1 - row.axis)
            layout = {"local_shape": tuple(part.shape), "global_shape": shape, "global_offset": offset}
            found.append(
                ShardedTensor(shown, part, part.dtype, **layout, axis_fragmentations=None, replica_id=replica_id)
            )
        return found

    def merge(parts: list[Tensor]) -> Tensor:
        out = torch.zeros_like(parameter)
        for shard, part in zip(slices, parts, strict=True):
            out.narrow(row.axis, shard.local_start, shard.stop - shard.start).copy_(part)
        return out

    parameter.has_unused_rows = sum(p.stop - p.start for p in slices) < parameter.shape[row.axis]  # type: ignore[attr-defined]
    return ShardedTensorFactory(row.megatron, parameter, build, merge, replica)
