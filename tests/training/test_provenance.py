"""Samples of other weights than those of their step's sync are refused, through a resume, too."""

from __future__ import annotations

import json

import pytest

from grpo_megatron.parallel.mesh import RankError
from grpo_megatron.training.colocation import Provenance
from grpo_megatron.types import Draw, Sample
from tests.sampling.fakes import LoneMesh, prompt


def provenance(*, max_staleness: int = 2, is_drawn: bool = True) -> Provenance:
    made = Provenance(LoneMesh(), max_staleness=max_staleness, is_drawn=is_drawn)
    for version in range(6):
        made.record(version, f"weights {version}")
    return made


def sample(version: int, digest: str) -> Sample:
    return Sample(prompt(3), 0, 1, [5], [-0.1], "stop", version, weights_digest=digest)


def test_a_sample_must_be_of_the_weights_of_its_version() -> None:
    good = [sample(5, "weights 5"), sample(4, "weights 4"), sample(3, "weights 3")]
    provenance().check(5, good)
    provenance().check(5, [])
    for wrong in (sample(5, "weights 4"), sample(5, ""), sample(4, "weights 5"), sample(2, "weights 2")):
        with pytest.raises(
            RankError, match="step 5 cannot train on 1 of 4 samples: prompt 'p/3', sample 1 was drawn by"
        ):
            provenance().check(5, [*good, wrong])
    with pytest.raises(
        RankError, match="with digest weights 4, but the sync of step 5 sent weights with digest weights 5;"
    ):
        provenance().check(5, [sample(5, "weights 4")])


def test_every_part_of_a_response_must_be_of_the_weights_of_its_step() -> None:
    """A response of rollout.partial: tokens of step 3, then of step 5."""

    def drawn(digest: str) -> Sample:
        draws = [Draw(0, 1, 3, "weights 3"), Draw(1, 2, 5, digest)]
        return Sample(prompt(3), 0, 1, [5, 6], [-0.1] * 2, "stop", 3, weights_digest="weights 3", draws=draws)

    provenance().check(5, [drawn("weights 5")])
    with pytest.raises(RankError, match="with digest weights 4, but the sync of step 5 sent weights with"):
        provenance().check(5, [drawn("weights 5"), drawn("weights 4")])


def test_the_last_sync_of_a_step_counts() -> None:
    made = provenance()
    made.record(5, "the initial model")
    made.check(5, [sample(5, "the initial model")])
    with pytest.raises(RankError, match="step 5"):
        made.check(5, [sample(5, "weights 5")])


def test_a_resumed_run_knows_the_weights_of_old_samples() -> None:
    made = Provenance(LoneMesh(), max_staleness=2, is_drawn=True)
    made.load_state(json.loads(json.dumps(provenance().state())))
    made.record(6, "weights 6")
    made.check(6, [sample(6, "weights 6"), sample(4, "weights 4")])
    with pytest.raises(RankError, match="step 6"):
        made.check(6, [sample(3, "weights 3")])
    assert made.state() == {"4": "weights 4", "5": "weights 5", "6": "weights 6"}


def test_samples_read_from_a_file_were_drawn_by_nothing() -> None:
    provenance(is_drawn=False).check(5, [sample(5, "")])
