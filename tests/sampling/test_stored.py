"""A sample that goes through a checkpoint comes back as it was, its loss mask at one bit per token."""

from __future__ import annotations

import base64
import json

import pytest

from grpo_megatron.sampling.collector import pack_sample, unpack_sample
from grpo_megatron.types import Prompt, Sample, Turn


@pytest.mark.parametrize("mask", [[], [1], [0], [1, 0, 1, 1, 0, 0, 0, 1, 0], [1] * 16, [0] * 17])
def test_a_sample_survives_packing(mask: list[int]) -> None:
    row = {"taken": object()}  # no JSON: a row stays out of checkpoints
    prompt = Prompt("u", (1, 2), "text", "42", "s", "r", {"level": 3}, columns=row, messages=[{"role": "user"}])
    n = len(mask)
    sample = Sample(
        prompt,
        3,
        1,
        list(range(n)),
        [-0.1 * t for t in range(n)],
        "stop",
        7,
        text="x",
        reward=0.5,
        loss_mask=mask,
        weights_digest="d7",
    )
    sample.steps = [(n - 1, 0.25)]
    sample.turns = [Turn(0, n - 1, "assistant", 7, 3), Turn(n - 1, n, "observation", 7, 11)]
    sample.status, sample.turn_rewards, sample.trajectory_metrics = "turn_limit", [(n - 2, 0.5)], {"tool_calls": 2.0}
    packed = json.loads(json.dumps(pack_sample(sample)))
    assert unpack_sample(packed) == sample
    assert not {"columns", "messages"} & {name for name, value in packed["prompt"].items() if value}
    assert len(base64.b64decode(packed["loss_mask"])) == -(-n // 8)


def test_a_sample_of_an_earlier_version_has_one_turn() -> None:
    sample = Sample(Prompt("u", (1,), "", "", "s", "r"), 0, 0, [5, 6], [0.0, 0.0], "stop", 0)
    packed = pack_sample(sample)
    for name in ("turns", "status", "turn_rewards", "trajectory_metrics"):
        del packed[name]
    assert unpack_sample(packed) == sample


def test_the_default_mask_is_all_ones_and_a_wrong_one_is_refused() -> None:
    prompt = Prompt("u", (1,), "", "", "s", "r")
    assert Sample(prompt, 0, 0, [5, 6], [0.0, 0.0], "stop", 0).loss_mask == [1, 1]
    with pytest.raises(AssertionError, match="loss_mask has 3 entries for 2 response tokens"):
        Sample(prompt, 0, 0, [5, 6], [0.0, 0.0], "stop", 0, loss_mask=[1, 0, 1])
