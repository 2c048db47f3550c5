"""The two-phase gather: same advantages bit for bit wherever a group was drawn, and every token where it belongs."""

from __future__ import annotations

import struct

import pytest

from tests import worlds
from tests.parallel import exchange_ranks

# (world, tp, pp, rollout tp): 5 prompts x 3 samples never divide evenly, so groups straddle ranks
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
def alone() -> dict:
    return worlds.run(exchange_ranks.roundtrip, 1, tp=1, pp=1, rollout_tp=1, num_prompts=5, n=3)[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_row_arrives_once_per_replica_with_exact_advantages(alone: dict, layout: tuple[int, ...]) -> None:
    world, tp, pp, rollout_tp = layout
    results = worlds.run(exchange_ranks.roundtrip, world, tp=tp, pp=pp, rollout_tp=rollout_tp, num_prompts=5, n=3)
    samples = exchange_ranks.draw(5, 3)
    dp = world // (tp * pp)
    assert results[0]["holders"] == world // rollout_tp
    by_replica: dict[int, list[int]] = {}
    for result in results:
        assert result["advantages"] == alone["advantages"]  # floats compared with ==: bit for bit
        assert by_replica.setdefault(result["dp_rank"], result["rows"]) == result["rows"]
        for row in result["rows"]:
            sample = samples[row]
            assert result["sequences"][row] == [*sample.prompt.prompt_ids, *sample.response_ids]
            assert result["logprobs"][row] == float32(sample.rollout_logprobs)
            assert set(result["batch_advantages"][row]) == set(float32([alone["advantages"][row]]))
    assert len(by_replica) == dp
    trained = sorted(row for rows in by_replica.values() for row in rows)
    assert trained == [row for row in range(15) if row != 3]  # (1, 0) is unscorable: row 3


def test_a_sample_drawn_twice_stops_every_rank() -> None:
    for message in worlds.run(exchange_ranks.drawn_twice, 2):
        assert "drawn twice: (prompt, index) [(0, 0), (0, 1)]" in message
