"""A model that is trained beside the policy: the critic, or a reward model that learns. How it is saved and loaded.

In a checkpoint it has a folder: plain values in a JSON file, weights and optimizer in state/. Its export is a Hugging Face
folder of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_megatron.models.heads.scalar import ScalarPolicy
from grpo_megatron.models.weights.sharded_state import Writes, load_sharded, save_sharded
from grpo_megatron.parallel.mesh import on_every_rank, on_first_rank


class NoModel:
    """Used where a run has no such model, or a frozen one: there is nothing to save."""

    def save(self, folder: Path, writes: Writes | None = None) -> None:
        """Does nothing."""

    def load(self, folder: Path, *, same_world: bool) -> None:
        """Does nothing."""

    def save_hf(self, target: Path, tokenizer_path: Path) -> None:
        """Does nothing."""


class TrainedModel(NoModel):
    """`folder_name` is its folder in a checkpoint, and `file_name` the JSON file in it."""

    model: ScalarPolicy
    folder_name: str
    file_name: str

    def content(self) -> Any:
        """The plain values that the JSON file holds."""
        return self.model.state()

    def restore(self, content: Any) -> None:
        """The inverse of `content`."""
        self.model.load_state(content)

    def save(self, folder: Path, writes: Writes | None = None) -> None:
        """Collective: write a new folder inside the existing `folder`. `writes`: see `save_sharded`. Raises RankError."""
        target = folder / self.folder_name
        content = self.content()

        def write() -> None:
            target.mkdir()
            (target / self.file_name).write_text(json.dumps(content))

        on_first_rank(self.model.mesh, f"cannot write checkpoint {target}", write)
        with self.model.in_use():
            save_sharded(self.model, target / "state", writes)

    def load(self, folder: Path, *, same_world: bool) -> None:
        """Collective: the inverse of `save`, in any layout. Raises RankError."""
        target = folder / self.folder_name

        def read() -> Any:
            return json.loads((target / self.file_name).read_text())

        content = on_every_rank(self.model.mesh, f"cannot read checkpoint {target}", read)
        with self.model.in_use():
            load_sharded(self.model, target / "state", same_world=same_world)
        self.restore(content)

    def save_hf(self, target: Path, tokenizer_path: Path) -> None:
        """Collective: write a Hugging Face folder, which `reward_model.path` or `critic.path` accepts."""
        with self.model.in_use():
            self.model.save_hf(target, tokenizer_path)
