"""The bounds of rounding in bfloat16: an honest pair is explained, and faults are still told from rounding.

docs/trust.md has the differences of more pairs, which the bounds were chosen from.
"""

from __future__ import annotations

from pathlib import Path

from grpo_megatron.report.trace_file import TraceFolder
from grpo_megatron.trust.compare import compare_runs
from tests.runs import make_run
from tests.trust.test_diff import make_runs

SETTINGS = ["model.dtype=bfloat16", "actor.optim.lr=0.0001", "algorithm.rollout_correction.rollout_rs=null"]
FAULTS = {
    "the advantage of one row": "advantages",
    "the scale of one gradient": "gradients 0",
    "a denominator per micro-batch": "token weights",
}


def test_faults_are_told_from_rounding(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    make_runs(1, folder=folder / "one", overrides=[*SETTINGS, "trainer.n_gpus_per_node=1"], faults=[])
    tp2 = [*SETTINGS, "actor.megatron.tensor_model_parallel_size=2"]
    make_runs(2, folder=folder / "tp2", overrides=tp2, faults=[*FAULTS])
    for name, stage in {"honest": None, **FAULTS}.items():
        sides = (TraceFolder(folder / "one/honest"), TraceFolder(folder / "tp2" / name))
        judged = compare_runs(*sides, tolerance=True)
        assert judged.verdict == ("wrong" if stage else "explained"), (name, judged.partings)
        assert stage is None or (judged.first and judged.first.stage == stage), (name, judged.partings)
