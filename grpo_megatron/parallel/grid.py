"""Grid: the layout of a world in plain numbers. Mesh is one rank's view of it, with process groups."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """Training layout tp x replicas x pp (replicas = cp * dp), rollout blocks of `rollout_tp`, nodes of `ranks_per_node`.

    rank = tp_rank + tp * (replica + replicas * pp_rank); experts are spread over `ep` neighbouring replicas.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    rollout_tp: int = 1
    ranks_per_node: int = 8

    @property
    def replicas(self) -> int:
        """Ranks with the same shard of everything but experts."""
        return self.world_size // (self.tp * self.pp)

    @property
    def num_nodes(self) -> int:
        return -(-self.world_size // self.ranks_per_node)

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def stage(self, rank: int) -> int:
        """The pipeline stage."""
        return rank // (self.tp * self.replicas)

    def ranks(self, tp_rank: int, pp_rank: int, ep_rank: int | None) -> list[int]:
        """The ranks that hold one shard of one stage, in order. `ep_rank` None: of a weight that is no expert's."""
        return [
            tp_rank + self.tp * (replica + self.replicas * pp_rank)
            for replica in range(self.replicas)
            if ep_rank is None or replica % self.ep == ep_rank
        ]

    def engine_rank(self, rank: int) -> int:
        """The tensor-parallel rank within the rank's engine."""
        return rank % self.rollout_tp
