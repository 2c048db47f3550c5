"""This rank's summed gradients after `backward`, for tests that compare them over layouts."""

from __future__ import annotations

from typing import Any

import torch


def named_gradients(policy: Any) -> dict[str, torch.Tensor]:
    """Gradients by global Megatron name."""
    from grpo_megatron.models.weights import global_parameters

    return {name: parameter.main_grad.clone() for name, parameter in global_parameters(policy.ddp).items()}  # type: ignore[attr-defined]
