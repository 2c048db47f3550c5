"""Responses and trajectories that take several steps, so that no step waits for the longest (`rollout.partial`).

A step keeps over_sample x as many prompts in progress as its batch has. All their responses grow in rounds of
`chunk_tokens` tokens. After a round in which enough groups are complete, the step takes these; the next step goes on with
the others under its own weights. What is cut, and where, follows from lengths of responses only. Trajectories of several
turns grow by `chunk_turns` turns, and what is cut follows from their turns only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from grpo_megatron.report.metrics import Metrics
from grpo_megatron.rollout.engine import Completion, Request, continued, sample_seed, training_truncation
from grpo_megatron.sampling.collector import Group, PolicyCollector, State, pack_groups, unpack_groups
from grpo_megatron.sampling.generator import SamplingRound, distinct_uids, sample_indices
from grpo_megatron.sampling.multi_turn import Trajectory, TrajectoryGenerator, hash_of
from grpo_megatron.types import UNFINISHED, Prompt, PromptImage, Sample, Segment

TURN = "turn"  # Sample.status of a stored turn of a trajectory under way
logger = logging.getLogger(__name__)


@dataclass
class _InProgress:
    """A group in progress, known on every rank. Its samples are on the ranks of one engine replica."""

    round_id: int
    uid: str
    version: int  # the step in which it began
    replica: int
    num_unfinished: int  # responses
    samples: list[Sample] = field(default_factory=list)  # empty on other replicas
    images: tuple[PromptImage, ...] = ()  # held, so that they are decoded once for all rounds
    wanted: Any = None  # of PartialTrajectories: a SamplingRound of the samples that were unfinished
    under_way: dict[int, Trajectory] = field(default_factory=dict)  # by number in `wanted`

    def unfinished(self) -> list[Sample]:
        """Returns the unfinished samples that this rank holds."""
        return [sample for sample in self.samples if sample.finish_reason == UNFINISHED]


class PartialCollector(PolicyCollector):
    """The collector that goes on with the unfinished responses of earlier steps.

    Each token keeps the log-probability and the version of its weights (Sample.samples), so that the rollout correction covers
    every step's age. A response of t tokens goes on as a request whose prompt is prompt and response so far, with a seed made
    of run, sample, prompt, sample and t: not of the step, the rank, or what else is generated. The first chunk has the seed of a
    response that is generated at once. A round is a tick of a logical clock: it depends neither on the time that anything
    takes, nor on the layout, nor on where a run was resumed. Ranks wait for each other at the end of a round only. A group
    that began `max_staleness` steps ago is completed in this step, whatever it takes, and trained on before others.
    """

    reads_rows = True  # the images of a prompt are those of its row

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        self.mesh, self.partial = self.generator.mesh, self.rollout.partial
        self.waiting: list[_InProgress] = []  # oldest first

    def groups(self, step: int, count: int, metrics: Metrics) -> list[Group]:
        # Dynamic sampling may skip a step, and replay takes fewer groups: what has become too old is not trained on.
        dropped = [group for group in self.waiting if step - group.version > self.partial.max_staleness]
        self.waiting = waiting = [g for g in self.waiting if step - g.version <= self.partial.max_staleness]
        self._drop(dropped)
        in_progress = self.waiting + self._begin(step, count, metrics)
        unfinished = [sample for group in in_progress for sample in group.unfinished()]
        earlier = {id(one) for group in waiting for one in group.samples if one.finish_reason != UNFINISHED}
        functions = {sample.prompt.reward for group in in_progress for sample in group.samples}
        self.generator.grading.begin(functions, len(unfinished))
        with metrics.phase("gen"):
            num_rounds = 0
            while sum(not group.num_unfinished for group in in_progress) < count or any(
                group.num_unfinished and self._is_due(group, step) for group in in_progress
            ):
                self._advance(in_progress, step)
                num_rounds += 1
        self.generator.record_cache(metrics)
        graded = [
            sample
            for group in in_progress
            for sample in group.samples
            if sample.finish_reason != UNFINISHED and id(sample) not in earlier
        ]
        self.generator.finish_grading(graded, step, step, metrics)
        self.learn([sample for group in in_progress if not group.num_unfinished for sample in group.samples])
        in_progress.sort(key=lambda group: (group.num_unfinished > 0, not self._is_due(group, step)))  # stable
        taken, left = in_progress[:count], in_progress[count:]
        self.waiting = sorted(left, key=lambda group: group.version)
        self._record(taken, step, num_rounds, len(dropped), metrics)
        return [Group(group.version, group.samples) for group in taken]

    def state(self) -> State:
        groups = [Group(group.version, self._stored(group)) for group in self.waiting]
        draws = [[group.round_id, group.uid] for group in self.waiting]
        return {**super().state(), "waiting": pack_groups(groups, self.mesh), "draws": draws}

    def load_state(self, state: State) -> None:
        super().load_state(state)
        groups = unpack_groups(state["waiting"], self.mesh)
        self.waiting = [
            _InProgress(
                round_id,
                uid,
                group.version,
                replica=number % self.mesh.num_engine_replicas,  # where unpack_groups puts it
                num_unfinished=sum(sample["finish_reason"] == UNFINISHED for sample in packed["samples"]),
                samples=group.samples,
            )
            for number, (group, packed, (round_id, uid)) in enumerate(
                zip(groups, state["waiting"], state["draws"], strict=True)
            )
        ]

    def _begin(self, step: int, count: int, metrics: Metrics) -> list[_InProgress]:
        """Begin new groups, for a full complement. Each goes to the replica with the fewest unfinished responses."""
        prompts, round_id = self.next_prompts(step, max(0, self._complement(step, count) - len(self.waiting)), metrics)
        load = [0] * self.mesh.num_engine_replicas
        for group in self.waiting:
            load[group.replica] += group.num_unfinished
        begun = []
        for prompt, uid in zip(prompts, distinct_uids(prompts), strict=True):
            replica, indices = load.index(min(load)), sample_indices(prompt.n or self.rollout.n, greedy=self.greedy)
            load[replica] += len(indices)
            mine = replica == self.mesh.engine_replica
            version = self.clock.version(step)
            samples = [Sample(prompt, 0, index, [], [], UNFINISHED, version) for index in indices] if mine else []
            images = prompt.images if mine and self.reads_rows else ()
            begun.append(_InProgress(round_id, uid, step, replica, len(indices), samples, images))
        return begun

    def _advance(self, in_progress: Sequence[_InProgress], step: int) -> None:
        """Generate one round. What becomes complete goes to the reward workers at once. Collective."""
        generator, version = self.generator, self.clock.version(step)
        responses = [(group, sample) for group in in_progress for sample in group.unfinished()]
        for finished in generator.engine.stream([self._request(*response) for response in responses], version):
            for number, completion in finished:
                sample = responses[number][1]
                self._extend(sample, completion, version)
                is_cut = completion.finish_reason == "length" and len(sample.response_ids) < self._limit(sample)
                sample.finish_reason = UNFINISHED if is_cut else completion.finish_reason
                if not is_cut:
                    generator.complete(sample)
            generator.grading.serve()
        self._count_unfinished(in_progress)

    def _count_unfinished(self, in_progress: Sequence[_InProgress]) -> None:
        """Collective: then every rank knows how many responses of each group are unfinished."""
        local = [len(group.unfinished()) if self.mesh.is_replica_leader else 0 for group in in_progress]
        for group, num_unfinished in zip(in_progress, self.mesh.total(local), strict=True):
            group.num_unfinished = num_unfinished

    def _complement(self, step: int, count: int) -> int:
        """Returns the prompts in progress that step `step` begins with."""
        return ceil(count * self.partial.over_sample)

    def _drop(self, groups: Sequence[_InProgress]) -> None:
        """Release what groups that are too old hold."""

    def _stored(self, group: _InProgress) -> list[Sample]:
        """Returns what a checkpoint has of a group."""
        return group.samples

    def _request(self, group: _InProgress, sample: Sample) -> Request:
        start = len(sample.response_ids)
        uid = f"{group.uid}@{start}" if start else group.uid
        seed = sample_seed(self.generator.seed, group.round_id, uid, sample.index)
        sample.seed = sample.seed if start else seed
        return self.generator.request(
            sample.prompt,
            sample.index,
            seed,
            min(self.partial.chunk_tokens, self._limit(sample) - start),
            self.rollout.temperature,
            training_truncation(self.rollout),
            written=sample.response_ids,
        )

    def _limit(self, sample: Sample) -> int:
        return sample.prompt.max_tokens or self.data.max_response_length

    def _extend(self, sample: Sample, completion: Completion, version: int) -> None:
        start, ids = len(sample.response_ids), completion.response_ids
        if not sample.segments or sample.segments[-1].version != version:
            sample.segments.append(Segment(start, start, version, self.generator.weights_digest()))
        sample.response_ids.extend(ids)
        sample.rollout_logprobs.extend(completion.logprobs)
        sample.routes = continued(sample.routes, completion.routes)
        sample.kept.extend(completion.kept)
        # A checkpoint stores None as no ids, which stand for the full vocabulary.
        sample.loss_mask.extend([int(kept is not None) for kept in completion.kept] or [1] * len(ids))
        sample.segments[-1] = replace(sample.segments[-1], end=len(sample.response_ids))
        sample.weights_digest = sample.segments[0].weights_digest

    def _is_due(self, group: _InProgress, step: int) -> bool:
        return step - group.version >= self.partial.max_staleness

    def _record(
        self, taken: Sequence[_InProgress], step: int, num_rounds: int, num_dropped: int, metrics: Metrics
    ) -> None:
        metrics.constant("rollout/partial/rounds", num_rounds)
        metrics.constant("rollout/partial/dropped_groups", num_dropped)
        metrics.constant("rollout/partial/waiting_groups", len(self.waiting))
        metrics.constant("rollout/partial/waiting_responses", sum(group.num_unfinished for group in self.waiting))
        metrics.constant("rollout/partial/waiting_age_max", max((step - g.version for g in self.waiting), default=0))
        metrics.constant("rollout/partial/staleness_max", max((step - group.version for group in taken), default=0))
        leader = metrics.when(self.mesh.is_replica_leader)
        for sample in (sample for group in taken for sample in group.samples):
            age = sum((step - draw.version) * (draw.end - draw.start) for draw in sample.segments)
            old = sum(draw.end - draw.start for draw in sample.segments if draw.version < self.clock.version(step))
            leader.mean("rollout/partial/staleness_mean", age, len(sample.response_ids))  # over tokens
            leader.mean("rollout/partial/earlier_token_ratio", old, len(sample.response_ids))


# -- Trajectories of several turns -------------------------------------------------------------------------------------


class PartialTrajectories(PartialCollector):
    """The same for trajectories of several turns (`rollout.multi_turn.environment`).

    A round plays up to `chunk_turns` turns of every trajectory under way, each until its environment has answered. In the
    last steps only as many groups are begun as the run trains on, so that none is left at its end. Between steps an
    environment waits in its process. A checkpoint has the turns so far: a resumed run starts the environments again and repeats
    them. Where the context of a turn is then another one, the trajectory begins again, with its seeds.
    """

    generator: TrajectoryGenerator
    reads_rows = False  # the environment shows images: its reset is given the row

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        self._stored_turns: dict[str, list[Sample]] = {}  # by key of the trajectory, of this replica
        self._is_resumed = False  # and has not repeated them yet

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._is_resumed = True
        for group in self.waiting:
            turns = [sample for sample in group.samples if sample.status == TURN]
            group.samples = [sample for sample in group.samples if sample.status != TURN]
            self._open(group)
            for number, trajectory in group.under_way.items():
                index = group.wanted.indices[number]
                self._stored_turns[trajectory.key] = [turn for turn in turns if turn.index == index]

    def _stored(self, group: _InProgress) -> list[Sample]:
        """Returns the complete samples, those under way without tokens, and each turn of theirs as a sample."""
        turns, nothing = [], Prompt("", (), "", "", "", "")
        for number, trajectory in group.under_way.items():
            for turn, version, context in trajectory.record:
                tokens = turn.response_ids, turn.logprobs, turn.finish_reason, version
                named: Any = {"status": TURN, "seed": context, "routes": turn.routes, "kept": turn.kept}
                named["loss_mask"] = [int(ids is not None) for ids in turn.kept]  # as in PartialCollector._extend
                named["weights_digest"] = trajectory.digests[version]
                turns.append(Sample(nothing, 0, group.wanted.indices[number], *tokens, **named))
            turns += self._stored_turns.get(trajectory.key, [])  # no step has repeated them since the resume
        return [
            replace(one, prompt=replace(one.prompt, images=())) if one.finish_reason == UNFINISHED else one
            for one in (*group.samples, *turns)
        ]

    def _begin(self, step: int, count: int, metrics: Metrics) -> list[_InProgress]:
        begun = super()._begin(step, count, metrics)
        for group in begun:
            self._open(group)
        return begun

    def _complement(self, step: int, count: int) -> int:
        return min(super()._complement(step, count), count * max(1, self.clock.num_steps - step))

    def _drop(self, groups: Sequence[_InProgress]) -> None:
        self.generator.answers.end([one for group in groups for one in group.under_way.values()])

    def _open(self, group: _InProgress) -> None:
        """Make the trajectories of the unfinished samples."""
        if samples := group.unfinished():
            first, indices = samples[0], [sample.index for sample in samples]
            settings = first.version, self.rollout.temperature, training_truncation(self.rollout), self.generator.seed
            limits = [len(samples)], [self._limit(first)]
            group.wanted = SamplingRound([first.prompt], [group.uid], indices, group.round_id, *settings, *limits)
            group.under_way = {n: self.generator.trajectory(group.wanted, n) for n in range(len(samples))}

    def _advance(self, in_progress: Sequence[_InProgress], step: int) -> None:
        generator, version = self.generator, self.clock.version(step)
        places = {
            one.key: (place, number)
            for place, group in enumerate(in_progress)
            for number, one in group.under_way.items()
        }

        def complete(ended: Sequence[Trajectory]) -> None:
            for trajectory in ended:
                place, number = places[trajectory.key]
                group = in_progress[place]
                del group.under_way[number]
                samples = generator.samples_of(group.wanted, number, trajectory)
                others = [one for one in group.samples if one.index != samples[0].index]
                group.samples = sorted([*others, *samples], key=lambda one: one.index)
                for sample in samples:
                    sample.prompt_index = place  # the grading tells trajectories apart by it
                    generator.complete(sample)
            generator.grading.serve()

        if self._is_resumed:
            self._is_resumed = False
            complete(self._repeat(in_progress, version))
        trajectories = [one for group in in_progress for one in group.under_way.values()]
        for trajectory in trajectories:
            trajectory.version, trajectory.digests[version] = version, generator.weights_digest()
        until = {one.key: one.num_generated + self.partial.chunk_turns for one in trajectories}
        for ended in generator.play(trajectories, version, until):
            complete(ended)
        self._count_unfinished(in_progress)

    def _repeat(self, in_progress: Sequence[_InProgress], version: int) -> list[Trajectory]:
        """Play the stored turns, which brings each environment to where it was. Returns what has ended. Collective."""
        turns, self._stored_turns = self._stored_turns, {}
        trajectories = [one for group in in_progress for one in group.under_way.values() if turns.get(one.key)]
        until, record = {one.key: len(turns[one.key]) for one in trajectories}, _Record(trajectories, turns)
        ended = [one for some in self.generator.play(trajectories, version, until, record) for one in some]
        for group in in_progress:
            for number, trajectory in group.under_way.items():
                if trajectory.key in record.differing:
                    self.generator.answers.end([trajectory])
                    group.under_way[number] = self.generator.trajectory(group.wanted, number)
        if record.differing and self.mesh.is_replica_leader:
            text = "%d of %d trajectories under way begin again, as their environments did not repeat their answers"
            logger.warning(text, len(record.differing), len(trajectories))
        return [one for one in ended if one.key not in record.differing]


class _Record:
    """The turns that were sampled before a checkpoint, in place of an engine. `differing`: keys with another context."""

    version = None

    def __init__(self, trajectories: Sequence[Trajectory], turns: Mapping[str, Sequence[Sample]]) -> None:
        self.trajectories, self.turns = {one.key: one for one in trajectories}, turns
        self.differing: set[str] = set()
        self._generated: list[tuple[str, Completion]] = []

    def submit(self, key: str, request: Request, version: int) -> None:
        trajectory = self.trajectories[key]
        turn = self.turns[key][trajectory.num_generated]
        if hash_of(request.prompt_ids, request.images) != turn.seed:
            self.differing.add(key)
        trajectory.version, trajectory.digests[turn.version] = turn.version, turn.weights_digest
        kept = [ids if is_known else None for ids, is_known in zip(turn.kept, turn.loss_mask, strict=False)]
        completion = Completion(turn.response_ids, turn.rollout_logprobs, turn.finish_reason, turn.routes, kept)
        self._generated.append((key, completion))

    def poll(self) -> list[tuple[str, Completion]]:
        generated, self._generated = self._generated, []
        return generated
