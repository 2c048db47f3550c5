"""ArrowRows: rows of Parquet and Arrow files, by pyarrow, which is optional (the extra `parquet`).

Arrow files are memory-mapped. A small Parquet file is decoded once. One of more than MAX_DECODED bytes is written once as
an Arrow file into the cache of the data (data/cache.py): a Parquet file can only be decoded by whole row groups, which may
be the whole file, and a step reads rows from all over it.

Values become what JSON has: dates are ISO texts, decimals are texts, bytes are base64 texts.
"""

from __future__ import annotations

import base64
import bisect
import datetime
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.data.cache import content_key, data_cache
from grpo_megatron.reading import ReadError, check_regular

ARROW_SUFFIXES = (".parquet", ".arrow")
MAX_DECODED = 1 << 26  # bytes of a Parquet file, uncompressed, that a rank keeps decoded
ROWS_PER_BATCH = 1024


class ArrowRows:
    """`batches`: record batches of pyarrow, in order."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = [batch for batch in batches if batch.num_rows]
        self._ends = list(itertools.accumulate(batch.num_rows for batch in self._batches))
        self._is_plain = bool(self._batches) and all(_gives_plain(field.type) for field in self._batches[0].schema)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def rows(self, start: int, stop: int) -> Iterator[Any]:
        for index in range(bisect.bisect_right(self._ends, start), len(self._ends)):
            batch, first = self._batches[index], self._ends[index] - self._batches[index].num_rows
            if first >= stop:
                return
            low, high = max(start - first, 0), min(stop - first, batch.num_rows)
            for begin in range(low, high, ROWS_PER_BATCH):  # a batch may be the whole file
                values = batch.slice(begin, min(ROWS_PER_BATCH, high - begin)).to_pylist()
                yield from values if self._is_plain else map(_plain, values)

    def place(self, number: int) -> str:
        return f"row {number}"


def open_arrow(path: Path) -> ArrowRows:
    """The rows of a .parquet or .arrow file. Raises ConfigError without pyarrow, ReadError, OSError."""
    check_regular(path)
    try:
        import pyarrow as pa
    except ImportError:
        raise ConfigError(
            f"data file {str(path)!r} needs pyarrow, which is not installed: pip install pyarrow"
        ) from None
    try:
        return ArrowRows(_mapped(path) if path.suffix == ".arrow" else _batches_of_parquet(path))
    except pa.ArrowInvalid as error:
        raise ReadError(f"is no {path.suffix[1:]} file that can be read ({str(error).partition(chr(10))[0]})") from None


def _mapped(path: Path) -> list[Any]:
    """The batches of an Arrow file; `datasets` writes the stream format, others the file format."""
    import pyarrow as pa

    source = pa.memory_map(str(path))
    try:
        reader = pa.ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        reader = pa.ipc.open_stream(source)
    batches: list[Any] = reader.read_all().to_batches()
    return batches


def _batches_of_parquet(path: Path) -> list[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    metadata = file.metadata
    size = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    if size <= MAX_DECODED:
        small: list[Any] = file.read().to_batches()
        return small

    def convert(target: Path) -> None:
        with pa.ipc.new_file(str(target), file.schema_arrow) as writer:
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH):
                writer.write_batch(batch)

    def is_whole(target: Path) -> bool:
        try:
            return sum(batch.num_rows for batch in _mapped(target)) == metadata.num_rows
        except (pa.ArrowInvalid, OSError):
            return False

    return _mapped(data_cache().file(f"{content_key(path)}.arrow", convert, is_whole))


def _gives_plain(kind: Any) -> bool:
    """Whether pyarrow's values of this type are those of JSON already, so that no value needs a look."""
    from pyarrow import types

    if types.is_struct(kind):
        return all(_gives_plain(field.type) for field in kind)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _gives_plain(kind.value_type)
    is_text = types.is_string(kind) or types.is_large_string(kind)
    is_number = types.is_integer(kind) or types.is_float32(kind) or types.is_float64(kind)
    return is_text or is_number or types.is_boolean(kind) or types.is_null(kind)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):  # an entry of a map
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value)
