"""Published files whose tensors are not those of the weight table: other beginnings of names, and stacks of experts.

The table has gate, up [I, h] and down [h, I] of every expert: `model.layers.0.mlp.experts.7.gate_proj.weight`. Files have

    mlp.experts.gate_up_proj [E, 2 I, h] and mlp.experts.down_proj [E, h, I]     Qwen3.5
    mlp.experts.gate_up_proj [E, h, 2 I] and mlp.experts.down_proj [E, I, h]     Qwen3-VL: transposed, but not by transformers
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

IS_TRANSPOSED = {"qwen3_5_moe": False, "qwen3_vl_moe": True}  # model_type of files with stacks
NESTED = ("qwen3_vl", "qwen3_5", *IS_TRANSPOSED)  # files have the names of transformers' modules
_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)\d+\.(gate|up|down)_proj\.weight")
_STACK = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj")


def published_name(name: str) -> str:
    """Returns a tensor's name as published folders of models that read images have it: `visual.`, `model.layers.`.

    transformers 4.52 and later wrote some with the names of its modules, and so does PEFT.
    """
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def name_in_file(name: str, model_type: str) -> str:
    """Returns the name that the published files of a family have for a tensor."""
    if model_type not in NESTED:
        return name
    return re.sub(r"^(?=visual\.)", "model.", re.sub(r"^model\.", "model.language_model.", name))


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file: one of the table, or a stack of its `parts`, expert by expert."""

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    is_transposed: bool = False

    def join(self, read: Callable[[str], Tensor]) -> Tensor:
        """Returns the tensor, from those of the table."""
        if len(self.parts) == 1:
            return read(self.parts[0])
        rows = torch.cat([read(name) for name in self.parts])  # [E * rows of an expert, columns]
        if self.is_transposed:
            return rows.view(self.shape[0], self.shape[2], self.shape[1]).transpose(1, 2).contiguous()
        return rows.view(self.shape)


def file_tensors(shapes: Mapping[str, tuple[int, ...]], model_type: str) -> dict[str, FileTensor]:
    """Returns name -> tensor of a family's files, for tensors of the table in stream order."""
    parts: dict[str, list[str]] = {}
    for name in shapes:
        match = _EXPERT.fullmatch(name) if model_type in IS_TRANSPOSED else None
        stack = f"{match[1]}{'down' if match[2] == 'down' else 'gate_up'}_proj" if match else name
        parts.setdefault(name_in_file(stack, model_type), []).append(name)
    return {name: _file_tensor(names, shapes, model_type) for name, names in parts.items()}


def _file_tensor(names: list[str], shapes: Mapping[str, tuple[int, ...]], model_type: str) -> FileTensor:
    if model_type not in IS_TRANSPOSED or not _EXPERT.fullmatch(names[0]):
        return FileTensor(shapes[names[0]], tuple(names))
    rows, columns = shapes[names[0]]
    per_expert = 1 if names[0].endswith("down_proj.weight") else 2
    sizes = (per_expert * rows, columns)
    is_transposed = IS_TRANSPOSED[model_type]
    return FileTensor(
        (len(names) // per_expert, *(sizes[::-1] if is_transposed else sizes)), tuple(names), is_transposed
    )


class Part(NamedTuple):
    """The place of an expert's weight in a stack: `rows` rows from `first` on."""

    expert: int
    first: int
    rows: int
    is_transposed: bool


class PartSlice:
    """An object that reads a part of an expert's weight [rows, columns] when it is indexed."""

    def __init__(self, stack: Any, part: Part) -> None:
        self._stack, self._part = stack, part

    def __getitem__(self, cut: slice | tuple[slice, ...]) -> Tensor:
        rows, columns = (*(cut if isinstance(cut, tuple) else (cut,)), slice(None))[:2]
        expert, first, count, is_transposed = self._part
        start, stop, _ = rows.indices(count)
        rows = slice(first + start, first + max(start, stop))
        if is_transposed:
            return self._stack[expert, columns, rows].t()  # type: ignore[no-any-return]
        return self._stack[expert, rows, columns]  # type: ignore[no-any-return]


def parts_of_stack(name: str, shape: tuple[int, ...], hidden: int) -> Iterable[tuple[str, Part, tuple[int, int]]]:
    """Yields name, place and shape of the table's tensors in a stack; nothing for another tensor.

    `name`: the published one. `hidden`: the model's size h, by which a stack shows whether it is transposed.
    """
    if not (match := _STACK.fullmatch(name)) or len(shape) != 3:
        return
    is_transposed = shape[2 if match[1] == "gate_up" else 1] != hidden
    kinds = ("gate", "up") if match[1] == "gate_up" else ("down",)
    all_rows, columns = shape[:0:-1] if is_transposed else shape[1:]
    rows = all_rows // len(kinds)
    for expert in range(shape[0]):
        for number, kind in enumerate(kinds):
            part = Part(expert, number * rows, rows, is_transposed)
            yield f"{name.rpartition('.')[0]}.{expert}.{kind}_proj.weight", part, (rows, columns)
