"""The supervised warm-up: which rows each update sees, and what progress it reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from grpo_megatron.config import ActorConfig, OptimConfig, SftConfig
from grpo_megatron.training.warm_up import warm_up
from tests.sampling.fakes import LoneMesh


def run(steps: int) -> tuple[list[Any], list[str], list[Any]]:
    """Five rows of one token each, two per update. Returns the prompts of each update, the notes, the optimizers."""
    updates: list[Any] = []
    optimizers: list[Any] = []
    notes: list[str] = []

    def update(batch: Any, loss: Any) -> Any:
        updates.append(sorted(int(tokens[0]) for tokens in batch.tokens))
        return [], {"actor/lr": 0.5, "actor/pg_loss": float(len(updates))}

    policy: Any = SimpleNamespace(
        mesh=LoneMesh(), update=update, set_optimizer=lambda optim, total: optimizers.append((optim.lr, total))
    )
    rows = [([number], [7]) for number in range(5)]
    sft = SftConfig(steps=steps, train_batch_size=2, optim=OptimConfig(lr=0.5))
    warm_up(policy, rows, sft, ActorConfig(), notes.append)
    return updates, notes, optimizers


def test_rows_come_in_file_order_again_and_again() -> None:
    updates, _, optimizers = run(4)
    assert updates == [[0, 1], [2, 3], [0, 4], [1, 2]]
    assert optimizers == [(0.5, 4)]


@pytest.mark.parametrize(("steps", "noted"), [(3, [1, 2, 3]), (25, [*range(2, 25, 2), 25])])
def test_it_notes_its_progress_and_its_end(steps: int, noted: list[int]) -> None:
    _, notes, _ = run(steps)
    assert [note.split()[1] for note in notes] == [f"{step}/{steps}" for step in noted]
    assert notes[-1].startswith(f"warm-up {steps:5d}/{steps}  loss {steps}.0000  lr 5.00e-01")
