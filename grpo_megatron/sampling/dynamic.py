"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): draw prompts until the batch is full of groups that teach.

A group teaches when its rewards differ; the raw reward decides, before any penalty. A round draws `gen_batch_size`
prompts. What a round brings beyond the batch waits for the next step, so nothing that was paid for is lost; it is then
one step old, which the correction of rollout_corr/* accounts for. After `max_num_gen_batches` rounds the step trains on
what there is, even on nothing: every denominator counts what is there.
"""

from __future__ import annotations

from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.sampling.collector import Collector, Group, State, informative
from grpo_megatron.sampling.replay import gather_state, share_out


class DynamicSampling:
    def __init__(self, inner: Collector, mesh: Mesh, *, round_size: int, max_rounds: int) -> None:
        self.inner, self.mesh, self.round_size, self.max_rounds = inner, mesh, round_size, max_rounds
        self.left_over: list[Group] = []

    def groups(self, step: int, count: int, metrics: Metrics) -> list[Group]:
        kept, rounds = self.left_over, 0
        while len(kept) < count and rounds < self.max_rounds:
            drawn = self.inner.groups(step, self.round_size, metrics)
            kept = kept + informative(drawn, self.mesh)
            rounds += 1
        self.left_over = kept[count:]
        metrics.constant("train/num_gen_batches", rounds)
        metrics.constant("train/batch_fill_ratio", min(1.0, len(kept) / count))
        return kept[:count]

    def epoch(self) -> float:
        return self.inner.epoch()

    def state(self) -> State:
        return {"inner": self.inner.state(), "left_over": gather_state(self.left_over, self.mesh)}

    def load_state(self, state: State) -> None:
        self.inner.load_state(state["inner"])
        self.left_over = share_out(state["left_over"], self.mesh)
