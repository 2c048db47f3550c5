"""Norms: of one token's hidden state, after a linear layer, and over all heads of queries or keys."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (arXiv:1910.07467) in float32. Megatron's wrapper of torch's norm refuses sequence parallelism.

    The weight's attribute `sequence_parallel` makes Megatron sum its gradient over tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps).to(x.dtype) * self.weight


class NormedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """A linear layer that is cut along its input, and a norm of its whole output (OLMo-2, arXiv 2501.00656)."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.post_norm = RMSNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[s, b, inputs / tp] -> [s (/ tp under sequence parallelism), b, outputs]."""
        output, bias = super().forward(x)
        return self.post_norm(output), bias


class HeadsRMSNorm(torch.nn.Module):
    """An RMSNorm over all heads of a token, of which each tensor-parallel rank has its part, in float32.

    The sum of squares is added up over the ranks. Every rank's result depends on it, so its gradient is too.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, num_heads: int, **unused: Any
    ) -> None:
        """`hidden_size` is that of one head; `num_heads` counts those of all ranks."""
        super().__init__()
        self.eps, self.width = eps, num_heads * hidden_size
        local = self.width // parallel_state.get_tensor_model_parallel_world_size()
        self.weight = torch.nn.Parameter(torch.ones(local, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x [s, b, heads / tp, d], normalised over heads and d of all ranks."""
        values = x.float()
        squares = reduce_from_tensor_model_parallel_region(values.square().sum((-2, -1), keepdim=True))
        mean = copy_to_tensor_model_parallel_region(squares) / self.width
        return (values * torch.rsqrt(mean + self.eps)).to(x.dtype) * self.weight.view(x.shape[-2:])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description of a checkpoint's tensors: the weight is cut along dimension 0."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)  # type: ignore[no-any-return]
