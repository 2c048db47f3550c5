"""Rows of data files, by number, and their fields. A row that cannot be parsed is a ValueError in its place.

.jsonl         8 bytes per row are in memory: its offset
.arrow         memory-mapped
.parquet       row groups are decoded when their rows are read; the latest KEPT_BYTES stay in memory
.json, .csv    in memory, up to MAX_WHOLE bytes; the values of a .csv file are texts
a folder       the files of one split of a Hugging Face data set (`files_of_split`)
hub:...        the Arrow files of a data set of the Hub at a commit (storage/hub.py)
"""

from __future__ import annotations

import base64
import bisect
import contextlib
import csv
import datetime
import glob
import hashlib
import itertools
import json
import logging
import os
import re
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from grpo_megatron.config import ConfigError
from grpo_megatron.config.problems import ProblemList
from grpo_megatron.data.images import ImageFormat, empty_images, flat_message, has_images
from grpo_megatron.imports import collection_paused
from grpo_megatron.registry import FUNCTION
from grpo_megatron.storage.hub import HUB_SET, data_files
from grpo_megatron.types import PromptImage
from grpo_megatron.untrusted import (
    ReadError,
    check_regular,
    cut,
    parse_json,
    path_problem,
    read_json,
    reason_of,
    shown,
    stand_in,
    surrogate_problem,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

TASK_FILES = ("task.toml", "task.yaml")  # of a task folder (data/folders.py)
FORMATS = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
MAX_ROW = 1 << 22  # bytes of a line, and characters of a field: a text of a million tokens
MAX_WHOLE = 1 << 29  # bytes of a file that is read as a whole
KEPT_BYTES = 1 << 32  # bytes of decoded Parquet row groups that a process keeps
MAX_GROUP = 1 << 31  # decoded bytes of one row group: a file of a kilobyte may repeat one value a million times
LARGE_GROUP = 1 << 26  # bytes of a row group whose decoding for a single row takes a noticeable time
ROWS_PER_BATCH = 1024  # rows of an Arrow file that become Python objects at once
BATCH_BYTES = 1 << 26  # of these rows; one row may have more
ROWS_PER_CHUNK = 8192  # rows that are checked at once
SHOWN_FROM = 8  # chunks from which on a progress bar is shown
SHOWN_PROBLEMS = 5  # wrong rows of a file that a message shows
BOM = b"\xef\xbb\xbf"

# -- Fields of a row. The readers raise ValueError with the field's name -------------------------------------------------

Messages = list[dict[str, Any]]  # [{"role": "user", "content": "..."}, ...]
Question = str | Messages


class Base64(str):
    """The text of a binary value: an image may be one, a prompt or an answer may not."""


def text_field(row: dict[str, Any], field: str, empty: bool = False) -> str:
    """Read the string `row[field]`. Raises ValueError when it is missing, of another type, or blank (unless `empty`)."""
    value = row.get(field)
    if not isinstance(value, str):
        if field not in row:
            raise missing_field([field], row)
        raise ValueError(f"field {field!r} is {type_name(value)}, not a string")
    if isinstance(value, Base64):
        raise ValueError(f"field {field!r} is binary, not a string; write the column as strings")
    if len(value) > MAX_ROW:
        raise ValueError(f"field {field!r} has {len(value):,} characters; at most {MAX_ROW:,} are read")
    if problem := surrogate_problem(value):
        raise ValueError(f"field {field!r}: {problem}")
    if not empty and not value.strip():
        raise ValueError(f"field {field!r} is empty")
    return value


def missing_field(fields: Sequence[str], row: dict[str, Any]) -> ValueError:
    """Make the error for a row that has none of `fields`."""
    shown = ", ".join(map(repr, dict.fromkeys(fields)))
    what = f"field {shown} is missing" if len(fields) == 1 else f"none of the fields {shown} is there"
    return ValueError(f"{what} (fields: {', '.join(map(repr, row)) or 'none'})"[:300])


def type_name(value: Any) -> str:
    """Name the type of a JSON value, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", type(None): "null", int: "a number", float: "a number"}
    names |= {bool: "true or false"}
    return names.get(type(value), type(value).__name__)


def read_question(row: dict[str, Any], field: str = "prompt") -> Question:
    """`row[field]`: text, or chat messages that do not end with the assistant's turn. Raises ValueError."""
    if not isinstance(row.get(field), list):
        return text_field(row, field)
    nested = len(row[field]) == 1 and isinstance(row[field][0], list)  # BFCL: a list of messages per turn, here of one
    messages: list[Any] = [*map(flat_message, row[field][0] if nested else row[field])]
    if not messages:
        raise ValueError(f"field {field!r} is empty")
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError(f"field {field!r}: a message must be an object with role and content")
        text_field(message, "role")
        text_field(message, "content")
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"field {field!r} ends with the assistant's turn; the policy writes the response")
    return messages


def question_text(question: Question) -> str:
    """Write the question as text; of a chat, the contents of its messages."""
    if isinstance(question, str):
        return question
    return "\n\n".join(message["content"] for message in question)


def problem_digest(question: Question, answer: str, images: Sequence[Mapping[str, Any]] = ()) -> str:
    """Identify a problem in data files, rollout files and evaluations: 32 hexadecimal digits.

    Row numbers change when a file is filtered, and an evaluation may render the same question by another template.
    The digest is equal for the same question as text and as a chat of one message. `images`: the facts of a row's images,
    of which other rows may ask the same.
    """
    content = json.dumps([question_text(question), answer, *(image["name"] for image in images)])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


# -- Files -------------------------------------------------------------------------------------------------------------


class RowFile:
    """The rows of one file."""

    def __len__(self) -> int:
        raise NotImplementedError

    def rows(self, start: int, stop: int) -> Iterator[Any]:
        """Yield the values of rows [start, stop) in order; a ValueError for a row that cannot be parsed. Raises ConfigError."""
        raise NotImplementedError

    def place(self, number: int) -> str:
        """Name the place of a row, for messages: "line 17"."""
        return f"row {number}"


class LineFile(RowFile):
    """A file with one JSON value per line, of at most `max_row` bytes. Blank lines are no rows. Raises ReadError, OSError.

    A file that changes while it is in use raises ConfigError: the offsets would point into other rows.
    """

    def __init__(self, path: Path, max_row: int = MAX_ROW) -> None:
        check_regular(path)
        self.path, self._max_row, self._identity = path, max_row, _identity(os.stat(path))
        self._starts = array("q")
        with path.open("rb") as file:
            offset, begins = file.seek(3 if file.read(3) == BOM else 0), True
            while line := file.readline(max_row):
                if begins and (len(line) == max_row or not line.isspace()):
                    self._starts.append(offset)
                begins = line.endswith(b"\n")
                offset += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def rows(self, start: int, stop: int) -> Iterator[Any]:
        for line in self._lines(start, stop):
            try:
                if len(line) > self._max_row:
                    raise ReadError(f"has more than {self._max_row:,} bytes, the most that are read")
                value = parse_json(line)
            except ReadError as error:
                value = error
            yield value

    def place(self, number: int) -> str:
        with self.path.open("rb") as file:
            count, left = 1, self._starts[number]
            while block := file.read(min(1 << 20, left)):
                count, left = count + block.count(b"\n"), left - len(block)
        return f"line {count}"

    def line(self, number: int) -> str:
        """Read a row as it is written."""
        return next(self._lines(number, number + 1)).decode()

    def _lines(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the lines of rows; of one that is too long, its beginning."""
        with self.path.open("rb") as file:
            if _identity(os.fstat(file.fileno())) != self._identity:
                raise ConfigError(f"data file {str(self.path)!r} was changed while it was in use; start again")
            for number in range(start, stop):
                file.seek(self._starts[number])
                yield file.readline(self._max_row + 1).removesuffix(b"\n")


class ListFile(RowFile):
    """Rows in memory; `places` where they are not numbered by "row"."""

    def __init__(self, rows: Sequence[Any], places: Sequence[str] | None = None) -> None:
        self._rows, self._places = rows, places

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, start: int, stop: int) -> Iterator[Any]:
        return iter(self._rows[start:stop])

    def place(self, number: int) -> str:
        return self._places[number] if self._places else super().place(number)


class ArrowPart(RowFile):
    """A table or record batch of pyarrow with `size` rows.

    Values become what JSON has: dates are ISO texts, decimals are texts, bytes are base64 texts.
    """

    def __init__(self, path: Path, size: int, load: Callable[[], Any]) -> None:
        self._path, self._size, self._load = path, size, load

    def __len__(self) -> int:
        return self._size

    def rows(self, start: int, stop: int) -> Iterator[Any]:
        while start < stop:
            with _readable(self._path):
                table = self._load()
                count = min(ROWS_PER_BATCH, stop - start, 1 + BATCH_BYTES * len(table) // (table.nbytes + 1))
                rows = table.slice(start, count)
                rows.validate(full=True)  # a wrong offset would end the process
                values = rows.to_pylist()
            yield from map(plain_value, values)
            start += count


class JoinedRows(RowFile):
    """Several files, or parts of one, under one numbering."""

    def __init__(self, files: Sequence[RowFile], *, are_shards: bool = True) -> None:
        self.files, self._are_shards = files, are_shards
        self._starts = [0, *itertools.accumulate(map(len, files))]

    def __len__(self) -> int:
        return self._starts[-1]

    def rows(self, start: int, stop: int) -> Iterator[Any]:
        while start < stop:
            file, row = self.locate(start)
            end = min(stop, self._starts[file + 1])
            yield from self.files[file].rows(row, row + end - start)
            start = end

    def place(self, number: int) -> str:
        file, row = self.locate(number)
        return f"shard {file}, {self.files[file].place(row)}" if self._are_shards else super().place(number)

    def locate(self, number: int) -> tuple[int, int]:
        """(file, row in the file) of a row."""
        file = bisect.bisect_right(self._starts, number) - 1
        return file, number - self._starts[file]


def open_rows(path: Path) -> RowFile:
    """Open the rows of a file, or of a folder with one split. Raises ConfigError: not there, unreadable, without rows."""
    with _readable(path):
        opened = [_open(file) for file in files_of_split(path)]
    rows = opened[0] if len(opened) == 1 else JoinedRows(opened)
    if not len(rows):
        raise ConfigError(f"data file {str(path)!r} has no rows")
    return rows


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn the errors of reading a file into a ConfigError with its name. pyarrow raises many types."""
    try:
        yield
    except ConfigError:
        raise
    except ReadError as error:
        raise ConfigError(f"data file {shown(str(path))} {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read data file {shown(str(path))}: {reason_of(error)}") from error
    except Exception as error:
        if path.suffix not in (".parquet", ".arrow"):
            raise
        reason = cut(str(error).partition("\n")[0])
        raise ConfigError(
            f"data file {shown(str(path))} is no {path.suffix[1:]} file that can be read ({reason})"
        ) from error


def _open(path: Path) -> RowFile:
    if folders := [str(folder.absolute()) for folder in task_folders(path)]:
        return ListFile([{"folder": folder} for folder in folders], folders)
    if path.suffix not in FORMATS:
        is_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(path)) and not path.parent.exists()
        if is_stream(path):
            raise ConfigError(
                f"data stream {str(path)!r}: it must be the only one in data.train_files, or of a source in data.sources"
            )
        fetch = f"; as an id of the Hub, write hub:{path}/SPLIT@COMMIT"
        what = "" if path.exists() else f"No such file or folder{fetch if is_id else ''}; "
        raise ConfigError(f"data file {str(path)!r}: {what}the name of a file must end with {' or '.join(FORMATS)}")
    if str(path).startswith(("http:/", "https:/")):
        raise ConfigError(f"data file {str(path)!r}: a run downloads no data; fetch the file, and name the copy")
    if glob.has_magic(str(path)) and not path.exists():
        raise ConfigError(f"data file {shown(str(path))}: no file matches this pattern")
    check_regular(path)
    if other := stand_in(path):
        raise ReadError(f"is {other}")
    if path.suffix == ".jsonl":
        return LineFile(path)
    if path.suffix in (".parquet", ".arrow"):
        return _open_arrow(path)
    if (size := path.stat().st_size) > MAX_WHOLE:
        raise ReadError(
            f"has {size:,} bytes; a {path.suffix} file is read into memory, so at most {MAX_WHOLE:,} are read: write it as"
            " .jsonl or .parquet, whose rows are read one by one"
        )
    if path.suffix == ".csv":
        return _open_table(path)
    rows = parse_json(path.read_bytes().removeprefix(BOM))
    if not isinstance(rows, list):
        raise ReadError(f"must be a list of objects, not {type_name(rows)}")
    return ListFile(rows)


def _open_table(path: Path) -> ListFile:
    """A table with a header (RFC 4180)."""
    csv.field_size_limit(MAX_ROW)
    rows: list[Any] = []
    places = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise ReadError(f"has a column twice in its header: {', '.join(map(repr, header))}")
            for cells in filter(None, reader):
                is_whole = len(cells) == len(header)
                problem = f"has {len(cells)} cells, and the header has {len(header)}"
                rows.append(dict(zip(header, cells, strict=True)) if is_whole else ReadError(problem))
                places.append(f"line {reader.line_num}")
        except csv.Error as error:
            raise ReadError(f"is no CSV ({error} at line {reader.line_num})") from None
        except UnicodeDecodeError:
            raise ReadError("is not UTF-8") from None
    return ListFile(rows, places)


def _open_arrow(path: Path) -> JoinedRows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix == ".parquet":
        file = pq.ParquetFile(path, memory_map=True)
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        for number, group in enumerate(groups):
            _check_group(number, group.total_byte_size)
        parts = [
            ArrowPart(path, group.num_rows, partial(_row_groups.read, file, number))
            for number, group in enumerate(groups)
        ]
        return JoinedRows(parts, are_shards=False)
    source = pa.memory_map(str(path))
    try:
        reader = pa.ipc.open_file(source)
    except pa.ArrowInvalid:  # `datasets` writes the stream format
        source.seek(0)
        reader = pa.ipc.open_stream(source)
    batches = reader.read_all().to_batches()
    return JoinedRows([ArrowPart(path, batch.num_rows, partial(batch.slice, 0)) for batch in batches], are_shards=False)


def _check_group(number: int, size: int) -> None:
    if size > MAX_GROUP:
        raise ReadError(
            f"has {size:,} bytes or more in row group {number} when it is decoded; at most {MAX_GROUP:,} are accepted: write it"
            " with smaller row groups (pyarrow: write_table(table, path, row_group_size=1000)), or as .jsonl"
        )


def _decoded(file: Any, number: int) -> Any:
    """Decode a row group in batches: a value that is repeated a million times is noticed before it fills the memory."""
    import pyarrow as pa

    group = file.metadata.row_group(number)
    # A row has at most all bytes of its columns, so a batch stays below MAX_GROUP, unless a list repeats one value.
    size = max(1, min(ROWS_PER_BATCH, MAX_GROUP // max(1, group.total_byte_size)))
    batches, decoded = [], 0
    for batch in file.iter_batches(size, row_groups=[number], use_threads=False):
        decoded += batch.get_total_buffer_size()
        _check_group(number, decoded)
        batches.append(batch)
    return pa.Table.from_batches(batches, file.schema_arrow)


class _RowGroups:
    """The decoded row groups of all Parquet files that were read last."""

    def __init__(self) -> None:
        self._tables: dict[tuple[Any, int], Any] = {}  # (open file, group) -> table; the latest read is the last one
        self._bytes, self._has_warned, self._lock = 0, False, threading.Lock()

    def read(self, file: Any, group: int) -> Any:
        """Get a decoded row group. Rank 0 hashes images in threads (checks/resume.py)."""
        with self._lock:
            return self._read(file, group)

    def _read(self, file: Any, group: int) -> Any:
        key = (file, group)
        table = self._tables.pop(key, None)
        if table is None:
            table = _decoded(file, group)
            self._bytes += table.nbytes
        self._tables[key] = table
        while self._bytes > KEPT_BYTES and len(self._tables) > 1:
            self._bytes -= self._tables.pop(next(iter(self._tables))).nbytes
            if table.nbytes > LARGE_GROUP and not self._has_warned:
                self._has_warned = True
                text = "a row that is read decodes its Parquet row group of %d MiB, because all together exceed %d MiB; write"
                text += " the files with small row groups (pyarrow: write_table(table, path, row_group_size=1000)), or .jsonl"
                logger.warning(text, table.nbytes >> 20, KEPT_BYTES >> 20)
        return table


_row_groups = _RowGroups()


def plain_value(value: Any) -> Any:
    """Make a value of JSON of one of pyarrow or of Python: dates are ISO texts, bytes base64 texts."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {key: plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):  # a tuple is an entry of a map
        return [plain_value(item) for item in value]
    if isinstance(value, bytes):
        return Base64(base64.b64encode(value).decode())
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else str(value)


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


# -- Folders of Hugging Face data sets ---------------------------------------------------------------------------------

SHARD = re.compile(r"(?P<split>[A-Za-z0-9_.]+?)(-\d{5}-of-\d{5}(-[0-9a-f]+)?)?\.(parquet|arrow|jsonl|json|csv)")
STATE, SPLITS = "state.json", "dataset_dict.json"
OTHER_FILES = ("dataset_info", "dataset_infos", "state", "dataset_dict")  # .json files that hold no rows


def files_of_split(path: Path) -> list[Path]:
    """List the files with the rows of `path`: itself, or those of a folder's only split, or of the split that it names.

        FOLDER of `Dataset.save_to_disk`        state.json names its .arrow files; it is one split
        FOLDER of `DatasetDict.save_to_disk`    one such folder per split: FOLDER/train
        FOLDER as on the Hub                    train-00000-of-00002.parquet, ..., there or in FOLDER/data: FOLDER/train

    Raises ConfigError: no such file or folder, or a folder with several splits. Raises ReadError, OSError.
    """
    if str(path).startswith(HUB_SET):
        return data_files(str(path))
    if task_folders(path):
        return [path]
    is_file = path_problem(path) or path.suffix in FORMATS or (path.exists() and not path.is_dir())
    if is_file or not (path.is_dir() or path.parent.is_dir()):
        return [path]
    if not path.exists():
        splits = _splits_of(path.parent)
        if path.name in splits or not splits or path.suffix or path.parent == Path():
            return splits.get(path.name, [path])  # a missing file is reported where it is opened
        raise ConfigError(
            f"data folder {shown(str(path.parent))} has no split {path.name!r}; it has {', '.join(sorted(splits))}"
        )
    splits = _splits_of(path)
    if not splits:
        raise ConfigError(
            f"data folder {shown(str(path))} holds no data set: neither {STATE} or {SPLITS} of `datasets`, nor files such as"
            " train-00000-of-00001.parquet; name a file, or a pattern"
        )
    if len(splits) > 1:
        names = ", ".join(str(path / name) for name in sorted(splits))
        raise ConfigError(f"data folder {shown(str(path))} has several splits; name one of {names}")
    return next(iter(splits.values()))


def task_folders(path: Path) -> list[Path]:
    """List the task folders in a folder, in the order of their names, or itself, if it is one. Empty: it has none."""
    if path_problem(path) or not path.is_dir():
        return []
    folders = [path, *sorted(entry for entry in path.iterdir() if entry.is_dir())]
    return [folder for folder in folders if any((folder / name).is_file() for name in TASK_FILES)]


def is_stream(path: Path) -> bool:
    """Tell whether a path of the config is the function of a stream, module:function (data/stream.py)."""
    return FUNCTION.fullmatch(str(path)) is not None and not path.exists()


def is_there(path: Path) -> bool:
    """Tell whether the file, folder or split exists. A stream, and a data set of the Hub, count as if they did."""
    if path_problem(path):
        return False
    if is_stream(path) or str(path).startswith(HUB_SET):
        return True
    return path.exists() or (path.parent.is_dir() and path.name in _splits_of(path.parent))


def _splits_of(folder: Path) -> dict[str, list[Path]]:
    """Find the splits of a folder: split -> its files, in order."""
    if (folder / STATE).is_file():
        state = read_json(folder / STATE)
        names = [entry.get("filename") for entry in state.get("_data_files") or []] if isinstance(state, dict) else []
        if not names or not all(isinstance(name, str) for name in names):
            raise ReadError(f"holds a {STATE} without _data_files, so it is no data set that was saved whole")
        return {folder.name: [folder / name for name in names]}
    if (folder / SPLITS).is_file():
        names = read_json(folder / SPLITS).get("splits", [])
        present = {name: _splits_of(folder / name) for name in names if (folder / name).is_dir()}
        return {name: splits[name] for name, splits in present.items() if name in splits}
    splits: dict[str, list[Path]] = {}
    for place in (folder / "data", folder):
        for file in sorted(place.glob(f"*{glob.escape('.')}*")) if place.is_dir() else []:
            match = SHARD.fullmatch(file.name)
            if match and match["split"] not in OTHER_FILES and file.is_file():
                splits.setdefault(match["split"], []).append(file)
        if splits:
            break
    return splits


# -- Several files under one numbering. A uid is "source/label/row number" ----------------------------------------------


class RowSet(JoinedRows):
    """The rows of several files. Raises ConfigError: no files, unreadable ones (all are named), or a file named twice."""

    def __init__(self, paths: Sequence[Path], source: str = "", images: ImageFormat | None = None) -> None:
        """`images`: how the model reads images. Without it, rows are given as they are, with images or without."""
        self._format, self.image_sizes = images, dict[int, list[tuple[int, int]]]()  # of rows that `parsed` has given
        self._image_digests: dict[int, list[bytes]] = {}
        if not paths:
            raise ConfigError("no data files; set data.train_files (data.val_files, sft.train_files)")
        self.paths, self.source = list(map(Path, paths)), source
        self.labels = distinct_labels(self.paths)
        problems = ProblemList()
        files = [problems.attempt("", open_rows, path) for path in self.paths]
        problems.raise_if_any()
        super().__init__([file for file in files if file is not None])

    def uid(self, number: int) -> str:
        """Identify a row over all runs that read a file of this name."""
        file, row = self.locate(number)
        return f"{self.source}/{self.labels[file]}/{row}"

    def row(self, number: int) -> dict[str, Any]:
        """Read a row that `parsed` has given."""
        with self._naming(number):
            return self._plain(number, self._raw(number))

    def images(self, number: int, places: Sequence[int]) -> tuple[PromptImage, ...]:
        """Decode the images of a row that `parsed` has given. `places`: of their first tokens. Decodes them at every call."""
        if self._format is None or number not in self.image_sizes:
            return ()
        with self._naming(number):
            return self._format.read(self._raw(number), self._folder(number), places, self._image_digests[number])

    def _raw(self, number: int) -> dict[str, Any]:
        return checked_row(next(self.rows(number, number + 1)))

    def _plain(self, number: int, row: dict[str, Any]) -> dict[str, Any]:
        if self._format is None or number not in self.image_sizes:
            return row
        return self._format.plain(row, self._folder(number), self.image_sizes[number])

    def _folder(self, number: int) -> Path:
        """The folder of the row's file. Its paths are relative to it."""
        path = self.paths[self.locate(number)[0]]
        return path if path.is_dir() else path.parent

    @contextlib.contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ConfigError(f"row {self.uid(number)}: {error}") from error

    def parsed(self, parse: Callable[[dict[str, Any]], T]) -> Iterator[list[tuple[int, T]]]:
        """(row number, `parse(row)`) of all rows, in chunks of ROWS_PER_CHUNK. `parse` raises ValueError for a wrong row.

        All rows are checked. Behind a wrong one no chunk is given any more, and the end raises ConfigError with all wrong
        rows. If the first chunk is all wrong, most likely by a wrong task, the others are not read.
        """
        problems: list[tuple[int, str]] = []
        for chunk in self._counted():
            start, stop = chunk * ROWS_PER_CHUNK, min((chunk + 1) * ROWS_PER_CHUNK, len(self))
            read = []
            with collection_paused():  # collections took 40 % of the time of a check (measured)
                for number, row in enumerate(self.rows(start, stop), start):
                    try:
                        content = checked_row(row)
                        if self._format is not None and has_images(content):
                            checked = self._format.check(content, self._folder(number))
                            self.image_sizes[number], self._image_digests[number] = checked
                        elif self._format is not None and (empty := empty_images(content)):
                            raise ValueError(empty)
                        read.append((number, parse(self._plain(number, content))))
                    except ValueError as error:
                        problems.append((number, str(error)))
            if chunk == 0 and not read and stop < len(self):
                raise self._wrong_rows(problems, stop)
            if not problems:
                yield read
        if problems:
            raise self._wrong_rows(problems, len(self))

    def _counted(self) -> Iterable[int]:
        """Count the chunks, with a progress bar on a terminal where there are many.

        A bar that is only disabled would leave a semaphore, of which Python complains when a rank ends at once.
        """
        chunks = range(-(-len(self) // ROWS_PER_CHUNK))
        if len(chunks) < SHOWN_FROM or not sys.stderr.isatty():
            return chunks
        return tqdm(chunks, "rows", unit=f" x {ROWS_PER_CHUNK} rows", leave=False)

    def _wrong_rows(self, problems: Sequence[tuple[int, str]], checked: int) -> ConfigError:
        """`problems`: (row number, message), in order, among the first `checked` rows."""
        texts = []
        for path, file, first in zip(self.paths, self.files, self._starts, strict=False):
            wrong = [(number - first, message) for number, message in problems if 0 <= number - first < len(file)]
            if wrong:
                lines = [f"  {file.place(number)}: {cut(message, 500)}" for number, message in wrong[:SHOWN_PROBLEMS]]
                more = [f"  and {len(wrong) - SHOWN_PROBLEMS} more"] if len(wrong) > SHOWN_PROBLEMS else []
                total = min(len(file), checked - first)
                of = f"the first {total}" if total < len(file) else f"{total}"
                of += f" row{'s' * (total > 1)} {'are' if len(wrong) > 1 else 'is'} wrong"
                texts.append("\n".join([f"data file {str(path)!r}: {len(wrong)} of {of}:", *lines, *more]))
        return ConfigError(*texts)


def checked_row(row: Any) -> dict[str, Any]:
    """Check that the row is an object. Raises ValueError, which for a row that cannot be parsed is the row itself."""
    if isinstance(row, dict):
        return row
    raise row if isinstance(row, ValueError) else ValueError(f"is {type_name(row)}, not an object")


def distinct_labels(paths: Sequence[Path]) -> list[str]:
    """Label each file by its name without extension. Raises ConfigError for a file that is named twice.

    Files of equal names get as many parent folders as tell them apart: a/train.jsonl and b/train.jsonl are "a.train" and
    "b.train".
    """
    full = [path.absolute() for path in paths]
    if twice := next((path for number, path in enumerate(full) if path in full[:number]), None):
        raise ConfigError(f"data file {str(twice)!r} is named twice; name it once")
    for length in range(1, max(len(path.parts) for path in full) + 1):
        stems = [path.stem.partition("@")[0] if HUB_SET in str(path) else path.stem for path in full]
        labels = [
            ".".join([*path.parts[-length:-1], stem]).replace("/", "") for path, stem in zip(full, stems, strict=True)
        ]
        if len(set(labels)) == len(labels):
            return labels
    return [".".join([*path.parts[1:-1], path.name]) for path in full]  # a.jsonl beside a.csv


def read_rows(path: Path | str, parse: Callable[[dict[str, Any]], T]) -> list[T]:
    """`parse(row)` of every row of a file or folder, in order. `parse` raises ValueError for a row that is wrong.

    Raises ConfigError (a ValueError) for an unreadable or empty file, and for wrong rows: the message has the first few with
    their lines, and the number of the others.
    """
    return [value for chunk in RowSet([Path(path)]).parsed(parse) for _, value in chunk]
