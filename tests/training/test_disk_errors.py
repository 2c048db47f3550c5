"""A disk that refuses on one rank is a RankError on every rank, wherever in a save it refuses; the next save works.

Two data-parallel ranks; each case makes the disk of one rank refuse one file. A rank that leaves the common sequence of
collectives shows as a timeout of the other rank. Rank 0 writes common.pt, .metadata and metadata.json of each of the two
states, pairs.json of the reward model, trainer.json and the manifest; both ranks write *.distcp files and hash them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny, worlds
from tests.training import disk_error_ranks

Failure = tuple[int, str, str]  # rank, part of the path, modes of opening

STATE: list[Failure] = [
    (0, "common.pt", "w"),
    (0, "__0_", "wx"),
    (1, "__1_", "wx"),
    (0, ".metadata", "wx"),
    (0, "metadata.json", "wx"),
]
REWARD_MODEL: list[Failure] = [
    (0, "reward_model", "m"),
    (0, "pairs.json", "wx"),
    *((rank, f"reward_model/state/{part}", modes) for rank, part, modes in STATE),
]
CHECKPOINT: list[Failure] = [
    (0, ".partial", "m"),
    *STATE,
    *REWARD_MODEL,
    (0, "__0_", "r"),
    (1, "__1_", "r"),
    (0, "trainer.json", "wx"),
    (0, "manifest.json", "wx"),
]
EXPORT: list[Failure] = [(0, "hf.partial", "m"), (0, "index.json", "w"), (0, "config.json", "r")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("disk") / "model", num_hidden_layers=1)


def check(outcome: str, failure: Failure) -> None:
    rank = failure[0]
    assert outcome.startswith("RankError: ") and f"rank {rank}: cannot write" in outcome, (failure, outcome)
    assert "No space left on device" in outcome or ("GiB free" in outcome and "enforce fail" in outcome), (
        failure,
        outcome,
    )
    assert f"rank {1 - rank}:" not in outcome, (failure, outcome)


@pytest.mark.slow
def test_a_checkpoint_with_a_reward_model(model: Path, tmp_path: Path) -> None:
    """No failure leaves a checkpoint behind. A checkpoint whose table of contents runs code is refused on every rank.

    In the background, the files of a save are those of one at the same place of the run, whatever the weights are meanwhile.
    """
    first, second = worlds.run(
        disk_error_ranks.save_checkpoint, 2, folder=model, out=tmp_path, failures=CHECKPOINT, timeout_s=400
    )
    assert first == second
    for (outcome, names), failure in zip(first, CHECKPOINT, strict=False):
        check(outcome, failure)
        assert names == [], failure
    assert first[len(CHECKPOINT)] == ("saved", [f"step_{len(CHECKPOINT) + 1:06d}"])
    background = first[-3]
    assert background["while it waits"] == ([".step_000002.partial", "step_000001"], None)
    assert background["at the end"] == (True, ["step_000002"])
    before, copied = background["same"]
    assert before == copied and len(before) == 10  # two states, each with common.pt and two files of each rank
    for failure in ((1, "__1_", "wx"), (0, ".metadata", "wx")):
        outcome, names = background[failure[1]]
        check(outcome, failure)
        assert names == [".step_000003.partial", "step_000002"]
    for outcome, exploded in first[-2:]:
        assert outcome.startswith("RankError: rank 0, 1: cannot read checkpoint") and "is not plain data" in outcome
        assert exploded == []


def test_an_export(model: Path, tmp_path: Path) -> None:
    """The last failure is a real one, a limit on the size of files, which safetensors reports in its own way."""
    first, second = worlds.run(disk_error_ranks.export, 2, folder=model, out=tmp_path, failures=EXPORT, timeout_s=400)
    assert first == second
    for (outcome, names), failure in zip(first, EXPORT, strict=False):
        check(outcome, failure)
        assert names == [], failure
    assert first[-2][0].startswith("RankError: rank 0: cannot write") and "File too large" in first[-2][0]
    assert first[-2][1] == [] and first[-1] == ("saved", ["hf"])
