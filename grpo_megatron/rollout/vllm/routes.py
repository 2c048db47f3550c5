"""The experts that vLLM's routers choose, per token and layer, for the trainer to replay (`actor.moe.route_replay: engine`).

On a GPU vLLM records them itself (`enable_return_routed_experts`), for all layers, and returns them with a finished request. A
request that a stop text of several tokens ends is aborted, so its routes are unknown. Not run on a GPU yet.

On the CPU that recorder does not run: it needs Triton. Here every router writes its choices to a table with one row for each
slot of the key-value cache. Prompts in the prefix cache so have routes already.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_megatron.types import TokenRoutes, route_itemsize


class RouteTable:
    """The routes of all slots of a vllm.LLM, on the CPU; on a GPU only the numbers of the layers with experts."""

    def __init__(self, llm: Any, model: torch.nn.Module, *, on_cuda: bool) -> None:
        named = ((name, getattr(module, "router", None)) for name, module in model.named_modules())
        routers: dict[int, Any] = {_layer(name): router for name, router in named if hasattr(router, "set_capture_fn")}
        first = next(iter(routers.values()))
        self.layers, self._on_cuda = sorted(routers), on_cuda
        self._dtype = np.dtype(f"i{route_itemsize(first.global_num_experts)}")
        if on_cuda:
            return
        (self._runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
        cache = self._runner.kv_cache_config
        # Only layers of full attention keep a request's slots to its end: windows give theirs away, and states have none.
        windows = [getattr(group.kv_cache_spec, "sliding_window", 0) for group in cache.kv_cache_groups]
        self._group = windows.index(None) if None in windows else 0
        self._layer_name = cache.kv_cache_groups[self._group].layer_names[0]
        num_slots = cache.num_blocks * cache.kv_cache_groups[self._group].kv_cache_spec.block_size
        self._table = np.full((num_slots, len(routers), first.top_k), -1, dtype=self._dtype)
        for number, layer in enumerate(self.layers):
            routers[layer].set_capture_fn(lambda experts, number=number: self._record(number, experts))

    def _record(self, number: int, experts: Tensor) -> None:
        from vllm.forward_context import get_forward_context

        slots = get_forward_context().slot_mapping.get(self._layer_name)
        if slots is not None:  # None: a run without requests
            is_token = slots >= 0
            self._table[slots[is_token].numpy(), number] = experts[is_token].numpy()

    def routes(self, engine_id: str, output: Any, num_tokens: int) -> TokenRoutes:
        """Returns the routes of a request's first tokens: int8 or int16 [num_tokens, layers x k].

        To be called in the request's last step: in the next one vLLM gives its slots away. `engine_id`: vLLM's name of the
        request. `output`: its CompletionOutput.
        """
        if self._on_cuda:
            if output.routed_experts is None:
                return None
            routes = output.routed_experts[:num_tokens, self.layers].astype(self._dtype)
        else:
            batch = self._runner.input_batch
            table = batch.block_table[self._group]
            blocks, size = table.get_numpy_array()[batch.req_id_to_index[engine_id]], table.block_size
            places = np.arange(num_tokens)
            routes = self._table[blocks[places // size] * size + places % size]
            if routes.min(initial=0) < 0:
                raise RuntimeError(f"vLLM's routers have not been recorded for all {num_tokens} tokens of a response")
        return routes.reshape(len(routes), -1)


def _layer(name: str) -> int:
    """Reads the layer's number: model.layers.7.mlp.experts -> 7."""
    return next(int(part) for part in name.split(".") if part.isdigit())
