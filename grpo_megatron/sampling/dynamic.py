"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): draw prompts until the batch is full of informative groups.

A group is informative when its rewards differ; the raw reward decides, before any penalty. A round draws up to
`gen_batch_size` prompts. After `max_num_gen_batches` rounds the step trains on the groups that it has, even on none:
every denominator counts only these.

Departure from DAPO: groups beyond the batch are left over for later steps instead of being thrown away. A left-over
group is off-policy, so its age is bounded: once it is more than `max_staleness` steps old it is dropped and never
trained on. The rollout correction sees the age, because a sample keeps the log-probabilities it was drawn with.

A round draws no more prompts than can be useful: with B prompts per batch, m groups missing from it and a share p of
informative groups in the last round,

    prompts = min(gen_batch_size, ceil((m + max_staleness * B) / p))

so that a round is expected to yield at most what this step and the next `max_staleness` steps can train on.
"""

from __future__ import annotations

from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.sampling.collector import Collector, Group, State, select_informative
from grpo_megatron.sampling.stored import pack_groups, unpack_groups


class DynamicSampling:
    """`round_size` is in prompts, `max_staleness` in steps (0: left-over groups are never used)."""

    def __init__(self, inner: Collector, mesh: Mesh, *, round_size: int, max_rounds: int, max_staleness: int) -> None:
        self.inner, self.mesh = inner, mesh
        self.round_size, self.max_rounds, self.max_staleness = round_size, max_rounds, max_staleness
        self.left_over: list[Group] = []  # oldest first
        self.last_round = (0, 0)  # informative groups, drawn groups

    def groups(self, step: int, count: int, metrics: Metrics) -> list[Group]:
        kept = [group for group in self.left_over if step - group.version <= self.max_staleness]
        num_dropped = len(self.left_over) - len(kept)
        rounds = 0
        while len(kept) < count and rounds < self.max_rounds:
            drawn = self.inner.groups(step, self._num_prompts(count - len(kept), count), metrics)
            informative = select_informative(drawn, self.mesh)
            self.last_round = (len(informative), len(drawn))
            kept = kept + informative
            rounds += 1
        batch, self.left_over = kept[:count], kept[count:]
        metrics.constant("train/num_gen_batches", rounds)
        metrics.constant("train/batch_fill_ratio", len(batch) / count)
        metrics.constant("train/left_over_groups_dropped", num_dropped)
        metrics.constant("train/left_over_staleness_max", max((step - group.version for group in batch), default=0))
        return batch

    def _num_prompts(self, missing: int, batch_size: int) -> int:
        """Prompts of the next round: see the module's header. A full round if the last round had no informative group."""
        informative, drawn = self.last_round
        if not informative:
            return self.round_size
        usable = missing + self.max_staleness * batch_size
        return min(self.round_size, -(-usable * drawn // informative))

    def epoch(self) -> float:
        return self.inner.epoch()

    def state(self) -> State:
        return {
            "inner": self.inner.state(),
            "left_over": pack_groups(self.left_over, self.mesh),
            "last_round": list(self.last_round),
        }

    def load_state(self, state: State) -> None:
        self.inner.load_state(state["inner"])
        self.left_over = unpack_groups(state["left_over"], self.mesh)
        informative, drawn = state["last_round"]
        self.last_round = (informative, drawn)
