"""What the ranks of the value model tests run. A layout is (world, tp, pp, sequence parallel), as in `policy_ranks`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from tests import tiny
from tests.models import policy_ranks, reward_ranks
from tests.models.gradients import named_gradients
from tests.models.policy_ranks import Layout

CLIPRANGE = 0.5  # the default of critic.cliprange_value


def build(folder: Path, layout: Layout, *, offload: bool = False, dtype: str = "float32", **megatron: Any) -> Any:
    from grpo_megatron.models.heads.scalar import ValueModel

    options: dict[str, Any] = {"model_class": ValueModel, "dtype": dtype, "offload": offload, "megatron": megatron}
    return reward_ranks.scalar(folder, "value", layout, **options)


def make_batch(pairs: Any, rows: list[int], micro: int = 2) -> Any:
    """Some tokens are outside the loss. `values` are where no test's critic is, so that some errors are clipped."""
    local = list(range(len(rows)))
    batch = tiny.make_batch(pairs, [[local[i : i + micro] for i in range(0, len(local), micro)]], rows, masked=True)
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None
    batch.values = torch.nan_to_num(batch.old_logprobs + 4.6)
    batch.returns = torch.nan_to_num(batch.ref_logprobs + 4.6) + batch.advantages
    return batch


def values(folders: dict[str, Path], pairs: Any, layout: Layout) -> dict[str, torch.Tensor]:
    """Family -> values, in micro-batches of different sizes, one of them empty."""
    batch = tiny.make_batch(pairs, [[[0, 1], [2], [], [3, 4, 5]]])
    return {family: build(folder, layout).numbers(batch) for family, folder in folders.items()}


def update(folder: Path, pairs: Any, layout: Layout) -> dict[str, Any]:
    """Gradients of one backward pass; then values, metrics and weights of two updates, with and without offloading."""
    model = build(folder, layout, use_distributed_optimizer=False)  # leaves whole gradients on every rank
    batch = make_batch(pairs, policy_ranks.share(len(pairs), model.mesh.dp_rank, model.mesh.dp))
    from grpo_megatron.algo.losses import value_loss

    loss = functools.partial(value_loss, cliprange=CLIPRANGE)
    model.backward(batch, batch.mini_batches[0], loss, [])
    gradients = reward_ranks.whole(model, named_gradients(model))
    return {"gradients": gradients, **trained_offloaded_or_not(folder, batch, layout)}


def trained_offloaded_or_not(folder: Path, batch: Any, layout: Layout, **options: Any) -> dict[str, Any]:
    """What `trained` returns, which must be the same bits with and without offloading."""
    plain, offloaded = (trained(build(folder, layout, offload=offload, **options), batch) for offload in (False, True))
    assert all(torch.equal(plain["weights"][name], offloaded["weights"][name]) for name in plain["weights"])
    assert torch.equal(plain["values"], offloaded["values"]) and plain["metrics"] == offloaded["metrics"]
    assert offloaded["on_device"] < plain["on_device"] / 20
    return plain


def in_bfloat16(folder: Path, pairs: Any) -> dict[str, Any]:
    """Two ranks, and weights that are gathered during the next forward pass."""
    batch = make_batch(pairs, policy_ranks.share(len(pairs), policy_ranks.world((2, 1, 1, False))[1].dp_rank, 2))
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    return trained_offloaded_or_not(folder, batch, (2, 1, 1, False), dtype="bfloat16", **overlap)


def trained(model: Any, batch: Any) -> dict[str, Any]:
    for _ in range(2):
        first = model.numbers(batch)  # reads weights that the last update may have offloaded
        with model.in_use():
            sums, metrics = model.update_values(batch, CLIPRANGE, epochs=1)
    on_device = sum(parameter.untyped_storage().nbytes() for parameter in model.ddp.parameters())
    with model.in_use():
        weights = policy_ranks.stream(model)
    totals = {name: (float(part.total), part.num_tokens) for name, part in sums[0].items()}
    return {"values": first, "metrics": metrics, "sums": totals, "weights": weights, "on_device": on_device}


def saved(folder: Path, pairs: Any, layout: Layout, target: Path) -> torch.Tensor:
    """Two updates of an offloaded model, then a Hugging Face folder. Returns the values of all rows."""
    model = build(folder, layout, offload=True)
    trained(model, make_batch(pairs, policy_ranks.share(len(pairs), model.mesh.dp_rank, model.mesh.dp)))
    with model.in_use():
        model.save_hf(target, folder)
    return model.numbers(tiny.make_batch(pairs, [[[row] for row in range(len(pairs))]]))
