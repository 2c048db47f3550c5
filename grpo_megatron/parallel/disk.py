"""Disk work between collectives: an error on one rank is raised on every rank.

A rank that fails alone skips the collectives that the other ranks enter, and they wait until the timeout. So every
action on the disk ends with one `agree`, which all ranks reach. The actions themselves must not communicate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.storage import StorageError

T = TypeVar("T")


def on_every_rank(mesh: Mesh, task: str, action: Callable[[], T]) -> T:
    """Collective: this rank's result of `action`. Raises RankError on every rank, "`task`: why", when one rank fails."""
    problem = None
    try:
        result = action()
    except (OSError, StorageError) as error:
        problem = f"{task}: {error}"
    mesh.agree(problem)
    return result


def on_first_rank(mesh: Mesh, task: str, action: Callable[[], object]) -> None:
    """Collective: rank 0 runs `action`, the other ranks wait for it. Raises RankError on every rank when it fails."""
    on_every_rank(mesh, task, action if mesh.rank == 0 else lambda: None)
