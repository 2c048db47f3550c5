"""Tally: what is known of each problem after one pass over all responses. It holds places of responses, no texts.

rollouts      trainer.rollout_data_dir, or its files: one response per line (report/step.py)
evaluation    the output folder of `evaluate`, or files of its samples/: one problem per line, with its responses
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from grpo_megatron.config import ConfigError
from grpo_megatron.data.curate_options import CurateOptions
from grpo_megatron.data.rows import (
    LineFile,
    Question,
    checked_row,
    missing_field,
    problem_digest,
    read_question,
    text_field,
    type_name,
)
from grpo_megatron.storage.run_files import rollout_files
from grpo_megatron.untrusted import ReadError, cut, reason_of, shown

# -- Responses with their scores, read one by one from rollout files and from the samples of an evaluation -------------
# rollouts      trainer.rollout_data_dir, or its files: one response per line (report/step.py)
# evaluation    the output folder of `evaluate`, or files of its samples/: one problem per line, with its responses
#
# A response remembers its place, so that its text can be read again later and need not be kept.

MAX_SAMPLES_LINE = 1 << 28  # bytes: a problem of an evaluation has all its responses in one line


class ResponsePlace(NamedTuple):
    """A line of a file, and the number of the response in it."""

    file: int
    line: int
    number: int


@dataclass(frozen=True)
class Response:
    """`text` is None for a trajectory of several turns. `score` is None if it could not be graded."""

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
        """Identifies its problem."""
        return problem_digest(self.question, self.answer, self.images)


def source_files(sources: Sequence[Path]) -> list[Path]:
    """The files of the given files and folders, in order. Raises ConfigError."""
    files: list[Path] = []
    for source in sources:
        if not source.is_dir():
            files.append(source)
            continue
        found = [path for _, path in rollout_files(source)] or sorted((source / "samples").glob("*.jsonl"))
        if not found:
            raise ConfigError(
                f"{shown(str(source))} has no rollouts (step_000000.jsonl, of trainer.rollout_data_dir) and no"
                " samples/*.jsonl (of `evaluate`, which writes them at its end)"
            )
        files += found
    if twice := {path.resolve() for path in files if files.count(path) > 1}:
        raise ConfigError(f"{shown(str(min(twice)))} is given twice; name it once")
    return files


class ResponseReader:
    """The responses of files: all of them, or one again. Keeps the last line. Raises ConfigError: a file cannot be read."""

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
        """Every response, in order. Raises ConfigError, which names file and line."""
        for file, lines in enumerate(self.files):
            for line, row in enumerate(lines.rows(0, len(lines))):
                for number, response in enumerate(self._responses(file, line, row)):
                    yield ResponsePlace(file, line, number), response

    def read(self, place: ResponsePlace) -> Response:
        """One response again. Raises ConfigError if the file has changed meanwhile."""
        at = place.file, place.line
        if self._last is None or self._last[0] != at:
            row = next(self.files[place.file].rows(place.line, place.line + 1))
            self._last = at, self._responses(*at, row)
        return self._last[1][place.number]

    def _responses(self, file: int, line: int, row: Any) -> list[Response]:
        try:
            row = checked_row(row)
            return _of_evaluation(row) if "samples" in row else [_of_rollout(row)]
        except ValueError as error:
            lines = self.files[file]
            raise ConfigError(f"{shown(str(lines.path))} {lines.place(line)}: {cut(str(error), 500)}") from error


def _of_rollout(row: dict[str, Any]) -> Response:
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


def _of_evaluation(row: dict[str, Any]) -> list[Response]:
    """The drawn samples; the greedy one only where no other was drawn. The first grader decides."""
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
    """`right` and `wrong` have the first few places of different complete texts, by a hash of the text.

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
    """`problems` by digest, in the order of their first responses.

    `left_out` counts responses that were replayed or that the options leave out, `unscorable` those without a score.
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
        kept = problem.right if is_right else problem.wrong
        if len(kept) < options.texts:  # texts that differ in white space only are equal
            kept.setdefault(hashlib.sha256(" ".join(response.text.split()).encode()).digest()[:8], place)
        if problem.best is None or response.score > problem.best[0]:
            problem.best = response.score, place
        if problem.worst is None or response.score < problem.worst[0]:
            problem.worst = response.score, place

    def _counts(self, response: Response) -> bool:
        options, step = self.options, response.step
        if response.is_replayed or (options.drop_truncated and response.is_truncated):
            return False
        last = math.inf if options.last_step is None else options.last_step
        return step is None or (options.first_step or 0) <= step <= last
