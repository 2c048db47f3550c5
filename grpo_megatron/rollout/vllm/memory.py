"""EngineMemory: digests of the memory of a vLLM worker, per Hugging Face tensor, as loaded: fused, cut, not yet quantised.

One linear layer of all experts is one parameter of vLLM. It is loaded in one call, once the last expert has arrived, and
digested in one (sync/digest.py). vLLM 0.26 and 0.32 have the same fused parameters and calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo_megatron.sync.digest import copy_all, empty_group, group_digests, group_view
from grpo_megatron.sync.plan import EngineTensors, SyncTensor
from grpo_megatron.types import WeightBucket

_FUSED = {  # last part of a module's Hugging Face name -> vLLM's module, the tensors in it from top to bottom
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("qkv_proj", ("q_proj", "k_proj", "v_proj"))),
    **dict.fromkeys(("gate_proj", "up_proj"), ("gate_up_proj", ("gate_proj", "up_proj"))),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z"), ("in_proj_qkvz", ("in_proj_qkv", "in_proj_z"))),
    **dict.fromkeys(("in_proj_b", "in_proj_a"), ("in_proj_ba", ("in_proj_b", "in_proj_a"))),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa"))),
}
_EXPERTS = ".experts"
# The last part of a stack's name -> vLLM's parameter, its name for the half of it, where it begins (None: at the middle).
# w13_weight [E, 2 * I / R, H] holds gate and up of every expert, w2_weight [E, H, I / R] down.
_GATE, _UP, _DOWN = ("w13_weight", "w1", 0), ("w13_weight", "w3", None), ("w2_weight", "w2", 0)
_EXPERT_KINDS: dict[str, tuple[str, str, int | None]] = {
    **dict.fromkeys(("gate_proj", "w1"), _GATE),
    **dict.fromkeys(("up_proj", "w3"), _UP),
    **dict.fromkeys(("down_proj", "w2"), _DOWN),
}
# gpt-oss: rows of gate and up alternate, there are biases (w13_bias, w2_bias), and its loader takes one expert at a time.
_ALTERNATING_KINDS = {"gate_up_proj": ("w13", "gpt_oss_w13", 0), "down_proj": ("w2", "gpt_oss_w2", 0)}
_KEEP_BITS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")  # if they keep the shape
_HOOKED = "_grpo_megatron_hooked"


@dataclass(frozen=True, eq=False)
class _Place:
    """The place of this worker's span of a tensor, or of each tensor of a stack of experts, in a parameter of vLLM.

    A stack's parameter has the experts as its first dimension.
    """

    name: str
    layer: nn.Module
    parameter: str
    offset: int | None  # of the span in the parameter; None: from the middle on, which padding may have moved
    tensors: Sequence[SyncTensor]
    span: tuple[int, int]
    half: str | None = None  # vLLM's name for this part of a stack's parameter; None: one tensor, no stack
    first_expert: int = 0  # counted over the full model

    @property
    def alternates(self) -> bool:
        """The stack has gate and up of each expert in turn, and the parameter their rows in turn."""
        return self.half == "gpt_oss_w13"

    def digests(self, parameter: Tensor) -> Tensor:
        """Computes the digests [n] of this worker's span of each tensor, in the type in which it was sent."""
        (start, stop), axis = self.span, self.tensors[0].axis + 1
        stack = self._as_sent(parameter.detach())
        if self.alternates:
            parts = [stack[: len(self.tensors) // 2, part::2].narrow(1, 0, stop - start) for part in (0, 1)]
            return torch.stack([group_digests(part, self.tensors[0], start) for part in parts], dim=1).flatten()
        stack = stack[None] if self.half is None else stack[: len(self.tensors)]
        offset = stack.shape[axis] // 2 if self.offset is None else self.offset
        return group_digests(stack.narrow(axis, offset, stop - start), self.tensors[0], start)

    def stacked(self, arrived: dict[str, Tensor]) -> Tensor:
        """Returns the tensors as one: a view where they are neighbours, otherwise a copy of what this worker reads."""
        tensors = [arrived[tensor.name] for tensor in self.tensors]
        view = group_view(tensors)
        if view is None:
            (start, stop), axis = self.span, self.tensors[0].axis
            view = empty_group(len(tensors), self.tensors[0], self.span, tensors[0].new_empty)
            targets = (part.narrow(axis, start, stop - start) for part in view)
            copy_all(list(zip(targets, (t.narrow(axis, start, stop - start) for t in tensors), strict=True)))
        return view

    def load(self, stack: Tensor) -> None:
        """Calls the weight loader, which takes a stack [experts, *full shape of one]. Raises RuntimeError."""
        parameter: Any = getattr(self.layer, self.parameter)
        names = {"shard_id": self.half, "expert_id": self.first_expert, "return_success": True}
        if self.half in ("gpt_oss_w13", "gpt_oss_w2"):
            for expert, values in enumerate(self._alternating(stack) if self.alternates else stack):
                names["expert_id"] = self.first_expert + expert
                parameter.weight_loader(parameter, values.T if values.dim() > 1 else values, self.parameter, **names)
            return
        if not parameter.weight_loader(parameter, stack, self.parameter, **names):
            raise RuntimeError(f"vLLM did not take {self.name} of {len(stack)} experts")

    def _alternating(self, stack: Tensor) -> Tensor:
        """Returns [experts, 2 x length of one, ...], of which twice the span has values, from gate and up of each expert."""
        (start, stop), tensor = self.span, self.tensors[0]
        double = SyncTensor(tensor.name, (2 * tensor.length, *tensor.shape[1:]), 0)
        out = empty_group(len(stack) // 2, double, (2 * start, 2 * stop), stack.new_empty)
        for part in (0, 1):
            out[:, 2 * start + part : 2 * stop : 2] = stack[part::2, start:stop]
        return out

    def load_span(self, tensor: Tensor) -> None:
        """Calls the weight loader with this worker's span."""
        parameter: Any = getattr(self.layer, self.parameter)
        parameter.weight_loader(
            parameter, tensor.narrow(self.tensors[0].axis, self.span[0], self.span[1] - self.span[0])
        )

    def _as_sent(self, tensor: Tensor) -> Tensor:
        """Undoes a cast to float32, unless it would change a value.

        vLLM keeps the A_log of gated delta nets so, and on a CPU with AMX the biases of small layers.
        """
        layer: Any = self.layer
        dtype = layer.dt_bias.dtype if self.parameter == "A_log" else getattr(layer, "params_dtype", tensor.dtype)
        if self.parameter not in ("bias", "A_log") or tensor.dtype == dtype:
            return tensor
        sent = tensor.to(dtype)
        return sent if torch.equal(sent.to(tensor.dtype), tensor) else tensor

    @property
    def key(self) -> tuple[int, str]:
        return id(self.layer), self.parameter

    @property
    def method(self) -> Any:
        """The object that processes the layer after loading, or None."""
        return getattr(self.layer, "quant_method", None)


class EngineMemory:
    """Digests of a worker's memory.

    vLLM loads a layer, then its `quant_method` processes it: on CPU a linear layer is packed and its parameter emptied, on a
    GPU it may be quantised. Three cases:
    - Layers without such a method (norms), and unquantised ones with a parameter that keeps its shape: the live memory is
      digested, after the update.
    - Packed and quantised layers: the parameter is digested when it is handed to `process_weights_after_loading`.
    - Other layers with a parameter that keeps shape and bits through the first update (experts): from then on as in the first
      case.
    The method must have been called since the update began, or the layer counts as not loaded.
    """

    def __init__(self, model: nn.Module, engine: EngineTensors, engine_rank: int) -> None:
        """Finds the places in a worker's `model`, for its tensor-parallel rank. Raises RuntimeError for unknown names."""
        self._places = list(_places(model, engine, engine_rank))
        self._of_expert = {t.name: place for place in self._places if place.half for t in place.tensors}
        # vLLM copies sinks past their weight loader, which a weight update replaces.
        self._sinks = {place.name: place for place in self._places if place.parameter == "sinks"}
        self._elsewhere = engine.groups.keys() - self._of_expert.keys()  # experts of other ranks
        self._arrived: dict[_Place, dict[str, Tensor]] = {}  # of stacks that are not complete
        self._of_layer: dict[int, list[_Place]] = {}
        for place in self._places:
            self._of_layer.setdefault(id(place.layer), []).append(place)
        self._is_live: dict[tuple[int, str], bool] = {}  # by place.key; absent: not known yet
        self._processed: set[int] = set()  # layers, since `begin`
        self._at_hook: dict[_Place, Tensor] = {}
        self._shapes: dict[tuple[int, str], torch.Size] = {}  # as loaded

    def load(self, bucket: WeightBucket, load_others: Callable[[WeightBucket], Any]) -> None:
        """Loads the tensors of the bucket that are not experts', then the stacks that are complete with it.

        vLLM must not get experts of other ranks: a layer with all of its experts is complete, and 0.26 fails at a further one.
        """
        others: WeightBucket = []
        complete: list[tuple[_Place, Tensor]] = []
        for name, tensor in bucket:
            place = self._of_expert.get(name)
            if name in self._sinks:
                self._sinks[name].load_span(tensor)
            elif place is None:
                others += [(name, tensor)] if name not in self._elsewhere else []
            else:
                arrived = self._arrived.setdefault(place, {})
                arrived[name] = tensor
                if len(arrived) == len(place.tensors):
                    complete.append((place, place.stacked(self._arrived.pop(place))))
        load_others(others)
        for place, stack in complete:
            place.load(stack)

    def begin(self) -> None:
        """Begins a weight update: forgets the last one, and hooks the layers' methods."""
        self._arrived.clear()
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
        """Digests a layer that has been loaded and not been processed yet."""
        if id(layer) in self._processed:
            return
        self._processed.add(id(layer))
        for place in self._of_layer.get(id(layer), ()):
            parameter = getattr(layer, place.parameter)
            self._shapes[place.key] = parameter.shape
            if not self._is_live.get(place.key, False):
                self._at_hook[place] = place.digests(parameter)

    def digests(self) -> dict[str, int]:
        """Returns name -> digest of this worker's span, after a complete update. What was not loaded is absent."""
        self._decide()
        names: list[str] = []
        digests: list[Tensor] = []
        for place in self._places:
            if place.method is not None and id(place.layer) not in self._processed:
                continue
            names += [tensor.name for tensor in place.tensors]
            if self._is_live.get(place.key, False):
                digests.append(place.digests(getattr(place.layer, place.parameter)))
            else:
                digests.append(self._at_hook[place])
        if not names:
            return {}
        rows = {name: row for row, name in enumerate(dict.fromkeys(names))}  # a tensor may have several places
        values, row_of = torch.cat(digests), torch.tensor([rows[name] for name in names])
        sums = values.new_zeros(len(rows)).index_add_(0, row_of.to(values.device), values)
        return dict(zip(rows, sums.tolist(), strict=True))

    def _decide(self) -> None:
        """Decides which parameters are live, of those that are undecided."""
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
                same = [place.digests(parameter) == self._at_hook[place] for place in places]
                self._is_live[key] = bool(torch.cat(same).all())


def _places(model: nn.Module, engine: EngineTensors, engine_rank: int) -> Iterator[_Place]:
    # A model with a tower has the decoder's names behind a prefix, which files do not have.
    modules = {name.removeprefix("language_model."): module for name, module in model.named_modules()}
    for name, module in list(modules.items()):
        if name.endswith(".attn") and hasattr(module, "sinks"):  # gpt-oss has names of its own
            modules |= {name.replace(".attn", ".self_attn"): module}
            modules |= {f"{name[:-5]}.self_attn.{child}": inner for child, inner in module.named_modules() if child}
        if name == "model.embedding":
            modules["model.embed_tokens"] = module
        if hasattr(module, "w13_weight"):  # some module within `experts`, or this itself
            modules[name.partition(_EXPERTS)[0] + _EXPERTS] = module
    for unit, names in engine.units(engine_rank).items():
        tensors, spans = [engine.tensors[name] for name in names], engine.intervals(names[0], engine_rank)
        if names[0] in engine.groups:  # what a rank does not keep is zero there, and so is the digest
            yield _expert_place(modules, unit, tensors, engine.spans[names[0]][engine_rank])
            continue
        layer, parameter, offset = _find(modules, unit, engine, engine_rank)
        for start, stop in spans:
            yield _Place(unit, layer, parameter, offset, tensors, (start, stop))
            offset += stop - start


def _find(
    modules: dict[str, nn.Module], name: str, engine: EngineTensors, engine_rank: int
) -> tuple[nn.Module, str, int]:
    """Finds (layer, parameter, offset) of a Hugging Face tensor. Raises RuntimeError if vLLM's model lacks it."""
    module, parameter = name.rsplit(".", 1)
    if module in modules:
        return modules[module], parameter, 0
    prefix, last = module.rsplit(".", 1)
    fused, parts = _FUSED.get(last, ("", ()))
    if f"{prefix}.{fused}" not in modules:
        raise RuntimeError(
            f"vLLM's model has no parameter for {name}: its memory cannot be compared with the weights sent"
        )
    before = [f"{prefix}.{part}.{parameter}" for part in parts[: parts.index(last)]]
    offset = sum(stop - start for other in before for start, stop in engine.intervals(other, engine_rank))
    return modules[f"{prefix}.{fused}"], parameter, offset


def _expert_place(
    modules: dict[str, nn.Module], stack: str, tensors: Sequence[SyncTensor], span: tuple[int, int]
) -> _Place:
    """Finds the place of a stack: model.layers.0.mlp.experts.gate_proj.weight. A worker's experts are neighbours."""
    module, kind, weight_or_bias = stack.rsplit(".", 2)
    layer = modules.get(module)
    if layer is None or not hasattr(layer, "w13_weight"):
        raise RuntimeError(f"vLLM's model has no {module}: its memory cannot be compared with the weights sent")
    parameter, half, offset = _EXPERT_KINDS.get(kind, ("", "", 0))
    if hasattr(layer, "w13_bias"):
        parameter, half, offset = _ALTERNATING_KINDS[kind]
        parameter = f"{parameter}_{weight_or_bias}"
    first_expert = int(tensors[0].name.removeprefix(f"{module}.").partition(".")[0])
    return _Place(stack, layer, parameter, offset, tensors, span, half, first_expert)
