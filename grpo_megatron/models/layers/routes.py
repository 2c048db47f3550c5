"""Route replay: a token's experts are those of an earlier pass (`actor.moe.route_replay`).

A router decides by differences that rounding can turn. Engine and trainer then compute a token with other experts, and the
ratio of its probabilities is far from 1. With a replay every pass of the trainer takes earlier routes:

    engine   recorded by the engine during generation (R3, arXiv:2510.11370). They travel with the sample
    old      of the pass that computed the old log-probabilities (R2, arXiv:2507.18071). They stay on their rank
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

# The recorded routes of a micro-batch: the layer's number among those with experts -> int16 [tokens of this rank, k]
RecordedRoutes = dict[int, Tensor]


class RouteChoice:
    """The choice of one layer's router. It has the interface of Megatron-Core's `RouterReplay`.

    `routes`, of the current micro-batch: int [t, k] of this rank's tokens, -1 where the router decides; or the table in which
    they are recorded; or None. The router also decides for a token whose routes name an expert twice. The scores are the
    trainer's own, gathered from all of the router's scores, so the router has
    gradients. `counts`: (experts of known routes that the router itself would have chosen, all experts of known routes).
    """

    routes: Tensor | RecordedRoutes | None = None

    def __init__(self, number: int, selection: Any) -> None:
        self._number, self._selection = number, selection  # selection: another one than Megatron-Core's, or None
        self.counts: Tensor | None = None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int, group_topk: int, default: Any
    ) -> tuple[Tensor, Tensor]:
        """Selects from scores [t, E]: (scores [t, topk], experts [t, topk]), in decreasing order of the scores."""
        select = default if self._selection is None else self._selection.get_replay_topk
        values, experts = select(scores, topk, num_groups, group_topk)
        if self.routes is None:
            return values, experts
        if isinstance(self.routes, dict):
            routes = self.routes.setdefault(self._number, experts.to(torch.int16)).long()
        else:
            routes = self.routes.long()
            replayed = torch.where(routes >= 0, routes, experts).sort(dim=1).values
            names_twice = (replayed[:, 1:] == replayed[:, :-1]).any(dim=1, keepdim=True)
            routes = routes.masked_fill(names_twice, -1)  # grouped products compute k experts of every token
            self._count(routes, experts)
        replayed = torch.where(routes >= 0, routes, experts)
        values, order = scores.gather(1, replayed).sort(dim=1, descending=True, stable=True)
        return values, replayed.gather(1, order)

    def feed(self, layer: TransformerLayer, args: Any, kwargs: dict[str, Any]) -> None:
        """Takes the micro-batch's routes of this layer and this rank's tokens: a hook before the layer's forward pass.

        They are an attribute of `PackedSeqParams`, which Megatron-Core passes to every layer, also when it computes the layer
        again in the backward pass. Nothing depends on the order of the calls, which pipelines and recomputation change.
        The engine's routes are on the host, [t, layers x k]; only those of one layer are on the device.
        """
        routes = routes_of(kwargs["packed_seq_params"])
        if isinstance(routes, Tensor):
            router = layer.mlp.router
            routes = routes[:, self._number * router.topk :][:, : router.topk]
            if layer.config.sequence_parallel:
                tp = parallel_state.get_tensor_model_parallel_world_size()
                routes = routes.chunk(tp)[parallel_state.get_tensor_model_parallel_rank()]
            routes = routes.to(router.weight.device)
        self.routes = routes

    @torch.no_grad()
    def _count(self, routes: Tensor, experts: Tensor) -> None:
        chosen = (routes.unsqueeze(2) == experts.unsqueeze(1)).sum()
        counts = torch.stack([chosen, (routes >= 0).sum()])
        self.counts = counts if self.counts is None else self.counts + counts


def replay_routes(model: torch.nn.Module, num_dense_layers: int) -> list[RouteChoice]:
    """Make every router of this stage take the routes of its micro-batch. `num_dense_layers`: first layers without experts."""
    choices = []
    for layer in model.modules():
        if isinstance(layer, TransformerLayer) and isinstance(layer.mlp, MoELayer):
            router = layer.mlp.router
            choice = RouteChoice(layer.layer_number - 1 - num_dense_layers, router.router_replay)
            router.router_replay = choice
            layer.register_forward_pre_hook(choice.feed, with_kwargs=True)
            choices.append(choice)
    return choices


def routes_of(packed: PackedSeqParams) -> Tensor | RecordedRoutes | None:
    """Returns the routes of a micro-batch; None: every router decides."""
    return getattr(packed, "routes", None)


def take_counts(choices: list[RouteChoice]) -> tuple[int, int]:
    """Returns the sums of `RouteChoice.counts` since the last call."""
    counts = [choice.counts for choice in choices if choice.counts is not None]
    for choice in choices:
        choice.counts = None
    chosen, known = torch.stack(counts).sum(0).tolist() if counts else (0, 0)
    return chosen, known
