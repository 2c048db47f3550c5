"""`diff` prints both values of the row or tensor where two runs part, where a rollout file, a dump or a checkpoint has them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

import grpo_megatron
from grpo_megatron.report.trace_file import TraceFolder
from grpo_megatron.storage.run_files import rollout_file
from grpo_megatron.trust.compare import compare_runs
from tests.runs import make_run, write_rows
from tests.trust.test_diff import FAULTS, SETTINGS, make_steps
from tests.worlds import ranks

BOTH_VALUES = {
    "a reward that reads the clock": "score: left 0.5, right 0.25",
    "the advantage of one row": r"in dumps/: (\d+) of \1 elements differ, by at most 0.001, in \[0:\1\]",
    "one element of one weight": r"in step_000002: 1 of 16384 elements differ, by at most 0.001, in \[0:1, 0:1\]",
    "another learning rate": "in layers 0, 1, 2, 3, and 3 tensors outside",
}


@ranks()
def make_runs(folder: Path) -> None:
    """Write traces of an honest run and of faulty ones, with the files that they have of the step."""
    from grpo_megatron.training.dump import Incident, write_dump

    settings = [*SETTINGS, "trainer.n_gpus_per_node=1", f"trainer.output_dir={folder / 'out'}"]
    with grpo_megatron.open(folder / "run.yaml", settings) as run:
        run.save_state(folder / "state")
        for number, name in enumerate(("honest", *BOTH_VALUES)):
            fault, target = FAULTS[name][0] if number else lambda *_: None, folder / name

            def plant(point: str, step: int, content: Any, fault: Any = fault, target: Path = target) -> None:
                fault(point, step, content)
                if (point, step) == ("batch", 0):
                    rows = [row for micro in content.mini_batches[0] for row in micro]
                    incident, batch = Incident(0, 1, "kl", {}, 0.0), replace(content, images=[])
                    write_dump(
                        target / "dumps/step_000000_kl", incident, batch, [rows], {}, run.config, run.mesh, Path.mkdir
                    )

            make_steps(run, target, fault if name == "another learning rate" else plant)
            run.save_state(target / "checkpoints/step_000002")


def test_both_values_are_printed(tmp_path: Path) -> None:
    make_runs(1, folder=make_run(tmp_path))
    for name, reward in (("honest", 0.5), ("a reward that reads the clock", 0.25)):
        files, config = tmp_path / f"rollouts {reward}", yaml.safe_load((tmp_path / name / "config.yaml").read_text())
        file = TraceFolder(tmp_path / name).file(0)
        assert file is not None
        prompt, index = file.rows[9]
        write_rows(rollout_file(files, 0), [{"step": 0, "group": prompt, "index": index, "score": reward}])
        config["trainer"]["rollout_data_dir"] = f"{files}"
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(config))
    for name, values in BOTH_VALUES.items():
        result = compare_runs(*(TraceFolder(tmp_path / side) for side in ("honest", name)))
        assert any(re.search(values, text) for text in result.texts), (name, result.texts)
