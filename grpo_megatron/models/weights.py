"""Hugging Face folder -> any tp x pp x ep layout, and any layout -> the collective stream of Hugging Face tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import hf_shapes, table_of
from grpo_megatron.models.mapping import WeightRow, bind_table, local_name
from grpo_megatron.models.precision import fill, plain
from grpo_megatron.parallel.mesh import Mesh, all_gather_values
from grpo_megatron.types import WeightBucket


class WeightsError(ValueError):
    """A Hugging Face folder whose tensors are not the model's: every wrong one is named."""


class SafetensorsFolder:
    """The safetensors files of a folder as one lazy name -> slice mapping. Nothing is read until a slice is taken."""

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
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [self.folder / name for name in names]
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

    def slice(self, name: str) -> Any:
        return self._owner[name].get_slice(name)

    def check(self, expected: dict[str, tuple[int, ...]], optional: set[str]) -> None:
        """Raise WeightsError that lists every missing, unexpected or misshapen tensor. Reads headers only."""
        problems = [f"missing {name}" for name in expected if name not in self._owner and name not in optional]
        known = set(expected) | optional
        ignored = ("rotary_emb.inv_freq", "masked_bias")  # buffers that old exporters wrote
        problems += [f"unexpected {n}" for n in self._owner if n not in known and not n.endswith(ignored)]
        for name, shape in expected.items():
            if name in self._owner and tuple(self.slice(name).get_shape()) != shape:
                problems.append(f"{name} has shape {tuple(self.slice(name).get_shape())}, expected {shape}")
        if problems:
            shown = "\n  ".join(problems[:20])
            more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
            raise WeightsError(f"model folder {str(self.folder)!r} does not hold this model:\n  {shown}{more}")


def check_hf(folder: Path, arch: Architecture) -> None:
    """Raise WeightsError unless the folder holds exactly this architecture's tensors. Reads headers only."""
    with SafetensorsFolder(folder) as files:
        files.check(hf_shapes(arch), {"lm_head.weight"} if arch.tied else set())


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside DDP and Float16Module."""
    while hasattr(model, "module"):
        model = model.module  # type: ignore[assignment]
    return model


def bind(model: torch.nn.Module, arch: Architecture) -> dict[str, tuple[str, torch.nn.Parameter]]:
    """Global local-spec name -> (this model's own name, parameter), for every parameter of this rank.

    Layer numbers are global, from each layer's own `layer_number`: uneven stages need no offset. So are expert
    numbers, from each layer's own `local_expert_indices`.
    """
    inner = bare(model)
    layers: Any = inner.decoder.layers  # type: ignore[union-attr]
    bound: dict[str, tuple[str, torch.nn.Parameter]] = {}
    for own_name, parameter in inner.named_parameters():
        parts = own_name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            layer = layers[int(parts[2])]
            parts[2] = str(layer.layer_number - 1)
            if parts[3:5] == ["mlp", "experts"]:
                parts[5:] = _global_expert(parts[5:], layer.mlp.local_expert_indices)
        bound[local_name(".".join(parts))] = (own_name, parameter)
    return bound


def _global_expert(parts: list[str], indices: list[int]) -> list[str]:
    """What follows `mlp.experts.`, sequential (local_experts.0.linear_fc1.weight) or grouped (linear_fc1.weight0), as
    the former with the expert's global number."""
    if parts[0] == "local_experts":
        return [parts[0], str(indices[int(parts[1])]), *parts[2:]]
    linear, weight = parts
    return ["local_experts", str(indices[int(weight.removeprefix("weight"))]), linear, "weight"]


def bound_rows(arch: Architecture) -> dict[str, WeightRow]:
    """Megatron global name -> row, for the whole model, in stream order: embedding, layers, final norm, head."""
    return {row.megatron: row for row in bind_table(table_of(arch), arch)}


@torch.no_grad()
def load_hf(model: torch.nn.Module, folder: Path, arch: Architecture, mesh: Mesh) -> None:
    """Fill this rank's parameters from a Hugging Face folder, reading only its own slices. Raises WeightsError.

    A tied model on several stages holds its embedding again as the last stage's head; both are filled here.
    """
    rows = bound_rows(arch)
    with SafetensorsFolder(folder) as files:
        files.check(hf_shapes(arch), {"lm_head.weight"} if arch.tied else set())
        for name, (_, parameter) in bind(model, arch).items():
            if name == "output_layer.weight" and arch.tied:
                name = "embedding.word_embeddings.weight"
            fill(parameter, rows[name].shard(files.slice, arch, mesh.tp_rank, mesh.tp))


@torch.no_grad()
def hf_weights(
    model: torch.nn.Module, arch: Architecture, mesh: Mesh, bucket_bytes: int, stage_of: dict[str, int]
) -> Iterator[WeightBucket]:
    """Collective: every rank gets every Hugging Face tensor, whole, in buckets of about `bucket_bytes`.

    Per bucket: the owning stage all-gathers its shards over tensor-parallel ranks (of experts, the owning
    expert-parallel rank does, and broadcasts to the others), then broadcasts them to the other stages. Tensors own
    their memory. `stage_of` says which stage owns each Megatron parameter (`stage_owners`).
    Something wrong on one rank (a parameter missing or misshapen) is agreed on before any tensor moves: RankError.
    """
    own = bind(model, arch)
    for bucket in _buckets(arch, mesh, bucket_bytes, stage_of, next(iter(own.values()))[1].element_size()):
        stage, ep_rank = stage_of[bucket[0].megatron], bucket[0].ep_rank(arch, mesh.ep)
        shapes = [row.local_shape(arch, mesh.tp) for row in bucket]
        sizes = [_numel(shape) for shape in shapes]
        flat, problem = None, None
        if mesh.pp_rank == stage and ep_rank in (None, mesh.ep_rank):
            try:
                flat = _flatten(bucket, shapes, own)
            except (KeyError, ValueError) as error:
                problem = f"cannot read weights: {error}"
        mesh.agree(problem)
        parameter = next(iter(own.values()))[1]
        gathered = torch.empty(mesh.tp, sum(sizes), dtype=parameter.dtype, device=parameter.device)
        if flat is not None:
            dist.all_gather(list(gathered.unbind(0)), flat, group=mesh.tp_group)
        if mesh.ep > 1 and ep_rank is not None and mesh.pp_rank == stage:
            dist.broadcast(gathered, mesh.expert_rank(ep_rank), group=mesh.ep_group)
        if mesh.pp > 1:
            dist.broadcast(gathered, mesh.stage_rank(stage), group=mesh.pp_group)
        parts = gathered.split(sizes, dim=1)
        out: WeightBucket = []
        for row, part, shape in zip(bucket, parts, shapes, strict=True):
            shards = [shard.view(shape) for shard in part.unbind(0)]
            out += list(zip(row.hf, row.merge(shards, arch), strict=True))
        del gathered, parts
        yield out


def stage_owners(model: torch.nn.Module, arch: Architecture, mesh: Mesh) -> dict[str, int]:
    """Collective: Megatron name -> the first pipeline stage that holds it (tied copies are left to the first)."""
    of_stage = [name for held in all_gather_values(list(bind(model, arch)), mesh.ep_group) for name in held]
    names = all_gather_values(of_stage, mesh.pp_group)
    owners: dict[str, int] = {}
    for stage, held in enumerate(names):
        for name in held:
            owners.setdefault(name, stage)
    missing = [name for name in bound_rows(arch) if name not in owners]
    if missing:
        raise WeightsError(f"no pipeline stage holds {', '.join(missing[:10])} ({len(missing)} in all)")
    return owners


def _buckets(
    arch: Architecture, mesh: Mesh, bucket_bytes: int, stage_of: dict[str, int], itemsize: int
) -> Iterator[list[WeightRow]]:
    """Cut the stream into runs of one owner, each about `bucket_bytes` whole (never less than one parameter)."""

    def owner(row: WeightRow) -> tuple[int, int | None]:
        return stage_of[row.megatron], row.ep_rank(arch, mesh.ep)

    bucket: list[WeightRow] = []
    size = 0
    for row in bound_rows(arch).values():
        bytes_ = _numel(row.local_shape(arch, mesh.tp)) * mesh.tp * itemsize
        if bucket and (size + bytes_ > bucket_bytes or owner(row) != owner(bucket[0])):
            yield bucket
            bucket, size = [], 0
        bucket.append(row)
        size += bytes_
    yield bucket


def _flatten(
    bucket: list[WeightRow], shapes: list[tuple[int, ...]], own: dict[str, tuple[str, torch.nn.Parameter]]
) -> Tensor:
    parts = []
    for row, shape in zip(bucket, shapes, strict=True):
        parameter = own[row.megatron][1]
        if tuple(parameter.shape) != shape:
            raise ValueError(f"{row.megatron} has shape {tuple(parameter.shape)}, expected {shape}")
        parts.append(plain(parameter).reshape(-1))
    return torch.cat(parts)


def _numel(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out
