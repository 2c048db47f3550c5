"""Grouped experts on the CPU: Megatron-Core's `TEGroupedMLP` around a stand-in for Transformer Engine's `GroupedLinear`.

The stand-in has the names and shapes of Transformer Engine's parameters, and computes with torch. What it saves is planned by
the function of Megatron-Core's own wrapper, which is taken from its source: without Transformer Engine it is not defined.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F


def wrapper_method(name: str) -> Any:
    """A method of Megatron-Core's `TEGroupedLinear`."""
    from megatron.core.extensions import transformer_engine

    tree = ast.parse(Path(str(transformer_engine.__file__)).read_text())
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "TEGroupedLinear"]
    [method] = [node for node in classes[0].body if isinstance(node, ast.FunctionDef) and node.name == name]
    space = dict(vars(transformer_engine))
    exec(compile(ast.Module([method], []), "TEGroupedLinear", "exec"), space)
    return space[name]


class GroupedLinear(torch.nn.Module):
    """weight0 [out, in], weight1, ...: one for each expert of the rank. `cut`: the dimension of a weight that ranks share."""

    cut: int
    use_bias = False
    _sharded_state_dict_grouped: Any = None

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__()
        self.num_gemms, self._pg_collection, self._tp_group = num_gemms, pg_collection, pg_collection.expt_tp
        shape = [output_size, input_size]
        shape[self.cut] //= pg_collection.expt_tp.size()
        for number in range(num_gemms):
            self.register_parameter(
                f"weight{number}", torch.nn.Parameter(torch.zeros(shape, dtype=config.params_dtype))
            )

    def forward(self, tokens: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, None]:
        parts = [F.linear(part, getattr(self, f"weight{n}")) for n, part in enumerate(tokens.split(counts))]
        return torch.cat(parts), None

    def get_extra_state(self) -> None:
        """Transformer Engine has one, for FP8."""

    def set_extra_state(self, state: Any) -> None:
        pass

    def _split_extra_state(self, state: Any) -> list[Any]:
        return [state] * self.num_gemms

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        axes = {f"{number}.weight": self.cut for number in range(self.num_gemms)}
        return wrapper_method("_sharded_state_dict_grouped")(self, axes, prefix, sharded_offsets, metadata)


class GroupedColumn(GroupedLinear):
    cut = 0


class GroupedRow(GroupedLinear):
    cut = 1


@contextlib.contextmanager
def grouped_experts(is_on: bool = True) -> Iterator[None]:
    """Models that are built inside have grouped experts."""
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.spec_utils import ModuleSpec

    from grpo_megatron.models.layers import spec

    plain = spec.get_gpt_layer_local_spec

    def local_spec(**options: Any) -> Any:
        layer = plain(**options)
        if options["num_experts"]:
            linear = MLPSubmodules(linear_fc1=GroupedColumn, linear_fc2=GroupedRow)
            layer.submodules.mlp.submodules.experts = ModuleSpec(module=TEGroupedMLP, submodules=linear)
        return layer

    with mock.patch.object(spec, "get_gpt_layer_local_spec", local_spec) if is_on else contextlib.nullcontext():
        yield
