"""`diff --replay`: runs the step where two runs part again, from each run's nearest checkpoint: which side repeats its record?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_megatron.report.trace_file import TraceFolder
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.run_files import WARM_UP_FOLDER, on_disk, read_step, steps_of
from grpo_megatron.trust.certify import FAULT
from grpo_megatron.trust.compare import Diff, Parting, compare_runs, leaf_lines
from grpo_megatron.trust.values import tensor_difference
from grpo_megatron.untrusted import MAX_YAML, parse_yaml, read_text

MAX_DISTANCE = 20  # from the checkpoint to the step; what is further away takes as long as a run
SETTINGS = {  # nothing but steps and their trace; no key of these reaches a number
    "trainer": {
        "save_freq": -1,
        "test_freq": -1,
        "val_before_train": False,
        "save_hf_at_end": False,
        "logger": ["jsonl"],
    }
    | {"trace": "full", "trace_keep": None, "rollout_data_dir": None, "resume_mode": "auto"}
    | {"stop_file": None, "stop_at": None},
}
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
ONE_PROCESS = {
    "trainer": {"nnodes": 1, "n_gpus_per_node": 1},
    "actor": {"megatron": {**dict.fromkeys(_SIZES, 1), "sequence_parallel": None}},
    "rollout": {"tensor_model_parallel_size": 1, "expert_parallel_size": 1},
}


def replay(result: Diff, sides: Sequence[TraceFolder], scale: float = 1.0) -> Iterator[str]:
    """Run the first step of `result` again for both sides; yields a line for each, and what follows from both."""
    if result.first is None:
        yield "the runs are equal, so there is no step to run again"
        return
    if Path(result.left).name == WARM_UP_FOLDER:
        yield "the runs part in the warm-up, which is not run again"
        return
    step, outcomes = result.first.step, dict[str, bool | None]()
    with tempfile.TemporaryDirectory(prefix="grpo-megatron-gradients-") as kept:
        files = [Path(kept, f"{number}") for number, _ in enumerate(sides)]
        for side, file in zip(sides, files, strict=True):
            is_same, text = _outcome(side, step, scale, _kept_gradient(result.first, file))
            outcomes[f"{side.run}"] = is_same
            yield f"{side.run}: {text}"
        if len(files) == 2 and all(file.exists() for file in files):
            left, right = (torch.load(file) for file in files)
            if left.shape == right.shape:
                yield from tensor_difference(f"{result.first.leaves[0].name} in these replays", left, right)
    known = [one for one in outcomes.values() if one is not None]
    wrong = [run for run, is_same in outcomes.items() if is_same is False]
    if len(known) == len(sides) and not wrong:
        yield "both repeat their records, so the cause is in what differs between them: settings, data, weights, layout"
    elif len(wrong) == 1 and len(known) == len(sides):
        yield f"{wrong[0]} alone does not: its record has what its state and settings do not give here (chance, machine, code)"
    elif wrong and len(wrong) == len(sides):
        yield "neither repeats its record: this machine or version computes another step; `certify` looks for the reason"


def _kept_gradient(first: Parting, file: Path) -> dict[str, str]:
    """Return the variable by which a replay on one rank keeps the gradient where the runs part; nothing for other stages."""
    prefix, is_gradient, update = first.stage.partition("gradients ")
    if not is_gradient or not first.leaves:
        return {}
    wanted = {"gradient": first.leaves[0].name, "model": prefix, "update": int(update), "note": f"{file}"}
    return {FAULT: json.dumps(wanted)}


def _outcome(side: TraceFolder, step: int, scale: float, variables: Mapping[str, str]) -> tuple[bool | None, str]:
    """Replay a side, in one process if that can be; says whether it has repeated its record, and what was seen."""
    try:
        settings, checkpoint = _start(side, step)
    except StorageError as problem:
        return None, str(problem)
    first = 0 if checkpoint is None else steps_of(checkpoint)
    count = int(settings["trainer"]["nnodes"]) * int(settings["trainer"]["n_gpus_per_node"])
    layouts = [("one process", ONE_PROCESS), *([(f"its {count} ranks", {})] if count > 1 else [])]
    refusal = ""
    for name, layout in layouts:
        with tempfile.TemporaryDirectory(prefix="grpo-megatron-replay-") as folder:
            work = Path(folder)
            print(f"replay of {side.run}: steps {first} to {step} in {name}", file=sys.stderr, flush=True)
            code = _run(side, step, work, _merged(settings, layout), checkpoint, {} if refusal else variables)
            if code == 0:
                is_same, seen = _compared(side, TraceFolder(work), scale)
                where = f"from {'its beginning' if checkpoint is None else checkpoint.name}, in {name}"
                return is_same, f"{'repeats its record' if is_same else 'does not repeat its record'} {where}: {seen}"
            lines = [one for one in (work / "log").read_text(errors="replace").splitlines() if one.strip()]
            refusal = f"cannot be run again in {name}: exit code {code}, {lines[-1] if lines else 'no output'}"
    return None, refusal


def _start(side: TraceFolder, step: int) -> tuple[dict[str, Any], Path | None]:
    """Find the settings of a step, and the newest checkpoint at or before it; None: the beginning. Raises StorageError."""
    saved = [path for path in on_disk(side.run) if steps_of(path) <= step]
    checkpoint = saved[-1] if saved else None
    if step - (0 if checkpoint is None else steps_of(checkpoint)) >= MAX_DISTANCE:
        place = "it has none before" if checkpoint is None else f"the nearest one is {checkpoint.name}"
        raise StorageError(
            f"cannot be run again: no checkpoint is less than {MAX_DISTANCE} steps before step {step} ({place}); the next run can"
            " keep more, with a smaller trainer.save_freq and trainer.max_actor_ckpt_to_keep=null"
        )
    try:
        if checkpoint is not None and step < max(side.facts):  # made by an earlier start than the last one
            return read_step(checkpoint, "config")["config"], checkpoint
        settings: dict[str, Any] = {}
        for path in (side.run / "config.yaml", *sorted((side.run / "config_attempts").glob("*.yaml"))[-1:]):
            settings = _merged(settings, parse_yaml(read_text(path, MAX_YAML)) or {})
    except (OSError, ValueError, AttributeError) as error:
        raise StorageError(f"cannot be run again: its config cannot be read: {error}") from error
    if checkpoint is None and settings["sft"]["steps"]:  # the warm-up's result, not the warm-up
        model = str((side.run / "warmup").absolute())
        settings = _merged(settings, {"model": {"path": model}, "sft": {"steps": 0}})
    return settings, checkpoint


def _merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Lay changes over settings, section by section."""
    both = {
        key: _merged(settings[key], value)
        if isinstance(value, Mapping) and isinstance(settings.get(key), Mapping)
        else value
        for key, value in changes.items()
    }
    return {**settings, **both}


def _run(
    side: TraceFolder,
    step: int,
    work: Path,
    settings: Mapping[str, Any],
    checkpoint: Path | None,
    variables: Mapping[str, str],
) -> int:
    """Train to the end of the step in `work`, with the checkpoint and the models of the run; returns the exit code."""
    (work / "checkpoints").mkdir()
    models = [side.run / name for name in ("warmup", "iterations") if (side.run / name).exists()]
    for path in (*models, *([checkpoint] if checkpoint is not None else [])):
        (work / path.relative_to(side.run)).symlink_to(path.absolute(), target_is_directory=True)
    complete = _merged(_merged(settings, SETTINGS), {"trainer": {"output_dir": f"{work}"}})
    (work / "run.yaml").write_text(json.dumps(complete))
    return replay_program(
        ["train", f"{work / 'run.yaml'}", "--last-step", f"{step}"], work / "log", complete, variables
    )


def replay_program(words: Sequence[str], log: Path, settings: Mapping[str, Any], variables: Mapping[str, str]) -> int:
    """Run a command of this program, with its output in `log`; returns its exit code."""
    command, environment = [sys.executable, "-m", "grpo_megatron", *words], {**os.environ, **variables}
    with log.open("w") as output:
        return subprocess.run(command, stdout=output, stderr=output, env=environment).returncode


def _compared(record: TraceFolder, again: TraceFolder, scale: float) -> tuple[bool, str]:
    """Compare the record with the steps that were run again: by their bits, and where these differ, by what rounding explains."""
    for tolerance in (False, True):
        result = compare_runs(record, again, tolerance=tolerance, scale=scale)
        if (first := result.first) is None:
            return True, "every digest is equal"
        if result.verdict == "explained":
            return True, f"rounding explains the differences, the first in step {first.step}, {first.stage}"
    assert first is not None
    where = f"step {first.step}, {first.stage}: {first.count} of {first.total} {first.kind}s"
    return False, "; ".join([where, *filter(None, [first.measured]), *leaf_lines(first.leaves[:1])])
