"""Both values at the place where two runs part, where files of both hold them: rollouts, kept samples, dumps, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo_megatron.config import ConfigError
from grpo_megatron.convert import ConvertError
from grpo_megatron.report.run_folder import KeptSamples, read_metrics
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.run_files import on_disk, rollout_file, steps_of
from grpo_megatron.untrusted import cut

LONGEST = 40  # characters or tokens of a value
ROLLOUT_FIELDS = {  # stage -> what a line of a rollout file has of it
    "prompts": ("prompt_text", "prompt", "uid"),
    "images": ("images",),
    "sampled by": ("version", "weights"),
    "responses": ("response", "turns", "finish_reason", "status"),
    "engine log-probabilities": ("response", "turns"),
    "rewards": ("score", "failure"),
    "reward parts": ("metrics", "texts"),
    "scores": ("reward",),
    "advantages": ("advantage",),
}
DUMPED_COLUMNS = {  # stage -> the column of a dumped mini-batch
    "engine log-probabilities": "rollout_logprobs",
    "old log-probabilities": "old_logprobs",
    "reference log-probabilities": "ref_logprobs",
    "corrections": "correction",
    "advantages": "advantages",
    "token weights": "token_weights",
}
SamplePlace = tuple[str, int, int]  # of a sample: uid and number of its prompt in the step, number in its group


def row_values(
    runs: Sequence[Path], rollouts: Sequence[str | None], step: int, stage: str, place: SamplePlace, row: int
) -> Iterator[str]:
    """Yield both values of a sample, from where they differ. `row`: of the step's table; `rollouts`: folders of their files."""
    found = [_stored(run, folder, step, place) for run, folder in zip(runs, rollouts, strict=True)]
    if stage in ("responses", "engine log-probabilities") and all("tokens" in one for one in found):
        yield from _from_difference(*(one["tokens"] for one in found))
    else:
        for name in ROLLOUT_FIELDS.get(stage, ()):
            left, right = (one.get(name) for one in found)
            if isinstance(left, str) and isinstance(right, str):
                yield from _from_difference(left, right)
            elif left != right:
                yield f"{name}: left {cut(repr(left), 4 * LONGEST)}, right {cut(repr(right), 4 * LONGEST)}"
    if stage in DUMPED_COLUMNS:
        columns = [_dumped(run, step, DUMPED_COLUMNS[stage], row) for run in runs]
        if columns[0] is not None and columns[1] is not None and columns[0].shape == columns[1].shape:
            yield from tensor_difference("in dumps/", columns[0], columns[1])


def weight_values(runs: Sequence[Path], steps_done: int, name: str) -> Iterator[str]:
    """Yield where a tensor differs in the checkpoints of both runs after so many steps."""
    paths = [path for run in runs for path in on_disk(run) if steps_of(path) == steps_done]
    if len(paths) != len(runs):
        return
    from grpo_megatron.convert.conversion import open_source  # imports Megatron-Core

    try:
        sources = [open_source(path) for path in paths]
        if all(name in source.shapes() for source in sources):
            left, right = (source.read(name) for source in sources)
            if left.shape == right.shape:
                yield from tensor_difference(f"in {paths[0].name}", left.float(), right.float())
    except (ConvertError, StorageError, ConfigError, OSError) as error:
        yield f"the checkpoints after {steps_done} steps cannot be compared: {str(error).splitlines()[0]}"


def tensor_difference(where: str, left: Tensor, right: Tensor) -> Iterator[str]:
    """Yield the largest difference of two equally large tensors, the slice that differs, and the first values of it."""
    unequal = left != right
    if not unequal.any():
        yield f"{where}: equal"
        return
    places = unequal.nonzero()
    spans = ", ".join(f"{int(low)}:{int(high) + 1}" for low, high in zip(places.amin(0), places.amax(0), strict=True))
    distance = float((left.double() - right.double()).abs().nan_to_num(float("inf")).max())
    yield f"{where}: {len(places)} of {left.numel()} elements differ, by at most {distance:.3g}, in [{spans}]"
    for name, side in (("left", left), ("right", right)):
        yield f"  first of them: {name} {[float(f'{value:.9g}') for value in side[unequal][:4].tolist()]}"


def _from_difference(left: Sequence[Any], right: Sequence[Any]) -> Iterator[str]:
    pairs = enumerate(zip(left, right, strict=False))
    place = next((n for n, pair in pairs if pair[0] != pair[1]), min(len(left), len(right)))
    if not place == len(left) == len(right):
        unit = "character" if isinstance(left, str) else "token"
        for name, side in (("left", left), ("right", right)):
            yield f"from {unit} {place}: {name} {side[place : place + LONGEST]!r}"


def _stored(run: Path, folder: str | None, step: int, place: SamplePlace) -> dict[str, Any]:
    """Read a sample: the line of its rollout file, and as "tokens" the kept tokens with the engine's log-probabilities."""
    uid, group, index = place
    path = None if folder is None else rollout_file(Path(folder), step)
    lines: Iterable[dict[str, Any]] = read_metrics(path) if path is not None and path.is_file() else ()
    wanted = (row for row in lines if row.get("group") == group and row.get("index") == index)
    found = dict(next(islice(wanted, 1), {}))
    for kept in KeptSamples(run).steps:
        for one in kept["groups"] if kept["step"] == step else ():
            for sample in one["samples"] if one.get("uid") == uid else ():
                if sample.get("index") == index and sample.get("drawn"):
                    found["tokens"] = [(piece[0], piece[1]) for piece in sample["pieces"]]
    return found


def _dumped(run: Path, step: int, column: str, row: int) -> Tensor | None:
    """Read a row of a mini-batch that a guard has dumped in the step."""
    for folder in sorted((run / "dumps").glob(f"step_{step:06d}_*")):
        from grpo_megatron.training.dump import read_dump  # imports Megatron-Core

        try:
            batch = read_dump(folder).batch
        except ConfigError:
            continue
        values = getattr(batch, column)
        if row in batch.rows and values is not None:
            place = batch.rows.index(row)
            return values[place][batch.response_mask[place]]
    return None
