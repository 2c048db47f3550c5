"""The command `curate`: responses of runs and evaluations -> pass rates, supervised rows, preference pairs, filtered data files.

One pass over all responses counts them per problem and keeps their places, not their texts. Rows are then written one by
one, so that no file is in memory as a whole (a data file in .json form is). Exit codes: 0; 2 for a mistake of the user, and
then nothing is written; else 1. Needs neither torch nor a GPU.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from grpo_megatron.config import ConfigError
from grpo_megatron.config.problems import counted
from grpo_megatron.data.curate_options import PAIRS, PASS_RATES, SUPERVISED, CurateOptions
from grpo_megatron.data.images import has_images, image_name, image_sources, located
from grpo_megatron.data.rows import (
    LineFile,
    Question,
    checked_row,
    missing_field,
    open_rows,
    problem_digest,
    question_text,
    read_question,
    text_field,
    type_name,
)
from grpo_megatron.data.sampler import wilson
from grpo_megatron.data.task import Task, get_task
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.files import new_folder, write_file
from grpo_megatron.storage.run_files import rollout_files
from grpo_megatron.untrusted import ReadError, cut, reason_of, shown, visible

TABLE_COLUMNS = ("rate", "low", "high", "n", "passes", "truncated", "mean_score", "mean_tokens", "question", "answer")
_BINS = 5  # of pass rates between 0 and 1, which have lines of their own
_BAR = 40  # characters of the longest bar
MAX_SAMPLES_LINE = 1 << 28  # bytes: a problem of an evaluation has all its responses in one line


def curate(options: CurateOptions) -> int:
    """Write the folder; returns the exit code. Raises ConfigError for the user's mistakes."""
    output = options.output
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        if not options.force:
            raise ConfigError(f"--output {str(output)!r} exists; choose another folder, or add --force")
        if not (output / PASS_RATES).is_file():
            raise ConfigError(f"--output {str(output)!r} was not written by this command; choose another folder")
    task = None if options.task is None else get_task(options.task)
    reader, tally = ResponseReader(source_files(list(options.sources))), Tally(options)
    for place, response in reader.all():
        tally.add(place, response)
    if not tally.problems:
        raise ConfigError(
            f"no response is counted: {tally.left_out} are left out by --drop-truncated or --first-step, or were"
            f" replayed, and {tally.unscorable} have no score"
        )
    try:
        with new_folder(output) as folder:
            written = _write(folder, tally, reader, task)
            summary = "\n".join([_summary(tally), *([""] if written else []), *written])
            write_file(folder / "summary.txt", summary + "\n")
    except OSError as error:
        raise StorageError(f"cannot write --output {str(output)!r}: {error}") from error
    print(f"{visible(summary)}\n\nwrote {output}/: {', '.join(sorted(path.name for path in output.iterdir()))}")
    return 0


def _write(folder: Path, tally: Tally, reader: ResponseReader, task: Task | None) -> list[str]:
    """Write all files into `folder`; returns a line on each that depends on the options. Raises ConfigError."""
    options, lines, images = tally.options, list[str](), dict[str, list[Any]]()
    write_file(folder / PASS_RATES, _json_lines(_pass_rates(tally, reader)))
    write_file(folder / "pass_rates.csv", _csv_lines(_pass_rates(tally, reader)))
    for path in options.data:
        assert task is not None
        counts: Counter[str] = Counter()
        write_file(folder / f"{path.stem}.jsonl", _filtered_lines(path, task, tally, counts, images))
        kept = counts.pop("kept")
        left_out = f" (left out: {_reasons(counts)})" if counts else ""
        lines.append(f"{path.stem}.jsonl: {kept} of {kept + counts.total()} rows{left_out}")
    for name, rows in ((SUPERVISED, _supervised(tally, reader, images)), (PAIRS, _preferences(tally, reader, images))):
        if (options.sft if name == SUPERVISED else options.pairs) is not None:
            counts = Counter()
            write_file(folder / name, _json_lines(rows, counts))
            lines.append(_line_on(name, counts.total(), tally))
    return lines


def _line_on(name: str, count: int, tally: Tally) -> str:
    problems, played = len(_kept(tally)), counted(tally.trajectories, "trajectory", "trajectories")
    left_out = f" (left out: {played} of several turns)" if tally.trajectories else ""
    if not count:
        raise ConfigError(
            f"{name} would have no row: none of the {problems} problems that the filters keep has complete"
            f" responses for one{left_out}; widen the filters, or leave the option out"
        )
    return f"{name}: {counted(count, 'row')} from {counted(problems, 'problem')}{left_out}"


def _json_lines(rows: Iterable[Mapping[str, Any]], counts: Counter[str] | None = None) -> Iterator[str]:
    for row in rows:
        if counts is not None:
            counts["rows"] += 1
        yield json.dumps(row) + "\n"


def _csv_lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for cells in itertools.chain([TABLE_COLUMNS], ([row[name] for name in TABLE_COLUMNS] for row in rows)):
        line = io.StringIO()
        csv.writer(line).writerow(cells)
        yield line.getvalue()


# -- Filters -----------------------------------------------------------------------------------------------------------
# DUPO (WebSailor, arXiv 2507.02592) leaves out, before training, what all of 8 responses solve: `drop_all_right`.


def _kept(tally: Tally) -> list[ProblemTally]:
    return [problem for problem in tally.problems.values() if _reason(problem, tally.options) is None]


def _reason(problem: ProblemTally, options: CurateOptions) -> str | None:
    """Say why the problem is left out; None: it is kept."""
    if problem.n < options.min_samples:
        return f"fewer than {options.min_samples} responses"
    if options.drop_all_right and problem.passes == problem.n:
        return "all right"
    if problem.rate < options.min_rate:
        return f"pass rate below {options.min_rate:g}"
    return f"pass rate above {options.max_rate:g}" if problem.rate > options.max_rate else None


def _filtered_lines(
    path: Path, task: Task, tally: Tally, counts: Counter[str], images: dict[str, list[Any]]
) -> Iterator[str]:
    """Yield the rows of a data file with kept problems. Only paths of images change: they become absolute.

    `counts`: "kept" or why not -> rows. `images`: the digest of each kept problem with images -> these.

    Raises ConfigError for an unreadable file or row, and if no row is left.
    """
    rows, measured = open_rows(path), 0
    folder = (path if path.is_dir() else path.parent).absolute()
    for number, row in enumerate(rows.rows(0, len(rows))):
        try:
            seen = image_sources(row) if has_images(checked_row(row)) else []
            names = [{"name": image_name(located(source, folder))} for source in seen]
            digest = problem_digest(*task.read_row(row), names)
        except ValueError as error:
            raise ConfigError(f"data file {str(path)!r} {rows.place(number)}: {error}") from error
        if (problem := tally.problems.get(digest)) is not None:
            measured += 1
            reason = _reason(problem, tally.options)
        else:
            reason = "not measured"
        counts[reason or "kept"] += 1
        if reason is None:
            changed = _with_absolute_paths(row, folder) if seen else row
            if seen:
                images[digest] = image_sources(changed)
            yield (rows.line(number) if isinstance(rows, LineFile) and changed == row else json.dumps(changed)) + "\n"
    if not measured:
        raise ConfigError(
            f"data file {str(path)!r}: none of its questions and answers, as --task {task.name} reads them, is among the"
            f" {len(tally.problems)} measured ones; give the file and the task that the responses belong to"
        )
    if not counts["kept"]:
        del counts["kept"]
        raise ConfigError(f"data file {str(path)!r}: no row is left ({_reasons(counts)}); widen the filters")


def _with_absolute_paths(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Make the row for a file in another folder."""

    def absolute(source: Any) -> Any:
        if isinstance(source, list):
            return list(map(absolute, source))
        place = located(source, folder)
        if isinstance(place, bytes):
            return source
        return {**source, "path": str(place)} if isinstance(source, dict) else str(place)

    def message(given: Any) -> Any:
        content = given.get("content") if isinstance(given, dict) else None
        return {**given, "content": list(map(part, content))} if isinstance(content, list) else given

    def part(given: dict[str, Any]) -> dict[str, Any]:
        name = next((name for name in ("image", "image_url", "url", "path") if given.get(name)), None)
        return given if name is None else {**given, name: absolute(given[name])}

    out = {name: absolute(value) if name in ("image", "images") and value else value for name, value in row.items()}
    for name in ("prompt", "messages"):
        if isinstance(out.get(name), list):
            out[name] = list(map(message, out[name]))
    return out


def _reasons(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))


# -- Rows of the files -------------------------------------------------------------------------------------------------


def _pass_rates(tally: Tally, reader: ResponseReader) -> Iterator[dict[str, Any]]:
    """Yield one row per problem, as data.sampling.pass_rates reads them."""
    for problem in tally.problems.values():
        low, high = wilson(problem.rate, problem.n)
        first = reader.read(problem.first)
        yield {
            "question": question_text(first.question),
            "answer": first.answer,
            "rate": problem.rate,
            "low": round(low, 6),
            "high": round(high, 6),
            "n": problem.n,
            "passes": problem.passes,
            "truncated": problem.truncated,
            "mean_score": round(problem.score_sum / problem.n, 6),
            "mean_tokens": round(problem.token_sum / problem.n, 2),
            **({"images": first.images} if first.images else {}),
        }


def _prompt(response: Response, images: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Make the columns of its question. Raises ConfigError: its images are in no row of --data."""
    if not response.images:
        return {"prompt": response.question}
    if response.digest not in images:
        raise ConfigError(
            f"--sft, --pairs: a question has the image {response.images[0]['name']}, and files of responses hold no images; set"
            " --data FILE with the rows that were answered"
        )
    return {"prompt": response.question, "images": images[response.digest]}


def _supervised(tally: Tally, reader: ResponseReader, images: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Yield up to --sft different right responses per problem: rejection sampling (RFT, arXiv 2308.01825)."""
    for problem in _kept(tally):
        for place in list(problem.right.values())[: tally.options.sft]:
            response = reader.read(place)
            yield {**_prompt(response, images), "response": response.text}


def _preferences(tally: Tally, reader: ResponseReader, images: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Yield rows {"prompt", "chosen", "rejected"}."""
    for problem in _kept(tally):
        for chosen, rejected in _pairs_of(problem, tally.options):
            better = reader.read(chosen)
            yield {**_prompt(better, images), "chosen": better.text, "rejected": reader.read(rejected).text}


def _pairs_of(problem: ProblemTally, options: CurateOptions) -> list[tuple[ResponsePlace, ResponsePlace]]:
    if options.pairs == "right-wrong":
        return list(zip(problem.right.values(), problem.wrong.values(), strict=False))[:1]
    if problem.best is None or problem.worst is None or problem.best[0] <= problem.worst[0]:
        return []
    return [(problem.best[1], problem.worst[1])]


def _summary(tally: Tally) -> str:
    """Write the counts, and a histogram of the problems by pass rate."""
    problems = list(tally.problems.values())
    truncated = sum(problem.truncated for problem in problems)
    mean = sum(problem.rate for problem in problems) / len(problems)
    lines = [
        f"{counted(len(problems), 'problem')}, {counted(sum(one.n for one in problems), 'response')} ({truncated} truncated);"
        f" not counted: {tally.left_out} replayed or left out by the options, {tally.unscorable} without a score",
        f"mean pass rate {mean:.4f}; the filters keep {counted(len(_kept(tally)), 'problem')}",
        "",
        f"{'pass rate':>12} {'problems':>9}",
    ]
    edges = [f"{number / _BINS:g}" for number in range(_BINS + 1)]
    inner = [f"{low} - <{high}" for low, high in itertools.pairwise(edges)]
    counts = dict.fromkeys(["0", f">{inner[0]}", *inner[1:], "1"], 0)
    for problem in problems:
        is_certain = problem.passes in (0, problem.n)
        number = (_BINS + 1) * (problem.passes > 0) if is_certain else 1 + problem.passes * _BINS // problem.n
        counts[list(counts)[number]] += 1
    for label, count in counts.items():
        bar = "#" * round(_BAR * count / max(counts.values()))
        lines.append(f"{label:>12} {count:>9} {bar}".rstrip())
    return "\n".join(lines)


# -- Responses with their scores, read one by one ----------------------------------------------------------------------
# rollouts      trainer.rollout_data_dir, or its files: one response per line (report/step.py)
# evaluation    the output folder of `evaluate`, or files of its samples/: one problem per line, with its responses


class ResponsePlace(NamedTuple):
    """A line of a file, and the number of the response in it."""

    file: int
    line: int
    number: int


@dataclass(frozen=True)
class Response:
    """A response with its score. `text` None: a trajectory of several turns. `score` None: it could not be graded."""

    question: Question
    answer: str
    text: str | None
    score: float | None
    num_tokens: int
    is_truncated: bool
    step: int | None = None  # of the training run; None in an evaluation
    is_replayed: bool = False  # an earlier step of the run had it, too
    images: Sequence[dict[str, Any]] = ()  # the facts of the question's images

    @property
    def digest(self) -> str:
        """The digest of its problem."""
        return problem_digest(self.question, self.answer, self.images)


def source_files(sources: Sequence[Path]) -> list[Path]:
    """List the files of the given files and folders, in order. Raises ConfigError."""
    files: list[Path] = []
    for source in sources:
        if not source.is_dir():
            files.append(source)
            continue
        inside = [path for _, path in rollout_files(source)] or sorted((source / "samples").glob("*.jsonl"))
        if not inside:
            raise ConfigError(
                f"{shown(str(source))} has no rollouts (step_000000.jsonl, of trainer.rollout_data_dir) and no"
                " samples/*.jsonl (of `evaluate`, which writes them at its end)"
            )
        files += inside
    if twice := {path.resolve() for path in files if files.count(path) > 1}:
        raise ConfigError(f"{shown(str(min(twice)))} is given twice; name it once")
    return files


class ResponseReader:
    """A reader of all responses of files, or of one again. Keeps the last line. Raises ConfigError: an unreadable file."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files: list[LineFile] = []
        for path in files:
            try:
                self.files.append(LineFile(path, MAX_SAMPLES_LINE))
            except OSError as error:
                raise ConfigError(f"cannot read {shown(str(path))}: {reason_of(error)}") from error
            except ReadError as error:
                raise ConfigError(f"{shown(str(path))} {error}") from error
        self._last: tuple[tuple[int, int], list[Response]] | None = None

    def all(self) -> Iterator[tuple[ResponsePlace, Response]]:
        """Yield every response, in order. Raises ConfigError, which names file and line."""
        for file, lines in enumerate(self.files):
            for line, row in enumerate(lines.rows(0, len(lines))):
                for number, response in enumerate(self._responses(file, line, row)):
                    yield ResponsePlace(file, line, number), response

    def read(self, place: ResponsePlace) -> Response:
        """Read one response again. Raises ConfigError if the file has changed meanwhile."""
        at = place.file, place.line
        if self._last is None or self._last[0] != at:
            row = next(self.files[place.file].rows(place.line, place.line + 1))
            self._last = at, self._responses(*at, row)
        return self._last[1][place.number]

    def _responses(self, file: int, line: int, row: Any) -> list[Response]:
        try:
            row = checked_row(row)
            return _read_evaluation(row) if "samples" in row else [_read_rollout(row)]
        except ValueError as error:
            lines = self.files[file]
            raise ConfigError(f"{shown(str(lines.path))} {lines.place(line)}: {cut(str(error), 500)}") from error


def _read_rollout(row: dict[str, Any]) -> Response:
    metrics = _field(row, "metrics", dict)
    return Response(
        read_question(row),
        text_field(row, "answer", empty=True),
        None if "turns" in row else text_field(row, "response", empty=True),
        _score(metrics, "acc") if "acc" in metrics else _score(row, "score"),
        _field(row, "response_tokens", int),
        _field(row, "finish_reason", str) == "length",
        _field(row, "step", int),
        _field(row, "replayed", bool),
        _images(row),
    )


def _read_evaluation(row: dict[str, Any]) -> list[Response]:
    """Read the samples; the greedy one only where there is no other. The first grader decides."""
    question, answer = text_field(row, "question"), text_field(row, "answer", empty=True)
    samples = _field(row, "samples", list)
    if not all(isinstance(sample, dict) for sample in samples):
        raise ValueError("field 'samples' must be a list of objects")
    responses = []
    for sample in [sample for sample in samples if sample.get("index") != "greedy"] or samples:
        first = next(iter(_field(sample, "grades", dict).values()), None)
        if not isinstance(first, dict) or not isinstance(first.get("correct"), bool):
            raise ValueError('field \'grades\' must have the verdict of a grader: {"accuracy": {"correct": true, ...}}')
        text = None if "turns" in sample else text_field(sample, "completion", empty=True)
        is_truncated = _field(sample, "finish_reason", str) == "length"
        tokens = _field(sample, "tokens", int)
        parts = (question, answer, text, float(first["correct"]), tokens, is_truncated)
        responses.append(Response(*parts, images=_images(row)))
    return responses


def _images(row: dict[str, Any]) -> list[dict[str, Any]]:
    images: list[dict[str, Any]] = _field(row, "images", list) if "images" in row else []
    if not all(isinstance(image, dict) and isinstance(image.get("name"), str) for image in images):
        raise ValueError('field \'images\' must have the facts of images: [{"name": "/data/1.png", ...}]')
    return images


def _score(row: dict[str, Any], field: str) -> float | None:
    if row.get(field, 0) is None:
        return None
    score = float(_field(row, field, int, float))
    if not math.isfinite(score):
        raise ValueError(f"field {field!r} is {score}, not a finite number")
    return score


def _field(row: dict[str, Any], field: str, *kinds: type) -> Any:
    if field not in row:
        raise missing_field([field], row)
    value = row[field]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"field {field!r} is {type_name(value)}, not {' or '.join(kind.__name__ for kind in kinds)}")
    return value


@dataclass
class ProblemTally:
    """The counts of a problem. `right` and `wrong`: places of a few different complete texts, by a hash of the text.

    `best` and `worst` are (score, place) of complete responses.
    """

    first: ResponsePlace
    n: int = 0
    passes: int = 0
    truncated: int = 0
    score_sum: float = 0.0
    token_sum: int = 0
    right: dict[bytes, ResponsePlace] = field(default_factory=dict)
    wrong: dict[bytes, ResponsePlace] = field(default_factory=dict)
    best: tuple[float, ResponsePlace] | None = None
    worst: tuple[float, ResponsePlace] | None = None

    @property
    def rate(self) -> float:
        """The share of right responses."""
        return self.passes / self.n


@dataclass
class Tally:
    """The counts of all problems, by digest, in the order of their first responses.

    `left_out` counts responses that were replayed or that the options leave out; `unscorable`: without a score.
    """

    options: CurateOptions
    problems: dict[str, ProblemTally] = field(default_factory=dict)
    left_out: int = 0
    unscorable: int = 0
    trajectories: int = 0

    def add(self, place: ResponsePlace, response: Response) -> None:
        """Count a response."""
        options = self.options
        if not self._counts(response):
            self.left_out += 1
            return
        if response.score is None:
            self.unscorable += 1
            return
        problem = self.problems.setdefault(response.digest, ProblemTally(place))
        is_right = response.score >= options.right
        problem.n += 1
        problem.passes += is_right
        problem.truncated += response.is_truncated
        problem.score_sum += response.score
        problem.token_sum += response.num_tokens
        self.trajectories += response.text is None
        # A row ends with the end-of-sequence token, which a truncated response does not have
        if response.text is None or not response.text.strip() or response.is_truncated:
            return
        texts = problem.right if is_right else problem.wrong
        if len(texts) < options.texts:  # texts that differ in white space only are equal
            texts.setdefault(hashlib.sha256(" ".join(response.text.split()).encode()).digest()[:8], place)
        if problem.best is None or response.score > problem.best[0]:
            problem.best = response.score, place
        if problem.worst is None or response.score < problem.worst[0]:
            problem.worst = response.score, place

    def _counts(self, response: Response) -> bool:
        options, step = self.options, response.step
        if response.is_replayed or (options.drop_truncated and response.is_truncated):
            return False
        return step is None or (options.first_step or 0) <= step
