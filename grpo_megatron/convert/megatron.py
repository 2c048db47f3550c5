"""A Megatron-Core distributed checkpoint as a source: converted, or written by training in any layout.

The tensors are read from the files chunk by chunk, without Megatron and without a model. contents.py reads the table of
contents and unpickles only torch's own records.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from grpo_megatron.convert import ConvertError, listing_error
from grpo_megatron.convert.archive import has_valid_checksum, locate_tensor
from grpo_megatron.convert.contents import read_contents
from grpo_megatron.convert.keys import Place, places, whole_shape
from grpo_megatron.convert.load_layout import tracked_folder
from grpo_megatron.convert.origin import Origin, read_origin
from grpo_megatron.convert.rows import megatron_runs
from grpo_megatron.convert.scalar_head import HeadRow, exported_text, head_rows, read_start
from grpo_megatron.convert.source import FLOATS, Source, dtype_name
from grpo_megatron.convert.span import ReusedMemory, Span
from grpo_megatron.models.families import architecture_of, read_config
from grpo_megatron.models.weights.table import Vocabulary, WeightRow
from grpo_megatron.reading.json_text import read_json

FORMAT_FILE, TRAINER_FILE = "metadata.json", "trainer.json"


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A stored part of a tensor. `offsets` and `sizes` include the stacked axes; `start` and `length` are bytes in the file."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    start: int
    length: int


class MegatronFolder(Source):
    """`folder` is a distributed checkpoint, or has one: in state/ a training step, or its critic/ or reward_model/, and in
    release/ or iter_*/ a folder of Megatron-LM.

    `hf` has config.json and the tokenizer, if the checkpoint does not. `family` None: that of the training run, or the one
    that config.json names. Raises ConvertError, which names every wrong tensor.
    """

    kind = "megatron"

    def __init__(self, folder: Path, hf: Path | None = None, family: str | None = None) -> None:
        super().__init__()
        self.folder = folder
        self.data_folder = folder
        if not (folder / FORMAT_FILE).exists():
            self.data_folder = tracked_folder(folder) or folder / "state"
        origin = read_origin(self.data_folder)
        self.hf_folder = self.tokenizer_folder = hf or self._find_hf(origin)
        try:
            self.config = read_config(self.hf_folder)
        except ValueError as error:
            raise ConvertError(f"{error}; name the Hugging Face folder with --hf") from error
        self._check_format()
        metadata = read_contents(self.data_folder / ".metadata")
        self._sizes = {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
        self.head = origin.head(set(self._sizes))
        if self.head is None:
            self.arch = architecture_of(self.config, family or origin.family())
        else:
            self._start = read_start(self.hf_folder, self.head, family)
            self.arch = self._start.arch
            self.head_rows = head_rows(2 if self.head == "process" else 1, has_bias=self._start.has_bias)
            self.tokenizer_folder = hf or self._find_tokenizer(origin)
        self._chunks: dict[str, list[_Chunk]] = {}
        for where, info in metadata.storage_data.items():
            if where.fqn in self._sizes:
                chunk = self._chunk_of(where, info)
                self._chunks.setdefault(where.fqn, []).append(chunk)
        self._where: dict[str, Place] = {}
        self._spans: dict[_Chunk, Span] = {}
        self._columns = ReusedMemory()
        self._owners = {name: (row, part) for row in self.rows for part, name in enumerate(row.hf)}
        self._check()
        self._layer_chunks = self._chunks_by_layer()

    def _find_hf(self, origin: Origin) -> Path:
        if (self.folder / "hf" / "config.json").exists():
            return self.folder / "hf"
        if (start := origin.start()) is None:
            raise ConvertError(
                f"{self.folder} has neither hf/config.json nor a {TRAINER_FILE} that names its model; give --hf FOLDER"
            )
        return start

    def _find_tokenizer(self, origin: Origin) -> Path:
        folder = origin.tokenizer() or self.hf_folder
        if not folder.is_dir():
            raise ConvertError(
                f"{str(folder)!r} has the tokenizer of the run, and is not there; name a folder with tokenizer and"
                " config.json with --hf"
            )
        return folder

    def _check_format(self) -> None:
        try:
            found = read_json(self.data_folder / FORMAT_FILE)
            backend, version = found["sharded_backend"], found["sharded_backend_version"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConvertError(
                f"{self.folder}: no Megatron-Core distributed checkpoint ({FORMAT_FILE}: {error})"
            ) from error
        if (backend, version) != ("torch_dist", 1):
            raise ConvertError(
                f"{self.data_folder}: format {backend} {version} is not supported (supported: torch_dist 1)"
            )

    def _chunk_of(self, where: Any, info: Any) -> _Chunk:
        stored = self._sizes[where.fqn].chunks
        sizes = next(tuple(c.sizes) for c in stored if where.offset is None or c.offsets == where.offset)
        offsets = tuple(where.offset) if where.offset is not None else (0,) * len(sizes)
        if Path(info.relative_path).name != info.relative_path:
            raise ConvertError(
                f"{self.data_folder}: {where.fqn} is in {info.relative_path!r} according to .metadata, outside the folder"
            )
        return _Chunk(where.fqn, offsets, sizes, self.data_folder / info.relative_path, info.offset, info.length)

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        problems: list[str] = []
        used: set[str] = set()
        for row in self.rows:
            place = next((p for p in places(row, self.arch) if p.key in self._sizes), None)
            if place is None:
                problems.append(f"missing {row.megatron}")
                continue
            used |= {p.key for p in places(row, self.arch)}
            self._where[row.megatron] = place
            problems += self._wrong_shape(row, place)
        of_model = {key for key in self._sizes if key.startswith(("decoder.", "embedding.", "output_layer.", "score."))}
        problems += [f"unexpected {key}" for key in sorted(of_model - used)]
        for path, end in self._ends().items():
            size = path.stat().st_size if path.exists() else -1
            if size < end:
                problems.append(
                    f"missing file {path.name}" if size < 0 else f"{path.name} is truncated: {size} of {end} bytes"
                )
        if problems:
            raise listing_error(
                f"{self.folder} does not hold the model of {self.hf_folder / 'config.json'}:", _unique(problems)
            )
        self.num_files = len(self._ends())
        self.dtypes = {}
        for row in self.rows:
            dtype = self._sizes[self._where[row.megatron].key].properties.dtype
            self.dtypes.update(dict.fromkeys(row.hf, dtype))
        wrong = {d for d in self.dtypes.values() if d not in FLOATS.values()}
        if wrong:
            raise ConvertError(
                f"{self.folder}: dtype {', '.join(map(dtype_name, wrong))}; supported: {', '.join(FLOATS)}"
            )
        self.layout = self._layout()

    def _wrong_shape(self, row: WeightRow, place: Place) -> list[str]:
        size, wanted = tuple(self._sizes[place.key].size), (*place.stack, *whole_shape(row, self.arch))
        compared = size
        if isinstance(row, Vocabulary) and len(size) == len(wanted) and size[0] >= wanted[0]:
            compared = (wanted[0], *size[1:])  # without the padding of the layout that wrote it
        if compared != wanted:
            return [f"{place.key} has shape {list(size)}, expected {list(wanted)}"]
        volume = sum(torch.Size(chunk.sizes).numel() for chunk in self._chunks.get(place.key, []))
        if volume != torch.Size(size).numel():
            return [f"{place.key} has chunks of {volume} elements in total, expected {torch.Size(size).numel()}"]
        return []

    def _chunks_by_layer(self) -> dict[tuple[str, tuple[int, ...]], list[_Chunk]]:
        """(key, index along the stacked axes) -> the chunks that overlap it."""
        found: dict[tuple[str, tuple[int, ...]], list[_Chunk]] = {}
        for key, depth in {place.key: len(place.stack) for place in self._where.values()}.items():
            for chunk in self._chunks[key]:
                ranges = (range(o, o + s) for o, s in zip(chunk.offsets[:depth], chunk.sizes[:depth], strict=True))
                for index in itertools.product(*ranges):
                    found.setdefault((key, index), []).append(chunk)
        return found

    def _ends(self) -> dict[Path, int]:
        """File -> the byte after its last chunk: the least size that it can have."""
        ends: dict[Path, int] = {}
        for place in self._where.values():
            for chunk in self._chunks.get(place.key, []):
                ends[chunk.path] = max(ends.get(chunk.path, 0), chunk.start + chunk.length)
        return ends

    def _layout(self) -> str:
        cut = Counter(len(self._chunks[p.key]) // max(1, torch.Size(p.stack).numel()) for p in self._where.values())
        objects = "with optimizer" if any(key.startswith("optimizer") for key in self._sizes) else "weights only"
        return f"{self.num_files} files, {objects}, up to {max(cut)} chunks per tensor; loads in any layout"

    # -- reading -------------------------------------------------------------------------------------------------------

    def config_text(self, dtype: torch.dtype) -> bytes:
        return super().config_text(dtype) if self.head is None else exported_text(self._start)

    def fill(self, name: str, first: int, last: int, out: Tensor) -> None:
        row, part = self._owners[name]
        if isinstance(row, HeadRow):
            out.zero_()
            if last == row.num_labels:
                self._fill(self._where[row.megatron], 0, 1, out[-1:])
            return
        done = 0
        for low, high in megatron_runs(row, self.arch, part, first, last):
            self._fill(self._where[row.megatron], low, high, out[done : done + high - low])
            done += high - low

    def _fill(self, place: Place, first: int, last: int, out: Tensor) -> None:
        """Read rows of a Megatron tensor of all ranks from the chunks that overlap them."""
        depth = len(place.stack)
        filled = 0
        for chunk in self._layer_chunks.get((place.key, place.index), []):
            low, high = chunk.offsets[depth], chunk.offsets[depth] + chunk.sizes[depth]
            a, b = max(first, low), min(last, high)
            if a >= b:
                continue
            inner = tuple(
                slice(o, o + s) for o, s in zip(chunk.offsets[depth + 1 :], chunk.sizes[depth + 1 :], strict=True)
            )
            target = out[(slice(a - first, b - first), *inner)]
            span, start = self._rows_of(chunk, place.index)
            if target.is_contiguous():
                span.read_into(start + a - low, start + b - low, target)
            else:  # columns of a tensor-parallel rank
                columns = self._columns.tensor(tuple(target.shape), span.dtype)
                span.read_into(start + a - low, start + b - low, columns)
                target.copy_(columns)
            filled += target.numel()
        if filled != out.numel():
            raise ConvertError(
                f"{self.folder}: the chunks of {place.key} leave gaps or overlap at rows {first} to {last}"
            )

    def _rows_of(self, chunk: _Chunk, index: tuple[int, ...]) -> tuple[Span, int]:
        """A chunk, which may span several layers (and experts), as rows; and the row at which this layer begins."""
        span = self._span(chunk)
        flat = 0
        for i, offset, size in zip(index, chunk.offsets, chunk.sizes, strict=False):
            flat = flat * size + i - offset
        tail = chunk.sizes[len(index) + 1 :]
        rows = math.prod(chunk.sizes[: len(index) + 1])
        return dataclasses.replace(span, shape=(rows, *tail)), flat * chunk.sizes[len(index)]

    def _span(self, chunk: _Chunk) -> Span:
        if chunk not in self._spans:
            dtype = self._sizes[chunk.key].properties.dtype
            self._spans[chunk] = locate_tensor(chunk.path, chunk.start, chunk.length, chunk.sizes, dtype)
        return self._spans[chunk]

    def check_content(self) -> bool:
        """Compare every chunk's checksum, which finds flipped bits without a manifest."""
        if self.hf_folder == self.folder / "hf":
            raise ConvertError(
                f"{self.folder} has no manifest.json any more, and no other checksums; --no-hashes reads it unchecked"
            )
        problems = [
            f"{chunk.path.name}: the checksum of {key} at byte {chunk.start} differs"
            for key in {place.key: None for place in self._where.values()}
            for chunk in self._chunks[key]
            if not has_valid_checksum(chunk.path, chunk.start, chunk.length, self._span(chunk))
        ]
        if problems:
            raise listing_error(f"{self.folder} is damaged:", problems)
        return True


def _unique(problems: list[str]) -> list[str]:
    return list(dict.fromkeys(problems))
