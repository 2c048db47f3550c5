"""What each collector returns at which step: prompts, seeds, versions, and how old a group may become."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from grpo_megatron.config import ConfigError, DataConfig, ReplayConfig, RolloutConfig
from grpo_megatron.data.responses import WrittenResponse
from grpo_megatron.data.sampler import Sampler
from grpo_megatron.device import Device
from grpo_megatron.parallel.mesh import build_mesh
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.sampling.collector import (
    FileCollector,
    Group,
    PolicyCollector,
    groups_by_prompt,
    numbered_samples,
    pack_groups,
    pack_sample,
    unpack_groups,
    unpack_sample,
)
from grpo_megatron.sampling.wrappers import DynamicSampling, Replay, prompt_sampler
from grpo_megatron.types import Prompt, Sample, Turn
from tests.fakes import FakeGenerator, LoneMesh, ScriptedCollector, prompt
from tests.worlds import ranks

MIXED, EQUAL = (1.0, 0.0), (1.0, 1.0)  # rewards of an informative group, and of one that is not


def _all_samples(groups: list[Any], mesh: Any) -> list[tuple[int, int, int, int]]:
    """(place, prompt, index, version) of the samples of every rank."""
    from grpo_megatron.sampling.collector import numbered_samples

    local = [(s.prompt_index, s.response_ids[0], s.index, s.version) for s in numbered_samples(groups)]
    return sorted(entry for entries in mesh.all_gather(local) for entry in entries)


@ranks()
def collect_on_ranks(
    kind: str, script: list[tuple[float, float]], counts: list[int], resume_at: int | None = None
) -> list[Any]:
    """The groups of each step; before step `resume_at` the collector is replaced by a new one with its state."""

    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)

    def build() -> Any:
        inner = ScriptedCollector(script, mesh)
        if kind == "dynamic":
            return DynamicSampling(inner, mesh, round_size=3, max_rounds=3, max_staleness=1)
        return Replay(inner, ReplayConfig(ratio=0.5, size=3, max_staleness=2), mesh)

    collector, out = build(), []
    for step, count in enumerate(counts):
        if step == resume_at:
            state = json.loads(json.dumps(collector.state()))
            collector = build()
            collector.load_state(state)
        metrics = Metrics()
        groups = collector.groups(step, count, metrics)
        out.append((_all_samples(groups, mesh), metrics.reduce(mesh.all_gather)))
    return out


def numbers(groups: list[Group]) -> list[int]:
    """The number of each group's prompt."""
    return [group.samples[0].prompt.prompt_ids[0] for group in groups]


def collect(collector: Any, steps: range, count: int) -> list[tuple[list[Group], dict[str, float]]]:
    """(groups, metrics) per step. Every sample must have the version of its group."""
    out = []
    for step in steps:
        metrics = Metrics()
        groups = collector.groups(step, count, metrics)
        assert all(sample.version == group.version for group in groups for sample in group.samples)
        out.append((groups, metrics.reduce()))
    return out


def ages(collected: list[tuple[list[Group], dict[str, float]]], first: int = 0) -> list[list[int]]:
    """Per step the ages of its groups, in steps, without repetition."""
    return [sorted({step - g.version for g in groups}) for step, (groups, _) in enumerate(collected, first)]


def column(collected: list[tuple[list[Group], dict[str, float]]], name: str) -> list[float]:
    return [metrics[name] for _, metrics in collected]


# -- the policy, the initial model, a file -----------------------------------------------------------------------------


def policy_collector(generator: Any, num_prompts: int = 5) -> PolicyCollector:
    sampler = Sampler([prompt(i) for i in range(num_prompts)], 2, shuffle=False)
    return PolicyCollector(generator, sampler, DataConfig(max_response_length=7), RolloutConfig(n=3, temperature=0.5))


def test_each_step_draws_its_own_prompts_with_its_own_seeds_and_weights() -> None:
    generator = FakeGenerator()
    collector = policy_collector(generator)
    collect(collector, range(3), count=2)
    assert [draw["uids"] for draw in generator.draws] == [["p/0", "p/1"], ["p/2", "p/3"], ["p/4", "p/0"]]
    assert [draw["round_id"] for draw in generator.draws] == [0, 1, 2]  # the step seeds the samples
    assert [draw["version"] for draw in generator.draws] == [0, 1, 2]  # and the engine holds its weights
    assert generator.draws[0]["temperature"] == 0.5 and generator.draws[0]["max_tokens"] == 7
    assert collector.epoch() == 6 / 5


def test_rounds_of_one_step_have_seeds_of_their_own() -> None:
    generator = FakeGenerator()
    collector = policy_collector(generator)
    for step in (0, 0, 3, 3, 3, 4):
        collector.groups(step, 2, Metrics())
    assert [draw["round_id"] for draw in generator.draws] == [0, 1 << 32, 3, 3 + (1 << 32), 3 + (2 << 32), 4]
    assert [draw["version"] for draw in generator.draws] == [0, 0, 3, 3, 3, 4]


def weighted_collector(generator: Any, weights: list[float]) -> PolicyCollector:
    """Of five prompts with pass rates 0, 0.2, ... 0.8, in batches of 2."""
    data = DataConfig.model_validate(
        {"train_batch_size": 2, "sampling": {"pass_rates": "rates.jsonl", "weight": "file"}}
    )
    prompts = [replace(prompt(i), pass_rate=0.2 * i, weight=weight) for i, weight in enumerate(weights)]
    return PolicyCollector(generator, prompt_sampler(prompts, data), data, RolloutConfig(n=3))


def test_weighted_draws_are_in_proportion_and_reported() -> None:
    """Ten samples are two epochs: prompts of weight 3, 1, 1, 0, 0 come 6, 2, 2, 0, 0 times."""
    generator = FakeGenerator()
    collector = weighted_collector(generator, [0, 1, 0, 3, 1])
    collected = collect(collector, range(5), count=2)
    drawn = [int(uid[2:]) for draw in generator.draws for uid in draw["uids"]]
    assert Counter(drawn) == {3: 6, 1: 2, 4: 2}
    pairs = [drawn[i : i + 2] for i in range(0, 10, 2)]
    assert column(collected, "data/pass_rate/mean") == pytest.approx([0.2 * sum(pair) / 2 for pair in pairs])
    with pytest.raises(ConfigError, match="gives other prompts or weights than in the checkpoint"):
        weighted_collector(generator, [0, 1, 0, 3, 2]).load_state(json.loads(json.dumps(collector.state())))


def test_without_pass_rates_nothing_is_reported_and_the_state_is_the_position() -> None:
    collector = policy_collector(FakeGenerator())
    [(_, metrics)] = collect(collector, range(1), count=2)
    assert "data/pass_rate/mean" not in metrics
    assert collector.state() == {"cursor": 2}


def test_the_initial_model_is_streamed_once_per_step() -> None:
    """Once, however many rounds the step takes, and before its first sample: the engine then still holds the policy."""
    events: list[str] = []
    generator = FakeGenerator(reward=lambda prompt, index, round_id: float(prompt.prompt_ids[0] == 0 and index == 0))
    sample = generator.sample

    def noted(*arguments: Any, **named: Any) -> list[Sample]:
        events.append(f"sample {named['version']}")
        return sample(*arguments, **named)

    generator.sample = noted  # type: ignore[method-assign]
    inner = policy_collector(generator)
    inner.prepare = lambda step, metrics: events.append(f"sync {step}")
    dynamic = DynamicSampling(inner, LoneMesh(), round_size=2, max_rounds=3, max_staleness=1)
    collect(dynamic, range(2), count=2)  # at most one informative group per round
    assert events == ["sync 0", "sample 0", "sample 0", "sample 0", "sync 1", "sample 1", "sample 1", "sample 1"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_is_read_on_and_its_groups_are_dealt_to_the_blocks(rank: int) -> None:
    entries = [(prompt(i), [WrittenResponse([i, 1]), WrittenResponse([i, 2])], [1.0, 0.0]) for i in range(5)]
    collector = FileCollector(Sampler(entries, 2, shuffle=False), LoneMesh(2, rank))  # type: ignore[arg-type]
    collected = collect(collector, range(3), count=2)
    held = [[bool(group.samples) for group in groups] for groups, _ in collected]
    assert held == [[rank == 0, rank == 1]] * 3
    assert [numbers([groups[rank]]) for groups, _ in collected] == [[rank], [2 + rank], [(4 + rank) % 5]]
    assert [group.version for group in collected[2][0]] == [2, 2]
    assert [sample.reward for sample in collected[0][0][rank].samples] == [1.0, 0.0]


def test_a_written_response_of_several_turns_has_its_loss_mask() -> None:
    turns = [Turn(0, 2, "assistant", 0, 0), Turn(2, 5, "observation", 0, 0), Turn(5, 6, "assistant", 0, 0)]
    entries = [(prompt(0), [WrittenResponse([7, 1, 9, 9, 9, 1], turns)], [1.0])]
    [group] = FileCollector(Sampler(entries, 1, shuffle=False), LoneMesh()).groups(0, 1, Metrics())  # type: ignore[arg-type]
    [sample] = group.samples
    assert (sample.response_ids, sample.loss_mask, sample.turns) == ([7, 1, 9, 9, 9, 1], [1, 1, 0, 0, 0, 1], turns)


# -- dynamic sampling --------------------------------------------------------------------------------------------------


def dynamic(script: list[Any], round_size: int, **settings: int) -> tuple[DynamicSampling, ScriptedCollector]:
    inner = ScriptedCollector(script, LoneMesh())
    return DynamicSampling(
        inner, LoneMesh(), round_size=round_size, **{"max_rounds": 3, "max_staleness": 1, **settings}
    ), inner


def test_left_over_groups_never_get_older_than_the_bound() -> None:
    # Batches of 2, rounds of 8, every group informative. Step 0 leaves six groups: step 1 trains on two of them, one step
    # old, and at step 2 the other four are dropped. From then on a round is no larger than this batch and the next.
    collector, inner = dynamic([MIXED], round_size=8)
    collected = collect(collector, range(6), count=2)
    assert ages(collected) == [[0], [1], [0], [1], [0], [1]]
    assert [numbers(groups) for groups, _ in collected] == [[0, 1], [2, 3], [8, 9], [10, 11], [12, 13], [14, 15]]
    assert column(collected, "train/left_over_staleness_max") == [0, 1, 0, 1, 0, 1]
    assert column(collected, "train/left_over_groups_dropped") == [0, 0, 4, 0, 0, 0]
    assert inner.requests == [(0, 8), (2, 4), (4, 4)]


@pytest.mark.parametrize(("bound", "expected"), [(0, [[0]] * 4), (2, [[0], [1], [2], [0]]), (9, [[0], [1], [2], [3]])])
def test_the_bound_is_in_steps(bound: int, expected: list[list[int]]) -> None:
    collector, _ = dynamic([MIXED], round_size=8, max_staleness=bound)
    assert ages(collect(collector, range(4), count=2)) == expected


def test_oversampling_stays_where_few_groups_are_informative() -> None:
    """One group in four: ceil((2 missing + 1 step x 2) x 4) = 16 prompts could be used, so the rounds stay at 8."""
    collector, inner = dynamic([MIXED, EQUAL, EQUAL, EQUAL], round_size=8)
    collect(collector, range(3), count=2)
    assert inner.requests == [(0, 8), (1, 8), (2, 8)]


def test_a_round_without_an_informative_group_is_followed_by_a_full_one() -> None:
    collector, inner = dynamic([MIXED] * 8 + [EQUAL] * 4 + [MIXED] * 99, round_size=8)
    collected = collect(collector, range(3), count=2)
    assert inner.requests == [(0, 8), (2, 4), (2, 8)]
    assert column(collected, "train/num_gen_batches") == [1, 0, 2]


def test_rounds_that_bring_nothing_end() -> None:
    collector, inner = dynamic([EQUAL], round_size=3)
    collected = collect(collector, range(2), count=2)
    assert [groups for groups, _ in collected] == [[], []]
    assert column(collected, "train/num_gen_batches") == [3, 3]
    assert column(collected, "train/batch_fill_ratio") == [0, 0]
    assert len(inner.requests) == 6


# -- replay ------------------------------------------------------------------------------------------------------------


def replay(script: list[Any], ratio: float, size: int) -> Replay:
    inner = ScriptedCollector(script, LoneMesh())
    return Replay(inner, ReplayConfig(ratio=ratio, size=size, max_staleness=2), LoneMesh())


def test_replay_never_uses_a_group_older_than_the_bound() -> None:
    # Batches of 4, of which one is replayed: step 0 leaves four groups in the buffer, more than two steps can use up.
    # At step 3 the rest of them is three steps old and is dropped. The three groups of step 1 are next.
    collected = collect(replay([MIXED], ratio=0.25, size=99), range(6), count=4)
    assert [groups[0].version for groups, _ in collected] == [0, 0, 0, 1, 2, 3]
    assert [numbers(groups)[0] for groups, _ in collected] == [0, 0, 1, 4, 7, 10]  # the oldest first, each once
    assert column(collected, "train/replay_staleness_max") == [0, 1, 2, 2, 2, 2]
    assert column(collected, "train/replayed_groups") == [0, 1, 1, 1, 1, 1]


def test_the_age_of_a_replayed_group_counts_from_its_draw() -> None:
    """Not from the step that trained on it first, which for a left-over group of dynamic sampling is a later one."""
    inner, _ = dynamic([MIXED], round_size=8)
    collector = Replay(inner, ReplayConfig(ratio=0.25, size=99, max_staleness=2), LoneMesh())
    collected = collect(collector, range(8), count=4)
    assert max(age for step in ages(collected) for age in step) == 2
    for step, (groups, metrics) in enumerate(collected):
        replayed = groups[: int(metrics["train/replayed_groups"])]
        marked = [all(sample.is_replayed for sample in group.samples) for group in groups]
        assert marked == [True] * len(replayed) + [False] * (len(groups) - len(replayed))
        assert metrics["train/replay_staleness_max"] == max((step - g.version for g in replayed), default=0)


# -- resume ------------------------------------------------------------------------------------------------------------


def numbered_rewards() -> FakeGenerator:
    return FakeGenerator(reward=lambda prompt, index, round_id: float(round_id + index))


RESUMED: dict[str, tuple[Callable[[], Any], int]] = {  # collector, groups per step
    "policy": (lambda: policy_collector(numbered_rewards()), 2),
    "weighted": (lambda: weighted_collector(numbered_rewards(), [0, 1, 0, 3, 1]), 2),
    "dynamic": (lambda: dynamic([MIXED, MIXED, EQUAL], round_size=9)[0], 2),
    "replay": (lambda: replay([MIXED, EQUAL], ratio=0.5, size=9), 4),
}


@pytest.mark.parametrize("resume_at", [1, 2, 3])
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_collector_goes_on_as_if_never_stopped(name: str, resume_at: int) -> None:
    """Prompts and seeds, left-over and replayed groups and their age, and the size of the next round."""
    build, count = RESUMED[name]

    def content(collected: list[tuple[list[Group], dict[str, float]]]) -> list[Any]:
        return [
            (
                [[(s.prompt.uid, s.index, s.version, s.reward) for s in group.samples] for group in groups],
                {name: value for name, value in metrics.items() if not name.startswith("timing")},
            )
            for groups, metrics in collected
        ]

    expected = collect(build(), range(5), count)
    first, second = build(), build()
    collect(first, range(resume_at), count)
    second.load_state(json.loads(json.dumps(first.state())))
    assert content(collect(second, range(resume_at, 5), count)) == content(expected[resume_at:])


# -- groups ------------------------------------------------------------------------------------------------------------


def test_samples_are_grouped_by_prompt_and_numbered_by_group() -> None:
    samples = [Sample(prompt(7 + i), i, 0, [1], [0.0], "stop", 4) for i in (0, 2)]
    groups = groups_by_prompt(samples, 3, version=4)
    assert [len(group.samples) for group in groups] == [1, 0, 1] and {g.version for g in groups} == {4}
    assert [s.prompt_index for s in numbered_samples([groups[2], groups[1], groups[0]])] == [0, 2]


def test_a_stored_group_comes_back_as_it_was() -> None:
    """Bit for bit, in a layout of two blocks, of which the second holds it whole."""
    sample = Sample(prompt(3), 1, 2, [5, 6], [-0.1, -1e-17], "length", 8, "text", 0.3, {"acc": 1.0}, [(1, 0.5)])
    packed = json.loads(json.dumps(pack_groups([Group(8, []), Group(8, [sample])], LoneMesh())))
    assert unpack_groups(packed, LoneMesh(2, 0)) == [Group(8, []), Group(8, [])]
    assert unpack_groups(packed, LoneMesh(2, 1)) == [Group(8, []), Group(8, [sample])]


@pytest.mark.parametrize("mask", [[], [1], [0], [1, 0, 1, 1, 0, 0, 0, 1, 0], [1] * 16, [0] * 17])
def test_a_sample_survives_packing(mask: list[int]) -> None:
    row = {"taken": object()}  # no JSON: a row stays out of checkpoints
    about = Prompt("u", (1, 2), "text", "42", "s", "r", {"level": 3}, columns=row, messages=[{"role": "user"}])
    n = len(mask)
    logprobs = [-0.1 * t for t in range(n)]
    sample = Sample(about, 3, 1, list(range(n)), logprobs, "stop", 7, text="x", reward=0.5, loss_mask=mask)
    sample.weights_digest, sample.scores = "d7", object()  # no JSON: a server would be asked again
    sample.steps = [(n - 1, 0.25)]
    sample.turns = [Turn(0, n - 1, "assistant", 7, 3), Turn(n - 1, n, "observation", 7, 11)]
    sample.status, sample.turn_rewards, sample.trajectory_metrics = "turn_limit", [(n - 2, 0.5)], {"tool_calls": 2.0}
    sample.routes = np.arange(-1, 2 * n + 1, dtype=np.int16).reshape(n + 1, 2) if n else None
    packed = json.loads(json.dumps(pack_sample(sample)))
    found = unpack_sample(packed)
    assert found == sample
    if n:
        assert found.routes.dtype == np.int16 and np.array_equal(found.routes, sample.routes)
    assert not {"columns", "messages"} & {name for name, value in packed["prompt"].items() if value}
    assert len(base64.b64decode(packed["loss_mask"])) == -(-n // 8)


def test_a_sample_of_an_earlier_version_has_one_turn() -> None:
    sample = Sample(prompt(0), 0, 0, [5, 6], [0.0, 0.0], "stop", 0)
    packed = pack_sample(sample)
    for name in ("turns", "status", "turn_rewards", "trajectory_metrics"):
        del packed[name]
    assert unpack_sample(packed) == sample


def test_the_default_mask_is_all_ones_and_a_wrong_one_is_refused() -> None:
    assert Sample(prompt(0), 0, 0, [5, 6], [0.0, 0.0], "stop", 0).loss_mask == [1, 1]
    with pytest.raises(AssertionError, match="loss_mask has 3 entries for 2 response tokens"):
        Sample(prompt(0), 0, 0, [5, 6], [0.0, 0.0], "stop", 0, loss_mask=[1, 0, 1])


# -- real ranks, which each hold half of every group -------------------------------------------------------------------


def places(step: Any) -> list[int]:
    """The prompts of a step, in order of their places; every group is whole."""
    samples, _ = step
    found = sorted({place for place, *_ in samples})
    assert found == list(range(len(found)))
    assert all(sorted(i for p, _, i, _ in samples if p == place) == [0, 1] for place in found)
    return [next(prompt for p, prompt, _, _ in samples if p == place) for place in found]


@pytest.mark.parametrize("resume_at", [None, 1, 2])
def test_dynamic_sampling_fills_the_batch_and_loses_nothing(resume_at: int | None) -> None:
    # Of six prompts 0, 3 and 4 are informative. Rounds of three bring {0}, {3, 4}, {6}, {9, 10}, ... A batch of two takes
    # two rounds and leaves one group for the next step.
    script = [MIXED, EQUAL, EQUAL, MIXED, MIXED, EQUAL]
    results = collect_on_ranks(2, kind="dynamic", script=script, counts=[2, 2, 2], resume_at=resume_at)
    steps = results[0]
    assert steps == results[1]
    assert [places(step) for step in steps] == [[0, 3], [4, 6], [9, 10]]
    assert [metrics["train/num_gen_batches"] for _, metrics in steps] == [2, 1, 1]
    assert [metrics["train/left_over_staleness_max"] for _, metrics in steps] == [0, 1, 0]
    assert {version for place, _, _, version in steps[1][0] if place == 0} == {0}  # left over from step 0


@pytest.mark.parametrize("resume_at", [None, 2])
def test_replay_is_bounded_in_share_size_and_age(resume_at: int | None) -> None:
    # Batches of four; groups 0, 2, 4, ... are informative. Half of a batch may be old, the oldest first, each once.
    script = [MIXED, EQUAL]
    steps = collect_on_ranks(2, kind="replay", script=script, counts=[4] * 4, resume_at=resume_at)[0]
    assert [places(step) for step in steps] == [[0, 1, 2, 3], [0, 2, 4, 5], [4, 6, 7, 8], [6, 8, 9, 10]]
    assert [metrics["train/replayed_groups"] for _, metrics in steps] == [0, 2, 1, 2]
    assert all(metrics["train/replay_staleness_max"] <= 2 for _, metrics in steps)
