"""The trace of a run: digests of everything that its steps computed, stage by stage. Written by rank 0, read by `diff`.

trace/steps.jsonl      {"step": 12, "stages": {"responses": "9f0c...", ...}}    the roots of the step's trees
                       {"step": 0, "facts": {...}}     software, layout and tensors, at each start; digests of the inputs later
                       {"step": 11, "saved": "51ab..."}    the optimizer's state in the checkpoint after the step
trace/step_000012.bin  the trees, and a few numbers of each leaf; of the last trainer.trace_keep steps; -1: weights at the start

A leaf is a row of the batch (by the prompt's place in the step and the sample's index), a tensor (by its Hugging Face name), a
rank, or the step. No leaf depends on the rank that made it. A node is the digest of FAN nodes below it (Merkle 1987), so that
two steps with n rows are compared with O(log n) reads per difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.report.metrics import Array
from grpo_megatron.report.run_folder import read_metrics
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.run_files import TRACE_FOLDER, WARM_UP_FOLDER
from grpo_megatron.untrusted import ReadError, parse_json

FORMAT = 2
FAN = 16
STEPS_FILE = "steps.jsonl"
FACT_TABLES = ("libraries", "code", "machine", "layout", "state", "beside")  # each a table of names and values


@dataclass(frozen=True)
class Stage:
    """A stage of a step. `numbers`: those of each leaf beside its digest. `kind`: of the leaves."""

    kind: str  # row | tensor | rank | step | term, of the loss
    numbers: tuple[str, ...] = ()


MEANS = (
    "mean",
    "projection",
)  # of a row's tokens; of two rows, |difference of projections|^2 is near the squared distance
NORMS = ("norm", "projection")  # of a tensor, likewise
TERMS = ("value",)
BESIDE = ("critic ", "reward model ")  # before the names of stages of models that are trained beside the policy


def _of_update(prefix: str = "") -> dict[str, Stage]:
    """Return the stages of a model's update. All but the weights have the number of the step's optimizer step: "losses 0"."""
    update = {
        "losses": Stage("term", TERMS),
        "gradients": Stage("tensor", NORMS),
        "gradient norm": Stage("step", NORMS[:1]),
    }
    return {f"{prefix}{name}": stage for name, stage in {**update, "weights": Stage("tensor", NORMS)}.items()}


STAGES = {  # in the order in which a step computes them
    "prompts": Stage("row"),
    "images": Stage("row"),
    "seeds": Stage("row"),
    "engine weights": Stage("tensor"),
    "sampled by": Stage("row"),  # version and digest of the weights that the engine had
    "responses": Stage("row", ("tokens",)),
    "engine log-probabilities": Stage("row", MEANS),
    "routes": Stage("row"),
    "rewards": Stage("row", ("reward",)),
    "reward parts": Stage("row"),
    "scores": Stage("row", ("score",)),  # after reward models and penalties
    "old log-probabilities": Stage("row", MEANS),
    "reference log-probabilities": Stage("row", MEANS),
    "teacher log-probabilities": Stage("row", MEANS),
    "values": Stage("row", MEANS),
    "corrections": Stage("row", MEANS),
    "advantages": Stage("row", MEANS),
    "token weights": Stage("row", MEANS),
    "returns": Stage("row", MEANS),
    **_of_update("critic "),
    **_of_update(),
    **_of_update("reward model "),
    "random state": Stage("rank"),
}


def base_name(name: str) -> str:
    """Return the stage of a name in a step, without the number of the optimizer step: "gradients" of "gradients 1"."""
    return name.rstrip("0123456789").rstrip()


def stage_of(name: str) -> Stage:
    """Look up a stage by its name in a step: "gradients 1"."""
    return STAGES[base_name(name)]


def stage_order(name: str) -> tuple[int, int, int]:
    """Return the sort key of a stage's name. The optimizer steps of a step follow each other."""
    base = base_name(name)
    number = name.removeprefix(base).strip()
    place = list(STAGES).index(base)
    first = list(STAGES).index(base.replace("gradient norm", "gradients").replace("losses", "gradients"))
    return (place, 0, 0) if not number else (first, int(number), place)


# -- trees -------------------------------------------------------------------------------------------------------------


def tree_levels(leaves: Array) -> list[Array]:
    """Return the levels of the trees over `leaves`, uint64 [..., n]: the leaves first, the root last, uint64 [..., 1]."""
    levels = [leaves]
    while levels[-1].shape[-1] != 1:
        below = levels[-1]
        count = max(1, -(-below.shape[-1] // FAN))
        padded = np.zeros((*below.shape[:-1], count * FAN), dtype=np.uint64)
        padded[..., : below.shape[-1]] = _mixed(below + np.uint64(len(levels)))
        factors = _mixed(np.arange(1, FAN + 1, dtype=np.uint64))
        levels.append((padded.reshape(*below.shape[:-1], count, FAN) * factors).sum(-1))
    return levels


def root(leaves: Array) -> str:
    """Return the root of the tree over `leaves`, in hexadecimal."""
    return f"{int(tree_levels(leaves)[-1][0]):016x}"


def _mixed(values: Array) -> Array:
    """Mix the bits of each number (splitmix64), so that sums of them are digests. Odd, as factors must be."""
    z = values * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) * np.uint64(2) + np.uint64(1)


def level_sizes(count: int) -> list[int]:
    """Return the sizes of the levels of a tree over `count` leaves."""
    sizes = [count]
    while sizes[-1] != 1:
        sizes.append(max(1, -(-sizes[-1] // FAN)))
    return sizes


# -- the file of a step: a line of JSON, then for each stage its levels (uint64) and the numbers of its leaves (float32) ---


@dataclass(frozen=True)
class Leaves:
    """The leaves of a stage: digests uint64 [n], 0 where there is none, and float32 [n, numbers of the stage].

    `names`: of terms. Other leaves follow from the step or the facts.
    """

    digests: Array
    numbers: Array
    names: tuple[str, ...] = ()


def step_content(
    step: int, stages: Mapping[str, Leaves], rows: Array, uids: Sequence[str]
) -> tuple[bytes, dict[str, str]]:
    """Make a step's file, and its roots. `rows`: int64 [rows, 2], prompt and sample; `uids`: of the prompts."""
    parts, sizes, roots, trees = [rows.astype("<i8").tobytes()], [], {}, dict[str, list[Array]]()
    for count in {len(leaves.digests) for leaves in stages.values()}:  # equally large trees are made together
        names = [name for name, leaves in stages.items() if len(leaves.digests) == count]
        together = tree_levels(np.stack([stages[name].digests for name in names]))
        trees |= {name: [level[number] for level in together] for number, name in enumerate(names)}
    for name, leaves in stages.items():
        levels = trees[name]
        roots[name] = f"{int(levels[-1][0]):016x}"
        numbers = leaves.numbers.astype("<f4").tobytes()
        sizes.append([name, len(leaves.digests), *([leaves.names] if leaves.names else [])])
        parts += [np.concatenate(levels).astype("<u8").tobytes(), numbers, bytes(-len(numbers) % 8)]
    head = {"format": FORMAT, "step": step, "rows": len(rows), "uids": list(uids), "stages": sizes}
    line = json.dumps(head).encode()
    return line + b" " * (-(len(line) + 1) % 8) + b"\n" + b"".join(parts), roots


class StepFile:
    """The file of a step, of which only what is asked for is read. Raises StorageError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                line = file.readline(1 << 28)
            head = parse_json(line.decode())
            self.step = int(head["step"])
            if head["format"] != FORMAT:
                raise StorageError(f"{path} has the trace format {head['format']}, and this version reads {FORMAT}")
            self.uids = list(map(str, head["uids"]))
            self._num_rows, self._sizes, place = int(head["rows"]), dict[str, tuple[int, int]](), len(line)
            self._first, place = place, place + 16 * self._num_rows
            self._names = {name: names[0] for name, _, *names in head["stages"] if names}
            for name, count, *_ in head["stages"]:
                self._sizes[name] = count, place
                numbers = 4 * count * len(stage_of(name).numbers)
                place += 8 * sum(level_sizes(count)) + numbers + -numbers % 8
            if (size := path.stat().st_size) != place:
                raise StorageError(
                    f"{path} is cut short: it has {size:,} bytes of {place:,}; without the file, its step is compared by stages"
                )
        except (OSError, ReadError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{path} is no file of a trace: {type(error).__name__}: {error}") from error

    def __contains__(self, stage: str) -> bool:
        return stage in self._sizes

    def count(self, stage: str) -> int:
        """Return the number of leaves."""
        return self._sizes[stage][0]

    @property
    def roots(self) -> dict[str, str]:
        """The roots of the stages."""
        tops = {name: len(level_sizes(count)) - 1 for name, (count, _) in self._sizes.items()}
        return {name: f"{int(self.nodes(name, top, 0, 1)[0]):016x}" for name, top in tops.items()}

    def terms(self, stage: str) -> list[str]:
        """List the names of a stage's terms."""
        return list(self._names.get(stage, ()))

    @cached_property
    def rows(self) -> list[tuple[int, int]]:
        """The (prompt, sample) of each row."""
        return [(int(p), int(i)) for p, i in self._read("<i8", self._first, 2 * self._num_rows).reshape(-1, 2)]

    def nodes(self, stage: str, level: int, start: int, stop: int) -> Array:
        """Read nodes of a level; level 0 has the leaves."""
        count, place = self._sizes[stage]
        sizes = level_sizes(count)
        stop = min(stop, sizes[level])
        return self._read("<u8", place + 8 * (sum(sizes[:level]) + start), max(0, stop - start))

    def numbers(self, stage: str) -> Array:
        """Read the numbers of all leaves, float32 [n, numbers of the stage]."""
        (count, place), width = self._sizes[stage], len(stage_of(stage).numbers)
        return self._read("<f4", place + 8 * sum(level_sizes(count)), count * width).reshape(count, width)

    def differing(self, other: StepFile, stage: str) -> Iterator[int]:
        """Yield the leaves that differ, in order, descending from the roots. Both stages have as many leaves."""
        top = len(level_sizes(self.count(stage))) - 1

        def below(level: int, start: int, stop: int) -> Iterator[int]:
            wrong = (
                np.flatnonzero(self.nodes(stage, level, start, stop) != other.nodes(stage, level, start, stop)) + start
            )
            for node in map(int, wrong):
                if level == 0:
                    yield node
                else:
                    yield from below(level - 1, node * FAN, (node + 1) * FAN)

        yield from below(top, 0, 1)

    def _read(self, kind: str, place: int, count: int) -> Array:
        return np.fromfile(self.path, dtype=kind, count=count, offset=place)


# -- the folder --------------------------------------------------------------------------------------------------------


class TraceFolder:
    """The trace of a run as it is on disk. Raises StorageError where there is none, with the reason."""

    def __init__(self, run: Path) -> None:
        self.run, self.folder = run, run / TRACE_FOLDER
        if not run.is_dir():
            raise StorageError(f"{run} is no folder; name the trainer.output_dir of a run")
        if not (self.folder / STEPS_FILE).is_file():
            near = [path for path in (run / WARM_UP_FOLDER, run.parent) if (path / TRACE_FOLDER / STEPS_FILE).is_file()]
            remedy = f"name {near[0]}, which has one" if near else "run it again"
            raise StorageError(
                f"{run} has no trace ({TRACE_FOLDER}/{STEPS_FILE}): it was run with trainer.trace=off, before its first step"
                f" ended, or by a version without traces; {remedy}"
            )
        try:
            rows = read_metrics(self.folder / STEPS_FILE)
        except (OSError, ReadError) as error:
            raise StorageError(f"{self.folder / STEPS_FILE} cannot be read: {error}") from error
        self.facts: dict[int, dict[str, Any]] = {}  # of each start, by its first step
        self.inputs: dict[str, dict[str, Any]] = {}
        self.saved: dict[int, str] = {}  # digests of the optimizer in checkpoints
        self.steps: dict[int, dict[str, str]] = {}  # the roots
        for row in rows:
            if isinstance(row.get("facts"), dict):
                self.facts[row["step"]] = row["facts"]
            elif isinstance(row.get("inputs"), dict):
                self.inputs = {key: files for key, files in row["inputs"].items() if isinstance(files, dict)}
            elif isinstance(row.get("saved"), str):
                self.saved[row["step"]] = row["saved"]
            elif isinstance(row.get("stages"), dict):
                self.steps[row["step"]] = {n: r for n, r in row["stages"].items() if base_name(n) in STAGES}
        formats = {facts.get("format") for facts in self.facts.values()}
        if formats - {FORMAT}:
            raise StorageError(
                f"{run} has a trace of format {', '.join(map(str, formats - {FORMAT}))}, and this version reads {FORMAT}; run"
                " both with one version, or compare their metrics with `report`"
            )
        parts = [facts.get(key, {}) for facts in self.facts.values() for key in FACT_TABLES]
        is_complete = all({"layout", "tensors"} <= facts.keys() for facts in self.facts.values())
        if not self.facts or not is_complete or not all(isinstance(part, dict) for part in parts):
            raise StorageError(
                f"{self.folder / STEPS_FILE} has no complete line with the facts of the run: its beginning was cut off"
            )

    def tensors(self, stage: str) -> list[str]:
        """List the names of a stage's tensors, in the model's order."""
        facts = self.facts[max(self.facts)]
        beside = facts.get("beside", {})
        return next((names for prefix, names in beside.items() if stage.startswith(prefix)), facts["tensors"])

    def facts_at(self, step: int) -> dict[str, Any]:
        """Return the facts of the start that made the step."""
        return self.facts[max((first for first in self.facts if first <= step), default=min(self.facts))]

    def file(self, step: int) -> StepFile | None:
        """Open the file of a step; None if it is no longer kept. Raises StorageError, also for that of another run or step."""
        path = self.folder / step_name(step)
        file = StepFile(path) if path.is_file() else None
        if file is not None and (file.step != step or file.roots != self.steps.get(step, file.roots)):
            raise StorageError(
                f"{path} is not of the step that {STEPS_FILE} describes; without the file, stages are compared"
            )
        return file


def step_name(step: int) -> str:
    """Name the file of a step."""
    return f"step_{step:06d}.bin"
