"""Collectors: where a step's samples come from. Every variant of data source is one small class; they are stacked.

    PolicyCollector             n samples of the next prompts, from the policy as it is now
    InitialModelCollector(c)    the same from the model of the run's start (RFT: the SFT model answers, the policy learns)
    FileCollector          responses that somebody else wrote (SFT), chosen and rejected ones (DPO)
    DynamicSampling(c)    rounds of c until every group has different rewards (DAPO's dynamic sampling)      filtering.py
    Replay(c)       groups of earlier steps beside those of c                                          replay.py

A group is the list of this rollout block's samples of one prompt; it may be empty here and not elsewhere. Every rank
holds the same number of groups in the same order, so decisions that are made from the gathered table fit all of them.
`state` is what a resumed run needs to go on with the same groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from grpo_megatron.algo.advantages import informative_groups
from grpo_megatron.config import DataConfig, RolloutConfig
from grpo_megatron.data.prompts import OfflineGroup
from grpo_megatron.data.sampler import Sampler
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.exchange import gather_groups
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.sampling.generator import Generator
from grpo_megatron.types import Prompt, Sample

Group = list[Sample]
State = dict[str, Any]


class Collector(Protocol):
    def groups(self, step: int, count: int, metrics: Metrics) -> list[Group]:
        """Up to `count` groups for step `step`. Collective; the engine is awake and holds the weights of `step`."""

    def epoch(self) -> float:
        """Passes over the data that are complete."""

    def state(self) -> State:
        """Collective: what `load_state` needs, the same on every rank; plain JSON."""

    def load_state(self, state: State) -> None: ...


def number(groups: Sequence[Group]) -> list[Sample]:
    """The samples of all groups; `prompt_index` becomes the group's place."""
    for place, group in enumerate(groups):
        for sample in group:
            sample.prompt_index = place
    return [sample for group in groups for sample in group]


def by_prompt(samples: Sequence[Sample], count: int) -> list[Group]:
    """`count` groups of the samples, by their prompt_index."""
    groups: list[Group] = [[] for _ in range(count)]
    for sample in samples:
        groups[sample.prompt_index].append(sample)
    return groups


def informative(groups: Sequence[Group], mesh: Mesh) -> list[Group]:
    """The groups with different rewards, seen over all ranks. Numbers their samples. Collective."""
    table = gather_groups(number(groups), mesh)
    kept = sorted({table.prompt_index[rows[0]] for rows in informative_groups(table)})
    return [groups[place] for place in kept]


class PolicyCollector:
    """The next prompts of the data, answered by whatever weights the engine holds."""

    def __init__(
        self,
        generator: Generator,
        prompts: Sampler[Prompt],
        data: DataConfig,
        rollout: RolloutConfig,
        *,
        greedy: bool = False,
    ) -> None:
        self.generator, self.prompts, self.data, self.rollout, self.greedy = generator, prompts, data, rollout, greedy
        self.position = 0
        self.last_round = (-1, 0)  # step, rounds drawn for it

    def groups(self, step: int, count: int, metrics: Metrics) -> list[Group]:
        start, self.position = self.position, self.position + count
        rounds = self.last_round[1] if self.last_round[0] == step else 0
        self.last_round = (step, rounds + 1)
        samples = self.generator.draw(
            self.prompts.items_from(start, count),
            self.rollout.n,
            draw_id=step + (rounds << 32),  # a prompt that comes again in another round is drawn anew
            version=step,
            max_tokens=self.data.max_response_length,
            temperature=self.rollout.temperature,
            greedy=self.greedy,
            metrics=metrics,
        )
        return by_prompt(samples, count)

    def epoch(self) -> float:
        return self.position / len(self.prompts.items)

    def state(self) -> State:
        return {"position": self.position}

    def load_state(self, state: State) -> None:
        self.position = state["position"]


class InitialModelCollector:
    """`inner`, with the engine holding the initial model: `hand_over(step)` streams it there, checked."""

    def __init__(self, inner: Collector, hand_over: Callable[[int, Metrics], None]) -> None:
        self.inner, self.hand_over = inner, hand_over

    def groups(self, step: int, count: int, metrics: Metrics) -> list[Group]:
        self.hand_over(step, metrics)
        return self.inner.groups(step, count, metrics)

    def epoch(self) -> float:
        return self.inner.epoch()

    def state(self) -> State:
        return self.inner.state()

    def load_state(self, state: State) -> None:
        self.inner.load_state(state)


class FileCollector:
    """Groups that were read: each entry is a prompt, its responses as token ids, and their rewards."""

    def __init__(self, entries: Sampler[OfflineGroup], mesh: Mesh) -> None:
        self.entries, self.mesh, self.position = entries, mesh, 0

    def groups(self, step: int, count: int, metrics: Metrics) -> list[Group]:
        start, self.position = self.position, self.position + count
        groups: list[Group] = []
        for place, (prompt, responses, rewards) in enumerate(self.entries.items_from(start, count)):
            held = place % self.mesh.num_rollout_blocks == self.mesh.rollout_block
            groups.append(
                [
                    Sample(prompt, place, index, ids, [0.0] * len(ids), "stop", step, reward=reward)
                    for index, (ids, reward) in enumerate(zip(responses, rewards, strict=True))
                    if held
                ]
            )
        return groups

    def epoch(self) -> float:
        return self.position / len(self.entries.items)

    def state(self) -> State:
        return {"position": self.position}

    def load_state(self, state: State) -> None:
        self.position = state["position"]
