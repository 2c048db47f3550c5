"""Reads the pickles of a distributed checkpoint without running code from them: each must be plain data.

.metadata             the table of contents: records of torch.distributed.checkpoint
common.pt             the common state of all ranks, a torch archive
objects in *.distcp   random states and the like, torch archives (torch reads tensors with weights_only=True)
_extra_state          Transformer Engine's FP8 state inside such an object, which it reads itself (not run on a GPU yet)
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint import default_planner, filesystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from grpo_megatron.imports import replaced
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.pieces import RemotePiece, open_piece

_RECORDS = {
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint.filesystem",
}
_DTYPES = (
    *("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
    *(("torch", name) for name in _DTYPES),
}
_STATE_NAMES = _NAMES | {("torch._utils", "_rebuild_tensor_v2"), ("_io", "BytesIO")}
_STATE_RECORDS = {"transformer_engine.common.recipe"}
_BACKENDS = {"sharded_backend": "torch_dist", "common_backend": "torch"}


class _Unpickler(pickle.Unpickler):
    """Accepts the classes that the modules `records` define, and `names`; refuses every other name."""

    def __init__(self, file: Any, records: set[str], names: set[tuple[str, str]]) -> None:
        super().__init__(file)
        self._records, self._names = records, names

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes") and self._names is _STATE_NAMES:
            return _load_archive
        if (module, name) in self._names:
            return super().find_class(module, name)
        if module in self._records:
            member = super().find_class(module, name)
            if isinstance(member, type) and member.__module__ == module:  # defined in that module, not imported by it
                return member
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")


def read_table(path: Path) -> Any:
    """Reads torch's Metadata: sizes and dtypes of tensors, file and offset of every chunk. Raises StorageError."""
    with _refusing(f"{path}: not a readable table of contents"), path.open("rb") as file:
        return _load_contents(file)


def check_plain(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Raise StorageError when a distributed checkpoint has anything but plain data. Runs no code from it.

    Of its objects, rank `part` of `parts` checks every `parts`-th one.
    """
    with _refusing(f"{folder / 'metadata.json'}: not Megatron-Core's"):
        versions = json.loads((folder / "metadata.json").read_text())
        for key, known in _BACKENDS.items():
            if versions.get(key, known) != known:
                raise ValueError(f"{key} is {versions[key]!r}, expected {known!r}")
    common = folder / "common.pt"
    with _refusing(f"{common}: refused, because it may run code"):
        _load_archive(common.read_bytes())
    contents = read_table(folder / ".metadata")
    places = sorted(contents.storage_data.items(), key=lambda place: str(place[0]))
    objects = [p for p in places if not isinstance(contents.state_dict_metadata.get(p[0].fqn), TensorStorageMetadata)]
    for index, info in objects[part::parts]:
        file = folder / info.relative_path
        with _refusing(f"{file}: refused, because the object {index.fqn!r} may run code"):
            if not file.resolve().is_relative_to(folder.resolve()):
                raise ValueError("it is outside the checkpoint")
            if info.transform_descriptors:
                raise ValueError(f"it is transformed by {info.transform_descriptors}")
            with open_piece(file) as stream:
                stream.seek(info.offset)
                check_object(index.fqn, stream.read(info.length))


@contextlib.contextmanager
def plain_data_only() -> Iterator[None]:
    """Makes torch's readers of distributed checkpoints refuse code inside the block, as `check_plain` does.

    So a file that is replaced after the check runs no code either. They find pieces in the memory of other nodes.
    """
    load_bytes: Callable[..., None] = default_planner.DefaultLoadPlanner.load_bytes

    def load_checked(planner: Any, item: Any, value: io.BytesIO) -> None:
        check_object(item.dest_index.fqn, value.getvalue())
        load_bytes(planner, item, value)

    slice_file = filesystem.FileSystemReader._slice_file

    def slice_piece(reader: Any, file: Any, info: Any) -> Any:
        if not isinstance(file, RemotePiece):
            return slice_file(reader, file, info)
        file.seek(info.offset)
        return io.BytesIO(file.read(info.length))

    with (
        replaced(filesystem.FileSystem, create_stream=lambda system, path, mode: open_piece(Path(path))),
        replaced(filesystem.FileSystemReader, _slice_file=slice_piece),
        replaced(filesystem, pickle=SimpleNamespace(load=_load_contents, dump=pickle.dump)),
        replaced(default_planner.DefaultLoadPlanner, load_bytes=load_checked),
    ):
        yield


@contextlib.contextmanager
def _refusing(reason: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        lines = str(error).splitlines() or [""]
        told = next((line for line in lines if "Unsupported" in line or "GLOBAL" in line), lines[0])
        raise StorageError(f"{reason} ({type(error).__name__}: {told.strip()})") from error


def _load_contents(file: Any) -> Any:
    contents = _Unpickler(io.BytesIO(file.read()), _RECORDS, _NAMES).load()
    for table in (contents.state_dict_metadata, contents.storage_data):
        if not isinstance(table, dict):
            raise TypeError(f"a table is {type(table).__name__}, not a dict")
    return contents


def _load_archive(content: bytes) -> Any:
    """Reads a torch archive by torch's unpickler for plain data and the classes that Megatron-Core has declared safe."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def check_object(name: str, archive: bytes) -> None:
    """Raise UnpicklingError when a stored object is more than plain data; `name` is its key in the checkpoint."""
    pending = [_load_archive(archive)]
    while pending and "_extra_state" in name:
        value = pending.pop()
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value
        elif isinstance(value, io.BytesIO) and value.getbuffer().nbytes:
            _check_state(value.getvalue())
        elif isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.numel():
            _check_state(bytes(value.tolist()))


def _check_state(raw: bytes) -> None:
    """Reads a state of Transformer Engine: a pickle, or a torch archive."""
    if raw[:4] == b"PK\x03\x04":
        _load_archive(raw)
    else:
        _Unpickler(io.BytesIO(raw), _STATE_RECORDS, _STATE_NAMES).load()
