"""The two phases: the same advantages bit for bit wherever a group was drawn; every token on the rank that trains on it."""

from __future__ import annotations

import itertools
import json
import math
import struct
from pathlib import Path

import pytest

from tests import worlds
from tests.parallel import exchange_ranks

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
    result: dict = worlds.run(exchange_ranks.roundtrip, 1, tp=1, pp=1, rollout_tp=1, num_prompts=5, n=3, out=out)[0]
    return {**result, "rollouts": {path.name: path.read_text() for path in out.glob("step_*.jsonl")}}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_row_arrives_once_per_replica_with_exact_advantages(
    alone: dict, layout: tuple[int, ...], tmp_path: Path
) -> None:
    """The rollout files, which rank 0 writes, are also the same bytes in every layout."""
    world, tp, pp, rollout_tp = layout
    arguments = {"tp": tp, "pp": pp, "rollout_tp": rollout_tp, "num_prompts": 5, "n": 3, "out": tmp_path}
    results = worlds.run(exchange_ranks.roundtrip, world, **arguments)
    assert {path.name: path.read_text() for path in tmp_path.glob("*.jsonl")} == alone["rollouts"]
    assert all("rank 0: cannot write the rollouts of step 1" in result["refused"] for result in results)
    assert all("No space left on device" in result["refused"] for result in results)
    assert [result["shown"] for result in results] == [alone["shown"], *[None] * (world - 1)]
    samples = exchange_ranks.draw(5, 3)
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
    samples = exchange_ranks.draw(5, 3)
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
    samples = {(s.prompt.uid, s.index): (row, s) for row, s in enumerate(exchange_ranks.draw(5, 3))}
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
    for sample, spans in zip(exchange_ranks.draw(5, 3), masked, strict=True):
        assert [t for start, end in spans for t in range(start, end)] == [
            t for t, m in enumerate(sample.loss_mask) if m
        ]
        assert all(end < start for (_, end), (start, _) in itertools.pairwise(spans))  # the longest runs
    assert masked[1] == [] and masked[0] == [(0, len(exchange_ranks.draw(5, 3)[0].response_ids))]


def test_a_sample_drawn_twice_stops_every_rank() -> None:
    for message in worlds.run(exchange_ranks.drawn_twice, 2):
        assert "drawn twice: (prompt, index) [(0, 0), (0, 1)]" in message
