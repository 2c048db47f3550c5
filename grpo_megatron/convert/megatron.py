"""A Megatron-Core distributed checkpoint: read as a source (converted, or written by training in any layout), and written.

torch.distributed.checkpoint reads the stored chunks that overlap a tensor, without Megatron and without a model. Its table of
contents is a pickle, of which only plain data is accepted (models/weights/plain_data.py).
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils.serialization import config

from grpo_megatron.config import LoraConfig
from grpo_megatron.config.problems import counted
from grpo_megatron.convert import ConvertError, listing_error
from grpo_megatron.convert.layout import (
    Place,
    common_state,
    extra_state_keys,
    places,
    tracked_folder,
    whole_shape,
    written_places,
)
from grpo_megatron.convert.output import HashedFiles, Progress
from grpo_megatron.convert.source import (
    FLOATS,
    HeadRow,
    Source,
    dtype_name,
    exported_text,
    head_rows,
    read_start,
    row_blocks,
)
from grpo_megatron.data.images import write_processor
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import architecture_of, read_config
from grpo_megatron.models.heads.reward_folder import HEAD, HEAD_BIAS, HeadKind
from grpo_megatron.models.lora.table import PEFT_PREFIX, lora_rows
from grpo_megatron.models.weights import plain_data
from grpo_megatron.models.weights.table import Vocabulary, WeightRow
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.run_files import CRITIC_FILE, PAIRS_FILE, STEP_FILE
from grpo_megatron.untrusted import read_json

FORMAT_FILE = "metadata.json"
TORCH_DIST = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
FILE_BYTES = 4 << 30
OF_THE_MODEL = ("decoder.", "embedding.", "output_layer.", "score.", "visual.", PEFT_PREFIX)  # beginnings of its keys

# -- the training step that a checkpoint belongs to --------------------------------------------------------------------
# step_000020/state                 policy          beside trainer.json
# step_000020/critic/state          critic          beside critic.json
# step_000020/reward_model/state    reward_model    beside pairs.json

PartName = Literal["policy", "critic", "reward_model"]
MARK_FILES: dict[PartName, str] = {"policy": STEP_FILE, "critic": CRITIC_FILE, "reward_model": PAIRS_FILE}


@dataclass(frozen=True)
class Origin:
    """`folder` is the part's. `config` is the run's; empty where trainer.json cannot be read."""

    folder: Path
    part: PartName | None
    config: dict[str, Any]
    inputs: dict[str, Any]  # key of the config -> file -> size and sha256 (checks/resume.py)

    def start(self) -> Path | None:
        """Returns the Hugging Face folder that the model started from. None: the config does not say."""
        if self.part == "reward_model":
            return self._path("reward_model", "path")
        return (self._path("critic", "path") if self.part == "critic" else None) or self._path("model", "path")

    def tokenizer(self) -> Path | None:
        """Returns the folder whose tokenizer the run exports. None: the config does not say."""
        return self._path("model", "tokenizer_path") or self._path("model", "path")

    def family(self) -> str | None:
        """Returns `model.family`. None: the key is not set."""
        return self._text("model", "family")

    def dtype(self) -> str | None:
        """Returns `model.dtype`. None: the config does not say."""
        return self._text("model", "dtype")

    def lora(self) -> LoraConfig | None:
        """Returns the adapters that the model was trained with. None: all of its weights were trained."""
        section = self.config.get("critic" if self.part == "critic" else "actor")
        values = section.get("lora") if isinstance(section, dict) and self.part in ("policy", "critic") else None
        if not isinstance(values, dict) or values.get("rank") is None:
            return None
        return LoraConfig.model_validate({name: value for name, value in values.items() if name != "path"})

    def base_files(self) -> dict[str, dict[str, Any]]:
        """Returns name, size and sha256 of the files that the model started from, as the step records them, if it does."""
        key = "critic.path" if self.part == "critic" and self._text("critic", "path") else "model.path"
        return dict(self.inputs.get(key, {}))

    def head(self, keys: set[str]) -> HeadKind | None:
        """Returns the kind of scalar head of a checkpoint with these tensors. None: a language model. Raises ConvertError."""
        if self.part == "critic":
            return "value"
        if self.part == "reward_model":
            return "outcome"
        if HEAD not in keys:
            return None
        if HEAD_BIAS not in keys:
            return "outcome"
        if self.part == "policy":
            return "process"
        raise ConvertError(
            f"{self.folder} has neither {CRITIC_FILE} nor {STEP_FILE}: its scalar head may be of a critic or of a process"
            " reward model, which are exported differently; put back the file that the run wrote beside state/"
        )

    def _text(self, section: str, key: str) -> str | None:
        values = self.config.get(section)
        value = values.get(key) if isinstance(values, dict) else None
        return value if isinstance(value, str) else None

    def _path(self, section: str, key: str) -> Path | None:
        """Returns a path of the config, relative to the folder in which the run was started.

        That folder may not be the current one. It is found above the checkpoint where `trainer.output_dir` is relative too.
        """
        value, output_dir = self._text(section, key), self._text("trainer", "output_dir")
        if value is None or output_dir is None or Path(value).is_absolute():
            return None if value is None else Path(value)
        end = Path(output_dir).parts
        for folder in self.folder.resolve().parents:
            started_in = Path(*folder.parts[: len(folder.parts) - len(end)])
            if end and started_in.joinpath(*end) == folder and (started_in / value).is_dir():
                return Path(os.path.relpath(started_in / value))
        return Path(value)


def read_origin(data_folder: Path) -> Origin:
    """Find the origin of a checkpoint whose files are in `data_folder`."""
    folder = data_folder.parent if data_folder.name == "state" else data_folder
    part = next((part for part, mark in MARK_FILES.items() if (folder / mark).exists()), None)
    step = folder.parent if part in ("critic", "reward_model") else folder
    try:
        content = read_json(step / STEP_FILE)
        config, inputs = content["config"], (content.get("run") or {}).get("inputs")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        config = inputs = None
    return Origin(folder, part, *(value if isinstance(value, dict) else {} for value in (config, inputs)))


@dataclass(frozen=True)
class StoredFactor(WeightRow):
    """A factor of LoRA. It is stored whole, under PEFT's name."""

    shape: tuple[int, ...] = ()
    split_dim: ClassVar[int | None] = None

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return (self.shape,)


class MegatronFolder(Source):
    """`folder` is a distributed checkpoint, or has one: in state/ a training step, or its critic/ or reward_model/, and in
    release/ or iter_*/ a folder of Megatron-LM.

    `hf` has config.json and the tokenizer, if the checkpoint does not. `family` None: that of the training run, or the one
    that config.json names. Raises ConvertError, which names every wrong tensor.
    """

    kind = "megatron"

    def __init__(self, folder: Path, hf: Path | None = None, family: str | None = None) -> None:
        self.folder = self.data_folder = folder
        if not (folder / FORMAT_FILE).exists():
            self.data_folder = tracked_folder(folder) or folder / "state"
        self.origin = origin = read_origin(self.data_folder)
        self.lora = origin.lora()
        self.hf_folder = self.tokenizer_folder = hf or self._find_hf(origin)
        try:
            self.config = read_config(self.hf_folder)
        except ValueError as error:
            raise ConvertError(f"{error}; name the Hugging Face folder with --hf") from error
        self._check_format()
        try:
            contents = plain_data.read_table(self.data_folder / ".metadata")
        except StorageError as error:
            raise ConvertError(str(error)) from error
        self._sizes = {k: v for k, v in contents.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
        self._stored: dict[MetadataIndex, _StorageInfo] = contents.storage_data
        self._reader = FileSystemReader(self.data_folder)
        self._reader.set_up_storage_reader(contents, is_coordinator=True)
        self.head = origin.head(set(self._sizes))
        if self.head is None:
            self.arch = architecture_of(self.config, family or origin.family())
        else:
            self._start = read_start(self.hf_folder, self.head, family)
            self.arch = self._start.arch
            self.head_rows = head_rows(2 if self.head == "process" else 1, has_bias=self._start.has_bias)
            self.tokenizer_folder = hf or self._find_tokenizer(origin)
        self._where: dict[str, Place] = {}
        self._check()
        self._owners = {name: row for row in self.rows for name in row.hf}
        self._chunks = self._chunks_by_layer()
        self._last: dict[str, Tensor] = {}  # the Hugging Face tensors of the row that was read last

    def _find_hf(self, origin: Origin) -> Path:
        if (self.folder / "hf" / "config.json").exists():
            return self.folder / "hf"
        if (start := origin.start()) is None:
            raise ConvertError(
                f"{self.folder} has neither hf/config.json nor a {STEP_FILE} that names its model; give --hf FOLDER"
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
            metadata = read_json(self.data_folder / FORMAT_FILE)
            backend, version = metadata["sharded_backend"], metadata["sharded_backend_version"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"no Megatron-Core distributed checkpoint ({FORMAT_FILE}: {error})"
            raise ConvertError(f"{self.folder}: {what}") from error
        if (backend, version) != ("torch_dist", 1):
            raise ConvertError(
                f"{self.data_folder}: format {backend} {version} is not supported (supported: torch_dist 1)"
            )

    @property
    def rows(self) -> list[WeightRow]:
        """With `lora`, those of the factors: the step has no other weights, except a scalar head."""
        if self.lora is None:
            return super().rows
        factors = lora_rows(self.arch, self.lora).values()
        named = ((name, shape) for row in factors for name, shape in zip(row.hf, row.hf_shapes(self.arch), strict=True))
        return [*(StoredFactor(name, (name,), shape=shape) for name, shape in named), *self.head_rows]

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        problems: list[str] = []
        used: set[str] = set()
        for row in self.rows:
            known = places(row, self.arch)
            place = next((p for p in known if p.key in self._sizes), None)
            if place is None:
                problems.append(f"missing {row.megatron}")
                continue
            used |= {p.key for p in known}
            self._where[row.megatron] = place
            problems += self._wrong_shape(row, place)
        model_keys = {key for key in self._sizes if key.startswith(OF_THE_MODEL)}
        problems += [f"unexpected {key}" for key in sorted(model_keys - used)]
        ends: dict[str, int] = {}  # file -> the byte after its last chunk: the least size that it can have
        for info in self._used().values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            file = self.data_folder / name
            if Path(name).name != name:
                problems.append(f"{name!r} is outside the folder according to .metadata")
            elif not file.exists():
                problems.append(f"missing file {name}")
            elif (size := file.stat().st_size) < end:
                problems.append(f"{name} is truncated: {size} of {end} bytes")
        if problems:
            what = f"{self.folder} does not hold the model of {self.hf_folder / 'config.json'}:"
            raise listing_error(what, list(dict.fromkeys(problems)))
        stored = {row: self._sizes[self._where[row.megatron].key] for row in self.rows}
        self.dtypes = {name: sizes.properties.dtype for row, sizes in stored.items() for name in row.hf}
        if wrong := {d for d in self.dtypes.values() if d not in FLOATS.values()}:
            names = ", ".join(map(dtype_name, wrong))
            raise ConvertError(f"{self.folder}: dtype {names}; supported: {', '.join(FLOATS)}")
        self.num_files = len(ends)
        cut = (len(self._sizes[p.key].chunks) // max(1, torch.Size(p.stack).numel()) for p in self._where.values())
        objects = "with optimizer" if any(key.startswith("optimizer") for key in self._sizes) else "weights only"
        chunks = counted(max(cut), "chunk")
        self.layout = f"{counted(len(ends), 'file')}, {objects}, up to {chunks} per tensor; loads in any layout"

    def _wrong_shape(self, row: WeightRow, place: Place) -> list[str]:
        size, wanted = tuple(self._sizes[place.key].size), (*place.stack, *whole_shape(row, self.arch))
        compared = size
        if isinstance(row, Vocabulary) and len(size) == len(wanted) and size[0] >= wanted[0]:
            compared = (wanted[0], *size[1:])  # without the padding of the layout that wrote it
        if compared != wanted:
            return [f"{place.key} has shape {list(size)}, expected {list(wanted)}"]
        volume = sum(chunk.sizes.numel() for chunk in self._sizes[place.key].chunks)
        if volume != torch.Size(size).numel():
            return [f"{place.key} has chunks of {volume} elements in total, expected {torch.Size(size).numel()}"]
        return []

    def _chunks_by_layer(self) -> dict[Place, list[ChunkStorageMetadata]]:
        """Key and index along the stacked axes -> the chunks that overlap it. A search among all would be quadratic."""
        chunks: dict[tuple[str, tuple[int, ...]], list[ChunkStorageMetadata]] = {}
        for key, depth in {place.key: len(place.stack) for place in self._where.values()}.items():
            for chunk in self._sizes[key].chunks:
                ranges = (range(o, o + s) for o, s in zip(chunk.offsets[:depth], chunk.sizes[:depth], strict=True))
                for index in itertools.product(*ranges):
                    chunks.setdefault((key, index), []).append(chunk)
        return {place: chunks.get((place.key, place.index), []) for place in self._where.values()}

    def _used(self) -> dict[MetadataIndex, _StorageInfo]:
        """Returns the stored chunks of the model; a training step has those of its optimizer besides."""
        used = {place.key for place in self._where.values()}
        return {where: info for where, info in self._stored.items() if where.fqn in used}

    def complete(self, folder: Path) -> None:
        data = self.origin.config.get("data")
        if self.arch.vision is not None and isinstance(data, dict):
            write_processor(folder, self.config, data.get("image_min_pixels"), data.get("image_max_pixels"))

    # -- reading -------------------------------------------------------------------------------------------------------

    def config_text(self, dtype: torch.dtype) -> bytes:
        return super().config_text(dtype) if self.head is None else exported_text(self._start)

    def read(self, name: str) -> Tensor:
        row = self._owners[name]
        if name not in self._last:
            self._last = {}  # frees its memory first
            self._last = dict(zip(row.hf, _hf_tensors(row, self._whole(row), self.arch), strict=True))
        return self._last[name]

    def _whole(self, row: WeightRow) -> Tensor:
        """Returns a row's Megatron tensor of all ranks, without the padding of a vocabulary."""
        place, shape = self._where[row.megatron], whole_shape(row, self.arch)
        stored = self._sizes[place.key]
        out = torch.empty((*(1 for _ in place.index), *shape), dtype=stored.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size((*place.index, *(0 for _ in shape))), out.size())
        known = dataclasses.replace(stored, chunks=self._chunks[place])
        items = create_read_items_for_chunk_list(place.key, known, [wanted])
        if sum(item.lengths.numel() for item in items) != out.numel():
            raise ConvertError(f"{self.folder}: the chunks of {place.key} leave gaps or overlap")
        try:
            self._reader.read_data(LoadPlan(items), _Into(out))
        except Exception as error:  # a damaged archive: zipfile, pickle and torch raise whatever its bytes lead to
            what = (str(error).splitlines() or [""])[0]
            raise ConvertError(f"{self.folder}: damaged at {row.megatron} ({what})") from error
        return out.view(shape)

    def check_content(self) -> bool:
        """Compare every chunk's checksum, which finds flipped bits without a manifest."""
        if self.hf_folder == self.folder / "hf":
            raise ConvertError(
                f"{self.folder} has no manifest.json any more, and no other checksums; --no-hashes reads it unchecked"
            )
        problems = [
            f"{info.relative_path}: the checksum of {where.fqn} at byte {info.offset} differs"
            for where, info in self._used().items()
            if not _has_valid_checksums(self.data_folder, info)
        ]
        if problems:
            raise listing_error(f"{self.folder} is damaged:", problems)
        return True


class _Into(DefaultLoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        spans = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._target[tuple(slice(start, start + length) for start, length in spans)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def _hf_tensors(row: WeightRow, full: Tensor, arch: Architecture) -> list[Tensor]:
    """Does `row.merge` of one rank's tensor, without a copy where a Hugging Face tensor is a run of its rows."""
    if isinstance(row, HeadRow):
        return row.merge([full], arch)
    segments = list(row.segments(arch))
    runs = zip(segments, full.split([length for *_, length in segments]), strict=True)
    in_order = sorted(runs, key=lambda item: item[0])  # by tensor, then by its rows
    parts = [[run for (owner, *_), run in in_order if owner == part] for part in range(len(row.hf))]
    return [part[0] if len(part) == 1 else torch.cat(part) for part in parts]


def _has_valid_checksums(folder: Path, info: _StorageInfo) -> bool:
    """Returns whether the checksums in a torch archive agree with its data. Those that a writer has left out are 0."""
    with (folder / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        archive = io.BytesIO(file.read(info.length))
    try:
        with zipfile.ZipFile(archive) as entries:
            for entry in entries.infolist():
                if entry.CRC:
                    entries.read(entry)
    except Exception:  # whatever damaged bytes make zipfile and zlib raise
        return False
    return True


# -- writing -----------------------------------------------------------------------------------------------------------


def write_checkpoint(source: Source, folder: Path, dtype: torch.dtype, progress: Progress) -> dict[str, str]:
    """Write the whole model as a distributed checkpoint into the existing `folder`. Returns file -> sha256.

    torch makes the table of contents. Its own writer of files keeps a chunk of every tensor in memory; here it is one.
    """
    items: list[list[WriteItem]] = []  # by file
    results: list[list[WriteResult]] = []
    with HashedFiles(folder) as files:
        for item, value in _chunks(source, dtype):
            if not items or files.size >= FILE_BYTES:
                files.begin(f"__0_{len(items)}.distcp")
                items.append([])
                results.append([])
            archive, start = io.BytesIO(), files.size
            with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined] # the manifest's sha256 is stronger
                torch.save(value, archive)
            buffer = archive.getbuffer()
            try:
                files.write(buffer)
            finally:  # after a full disk, Python 3.12 crashed when it collected an archive whose buffer was still in use
                files.wait()
                buffer.release()
            stored = _StorageInfo(f"__0_{len(items) - 1}.distcp", start, files.size - start)
            items[-1].append(item)
            results[-1].append(WriteResult(item.index, stored.length, stored))
            progress.add(value.nbytes if isinstance(value, Tensor) else 0)
            del value, archive  # before the next one is made
    _, contents = create_default_global_save_plan([SavePlan(file_items) for file_items in items])
    writer = FileSystemWriter(folder, sync_files=False)  # fsync comes before the folder's rename
    writer.finish(contents, results)
    torch.save(common_state(source.arch), folder / "common.pt")
    (folder / FORMAT_FILE).write_text(json.dumps(TORCH_DIST))
    return files.hashes


def _chunks(source: Source, dtype: torch.dtype) -> Iterator[tuple[WriteItem, Any]]:
    """Yields every stored object and chunk as an item of torch's plan, and its value.

    A tensor is stored as chunks of rows. A rank of any layout reads the chunks that overlap its part.
    """
    for key in extra_state_keys(source.rows, source.arch):
        yield WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO), [None]
    for row in source.rows:
        shape, tensors = whole_shape(row, source.arch), [source.read(name) for name in row.hf]
        for place in written_places(row, source.arch):
            for first, last in row_blocks(shape):
                slices = row.slices_within(source.arch, first, last)
                block = torch.cat([tensors[shard.tensor][shard.start : shard.stop] for shard in slices])
                data = block.to(row.dtype(dtype)).view(*(1 for _ in place.index), *block.shape)
                offsets = torch.Size((*place.index, first, *(0 for _ in shape[1:])))
                info = TensorWriteData(
                    ChunkStorageMetadata(offsets, data.size()),
                    TensorProperties(dtype=data.dtype),
                    torch.Size((*place.stack, *shape)),
                )
                yield WriteItem(MetadataIndex(place.key, offsets), WriteItemType.SHARD, tensor_data=info), data
                del block, data
        del tensors  # before the next ones are read
