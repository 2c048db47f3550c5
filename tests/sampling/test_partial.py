"""Partial rollouts: which groups a step takes, what is cut, with which seeds it goes on, and that nothing else matters."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from grpo_megatron.config import DataConfig, RolloutConfig
from grpo_megatron.data.sampler import Sampler
from grpo_megatron.device import Device
from grpo_megatron.parallel.mesh import build_mesh
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.rollout.engine import Completion, sample_seed
from grpo_megatron.sampling.collector import numbered_samples, pack_sample, unpack_sample
from grpo_megatron.sampling.generator import Generator
from grpo_megatron.sampling.partial import PartialCollector
from grpo_megatron.types import UNFINISHED, Sample
from tests.fakes import CountingEngine, LoneMesh, prompt
from tests.worlds import ranks

# Six prompts, two per batch and three in progress; responses grow by 4 tokens per round, at most 12.
LENGTHS = [2, 11, 3, 30, 4, 5]
PARTIAL = {"over_sample": 1.5, "max_staleness": 2, "chunk_tokens": 4}


@ranks()
def collect_partial(lengths: list[int], resume_at: int | None) -> list[Any]:
    """Per step the samples of all ranks: (place, index, tokens, versions), with random delays. `resume_at`: as above."""
    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)
    rollout = RolloutConfig.model_validate({"n": 2, "partial": PARTIAL})

    def build() -> Any:
        engine: Any = CountingEngine(lengths, after_step=lambda: time.sleep(random.uniform(0, 0.005)))
        generator = Generator(engine, None, None, mesh, rollout, lambda: "")
        sampler = Sampler([prompt(i) for i in range(len(lengths))], 2, shuffle=False)
        return PartialCollector(generator, sampler, DataConfig(max_response_length=12), rollout)

    collector, out = build(), []
    for step in range(5):
        if step == resume_at:
            state = json.loads(json.dumps(collector.state()))
            collector = build()
            collector.load_state(state)
        local = [
            (s.prompt_index, s.index, s.prompt.uid, s.response_ids, s.rollout_logprobs, [d.version for d in s.segments])
            for s in numbered_samples(collector.groups(step, 2, Metrics()))
        ]
        out.append(sorted(entry for entries in mesh.all_gather(local) for entry in entries))
    return out


def collector(engine: Any, mesh: Any = None, **partial: Any) -> PartialCollector:
    rollout = RolloutConfig.model_validate({"n": 2, "seed": 9, "partial": {**PARTIAL, **partial}})
    step = iter(range(1000))
    generator = Generator(engine, None, None, mesh or LoneMesh(), rollout, lambda: f"digest {next(step)}")  # type: ignore[arg-type]
    sampler = Sampler([prompt(i) for i in range(len(LENGTHS))], 2, shuffle=False)
    return PartialCollector(generator, sampler, DataConfig(max_response_length=12), rollout)


def taken(made: Any, steps: range, metrics: list[Any] | None = None) -> list[list[tuple[int, int, list[int]]]]:
    """Per step, of each group: its prompt, its version, and the versions of its tokens."""
    out = []
    for step in steps:
        recorded = Metrics()
        groups = made.groups(step, 2, recorded)
        if metrics is not None:
            metrics.append(recorded.reduce())
        for group in groups:
            assert [s.index for s in group.samples] == [0, 1] and {s.version for s in group.samples} == {group.version}
            assert all(s.response_ids == list(range(len(s.response_ids))) for s in group.samples)
            assert all(len(s.loss_mask) == len(s.rollout_logprobs) == len(s.response_ids) for s in group.samples)
        first = [group.samples[0] for group in groups]
        out.append(
            [
                (s.prompt.prompt_ids[0], s.version, [d.version for d in s.segments for _ in range(d.start, d.end)])
                for s in first
            ]
        )
    return out


def test_a_step_takes_what_is_complete_and_goes_on_with_the_rest() -> None:
    """Step 0 begins 0, 1 and 2 and takes 0 and 2 after one round; prompt 1 has 4 of its 11 tokens, and 7 from step 1."""
    metrics: list[Any] = []
    steps = taken(collector(CountingEngine(LENGTHS)), range(4), metrics)
    assert [[number for number, *_ in step] for step in steps] == [[0, 2], [1, 4], [3, 0], [5, 2]]
    assert steps[0] == [(0, 0, [0] * 2), (2, 0, [0] * 3)]
    assert steps[1] == [(1, 0, [0] * 4 + [1] * 7), (4, 1, [1] * 4)]
    assert [m["rollout/partial/waiting_groups"] for m in metrics] == [1, 1, 1, 1]
    assert metrics[1]["rollout/partial/staleness_max"] == 1
    assert metrics[1]["rollout/partial/earlier_token_ratio"] == pytest.approx(4 / 15)


def test_a_due_group_is_completed_and_taken_first() -> None:
    """Prompt 1 needs three rounds, and others are complete after one; at age 1 it is due."""
    engine = CountingEngine([1, 30, 1, 1, 1, 1])
    steps = taken(collector(engine, max_staleness=1), range(2))
    assert [[number for number, *_ in step] for step in steps] == [[0, 2], [1, 3]]
    assert steps[1][0] == (1, 0, [0] * 4 + [1] * 8)  # 12 tokens are the limit
    later = taken(collector(CountingEngine([1, 30, 1, 1, 1, 1]), max_staleness=2), range(3))
    assert [[number for number, *_ in step] for step in later] == [[0, 2], [3, 4], [1, 5]]
    assert later[2][0] == (1, 0, [0] * 4 + [1] * 4 + [2] * 4)


def test_chunks_have_seeds_of_their_own_and_the_weights_that_drew_them() -> None:
    engine = CountingEngine(LENGTHS)
    made = collector(engine)
    groups = [group for step in range(2) for group in made.groups(step, 2, Metrics())]
    seeds = [r.seed for r in engine.requests if r.prompt_ids[0] == 1]
    uids = ("p/1#0", "p/1#0", "p/1#0@4", "p/1#0@4", "p/1#0@8", "p/1#0@8")
    assert seeds[:6] == [sample_seed(9, 0, uid, i) for uid, i in zip(uids, (0, 1) * 3, strict=True)]
    sample = next(group for group in groups if group.samples[0].prompt.prompt_ids == (1,)).samples[0]
    assert [(draw.start, draw.end, draw.version) for draw in sample.segments] == [(0, 4, 0), (4, 11, 1)]
    assert sample.weights_digest == sample.segments[0].weights_digest and sample.finish_reason == "stop"


def test_a_token_of_unknown_ids_stays_out_of_the_loss_through_a_checkpoint() -> None:
    made, sample = collector(CountingEngine(LENGTHS)), Sample(prompt(0), 0, 0, [], [], UNFINISHED, 0)
    made._extend(sample, Completion([5, 6], [-1.0, -1.0], "length", kept=[np.array([5], np.int32), None]), 0)
    again = unpack_sample(json.loads(json.dumps(pack_sample(sample))))
    assert again.loss_mask == [1, 0] and [len(ids) for ids in again.kept] == [1, 0]  # type: ignore[arg-type]


def test_the_limit_ends_a_response_and_a_chunk_does_not() -> None:
    """What waits has its row in a checkpoint, as it is graded later; complete responses have their reward.

    Prompt 1 began at step 0 and is too old at step 3. (Dynamic sampling calls in no step that left-over groups fill.)
    """
    (first, _) = collector(CountingEngine([30] * 6)).groups(0, 2, Metrics())
    assert [(s.finish_reason, len(s.response_ids)) for s in first.samples] == [("length", 12)] * 2
    made = collector(CountingEngine([1, 30, 1, 1, 1, 1]))
    made.groups(0, 2, Metrics())
    (waiting,) = made.waiting
    assert [(s.finish_reason, len(s.response_ids)) for s in waiting.samples] == [(UNFINISHED, 4)] * 2
    about = {"columns": {"gold": "x"}, "messages": [{"role": "user", "content": "q"}]}
    stored = [replace(sample, prompt=replace(sample.prompt, **about)) for sample in waiting.samples]  # type: ignore[arg-type]
    stored[1].finish_reason = "stop"
    one, other = (unpack_sample(json.loads(json.dumps(pack_sample(sample)))) for sample in stored)
    assert one.prompt.columns == {"gold": "x"} and one.prompt.messages
    assert other.prompt.columns == {} and other.prompt.messages is None
    metrics = Metrics()
    groups = made.groups(3, 2, metrics)
    assert [group.version for group in groups] == [3, 3] and metrics.reduce()["rollout/partial/dropped_groups"] == 1


def test_a_resumed_run_knows_which_block_has_which_group() -> None:
    """New groups go to the block with the fewest unfinished responses."""
    first = collector(CountingEngine([30] * 6), over_sample=2.0, max_staleness=4)
    first.groups(0, 2, Metrics())
    second = collector(CountingEngine([30] * 6), mesh=LoneMesh(2, 1), over_sample=2.0, max_staleness=4)
    second.load_state(json.loads(json.dumps(first.state())))
    assert [(group.replica, bool(group.samples)) for group in second.waiting] == [(0, False), (1, True)]


def test_a_group_that_is_partly_finished_goes_on_after_a_resume() -> None:
    """One of two responses is complete. The other one alone is continued, and then the group is."""
    first = collector(CountingEngine([1, 30, 1, 1, 1, 1]))
    first.groups(0, 2, Metrics())
    (waiting,) = first.waiting
    done, waiting.num_unfinished = waiting.samples[1], 1
    done.finish_reason = "stop"
    engine = CountingEngine([1, 7, 1, 1, 1, 1])
    second = collector(engine)
    second.load_state(json.loads(json.dumps(first.state())))
    assert [(group.num_unfinished, len(group.unfinished())) for group in second.waiting] == [(1, 1)]
    groups = second.groups(1, 2, Metrics())
    assert [len(r.prompt_ids) for r in engine.requests if r.prompt_ids[0] == 1] == [5]
    (group,) = (group for group in groups if group.samples[0].prompt.prompt_ids == (1,))
    assert [(s.index, len(s.response_ids), s.finish_reason) for s in group.samples] == [(0, 7, "stop"), (1, 4, "stop")]


@pytest.mark.slow
def test_the_samples_are_the_same_on_two_ranks() -> None:
    """Over real gloo: groups are on one block each; after a resume on another."""
    alone = collect_partial(1, lengths=LENGTHS, resume_at=None)[0]
    together = collect_partial(2, lengths=LENGTHS, resume_at=2)
    assert together[0] == together[1] == alone
    assert len({place for step in alone for place, *_ in step}) == 2
