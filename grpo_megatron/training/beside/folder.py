"""The folder of a model beside the policy in a checkpoint: plain values in a JSON file, weights and optimizer in state/."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from grpo_megatron.models.policy import Policy
from grpo_megatron.models.weights.sharded_state import Writes, load_sharded, save_sharded
from grpo_megatron.parallel.mesh import on_every_rank, on_first_rank


def save_beside(
    model: Policy,
    target: Path,
    file: str,
    content: Any,
    on_device: AbstractContextManager[None],
    writes: Writes | None = None,
) -> None:
    """Collective: a new folder `target` in an existing one. Inside `on_device` all of the model is there. Raises RankError.

    `writes`: see `save_sharded`.
    """

    def write() -> None:
        target.mkdir()
        (target / file).write_text(json.dumps(content))

    on_first_rank(model.mesh, f"cannot write checkpoint {target}", write)
    with on_device:
        save_sharded(model, target / "state", writes)


def load_beside(
    model: Policy, target: Path, file: str, on_device: AbstractContextManager[None], *, same_world: bool
) -> Any:
    """Collective: the inverse of `save_beside`, in any layout. Returns the content. Raises RankError."""
    content = on_every_rank(
        model.mesh, f"cannot read checkpoint {target}", lambda: json.loads((target / file).read_text())
    )
    with on_device:
        load_sharded(model, target / "state", same_world=same_world)
    return content
