"""Collectors provide the samples of a step. Each data source is one small class; wrappers.py stacks others on them.

    PolicyCollector     n samples of each of the next prompts, from the weights that the engine has
    PartialCollector    the same, with responses that take several steps (partial.py)
    FileCollector       responses read from a file (SFT), or chosen and rejected ones (DPO)

Every rank has the same number of groups in the same order, so that a decision made from the gathered table is the same on
all ranks.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from grpo_megatron.algo.advantages import informative_groups
from grpo_megatron.config import ConfigError, DataConfig, RolloutConfig
from grpo_megatron.data.curriculum import Curriculum, right_counts
from grpo_megatron.data.responses import OfflineGroup
from grpo_megatron.data.sampler import Sampler
from grpo_megatron.parallel.exchange import flat_ids, gather_groups, split_ids
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.rollout.engine import training_truncation
from grpo_megatron.sampling.generator import Generator, LengthHistory
from grpo_megatron.types import UNFINISHED, Prompt, PromptImage, Sample, Segment, Turn

State = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """The samples of one prompt that this rank's engine replica holds: all of them, some, or none.

    `version` is the step for which they were sampled. Every rank knows it, also where `samples` is empty.
    """

    version: int
    samples: list[Sample]


@dataclass(frozen=True)
class Clock:
    """The rule which weights sample which step: those of `lag` steps before, or the oldest that this run has.

    A function of the step alone: how late a rank is changes nothing. `first`: the step at which the run has begun, or goes
    on. `sampled`: the steps before it had been sampled then, ahead of their training. Version v: the weights after v steps.
    """

    lag: int = 0  # rollout.lag
    first: int = 0
    drawn: int = 0
    num_steps: int = 0

    def version(self, step: int) -> int:
        return max(self.first, step - self.lag)

    def steps(self, version: int) -> range:
        """Returns the steps that are sampled by `version`, and none before it is there."""
        start = self.drawn if version == self.first else max(self.drawn, version + self.lag)
        return range(start, min(self.num_steps, version + self.lag + 1))


class Collector:
    """The source of a step's samples. This base class has none: it serves a run without training steps."""

    def groups(self, step: int, count: int, metrics: Metrics) -> list[Group]:
        """Returns up to `count` groups for step `step`.

        Collective. The engine is awake and holds the weights that sample `step`.
        """
        return []

    def validations(self, step: int, metrics: Metrics) -> list[tuple[int, dict[str, float]]]:
        """Results (version, metrics) of validations that other ranks have made before they sampled `step`. Collective."""
        return []

    def epoch(self) -> float:
        """Returns the passes over the data so far, as a fractional number."""
        return 0.0

    def state(self) -> State:
        """Returns what a resumed run needs to continue with the same groups: plain JSON, the same on every rank.

        Collective.
        """
        return {}

    def load_state(self, state: State) -> None:
        """Restore what `state` has returned."""


def numbered_samples(groups: Sequence[Group]) -> list[Sample]:
    """Returns the samples of all groups, in order. Sets each sample's `prompt_index` to the index of its group."""
    for index, group in enumerate(groups):
        for sample in group.samples:
            sample.prompt_index = index
    return [sample for group in groups for sample in group.samples]


def groups_by_prompt(samples: Sequence[Sample], count: int, version: int) -> list[Group]:
    """`count` groups of the samples, by `prompt_index`. A prompt without samples on this rank gets an empty group."""
    groups = [Group(version, []) for _ in range(count)]
    for sample in samples:
        groups[sample.prompt_index].samples.append(sample)
    return groups


def select_informative(groups: Sequence[Group], mesh: Mesh) -> list[Group]:
    """Returns the groups whose rewards differ, over the samples of all ranks. Numbers the samples. Collective."""
    table = gather_groups(numbered_samples(groups), mesh)
    return [groups[index] for index in sorted({table.prompt_index[rows[0]] for rows in informative_groups(table)})]


class PolicyCollector(Collector):
    """The next prompts of the data, answered by the weights that the engine holds.

    `prepare(step, metrics)` is called once per step, before anything is sampled: with algorithm.source=initial (RFT) it streams
    the model that the run started from into the engine, which keeps these weights until the next step's rollout begins,
    however many rounds of dynamic sampling a step takes.
    """

    def __init__(
        self,
        generator: Generator,
        prompts: Sampler[Prompt],
        data: DataConfig,
        rollout: RolloutConfig,
        *,
        greedy: bool = False,
        prepare: Callable[[int, Metrics], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.generator, self.prompts, self.data, self.rollout, self.greedy = generator, prompts, data, rollout, greedy
        self.prepare, self.clock = prepare, clock or Clock()
        self.cursor = 0  # prompts taken from the data so far
        self.step, self.num_rounds = -1, 0  # the last step, and the rounds for it
        self.lengths = LengthHistory()

    def groups(self, step: int, count: int, metrics: Metrics) -> list[Group]:
        prompts, round_id = self.next_prompts(step, count, metrics)
        samples = self.generator.sample(
            prompts,
            self.rollout.n,
            round_id=round_id,
            version=self.clock.version(step),
            max_tokens=self.data.max_response_length,
            temperature=self.rollout.temperature,
            truncation=training_truncation(self.rollout),
            greedy=self.greedy,
            history=self.lengths,
            limits_by_prompt=True,
            metrics=metrics,
        )
        self.learn(samples)
        return groups_by_prompt(samples, count, version=step)

    def learn(self, samples: Sequence[Sample]) -> None:
        """Give the pass rates of graded samples to a curriculum that follows them. Collective."""
        if isinstance(self.prompts, Curriculum) and self.prompts.learns:
            mesh = self.generator.mesh
            local = right_counts(samples if mesh.is_replica_leader else [])
            counts = sum(mesh.all_gather(local), Counter[tuple[str, bool]]())
            uids = sorted({uid for uid, _ in counts})
            self.prompts.learn({uid: (counts[uid, True], counts[uid, True] + counts[uid, False]) for uid in uids})

    def next_prompts(self, step: int, count: int, metrics: Metrics) -> tuple[list[Prompt], int]:
        """Returns the next `count` prompts of the data, and the round's number, which is in their seeds."""
        if step != self.step:
            self.step, self.num_rounds = step, 0
            if self.prepare is not None:
                self.prepare(step, metrics)
        prompts = self.prompts.items_from(self.cursor, count, step)
        if isinstance(self.prompts, Curriculum):
            for piece in self.prompts.pieces:
                metrics.constant(f"data/curriculum/{piece.name}/prompts", self.prompts.counts[piece.name])
        if self.data.sampling.pass_rates is not None:
            metrics.mean_of("data/pass_rate/mean", [prompt.pass_rate or 0.0 for prompt in prompts])
        round_id = step + (self.num_rounds << 32)  # a prompt that returns in a later round gets new seeds
        self.cursor += count
        self.num_rounds += 1
        return prompts, round_id

    def epoch(self) -> float:
        return self.prompts.epoch_at(self.cursor)

    def state(self) -> State:
        selection = self._selection()
        optional = {"selection": selection, "lengths": self.lengths.state(), "prompts": self.prompts.state()}
        return {"cursor": self.cursor} | {name: value for name, value in optional.items() if value}

    def load_state(self, state: State) -> None:
        self.cursor = state["cursor"]
        self.lengths.load_state(state.get("lengths", {}))
        if "prompts" in state:
            self.prompts.load_state(state["prompts"])
        if "selection" in state and state["selection"] != self._selection():
            raise ConfigError(
                f"data.sampling.pass_rates={str(self.data.sampling.pass_rates)!r} gives other prompts or weights than in"
                " the checkpoint, whose position in them would have another meaning; put the old file back, or start a"
                " new run in another trainer.output_dir"
            )

    def _selection(self) -> str:
        """Returns a digest of the selected prompts and their weights; empty if all are sampled alike."""
        if self.data.sampling.pass_rates is None:
            return ""
        selected = [[prompt.uid, prompt.weight] for prompt in self.prompts.items]
        return hashlib.sha256(json.dumps(selected).encode()).hexdigest()


class FileCollector(Collector):
    """The groups of a file: each entry is a prompt, its responses, and their rewards."""

    def __init__(self, entries: Sampler[OfflineGroup], mesh: Mesh) -> None:
        self.entries, self.mesh = entries, mesh
        self.cursor = 0  # entries taken so far

    def groups(self, step: int, count: int, metrics: Metrics) -> list[Group]:
        groups = [Group(step, []) for _ in range(count)]
        for index in range(count):
            if index % self.mesh.num_engine_replicas != self.mesh.engine_replica:
                continue
            prompt, responses, rewards = self.entries.items[self.entries.index_at(self.cursor + index)]
            groups[index].samples.extend(
                Sample(
                    prompt,
                    index,
                    i,
                    response.ids,
                    [0.0] * len(response),
                    "stop",
                    step,
                    reward=reward,
                    loss_mask=response.loss_mask(),
                    turns=response.turns,
                    steps=response.labels,
                )
                for i, (response, reward) in enumerate(zip(responses, rewards, strict=True))
            )
        self.cursor += count
        return groups

    def epoch(self) -> float:
        return self.cursor / len(self.entries.items)

    def state(self) -> State:
        return {"cursor": self.cursor}

    def load_state(self, state: State) -> None:
        self.cursor = state["cursor"]


# -- Stored groups -----------------------------------------------------------------------------------------------------
# Stored groups: samples that wait for a later step, as plain JSON in a checkpoint.
#
# A checkpoint holds every group whole, whichever ranks held its samples. After a resume, whole groups are dealt to the
# engine replicas in turn, so the layout may have changed.

PackedGroup = dict[str, Any]


def pack_groups(groups: Sequence[Group], mesh: Mesh) -> list[PackedGroup]:
    """Returns every group with the samples of all ranks, as plain JSON, the same on every rank. Collective."""
    held = [index for index, group in enumerate(groups) if group.samples and mesh.is_replica_leader]
    own = {index: _packed(groups[index].samples) for index in held}
    packed: list[PackedGroup] = [{"version": group.version, "samples": [], "pixels": {}} for group in groups]
    for index, (samples, pixels) in itertools.chain.from_iterable(part.items() for part in mesh.all_gather(own)):
        packed[index]["samples"].extend(samples)
        packed[index]["pixels"].update(pixels)
    for entry in packed:
        entry["samples"].sort(key=lambda sample: sample["index"])
    return packed


def unpack_groups(packed: Sequence[PackedGroup], mesh: Mesh) -> list[Group]:
    """Unpack groups: every num_engine_replicas-th one is complete in this replica, the others are empty."""
    groups = [Group(entry["version"], []) for entry in packed]
    for index in range(mesh.engine_replica, len(packed), mesh.num_engine_replicas):
        of_group = packed[index]
        pixels = {
            digest: zlib.decompress(base64.b64decode(text)) for digest, text in of_group.get("pixels", {}).items()
        }
        groups[index].samples.extend(unpack_sample(sample, pixels) for sample in of_group["samples"])
    return groups


def _packed(samples: Sequence[Sample]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Returns the samples of a group, and digest -> pixels of the images, which it stores once."""
    images = [image for sample in samples for image in sample.prompt.images]  # held, so that each is decoded once
    pixels = {image.digest: image.pixels for image in images}
    texts = {digest: base64.b64encode(zlib.compress(own, 1)).decode() for digest, own in pixels.items()}
    return [*map(pack_sample, samples)], texts


def pack_sample(sample: Sample) -> dict[str, Any]:
    """Pack a sample as JSON.

    Long columns are base64: JSON numbers would take several times the space. Images are without pixels.
    """
    packed = {name: getattr(sample, name) for name in Sample.__dataclass_fields__ if name != "scores"}
    is_graded = sample.finish_reason != UNFINISHED
    packed["prompt"] = asdict(without_row(sample.prompt) if is_graded else sample.prompt)
    packed["prompt"]["images"] = [[one.digest, *one.size, one.first] for one in sample.prompt.images]
    packed["turns"] = [asdict(turn) for turn in sample.turns]
    packed["segments"] = [asdict(segment) for segment in sample.segments]
    packed["response_ids"] = _to_base64(np.asarray(sample.response_ids, dtype="<i4"))
    packed["rollout_logprobs"] = _to_base64(np.asarray(sample.rollout_logprobs, dtype="<f8"))
    packed["loss_mask"] = _to_base64(np.packbits(np.asarray(sample.loss_mask, dtype=bool)))
    if (routes := sample.routes) is not None:
        packed["routes"] = {"dtype": str(routes.dtype), "width": routes.shape[1], "rows": _to_base64(routes)}
    packed["kept"] = _to_base64(flat_ids(sample.kept))
    return packed


def without_row(prompt: Prompt) -> Prompt:
    """Returns the prompt without its data file's row, but for the facts of images: those of a sample that is graded."""
    return replace(prompt, columns={n: v for n, v in prompt.columns.items() if n == "images"}, messages=None)


def unpack_sample(packed: dict[str, Any], pixels: Mapping[str, bytes] | None = None) -> Sample:
    """Returns the sample that `pack_sample` has packed. `pixels`: of its images, by digest."""
    prompt = dict(packed["prompt"])
    prompt["prompt_ids"] = tuple(prompt["prompt_ids"])
    prompt["teacher_ids"] = tuple(prompt.get("teacher_ids", ()))
    prompt["images"] = tuple(
        PromptImage(digest, (rows, columns), first, (pixels or {})[digest])
        for digest, rows, columns, first in prompt.get("images", ())
    )
    columns: dict[str, Any] = {
        "prompt": Prompt(**prompt),
        "response_ids": _from_base64(packed["response_ids"], "<i4"),
        "rollout_logprobs": _from_base64(packed["rollout_logprobs"], "<f8"),
        "steps": _rewards(packed["steps"]),
        "turns": [Turn(**turn) for turn in packed.get("turns", [])],
        "turn_rewards": _rewards(packed.get("turn_rewards", [])),
        "segments": [Segment(**segment) for segment in packed.get("segments", [])],
    }
    if (routes := packed.get("routes")) is not None:
        rows = np.frombuffer(base64.b64decode(routes["rows"]), dtype=routes["dtype"])
        columns["routes"] = rows.reshape(-1, routes["width"])
    columns["kept"] = split_ids(np.frombuffer(base64.b64decode(packed.get("kept", "")), dtype=np.int32))
    bits = np.array(_from_base64(packed["loss_mask"], "u1"), dtype=np.uint8)
    columns["loss_mask"] = np.unpackbits(bits, count=len(columns["response_ids"])).tolist()
    return Sample(**{**packed, **columns})


def _rewards(pairs: Sequence[Sequence[float]]) -> list[tuple[int, float]]:
    """Returns (token, reward) pairs, which JSON has as lists."""
    return [(int(token), float(reward)) for token, reward in pairs]


def _to_base64(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _from_base64(text: str, dtype: str) -> list[Any]:
    values: list[Any] = np.frombuffer(base64.b64decode(text), dtype=dtype).tolist()
    return values
