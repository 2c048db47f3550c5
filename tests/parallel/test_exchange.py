"""The two phases: the same advantages bit for bit wherever a group was sampled; every token on the rank that trains on it."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import random
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from grpo_megatron.types import Prompt, PromptImage, Sample
from tests import worlds

# (world, tp, pp, rollout tp): 5 prompts x 3 samples never divide evenly, so some groups are on two ranks
LAYOUTS = [
    (1, 1, 1, 1),
    (2, 1, 1, 1),
    (2, 2, 1, 1),
    (2, 1, 2, 2),
    (4, 1, 1, 1),
    (4, 2, 1, 2),
    (4, 1, 2, 1),
    (4, 2, 2, 4),
]


def float32(values: list[float]) -> list[float]:
    return [struct.unpack("f", struct.pack("f", v))[0] for v in values]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("alone") / "rollouts"
    result: dict = worlds.run(roundtrip, 1, tp=1, pp=1, rollout_tp=1, num_prompts=5, n=3, out=out)[0]
    return {**result, "rollouts": {path.name: path.read_text() for path in out.glob("step_*.jsonl")}}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_row_arrives_once_per_replica_with_exact_advantages(
    alone: dict, layout: tuple[int, ...], tmp_path: Path
) -> None:
    """The rollout files, which rank 0 writes, are also the same bytes in every layout."""
    world, tp, pp, rollout_tp = layout
    arguments = {"tp": tp, "pp": pp, "rollout_tp": rollout_tp, "num_prompts": 5, "n": 3, "out": tmp_path}
    results = worlds.run(roundtrip, world, **arguments)
    assert {path.name: path.read_text() for path in tmp_path.glob("*.jsonl")} == alone["rollouts"]
    assert all("rank 0: cannot write the rollouts of step 1" in result["refused"] for result in results)
    assert all("No space left on device" in result["refused"] for result in results)
    assert [result["shown"] for result in results] == [alone["shown"], *[None] * (world - 1)]
    samples = draw(5, 3)
    dp = world // (tp * pp)
    assert results[0]["holders"] == world // rollout_tp
    by_replica: dict[int, list[int]] = {}
    assert [result["leader"] for result in results] == [rank // rollout_tp * rollout_tp for rank in range(world)]
    for result in results:
        assert result["advantages"] == alone["advantages"]  # floats compared with ==: bit for bit
        assert by_replica.setdefault(result["dp_rank"], result["rows"]) == result["rows"]
        assert not result["padding"]
        for row in result["rows"]:
            sample = samples[row]
            assert result["sequences"][row] == [*sample.prompt.prompt_ids, *sample.response_ids]
            assert result["logprobs"][row] == float32(sample.rollout_logprobs)
            known = [] if sample.routes is None else sample.routes.tolist()
            unknown = len(result["sequences"][row]) - len(known)
            assert result["routes"][row] == [*known, *[[-1, -1, -1]] * unknown]
            mask = sample.loss_mask
            assert result["loss_masks"][row] == mask
            (advantage,) = float32([alone["advantages"][row]])
            assert result["batch_advantages"][row] == [advantage * in_loss for in_loss in mask]
            (weight,) = float32([result["plan_weights"][row]])
            assert result["token_weights"][row] == [weight * in_loss for in_loss in mask]
    assert len(by_replica) == dp
    trained = sorted(row for rows in by_replica.values() for row in rows)
    assert trained == [row for row in range(15) if row not in (1, 3)]  # (0, 1) has no loss token, (1, 0) no reward


def test_a_rollout_file_has_every_sample_in_order(alone: dict) -> None:
    assert sorted(alone["rollouts"]) == ["step_000000.jsonl", "step_000002.jsonl"]
    lines = [json.loads(line) for line in alone["rollouts"]["step_000002.jsonl"].splitlines()]
    samples = draw(5, 3)
    assert [(row["group"], row["index"]) for row in lines] == [(s.prompt_index, s.index) for s in samples]
    for row, sample, advantage in zip(lines, samples, alone["advantages"], strict=True):
        assert (row["prompt"], row["answer"]) == (f"question {row['group']}", f"{row['group']}")
        assert row["response"] == f"response {row['group']} {row['index']}"
        assert row["reward"] == row["score"] == (None if math.isnan(sample.reward) else sample.reward)
        is_trained_on = (row["group"], row["index"]) not in ((0, 1), (1, 0))  # no loss token, no reward
        assert row["advantage"] == (advantage if is_trained_on else None)
        assert (row["step"], row["version"], row["finish_reason"]) == (2, 0, sample.finish_reason)
        assert row["response_tokens"] == len(sample.response_ids)


def test_the_report_has_the_numbers_of_engine_and_policy(alone: dict) -> None:
    """Of the group whose rewards differ most and of the first one. Rows 1 and 3 are not trained on: no policy's numbers."""
    samples = {(s.prompt.uid, s.index): (row, s) for row, s in enumerate(draw(5, 3))}
    assert [len(group["samples"]) for group in alone["shown"]] == [3, 3]
    for group in alone["shown"]:
        for found in group["samples"]:
            row, sample = samples[group["uid"], found["index"]]
            assert [piece[0] for piece in found["pieces"]] == [f"<{i}>" for i in sample.response_ids]
            in_loss = [bool(mask) for mask in sample.loss_mask]
            engine = [round(v, 4) if m else None for v, m in zip(sample.rollout_logprobs, in_loss, strict=True)]
            assert [piece[1] for piece in found["pieces"]] == engine
            gaps = [0.25 if mask and row not in (1, 3) else None for mask in in_loss]
            assert [piece[2] for piece in found["pieces"]] == gaps


def test_masks_travel_as_spans_and_only_where_there_is_a_zero(alone: dict) -> None:
    unmasked, masked = alone["loss_spans"]
    assert unmasked == []
    for sample, spans in zip(draw(5, 3), masked, strict=True):
        assert [t for start, end in spans for t in range(start, end)] == [
            t for t, m in enumerate(sample.loss_mask) if m
        ]
        assert all(end < start for (_, end), (start, _) in itertools.pairwise(spans))  # the longest runs
    assert masked[1] == [] and masked[0] == [(0, len(draw(5, 3)[0].response_ids))]


def test_a_sample_drawn_twice_stops_every_rank() -> None:
    for message in worlds.run(drawn_twice, 2):
        assert "sampled twice: (prompt, index) [(0, 0), (0, 1)]" in message


def test_parts_of_rewards_and_ages_of_tokens_by_row() -> None:
    """Two leaders with every other sample. One sample was continued twice: by weights of steps 3, 4 and 6; the step is 6."""
    import torch

    from grpo_megatron.parallel.exchange import merge_parts, set_ages, table_part, with_reward_parts
    from grpo_megatron.types import Batch, Segment

    samples = draw(2, 2)
    for number, sample in enumerate(samples):
        sample.version, sample.reward_metrics = 5, {"a": float(number)} | ({"b": 2.0} if number == 1 else {})
    samples[2].response_ids, samples[2].loss_mask = [1] * 4, [1] * 4
    samples[2].segments = [Segment(0, 1, 3, ""), Segment(1, 3, 4, ""), Segment(3, 4, 6, "")]
    other = samples[1::2]

    def gather(values: Any) -> list[Any]:  # of the second rank, by the same rule
        return [values, keys_of[type(next(iter(values.values())))]]

    keys_of: dict[type, Any] = {
        dict: {(s.prompt_index, s.index): s.reward_metrics for s in other},
        list: {(s.prompt_index, s.index): [(len(s.response_ids), s.version)] for s in other},
    }
    mesh: Any = mock.Mock(is_replica_leader=True, all_gather=gather)
    table = merge_parts([table_part(samples)])
    assert with_reward_parts(samples[::2], table, ["b", "a"], mesh).reward_parts == [[0, 0], [2, 1], [0, 2], [0, 3]]
    with pytest.raises(ValueError, match="no sample of this step has 'c'; the reward reports a, b"):
        with_reward_parts(samples[::2], table, ["a", "c"], mesh)
    batch: Any = mock.Mock(spec=Batch, rows=[2, 1], rollout_logprobs=torch.zeros(2, 9))
    set_ages(samples[::2], batch, table, 6, mesh)
    length = len(samples[1].response_ids)
    assert batch.ages.tolist() == [[3, 2, 2, 0] + [0] * 5, [1] * length + [0] * (9 - length)]


@pytest.mark.parametrize("layout", [(2, 1, 1, 1), (2, 2, 1, 1), (4, 1, 2, 2), (4, 1, 1, 1)], ids=str)
def test_an_image_travels_once_between_two_ranks(layout: tuple[int, ...]) -> None:
    """Five prompts with three samples each: two with the image A, at other places; one with A and B; two with none."""
    world, tp, pp, rollout_tp = layout
    size = 2 * 3 * 28 * 28 * 3
    for result in worlds.run(travelling, world, tp=tp, pp=pp, rollout_tp=rollout_tp):
        for row, (found, pixels) in result["images"].items():
            assert found == IMAGES[row // 3] and pixels == [pixels_of(image.digest) for image in found]
        assert any(result["parcels"]) or not result["held"]
        for sent, digests in result["parcels"]:  # all else in a parcel is smaller than half of an image
            assert 0 <= sent - size * len(digests) < size / 2


# -- what the ranks run ------------------------------------------------------------------------------------------------


def draw(num_prompts: int, n: int) -> list[Sample]:
    """All samples of a step, determined by (prompt, index) alone.

    Sample (0, 1) has no loss token; those of index 2 have a random loss mask, the others one of ones.
    """
    samples = []
    for p in range(num_prompts):
        prompt = Prompt(f"t/{p}", tuple(range(1, 2 + p)), "", f"{p}", "t", "r", question=f"question {p}")
        for i in range(n):
            rng = random.Random(f"{p}/{i}")
            length = rng.randint(1, 9)
            ids = [rng.randint(0, 50000) for _ in range(length)]
            logprobs = [-rng.random() for _ in ids]
            sample = Sample(prompt, p, i, ids, logprobs, rng.choice(["stop", "length"]), version=0)
            sample.text = f"response {p} {i}"
            if i:  # samples of index 0 have no routes
                sample.routes = np.array([[p, i, t] for t in range(len(prompt.prompt_ids) + length - 1)], dtype=np.int8)
            if (p, i) == (0, 1):
                sample.loss_mask = [0] * length
            elif i == 2:
                sample.loss_mask = [1] + [rng.randint(0, 1) for _ in range(length - 1)]
            sample.reward = math.nan if (p, i) == (1, 0) else rng.choice([0.0, 0.1, 0.7, 1.0])
            samples.append(sample)
    return samples


def roundtrip(tp: int, pp: int, rollout_tp: int, num_prompts: int, n: int, out: Path) -> dict[str, Any]:
    """Also writes the samples into `out`, a rollout file; its folder refuses the file of step 1."""
    from grpo_megatron.algo.plan import make_plan
    from grpo_megatron.config import ActorConfig, AlgorithmConfig
    from grpo_megatron.device import Device
    from grpo_megatron.parallel.exchange import exchange, gather_groups
    from grpo_megatron.parallel.mesh import build_mesh

    mesh = build_mesh(Device("cpu"), tp=tp, pp=pp, rollout_tp=rollout_tp)
    everything = draw(num_prompts, n)
    blocks, block = mesh.num_engine_replicas, mesh.engine_replica
    cut = [b * len(everything) // blocks for b in range(blocks + 1)]
    held = everything[cut[block] : cut[block + 1]]  # a cut may fall inside a group
    unmasked = gather_groups([replace(sample, loss_mask=[]) for sample in held], mesh)
    table = gather_groups(held, mesh)
    actor = ActorConfig(ppo_mini_batch_size=2, ppo_max_token_len_per_gpu=40)
    plan = make_plan(table, AlgorithmConfig(), actor, dp=mesh.dp, train_batch_size=num_prompts, max_response_length=9)
    batch = exchange(held, table, plan, mesh)
    rows = batch.rows
    return {
        "refused": write_rollouts(out, held, table, plan, mesh),
        "shown": shown_groups(held, table, plan, batch, mesh),
        "dp_rank": mesh.dp_rank,
        "holders": len(set(table.holder)),
        "loss_spans": (unmasked.loss_spans, table.loss_spans),
        "advantages": plan.advantages,
        "rows": rows,
        "sequences": {row: batch.tokens[i].tolist() for i, row in enumerate(rows)},
        "routes": {row: batch.routes[i].tolist() for i, row in enumerate(rows)} if batch.routes else {},
        "logprobs": {row: batch.rollout_logprobs[i][batch.response_mask[i]].tolist() for i, row in enumerate(rows)},
        "batch_advantages": {row: batch.advantages[i][batch.response_mask[i]].tolist() for i, row in enumerate(rows)},
        "token_weights": {row: batch.token_weights[i][batch.response_mask[i]].tolist() for i, row in enumerate(rows)},
        "loss_masks": {row: batch.loss_mask[i][batch.response_mask[i]].tolist() for i, row in enumerate(rows)},
        "leader": mesh.replica_broadcast(mesh.rank),
        "padding": bool((batch.loss_mask & ~batch.response_mask).any()),
        "plan_weights": plan.token_weights,
    }


def shown_groups(held: list[Sample], table: Any, plan: Any, batch: Any, mesh: Any) -> list[dict[str, Any]] | None:
    """What rank 0 shows. The policy's log-probabilities are the engine's plus 0.25; a token's text is its id."""
    from types import SimpleNamespace

    from grpo_megatron.report.step import ShownSamples

    batch.old_logprobs = batch.rollout_logprobs + 0.25
    tokenizer = SimpleNamespace(decode=lambda ids, **options: "".join(f"<{i}>" for i in ids))
    groups = ShownSamples(mesh, tokenizer, is_generated=True).gather(held, table, plan, batch)
    batch.old_logprobs = None
    return None if groups is None else groups()


def write_rollouts(out: Path, held: list[Sample], table: Any, plan: Any, mesh: Any) -> str:
    """Write step 0, then step 1 on a full disk, then step 2. Returns the message of step 1's failure."""
    from grpo_megatron.parallel.mesh import RankError
    from grpo_megatron.report import step as report
    from grpo_megatron.report.metrics import Metrics

    files = report.RolloutFiles(out, out / "run", mesh, tokenizer=None)
    refused = ""
    with mock.patch.object(report, "TOKENS_PER_PART", 20):
        files.write(0, Metrics(), held, table, plan)
        try:
            with mock.patch.object(report, "write_file", full_disk):
                files.write(1, Metrics(), held, table, plan)
        except RankError as error:
            refused = str(error)
        files.write(2, Metrics(), held, table, plan)
    return refused


def full_disk(path: Path, parts: Iterator[str]) -> None:
    """Fails after the first part: the others are on their way to rank 0."""
    next(parts)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def pixels_of(digest: str) -> bytes:
    return random.Random(digest).randbytes(2 * 3 * 28 * 28 * 3)


def placed(digest: str, first: int) -> PromptImage:
    return PromptImage(digest, (2, 3), first, pixels_of(digest))


IMAGES = [(placed("A", 0),), (), (placed("A", 1),), (placed("B", 0), placed("A", 7)), ()]


def travelling(tp: int, pp: int, rollout_tp: int) -> dict[str, Any]:
    """The images of this rank's rows, and of each parcel that it sends the bytes and the images that belong into it."""
    import pickle

    from grpo_megatron.algo.plan import make_plan
    from grpo_megatron.config import ActorConfig, AlgorithmConfig
    from grpo_megatron.device import Device
    from grpo_megatron.parallel.exchange import exchange, gather_groups, moves
    from grpo_megatron.parallel.mesh import build_mesh

    mesh = build_mesh(Device("cpu"), tp=tp, pp=pp, rollout_tp=rollout_tp)
    samples = draw(5, 3)
    for sample in samples:  # each has pixels of its own, as rows that are decoded again have
        images = tuple(placed(one.digest, one.first) for one in IMAGES[sample.prompt_index])
        sample.prompt, sample.reward = replace(sample.prompt, images=images), float(sample.index)
        sample.loss_mask, sample.routes = [1] * len(sample.response_ids), None
    blocks, block = mesh.num_engine_replicas, mesh.engine_replica
    held = [sample for place, sample in enumerate(samples) if place % blocks == block]
    table = gather_groups(held, mesh)
    actor = ActorConfig(ppo_max_token_len_per_gpu=400)
    plan = make_plan(table, AlgorithmConfig(), actor, dp=mesh.dp, train_batch_size=5, max_response_length=9)
    outgoing = moves(table, plan.owner(), mesh.rank, mesh.dp_rank)[0]
    wanted = [{one.digest for row in rows for one in IMAGES[row // 3]} for rows in outgoing.values()]
    seen: list[int] = []
    route = mesh.route

    def counted(parcels: Any) -> Any:
        seen.extend(len(pickle.dumps(parcel.content)) for parcel in parcels)
        return route(parcels)

    with mock.patch.object(type(mesh), "route", lambda self, parcels: counted(parcels)):
        batch = exchange(held, table, plan, mesh)
    images = batch.images or [()] * len(batch.rows)
    return {
        "images": {row: (own, [one.pixels for one in own]) for row, own in zip(batch.rows, images, strict=True)},
        "parcels": list(zip(seen, wanted, strict=True)),
        "held": len(held) if mesh.is_replica_leader else 0,
    }


def drawn_twice() -> str:
    from grpo_megatron.device import Device
    from grpo_megatron.parallel.exchange import gather_groups
    from grpo_megatron.parallel.mesh import RankError, build_mesh

    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)
    try:
        gather_groups(draw(1, 2), mesh)
    except RankError as error:
        return str(error)
    return "accepted"
