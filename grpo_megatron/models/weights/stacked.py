"""Files with all experts of a layer in one tensor (gpt-oss), beside a weight table with one row per expert.

    gate_up_proj   [E, h, 2 f], gate and up alternate    gate_up_proj_bias [E, 2 f]
    down_proj      [E, f, h]                             down_proj_bias    [E, h]
    .._proj_blocks [E, outputs, inputs / 32, 16] and .._proj_scales [E, outputs, inputs / 32]: a weight in MXFP4

MXFP4 (OCP Microscaling Formats 1.0): a byte has two numbers of 4 bits, the lower first, and 32 numbers share the power of two
scale - 127. bfloat16 has every such number exactly. Nothing is written in MXFP4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

STACKED_FAMILIES = ("gpt_oss",)
_STACK = re.compile(r"^(.+\.mlp\.experts)\.(gate_up|down)_proj(_bias|_blocks|)$")
_PART = re.compile(r"^(.+\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.(weight|bias)$")
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file, by its header. `name` is the name in the file, `dtype` the format's (BF16).

    `expert`: it is that of one expert in the file's tensor. `part`: of gate (0) and up (1) there; None: it is down.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    expert: int | None = None
    part: int | None = None


def split_experts(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns name -> tensor, with one for each expert in place of those of all experts. Scales belong to their blocks."""
    out: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        scales = tensors.get(name.removesuffix("_blocks") + "_scales")
        is_whole = not name.endswith("_blocks") or (scales is not None and scales.shape == stored.shape[:-1])
        stack = _STACK.match(name) if is_whole else None
        if stack is None:
            out[name] = stored
            continue
        module, kind, suffix = stack.groups()
        shape, dtype = stored.shape[1:], stored.dtype
        if suffix == "_blocks":
            shape, dtype = (shape[0], shape[1] * 32), "BF16"
        elif not suffix:
            shape = shape[::-1]
        names: list[tuple[str, int | None]] = [("down", None)]
        if kind == "gate_up":
            shape, names = (shape[0] // 2, *shape[1:]), [("gate", 0), ("up", 1)]
        for expert in range(stored.shape[0]):
            for part_name, part in names:
                tensor = f"{module}.{expert}.{part_name}_proj.{'bias' if suffix == '_bias' else 'weight'}"
                out[tensor] = StoredTensor(stored.file, stored.name, dtype, shape, expert, part)
    used = {stored.name.removesuffix("_blocks") + "_scales" for stored in out.values() if stored.expert is not None}
    return {name: stored for name, stored in out.items() if name not in used}


def read_expert(stored: StoredTensor, slice_of: Callable[[str], Any]) -> Tensor:
    """Reads the tensor of one expert. `slice_of`: name in the files -> an object that reads what it is indexed with."""
    values: Tensor = slice_of(stored.name)[stored.expert]
    if stored.name.endswith("_blocks"):
        values = decode_mxfp4(values, slice_of(stored.name.removesuffix("_blocks") + "_scales")[stored.expert])
    elif values.dim() > 1:
        values = values.T
    return values if stored.part is None else values[stored.part :: 2]


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns the bfloat16 numbers [rows, 32 n] of blocks [rows, n, 16] with scales [rows, n], both bytes. Exact."""
    numbers = torch.tensor([*_MAGNITUDES, *(-number for number in _MAGNITUDES)], dtype=torch.bfloat16)
    pairs = torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], dim=1)  # [256, 2]
    values = pairs[blocks.int()].flatten(2)  # [rows, n, 32]
    return torch.ldexp(values, scales.int().unsqueeze(-1) - 127).flatten(1)


def file_tensors(names: Iterable[str], model_type: str) -> dict[str, list[str]]:
    """Returns name in the files of a family -> the tensors of the model that make it, in their order."""
    out: dict[str, list[str]] = {}
    for name in names:
        part = _PART.match(name) if model_type in STACKED_FAMILIES else None
        if part is not None:
            kind = "down" if part[2] == "down" else "gate_up"
            out.setdefault(f"{part[1]}.{kind}_proj{'_bias' if part[3] == 'bias' else ''}", []).append(name)
        else:
            out[name] = [name]
    return out


def join_experts(name: str, parts: Sequence[Tensor]) -> Tensor:
    """Returns the tensor that files have by this name. The inverse of `split_experts`; one other tensor stays as it is."""
    stack = _STACK.match(name)
    if stack is None:
        return parts[0]
    values = torch.stack(list(parts))
    if stack[2] == "gate_up":
        values = values.unflatten(0, (-1, 2)).transpose(1, 2).flatten(1, 2)  # [E, 2 f] or [E, 2 f, h]
    return values.transpose(1, -1).contiguous() if values.dim() > 2 else values


def joined_shape(name: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the shape of `join_experts`."""
    with torch.device("meta"):
        return tuple(join_experts(name, [torch.empty(shape) for shape in shapes]).shape)


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Returns whether a config.json says that the experts are in MXFP4."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"
