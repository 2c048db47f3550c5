"""Streams: rows of the user's own iterator, which may never end (`data.train_files: module:function`).

The function is called with those of `seed` (data.seed) and `epoch` (0, 1, ...) that it names. It returns an iterator of
rows, or an iterable such as a `datasets.IterableDataset`. Rank 0 alone reads it and gives the rows to all ranks, so that
they agree whatever it does. A checkpoint has its `state_dict()`; without one, a resumed run reads the earlier rows again
and drops them, so that the function must then be one of its arguments alone.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data.images import empty_images, has_images
from grpo_megatron.data.prompts import PromptReader, image_format
from grpo_megatron.data.rows import ROWS_PER_CHUNK, RowSet, checked_row, plain_value
from grpo_megatron.data.sampler import FirstRankShare, LazySequence, Mixture, Sampler, alone
from grpo_megatron.data.task import get_task
from grpo_megatron.registry import import_function, no_exit
from grpo_megatron.types import Prompt
from grpo_megatron.untrusted import cut

CHECKED_ROWS = 32  # rows that are checked before the run
NumberedRow = tuple[int, dict[str, Any]]


class StreamRows(RowSet):
    """The names of a stream's rows, for a PromptReader. A row is held by who makes its prompt."""

    def __init__(self, path: Path, source: str) -> None:
        self.paths, self.source, self.image_sizes = [path], source, {}

    def uid(self, number: int) -> str:
        return f"{self.source}/{self.paths[0].name.partition(':')[2]}/{number}"


class RowStream:
    """The rows of `name` (module:function), with the position in them. Every error is a ConfigError with the row's number."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed
        self.number = 0  # rows of all passes that were read
        self._open(0)

    def _open(self, epoch: int, own: Any = None) -> None:
        """Begin pass `epoch`; with a state, go on in it."""
        self.epoch, self.place = epoch, 0
        try:
            with no_exit("it"):
                function: Any = import_function(self.name)
                given = {"seed": self.seed, "epoch": epoch}
                named = inspect.signature(function).parameters
                self._source = function(**{key: value for key, value in given.items() if key in named})
                if own is not None:
                    self._source.load_state_dict(own)
                self._rows: Iterator[Any] = iter(self._source)
        except Exception as error:  # whatever the user's code raises
            self._fail(f"cannot be opened: {type(error).__name__}: {error}", error)

    def _fail(self, what: str, cause: Exception | None = None) -> NoReturn:
        raise ConfigError(f"data stream {self.name!r}: {cut(what, 1000)}; correct the function") from cause

    def next_row(self) -> NumberedRow:
        """Read the next row and its number; after the last one, the first one of the next pass."""
        try:
            with no_exit("it"):
                try:
                    row = next(self._rows)
                except StopIteration:
                    if not self.place:
                        self._fail(f"pass {self.epoch} over it has no row")
                    self._open(self.epoch + 1)
                    return self.next_row()
        except ConfigError:
            raise
        except Exception as error:  # whatever the user's code raises
            self._fail(f"reading row {self.number} raised {type(error).__name__}: {error}", error)
        self.number, self.place = self.number + 1, self.place + 1
        try:
            return self.number - 1, plain_value(checked_row(row))
        except ValueError as error:
            self._fail(f"row {self.number - 1} {error}", error)

    def state(self) -> dict[str, Any]:
        """Return plain JSON from which `load_state` goes on. Raises ConfigError: the user's state is none."""
        own = None
        try:
            if hasattr(self._source, "state_dict"):
                own = json.loads(json.dumps(self._source.state_dict()))
        except Exception as error:  # whatever the user's code raises
            self._fail(f"its state_dict() is no JSON: {type(error).__name__}: {error}", error)
        return {"epoch": self.epoch, "place": self.place, "number": self.number, "own": own}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on behind the rows that were read when `state` was made."""
        self._open(state["epoch"], state["own"])
        while state["own"] is None and self.epoch == state["epoch"] and self.place < state["place"]:
            self.next_row()
        if self.epoch != state["epoch"]:
            self._fail(
                f"pass {state['epoch']} has fewer rows than the {state['place']} that were read of it; resume needs them"
            )
        self.place, self.number = state["place"], state["number"]


class StreamPrompts(LazySequence[Prompt]):
    """The first prompts of a stream, on which the checks try rewards; the run reads it anew. Raises ConfigError."""

    def __init__(self, reader: PromptReader, seed: int) -> None:
        self.reader, self.name, self.seed = reader, str(reader.rows.paths[0]), seed
        stream = RowStream(self.name, seed)
        rows = self.fitting(stream, CHECKED_ROWS)
        if (state := stream.state())["own"] is not None:
            stream.load_state(state)  # raises now, not in a resumed run
        prompts = [self.reader.make(*row) for row in rows]
        kinds = {prompt.reward: place for place, prompt in reversed([*enumerate(prompts)])}
        super().__init__(len(prompts), prompts.__getitem__, sorted(kinds.values()))

    def fitting(self, stream: RowStream, count: int) -> list[NumberedRow]:
        """Read the next `count` rows whose prompts fit into data.max_prompt_length. No row beyond them is read."""
        data, kept, dropped = self.reader.data, list[NumberedRow](), 0
        reads_images = image_format(self.reader.tokenizer) is not None
        while len(kept) < count:
            rows = [stream.next_row() for _ in range(count - len(kept))]
            questions = []
            for number, row in rows:
                try:
                    if has_images(row):
                        raise ValueError("has images, which a stream cannot have; write the rows to a file")
                    if reads_images and (empty := empty_images(row)):
                        raise ValueError(empty)
                    questions.append((number, self.reader.parsed(row)[0]))
                except ValueError as error:
                    raise ConfigError(f"data stream {self.name!r}: row {number}: {error}") from error
            fitting = [row for row, fits in zip(rows, self.reader.fit(questions), strict=True) if fits]
            kept, dropped = kept + fitting, len(rows) - len(fitting) + (0 if fitting else dropped)
            if (dropped and not data.filter_overlong_prompts) or dropped > ROWS_PER_CHUNK:
                raise ConfigError(
                    f"data stream {self.name!r}: {dropped} of the rows up to {rows[-1][0]} are longer than"
                    f" data.max_prompt_length={data.max_prompt_length} tokens; raise it"
                )
        return kept


def is_endless(prompts: Sequence[Prompt]) -> bool:
    """Tell whether these are the first prompts of a stream, or of a mixture with one: their number has no meaning."""
    return isinstance(prompts, StreamPrompts) or (
        isinstance(prompts, Mixture) and any(is_endless(source.prompts) for source in prompts.sources)
    )


def load_stream(data: DataConfig, path: Path, source: str | None, *settings: Any) -> StreamPrompts:
    """Open a stream. `settings`: the other fields of a PromptReader behind `rows`. Raises ConfigError."""
    task = get_task(data.task)
    return StreamPrompts(PromptReader(data, task, StreamRows(path, source or task.name), *settings), data.seed)


class StreamSampler(Sampler[Prompt]):
    """The prompts of a stream, in its order. A cursor is a place in it, and is read once, in order."""

    def __init__(self, prompts: StreamPrompts, batch_size: int, share: FirstRankShare = alone) -> None:
        super().__init__(prompts, batch_size, shuffle=False)
        self.prompts, self.share = prompts, share
        self._stream: RowStream | None = None  # of rank 0

    def _opened(self) -> RowStream:
        self._stream = self._stream or RowStream(self.prompts.name, self.prompts.seed)
        return self._stream

    def items_from(self, start: int, count: int, step: int = 0) -> list[Prompt]:
        """Read the next `count` prompts. Collective. Raises ConfigError on every rank."""
        rows = _of_first(self.share, lambda: self.prompts.fitting(self._opened(), count)) if count else []
        return [self.prompts.reader.make(*row) for row in rows]

    def epoch_at(self, cursor: int) -> float:
        return 0.0

    def state(self) -> dict[str, Any]:
        """Return the position in the stream. Collective."""
        return {"stream": _of_first(self.share, lambda: self._opened().state())}

    def load_state(self, state: dict[str, Any]) -> None:
        _of_first(self.share, lambda: self._opened().load_state(state["stream"]))


def _of_first(share: FirstRankShare, make: Callable[[], Any]) -> Any:
    """Return what `make` returns on rank 0. Its ConfigError is raised on every rank."""

    def attempt() -> tuple[Any, str]:
        try:
            return make(), ""
        except ConfigError as error:
            return None, str(error)

    value, problem = share(attempt)
    if problem:
        raise ConfigError(problem)
    return value
