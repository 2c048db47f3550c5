"""A torch archive (a zip file that holds one tensor) at some offset of a file: where the elements of the tensor are."""

from __future__ import annotations

import functools
import io
import math
import os
import pickle
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.convert import ConvertError
from grpo_megatron.convert.span import Span, as_bytes, row_blocks

FRAMED_BYTES = 32 << 20  # larger tensors are not compared with `archive_frame`, which makes the whole archive in memory


class _View(io.RawIOBase):
    """A file object that shows only the bytes of one archive within a file."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning of the archive")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        self._file.seek(self._start + self._at)
        count = int(self._file.readinto(view[: max(0, min(len(view), self._length - self._at))]))
        self._at += count
        return count


def _data_entry(view: _View) -> zipfile.ZipInfo:
    with zipfile.ZipFile(view) as archive:
        found = [info for info in archive.infolist() if "/data/" in info.filename]
    if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"an archive of {len(found)} storages")
    return found[0]


def _data_start(view: _View, info: zipfile.ZipInfo) -> int:
    view.seek(info.header_offset + 26)  # lengths of name and extra field, then both, then the data
    name_length, extra_length = (int.from_bytes(view.read(2), "little") for _ in range(2))
    return info.header_offset + 30 + name_length + extra_length


@functools.lru_cache(maxsize=64)
def archive_frame(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """The bytes that torch.save writes before and after the elements of a tensor of this shape and dtype.

    Without checksums they do not depend on the elements, so that elements can be copied from file to file without torch.save.
    """
    checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # the manifest's sha256 is stronger
    try:
        whole = io.BytesIO()
        torch.save(torch.zeros(shape, dtype=dtype), whole)
    finally:
        torch.serialization.set_crc32_options(checksums)
    view = _View(whole, 0, len(whole.getbuffer()))
    start, count = _data_start(view, _data_entry(view)), math.prod(shape) * dtype.itemsize
    return bytes(whole.getbuffer()[:start]), bytes(whole.getbuffer()[start + count :])


def _is_framed(file: Any, start: int, length: int, frame: tuple[bytes, bytes]) -> bool:
    before, after = frame
    file.seek(start)
    if file.read(len(before)) != before:
        return False
    file.seek(start + length - len(after))
    return bool(file.read(len(after)) == after)


def locate_tensor(path: Path, start: int, length: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Span:
    """The elements of the archive. Only its structure is read. Raises ConvertError when it is damaged."""
    nbytes = math.prod(sizes) * dtype.itemsize
    try:
        with path.open("rb") as file:
            if nbytes <= FRAMED_BYTES:  # the common and fast case: the archive has exactly torch's bytes
                expected = archive_frame(sizes, dtype)
                if length == nbytes + sum(map(len, expected)) and _is_framed(file, start, length, expected):
                    return Span(path, start + len(expected[0]), dtype, sizes)
            view = _View(file, start, length)
            info = _data_entry(view)
            view.seek(0)
            tensor = torch.load(view, map_location="meta", weights_only=True)  # type: ignore[arg-type]
            if not isinstance(tensor, Tensor) or tensor.storage_offset() or tensor.nbytes != info.file_size:
                raise ValueError("the archive does not hold exactly one whole tensor")
            if tuple(tensor.shape) != sizes or not tensor.is_contiguous():
                raise ValueError(f"the archive holds a tensor of shape {list(tensor.shape)} instead of {list(sizes)}")
            offset = start + _data_start(view, info)
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise ConvertError(f"{path}: damaged at byte {start} ({str(error).splitlines()[0]})") from error
    return Span(path, offset, tensor.dtype, sizes)


def has_valid_checksum(path: Path, start: int, length: int, span: Span) -> bool:
    """Whether the archive's checksum agrees with its data. True as well when the writer left the checksum out."""
    with path.open("rb") as file:
        expected = _data_entry(_View(file, start, length)).CRC
    flat = replace(span, dtype=torch.uint8, shape=(span.nbytes,))
    crc = 0
    for first, last in row_blocks(flat.shape):
        crc = zlib.crc32(as_bytes(flat.rows(first, last)), crc)
    return not expected or crc == expected
