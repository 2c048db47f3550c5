"""How far two runs of `training_ranks.logprobs_and_gradients` are apart."""

from __future__ import annotations

from typing import Any

import torch


def mean_error(got: dict[str, Any], exact: dict[str, Any]) -> float:
    return float((got["logprobs"] - exact["logprobs"])[exact["mask"]].abs().mean())


def worst_angle(got: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The smallest cosine between two gradients of one parameter, and the parameter's name."""
    assert got.keys() == exact.keys()
    cosines = {n: torch.cosine_similarity(got[n].flatten(), exact[n].flatten(), dim=0).item() for n in exact}
    name = min(cosines, key=lambda n: cosines[n])
    return cosines[name], name
