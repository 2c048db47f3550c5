"""Run as a script: prints, as JSON, the names of a checkpoint's norms under Megatron-Core's own layer specs.

The specs for Transformer Engine need the package to be importable, not to work: here its classes are empty modules. The
printed names come from Megatron-Core: its specs fuse some norms with the linear layer behind them and rename others.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
from typing import Any, ClassVar


class _Package(types.ModuleType):
    """A module that has every class and every submodule."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].islower():
            return importlib.import_module(f"{self.__name__}.{name}")
        import torch

        setattr(self, name, type(name, (torch.nn.Module,), {}))
        return self.__dict__[name]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.split(".")[0] != "transformer_engine":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        module: Any = _Package(spec.name)
        module.__version__ = "2.9.0"
        return module

    def exec_module(self, module: Any) -> None: ...


def norms(spec: Any) -> list[str]:
    """Names of a layer's norms in a distributed checkpoint, from its spec."""
    from megatron.core.transformer.identity_op import IdentityOp

    layer = spec.submodules
    attention, mlp = layer.self_attention.submodules, layer.mlp.submodules
    found = []
    for norm, module, linear in (
        ("input_layernorm", attention.linear_qkv, "self_attention.linear_qkv"),
        ("pre_mlp_layernorm", getattr(mlp, "linear_fc1", None), "mlp.linear_fc1"),
    ):
        if getattr(layer, norm) is IdentityOp:  # then it is fused with the linear layer
            assert module.__name__ == "TELayerNormColumnParallelLinear"
            found.append(f"{linear}.layer_norm_weight")
        else:
            found.append(f"{norm}.weight")
    heads = [norm for norm in ("q_layernorm", "k_layernorm") if getattr(attention, norm) is not IdentityOp]
    found += [f"self_attention.{norm}.weight" for norm in heads]
    for old, new in layer.sharded_state_dict_keys_map.items():
        found = [new + name.removeprefix(old) if name.startswith(old) else name for name in found]
    return found


def main() -> None:
    sys.meta_path.insert(0, _Finder())
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )

    found = {}
    for engine, make in (("te", get_gpt_layer_with_transformer_engine_spec), ("local", get_gpt_layer_local_spec)):
        found[f"{engine} dense"] = norms(make())
        found[f"{engine} qk_norm"] = norms(make(qk_layernorm=True))
        found[f"{engine} experts"] = norms(make(num_experts=4, moe_grouped_gemm=False, qk_layernorm=True))
        if engine == "te":  # local experts are never grouped here
            found["te experts grouped"] = norms(make(num_experts=4, moe_grouped_gemm=True, qk_layernorm=True))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
