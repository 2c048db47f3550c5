"""EngineMemory: digests of what a vLLM worker holds, per Hugging Face tensor, as loaded: fused, cut, not yet quantised.

vLLM loads a layer, then its `quant_method` processes it: on CPU a linear layer is packed and its parameter emptied, on a
GPU it may be quantised. Three cases:
- Layers without such a method (norms), and unquantised ones whose parameter keeps its shape: the live memory is digested,
  after the update.
- Packed and quantised layers: the parameter is digested when it is handed to `process_weights_after_loading`.
- Other layers whose parameter keeps shape and bits through the first update (experts): from then on as in the first case.
The method must have been called since the update began, or the layer counts as not loaded.

Works with vLLM 0.26 and 0.32, whose fused parameters and calls are the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo_megatron.sync.digest import part_digest
from grpo_megatron.sync.plan import EngineTensors, SyncTensor

_FUSED = {  # last part of a module's Hugging Face name -> vLLM's module, the tensors in it from top to bottom
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("qkv_proj", ("q_proj", "k_proj", "v_proj"))),
    **dict.fromkeys(("gate_proj", "up_proj"), ("gate_up_proj", ("gate_proj", "up_proj"))),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa"))),
}
_EXPERTS = ".experts"
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<expert>\d+)\.(?P<kind>\w+)\.weight")
_EXPERT_KINDS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}
_KEEP_BITS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")  # if they keep the shape
_HOOKED = "_grpo_megatron_hooked"


@dataclass(frozen=True)
class _Place:
    """Where this worker keeps its span of a tensor: `parameter[expert]` (None: no expert) from `offset` of `axis` on.

    `offset` None: from the middle on, which padding may have moved.
    """

    layer: nn.Module
    parameter: str
    expert: int | None
    offset: int | None
    length: int
    tensor: SyncTensor
    start: int

    def digest(self, parameter: Tensor) -> Tensor:
        """The digest of this worker's span of the tensor, in the type in which it was sent."""
        tensor, axis = self._as_sent(parameter.detach()), self.tensor.axis
        if self.expert is not None:
            tensor = tensor[self.expert]
        offset = tensor.shape[axis] // 2 if self.offset is None else self.offset
        return part_digest(tensor.narrow(axis, offset, self.length), self.tensor, self.start)

    def _as_sent(self, tensor: Tensor) -> Tensor:
        """On a CPU with AMX, vLLM keeps the biases of small layers in float32. A value that was not sent stays as it is."""
        dtype = getattr(self.layer, "params_dtype", tensor.dtype)
        if self.parameter != "bias" or tensor.dtype == dtype:
            return tensor
        sent = tensor.to(dtype)
        return sent if torch.equal(sent.to(tensor.dtype), tensor) else tensor

    @property
    def key(self) -> tuple[int, str]:
        return id(self.layer), self.parameter

    @property
    def method(self) -> Any:
        """What processes the layer after loading, or None."""
        return getattr(self.layer, "quant_method", None)


class EngineMemory:
    """`model` is the worker's vLLM model, `engine_rank` its tensor-parallel rank. Raises RuntimeError for unknown names."""

    def __init__(self, model: nn.Module, engine: EngineTensors, engine_rank: int) -> None:
        self._places = list(_places(model, engine, engine_rank))
        empty = {
            name for name in engine.tensors if engine.spans[name][engine_rank][0] == engine.spans[name][engine_rank][1]
        }
        self._elsewhere = {name for name in empty if _EXPERT.fullmatch(name)}  # experts of other ranks
        self._of_layer: dict[int, list[_Place]] = {}
        for place in self._places:
            self._of_layer.setdefault(id(place.layer), []).append(place)
        self._is_live: dict[tuple[int, str], bool] = {}  # by place.key; absent: not known yet
        self._processed: set[int] = set()  # layers, since `begin`
        self._at_hook: dict[str, Tensor] = {}
        self._shapes: dict[tuple[int, str], torch.Size] = {}  # as loaded

    def reads(self, name: str) -> bool:
        """Whether vLLM may be given the tensor. It must not get experts of other ranks: when a layer has all of its own
        experts it is complete, and 0.26 fails at a further one."""
        return name not in self._elsewhere

    def begin(self) -> None:
        """Before a weight update: forget the last one, and watch the layers' methods."""
        self._processed.clear()
        self._at_hook.clear()
        for places in self._of_layer.values():
            method = places[0].method
            if method is not None and _HOOKED not in vars(method):
                self._hook(method)

    def _hook(self, method: Any) -> None:
        process = method.process_weights_after_loading

        def process_weights_after_loading(layer: nn.Module) -> None:
            self._see(layer)
            process(layer)

        method.process_weights_after_loading = process_weights_after_loading
        setattr(method, _HOOKED, True)

    def _see(self, layer: nn.Module) -> None:
        """A layer has been loaded and not been processed yet."""
        if id(layer) in self._processed:
            return
        self._processed.add(id(layer))
        for place in self._of_layer.get(id(layer), ()):
            parameter = getattr(layer, place.parameter)
            self._shapes[place.key] = parameter.shape
            if not self._is_live.get(place.key, False):
                self._at_hook[place.tensor.name] = place.digest(parameter)

    def digests(self) -> dict[str, int]:
        """Name -> digest of this worker's span, after a complete update. What was not loaded is absent."""
        self._decide()
        found: dict[str, Tensor] = {}
        for place in self._places:
            name = place.tensor.name
            if place.method is not None and id(place.layer) not in self._processed:
                continue
            if self._is_live.get(place.key, False):
                found[name] = place.digest(getattr(place.layer, place.parameter))
            else:
                found[name] = self._at_hook[name]
        values = torch.stack(list(found.values())).tolist() if found else []
        return dict(zip(found, values, strict=True))

    def _decide(self) -> None:
        """Find out which parameters are live, of those that are not known yet."""
        undecided: dict[tuple[int, str], list[_Place]] = {}
        for place in self._places:
            if place.key not in self._is_live and (place.method is None or place.key in self._shapes):
                undecided.setdefault(place.key, []).append(place)  # others were never loaded
        for key, places in undecided.items():
            parameter, method = getattr(places[0].layer, places[0].parameter), places[0].method
            if method is None:
                self._is_live[key] = True
            elif parameter.shape != self._shapes[key]:
                self._is_live[key] = False
            elif type(method).__name__ in _KEEP_BITS:
                self._is_live[key] = True
            elif parameter.min() < parameter.max():  # equal numbers could have been reordered
                same = [place.digest(parameter) == self._at_hook[place.tensor.name] for place in places]
                self._is_live[key] = bool(torch.stack(same).all())


def _places(model: nn.Module, engine: EngineTensors, engine_rank: int) -> Iterator[_Place]:
    modules = dict(model.named_modules())
    for name, module in list(modules.items()):
        if hasattr(module, "w13_weight"):  # some module within `experts`, or this itself
            modules[name.partition(_EXPERTS)[0] + _EXPERTS] = module
    first_experts: dict[str, int] = {}
    for name, tensor in engine.tensors.items():
        start, stop = engine.spans[name][engine_rank]
        if start < stop:
            layer, parameter, expert, offset = _find(modules, name, engine, engine_rank)
            if expert is not None:
                expert -= first_experts.setdefault(name.partition(_EXPERTS)[0], expert)
            yield _Place(layer, parameter, expert, offset, stop - start, tensor, start)


def _find(
    modules: dict[str, nn.Module], name: str, engine: EngineTensors, engine_rank: int
) -> tuple[nn.Module, str, int | None, int | None]:
    """(layer, parameter, expert, offset) of a Hugging Face tensor. Raises RuntimeError if vLLM's model lacks it.

    Experts are counted over the whole model.
    """
    match = _EXPERT.fullmatch(name)
    if match is not None:
        return _find_expert(modules, match)
    module, parameter = name.rsplit(".", 1)
    if module in modules:
        return modules[module], parameter, None, 0
    prefix, last = module.rsplit(".", 1)
    fused, parts = _FUSED.get(last, ("", ()))
    if f"{prefix}.{fused}" not in modules:
        raise RuntimeError(
            f"vLLM's model has no parameter for {name}: its memory cannot be compared with the weights sent"
        )
    before = [f"{prefix}.{part}.{parameter}" for part in parts[: parts.index(last)]]
    offset = sum(stop - start for start, stop in (engine.spans[other][engine_rank] for other in before))
    return modules[f"{prefix}.{fused}"], parameter, None, offset


def _find_expert(modules: dict[str, nn.Module], match: re.Match[str]) -> tuple[nn.Module, str, int, int | None]:
    """w13_weight [E, 2 * I / R, H] holds gate and up of every expert, w2_weight [E, H, I / R] down."""
    layer = modules.get(match["experts"])
    if not hasattr(layer, "w13_weight"):
        raise RuntimeError(
            f"vLLM's model has no {match['experts']}: its memory cannot be compared with the weights sent"
        )
    assert layer is not None
    kind, expert = _EXPERT_KINDS[match["kind"]], int(match["expert"])
    return layer, "w2_weight" if kind == 2 else "w13_weight", expert, None if kind == 1 else 0
