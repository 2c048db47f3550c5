"""TokenCache: token ids of the rows of a data set, which the survey makes once for all ranks, runs and draws.

On disk there is one entry per chunk of the survey (data/cache.py), little-endian: for each row its number of ids (uint32), a
crc32 of its number and ids (uint32) and the place of its ids in the file (uint64), then all ids (int32). A draw reads 16
bytes and the ids of one row in 10 us, where rendering and tokenising take 150 us (measured: GSM8K, Qwen's tokenizer). A row that
does not match its crc32 counts as absent.

Small data sets keep their ids in memory. Large ones without a key, as those of tasks in Python, keep none.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np

from grpo_megatron.data import survey
from grpo_megatron.data.cache import DIGEST, data_cache

MAX_TOKEN_BYTES = 1 << 30  # of one data set on disk: 1.8 million prompts of 150 tokens
RECORD = struct.Struct("<IIQ")


class TokenCache:
    """Of `rows` rows. `key` is that of their survey; None: in memory."""

    def __init__(self, key: str | None, rows: int) -> None:
        self._folder, self._per_chunk = None if key is None else f"tokens-{key}", survey.ROWS_PER_CHUNK
        self._share = MAX_TOKEN_BYTES // -(-rows // self._per_chunk)
        self._kept: dict[int, bytes] = {}

    @classmethod
    def of(cls, key: str | None, rows: int) -> TokenCache | None:
        """None where no ids are kept: see the header."""
        if rows < survey.MIN_CACHED:
            return cls(None, rows)
        return cls(key, rows) if key else None

    def store(self, first: int, encoded: Sequence[Sequence[int]]) -> None:
        """Keep the ids of a chunk's rows, of which `first` is the first.

        Each chunk has an equal share of MAX_TOKEN_BYTES, and none is stored that exceeds it. So the bound holds whichever
        processes write.
        """
        ids = [np.array(row, "<i4").tobytes() for row in encoded]
        if self._folder is None:
            self._kept.update(enumerate(ids, first))
            return
        places = np.cumsum([DIGEST + RECORD.size * len(ids), *map(len, ids)]).tolist()
        if places[-1] <= self._share:
            records = [
                RECORD.pack(len(own) // 4, _check(row, own), place)
                for row, (own, place) in enumerate(zip(ids, places, strict=False), first)
            ]
            data_cache().write(self._entry(first), b"".join(records + ids))

    def find(self, row: int) -> tuple[int, ...] | None:
        """The ids of a row; None where they are not kept, or were damaged."""
        own = self._kept.get(row) if self._folder is None else self._read(row)
        return None if own is None else tuple(np.frombuffer(own, "<i4").tolist())

    def _read(self, row: int) -> bytes | None:
        try:
            with (data_cache().folder / self._entry(row)).open("rb", buffering=0) as file:
                file.seek(DIGEST + RECORD.size * (row % self._per_chunk))
                count, check, place = RECORD.unpack(file.read(RECORD.size))
                if 4 * count > self._share:
                    return None
                file.seek(place)
                own: bytes = file.read(4 * count)
        except (OSError, OverflowError, struct.error):
            return None
        return own if _check(row, own) == check else None

    def _entry(self, row: int) -> str:
        return f"{self._folder}/{row // self._per_chunk:06d}"


def _check(row: int, ids: bytes) -> int:
    return zlib.crc32(ids, zlib.crc32(row.to_bytes(8, "little")))
