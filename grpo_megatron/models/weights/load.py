"""Weights of a model in a layout: loaded from a Hugging Face folder, and streamed as Hugging Face tensors.

Any folder loads into any tp x pp x ep layout. From any layout, `hf_weights` streams whole tensors to every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import hf_shapes, table_of
from grpo_megatron.models.layers.precision import dequantized, set_parameter
from grpo_megatron.models.weights.table import WeightRow, expand_table, local_name
from grpo_megatron.parallel.mesh import Mesh, all_gather_values
from grpo_megatron.reading import read_json
from grpo_megatron.types import WeightBucket

CONSTANTS = (".router.expert_bias",)  # buffers with a row in the weight table


class WeightsError(ValueError):
    """A Hugging Face folder that cannot be read, or whose tensors are not the model's. The message names wrong tensors."""

    tells_what_to_do = True  # the command line prints it without a traceback


class SafetensorsFolder:
    """The safetensors files of a folder as one mapping from name to slice. Data is read when a slice is indexed."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._stack = ExitStack()
        self._owner: dict[str, Any] = {}
        files = self._files()
        for file in files:
            try:
                handle = self._stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{file}: not a readable safetensors file ({error})") from error
            self._owner.update(dict.fromkeys(handle.keys(), handle))

    def _files(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            files = [self.folder / name for name in _indexed_files(index)]
        else:
            files = sorted(self.folder.glob("*.safetensors"))
        missing = [str(file) for file in files if not file.exists()]
        if missing or not files:
            what = f"missing {', '.join(missing)}" if missing else "no *.safetensors file"
            raise WeightsError(f"model folder {str(self.folder)!r}: {what}")
        return files

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def has(self, name: str) -> bool:
        """Whether the folder has the tensor."""
        return name in self._owner

    def slice(self, name: str) -> Any:
        """The tensor, of which only what is sliced will be read."""
        return self._owner[name].get_slice(name)

    def check_model(self, arch: Architecture) -> None:
        """Raise WeightsError unless the folder holds exactly this architecture's tensors. Reads headers only."""
        self.check(hf_shapes(arch), {"lm_head.weight"} if arch.tied else set(), arch.is_extra)

    def check(
        self, expected: dict[str, tuple[int, ...]], optional: set[str], is_extra: Callable[[str], bool] | None = None
    ) -> None:
        """Raise WeightsError that lists missing, unexpected and misshapen tensors, 20 at most. Reads headers only.

        `is_extra`: tensors that may be there and are not read.
        """
        problems = [f"missing {name}" for name in expected if name not in self._owner and name not in optional]
        known = set(expected) | optional
        ignored = ("rotary_emb.inv_freq", "masked_bias")  # buffers written by old exporters
        unexpected = [n for n in self._owner if n not in known and not n.endswith(ignored)]
        problems += [f"unexpected {name}" for name in unexpected if is_extra is None or not is_extra(name)]
        for name, shape in expected.items():
            if name in self._owner and tuple(self.slice(name).get_shape()) != shape:
                problems.append(f"{name} has shape {tuple(self.slice(name).get_shape())}, expected {shape}")
        if problems:
            shown = "\n  ".join(problems[:20])
            more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
            raise WeightsError(f"model folder {str(self.folder)!r} does not hold this model:\n  {shown}{more}")


def _indexed_files(index: Path) -> list[str]:
    """The names of the files in an index. Raises WeightsError for a name that is no *.safetensors file of its folder."""
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index}: not a readable index ({type(error).__name__}: {error})") from error
    outside = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if outside:
        raise WeightsError(f"{index}: weight_map names {outside[0]!r}, which is no *.safetensors file of this folder")
    return names


def check_hf(folder: Path, arch: Architecture) -> None:
    """Raise WeightsError unless the folder holds exactly this architecture's tensors. Reads headers only."""
    with SafetensorsFolder(folder) as files:
        files.check_model(arch)


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
        parameters[local_name(".".join(parts))] = parameter
    return parameters


def _global_expert(parts: list[str], indices: list[int]) -> list[str]:
    """The rest of a name after `mlp.experts.`, in the form of sequential experts, with the expert's global number.

    Sequential experts are named local_experts.0.linear_fc1.weight, grouped ones linear_fc1.weight0.
    """
    if parts[0] == "local_experts":
        return [parts[0], str(indices[int(parts[1])]), *parts[2:]]
    linear, weight = parts
    return ["local_experts", str(indices[int(weight.removeprefix("weight"))]), linear, "weight"]


def model_rows(arch: Architecture) -> dict[str, WeightRow]:
    """Global Megatron name -> row, for the whole model, in stream order: embedding, layers, final norm, head."""
    return {row.megatron: row for row in expand_table(table_of(arch), arch)}


@torch.no_grad()
def load_hf(model: torch.nn.Module, folder: Path, arch: Architecture, mesh: Mesh) -> None:
    """Set this rank's parameters from a Hugging Face folder. Reads only the slices of this rank. Raises WeightsError.

    A tied model with several stages has a copy of its embedding as the last stage's head. Both are set here.
    """
    rows = model_rows(arch)
    with SafetensorsFolder(folder) as files:
        files.check_model(arch)
        for name, parameter in global_parameters(model).items():
            if name == "output_layer.weight" and arch.tied:
                name = "embedding.word_embeddings.weight"
            set_parameter(parameter, rows[name].shard(files.slice, arch, mesh.tp_rank, mesh.tp))


@torch.no_grad()
def hf_weights(
    model: torch.nn.Module, arch: Architecture, mesh: Mesh, bucket_bytes: int, stage_of: dict[str, int]
) -> Iterator[WeightBucket]:
    """Collective: every rank gets every Hugging Face tensor, whole, in buckets of about `bucket_bytes`.

    Per bucket: the owning stage all-gathers its shards over tensor-parallel ranks, then broadcasts them to the other
    stages. (Experts: the owning expert-parallel rank all-gathers, and broadcasts to the other expert-parallel ranks first.)
    The yielded tensors own their memory. `stage_of` maps each Megatron name to its stage (`stage_owners`).
    Before each bucket, the ranks agree that no parameter is missing or has a wrong shape. Raises RankError.
    """
    parameters = global_parameters(model)
    example = next(iter(parameters.values()))
    for rows in _row_groups(arch, mesh, bucket_bytes, stage_of, example.element_size()):
        stage, ep_rank = stage_of[rows[0].megatron], rows[0].ep_rank(arch, mesh.ep)
        shapes = [row.local_shape(arch, mesh.tp) for row in rows]
        sizes = [math.prod(shape) for shape in shapes]
        flat, problem = None, None
        if mesh.pp_rank == stage and ep_rank in (None, mesh.ep_rank):
            try:
                flat = _flatten(rows, shapes, parameters)
            except (KeyError, ValueError) as error:
                problem = f"cannot read weights: {error}"
        mesh.agree(problem)
        dtype = rows[0].dtype(example.dtype)  # of all rows of the group
        gathered = torch.empty(mesh.tp, sum(sizes), dtype=dtype, device=example.device)
        if flat is not None:
            dist.all_gather(list(gathered.unbind(0)), flat, group=mesh.tp_group)
        if mesh.ep > 1 and ep_rank is not None and mesh.pp_rank == stage:
            dist.broadcast(gathered, mesh.expert_rank(ep_rank), group=mesh.ep_group)
        if mesh.pp > 1:
            dist.broadcast(gathered, mesh.stage_rank(stage), group=mesh.pp_group)
        parts = gathered.split(sizes, dim=1)
        bucket: WeightBucket = []
        for row, part, shape in zip(rows, parts, shapes, strict=True):
            shards = [shard.view(shape) for shard in part.unbind(0)]
            bucket += list(zip(row.hf, row.merge(shards, arch), strict=True))
        del gathered, parts
        yield bucket


def stage_owners(model: torch.nn.Module, arch: Architecture, mesh: Mesh) -> dict[str, int]:
    """Collective: Megatron name -> the first pipeline stage that has it (a tied head is the first stage's embedding)."""
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


def _row_groups(
    arch: Architecture, mesh: Mesh, bucket_bytes: int, stage_of: dict[str, int], itemsize: int
) -> Iterator[list[WeightRow]]:
    """Consecutive rows with one owner and dtype, whose whole tensors have about `bucket_bytes` (at least one row)."""

    def owner(row: WeightRow) -> tuple[int, int | None, bool]:
        return stage_of[row.megatron], row.ep_rank(arch, mesh.ep), row.is_constant

    group: list[WeightRow] = []
    group_bytes = 0
    for row in model_rows(arch).values():
        num_bytes = math.prod(row.local_shape(arch, mesh.tp)) * mesh.tp * itemsize
        if group and (group_bytes + num_bytes > bucket_bytes or owner(row) != owner(group[0])):
            yield group
            group, group_bytes = [], 0
        group.append(row)
        group_bytes += num_bytes
    yield group


def _flatten(rows: list[WeightRow], shapes: list[tuple[int, ...]], parameters: dict[str, Tensor]) -> Tensor:
    """This rank's parameters of the rows, end to end. Raises KeyError or ValueError with the name."""
    parts = []
    for row, shape in zip(rows, shapes, strict=True):
        parameter = parameters[row.megatron]
        if tuple(parameter.shape) != shape:
            raise ValueError(f"{row.megatron} has shape {tuple(parameter.shape)}, expected {shape}")
        parts.append(dequantized(parameter).reshape(-1))
    return torch.cat(parts)
