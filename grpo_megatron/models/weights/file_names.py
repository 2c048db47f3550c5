"""Published files whose tensors are not those of the weight table: other beginnings of names, and stacks of experts.

The table has gate, up [I, h] and down [h, I] of every expert: `model.layers.0.mlp.experts.7.gate_proj.weight`. Files have

    mlp.experts.gate_up_proj [E, 2 I, h] and mlp.experts.down_proj [E, h, I]     Qwen3.5
    mlp.experts.gate_up_proj [E, h, 2 I] and mlp.experts.down_proj [E, I, h]     Qwen3-VL: transposed, but not by transformers
    the same, rows of gate and up in turn; gate_up_proj_bias [E, 2 I], down_proj_bias [E, h]     gpt-oss, also in MXFP4
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_megatron.models.weights.stream import WeightsError


class StackLayout(NamedTuple):
    """Every expert in a stack is [columns, rows]; gate and up have their rows in turn. Else [rows, columns]; gate, then up."""

    is_transposed: bool
    is_alternating: bool


NESTED = ("qwen3_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl_moe")  # files have the names of transformers' modules
STACKS = {  # model_type of files with stacks
    "qwen3_5_moe": StackLayout(is_transposed=False, is_alternating=False),
    "qwen3_vl_moe": StackLayout(is_transposed=True, is_alternating=False),
    "gpt_oss": StackLayout(is_transposed=True, is_alternating=True),
}
_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)\d+\.(gate|up|down)_proj\.(weight|bias)")
_STACK = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up|down)_proj(_bias)?")


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
    layout: StackLayout | None = None  # of a stack

    def join(self, read: Callable[[str], Tensor]) -> Tensor:
        """Returns the tensor, from those of the table."""
        if self.layout is None:
            return read(self.parts[0])
        experts = torch.stack([read(name) for name in self.parts]).unflatten(0, (self.shape[0], -1))
        if self.layout.is_alternating:  # [E, 1 or 2, rows, columns]; a bias has no columns
            experts = experts.transpose(1, 2)
        if self.layout.is_transposed and len(self.shape) > 2:
            experts = experts.movedim(-1, 1)
        return experts.reshape(self.shape).contiguous()


def file_tensors(shapes: Mapping[str, tuple[int, ...]], model_type: str) -> dict[str, FileTensor]:
    """Returns name -> tensor of a family's files, for tensors of the table in stream order."""
    parts: dict[str, list[str]] = {}
    for name in shapes:
        match = _EXPERT.fullmatch(name) if model_type in STACKS else None
        bias = "_bias" if name.endswith(".bias") else ""
        stack = f"{match[1]}{'down' if match[2] == 'down' else 'gate_up'}_proj{bias}" if match else name
        parts.setdefault(name_in_file(stack, model_type), []).append(name)
    return {name: _file_tensor(names, shapes, model_type) for name, names in parts.items()}


def _file_tensor(names: list[str], shapes: Mapping[str, tuple[int, ...]], model_type: str) -> FileTensor:
    if model_type not in STACKS or not _EXPERT.fullmatch(names[0]):
        return FileTensor(shapes[names[0]], tuple(names))
    rows, *columns = shapes[names[0]]
    per_expert = 1 if ".down_proj." in names[0] else 2
    sizes = (per_expert * rows, *columns)
    layout = STACKS[model_type]
    return FileTensor(
        (len(names) // per_expert, *(sizes[::-1] if layout.is_transposed else sizes)), tuple(names), layout
    )


class Part(NamedTuple):
    """The place of an expert's weight or bias in a stack: `rows` rows from `first` on, every `step`-th."""

    expert: int
    first: int
    rows: int
    step: int
    is_transposed: bool


class PartSlice:
    """An object that reads a part of an expert's weight [rows, columns], or bias [rows], when it is indexed."""

    def __init__(self, stack: Any, part: Part) -> None:
        self._stack, self._part = stack, part

    def __getitem__(self, cut: slice | tuple[slice, ...]) -> Tensor:
        rows, *columns = cut if isinstance(cut, tuple) else (cut,)
        expert, first, count, step, is_transposed = self._part
        start, stop, _ = rows.indices(count)
        rows = slice(first + step * start, first + step * max(start, stop) - step + 1)
        if is_transposed:
            values = self._stack[(expert, *(columns or [slice(None)]), rows)].t()
        else:
            values = self._stack[(expert, rows, *columns)]
        return values[::step]  # type: ignore[no-any-return]


def parts_of_stack(
    name: str, shape: tuple[int, ...], model_type: str, hidden: int
) -> Iterable[tuple[str, Part, tuple[int, ...]]]:
    """Yields name, place and shape of the table's tensors in a stack; nothing for another tensor.

    `name`: the published one. `hidden`: the model's size h, by which Qwen's stacks show whether they are transposed. Raises
    WeightsError where they do not.
    """
    match = _STACK.fullmatch(name) if model_type in STACKS else None
    if not match or len(shape) != (2 if match[3] else 3):
        return
    kinds = ("gate", "up") if match[2] == "gate_up" else ("down",)
    is_alternating = STACKS[model_type].is_alternating
    if STACKS[model_type] == StackLayout(is_transposed=True, is_alternating=False) and shape[1] == shape[2]:
        raise WeightsError(
            f"{name} is {list(shape)}: with experts as wide as the model it does not show if they are transposed, as published,"
            " or not, as transformers saves them; write one tensor per expert (mlp.experts.0.gate_proj.weight, ...)"
        )
    is_transposed = not match[3] and (is_alternating or shape[2 if len(kinds) > 1 else 1] != hidden)
    all_rows, *columns = shape[:0:-1] if is_transposed else shape[1:]
    rows, step = all_rows // len(kinds), len(kinds) if is_alternating else 1
    for expert in range(shape[0]):
        for number, kind in enumerate(kinds):
            part = Part(expert, number * (1 if is_alternating else rows), rows, step, is_transposed)
            tensor = f"{match[1]}{expert}.{kind}_proj.{'bias' if match[3] else 'weight'}"
            yield tensor, part, (rows, *columns)
