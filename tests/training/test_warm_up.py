"""The supervised warm-up: which rows each update sees, and what progress it reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_megatron.config import ActorConfig, OptimConfig, SftConfig
from grpo_megatron.data.written import WrittenResponse
from grpo_megatron.training.warm_up import warm_up
from grpo_megatron.types import Turn
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
    rows = [([number], WrittenResponse([7])) for number in range(5)]
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


def test_observations_are_not_learned() -> None:
    """Two rows of 6 and 2 response tokens. Three of the six are an observation: the weights are 1 / (3 + 2)."""
    batches: list[Any] = []

    def update(batch: Any, loss: Any) -> Any:
        batches.append(batch)
        return [], {"actor/lr": 0.5, "actor/pg_loss": 1.0}

    policy: Any = SimpleNamespace(mesh=LoneMesh(), update=update, set_optimizer=lambda optim, total: None)
    turns = [Turn(0, 2, "assistant", 0, 0), Turn(2, 5, "observation", 0, 0), Turn(5, 6, "assistant", 0, 0)]
    rows = [([1], WrittenResponse([7, 1, 9, 9, 9, 1], turns)), ([2], WrittenResponse([7, 1]))]
    warm_up(policy, rows, SftConfig(steps=1, train_batch_size=2), ActorConfig(), lambda note: None)
    [batch] = batches
    assert [tokens.tolist() for tokens in batch.tokens] == [[1, 7, 1, 9, 9, 9, 1], [2, 7, 1]]
    weights = [[w / 5 for w in (1, 1, 0, 0, 0, 1)], [w / 5 for w in (1, 1, 0, 0, 0, 0)]]
    assert torch.allclose(batch.token_weights, torch.tensor(weights))
    assert batch.loss_mask.tolist() == (batch.token_weights > 0).tolist()
