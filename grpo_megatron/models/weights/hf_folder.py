"""The safetensors files of a Hugging Face folder, and the weights of a model from them, in any tp x pp x ep layout."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from grpo_megatron.data.images import PROCESSOR_FILES, write_processor
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import hf_shapes
from grpo_megatron.models.weights.file_names import (
    STACKS,
    FileTensor,
    Part,
    PartSlice,
    file_tensors,
    name_in_file,
    parts_of_stack,
    published_name,
)
from grpo_megatron.models.weights.mxfp4 import MXFP4Slice
from grpo_megatron.models.weights.stream import (
    EMBEDDING,
    HEAD,
    WeightsError,
    global_parameters,
    model_rows,
    set_parameter,
)
from grpo_megatron.parallel.mesh import Mesh, on_first_rank
from grpo_megatron.storage.files import new_folder
from grpo_megatron.types import WeightBucket
from grpo_megatron.untrusted import read_json, stand_in

INDEX_FILE = "model.safetensors.index.json"
OLD_BUFFERS = ("rotary_emb.inv_freq", "masked_bias")  # written by old exporters, and not read


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file, by its header. `name` is the name in the file, `dtype` the format's (BF16).

    `part`: it is an expert's part of the file's tensor. `scales`: the file's tensor has the blocks of MXFP4.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    part: Part | None = None
    scales: StoredTensor | None = None


class SafetensorsFolder:
    """The safetensors files of a folder as one mapping from published name to tensor. Opening it reads headers only.

    `index`: name -> file, as the folder's index says; None without an index. Raises WeightsError for files that are
    missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.index = Path(folder), _read_index(Path(folder) / INDEX_FILE)
        if self.index is None:
            self.files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        else:
            self.files = sorted({*self.index.values()})
        missing = [str(self.folder / name) for name in self.files if not (self.folder / name).exists()]
        if missing or not self.files:
            problem = (
                f"missing {', '.join(missing)}"
                if missing
                else "no *.safetensors file (transformers writes them: from_pretrained, then save_pretrained)"
            )
            raise WeightsError(f"model folder {str(self.folder)!r}: {problem}")
        self.metadata: dict[str, str] = {}
        self.headers = {name: self._header(self.folder / name) for name in self.files}
        if damaged := [header for header in self.headers.values() if isinstance(header, str)]:
            raise WeightsError("\n  ".join(damaged))
        self.tensors: dict[str, StoredTensor] = {}
        model_type, hidden = _stacks_of(self.folder)
        headers = [header.items() for header in self.headers.values() if isinstance(header, dict)]
        stored: dict[str, StoredTensor] = {}
        for name, tensor in itertools.chain(*headers):
            _add_once(stored, {published_name(name): tensor})
        for name, tensor in (_mxfp4_joined(stored) if model_type else stored).items():
            parts = parts_of_stack(name, tensor.shape, model_type, hidden)
            of_model = {n: tensor._replace(shape=shape, part=part) for n, part, shape in parts} or {name: tensor}
            _add_once(self.tensors, of_model)
        self._open_files = ExitStack()
        self._handles: dict[Path, Any] = {}

    def _header(self, file: Path) -> dict[str, StoredTensor] | str:
        """Returns every tensor of a file, by its name there; or an error message."""
        try:
            with safe_open(file, framework="pt") as handle:  # checks that the header describes the whole file
                self.metadata.update(handle.metadata() or {})
                slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 - no dict
                return {n: StoredTensor(file, n, s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
        except (SafetensorError, OSError) as error:
            if isinstance(error, SafetensorError) and (other := stand_in(file)):
                return f"{file}: {other}"
            return f"{file}: not a readable safetensors file ({error})"

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open_files.close()

    def slice(self, name: str) -> Any:
        """Returns an object that reads a part of the tensor when it is indexed. The file stays open until `__exit__`."""
        return self._slice(self.tensors[name], self._handles, self._open_files)

    def _slice(self, stored: StoredTensor, handles: dict[Path, Any], open_files: ExitStack) -> Any:
        if stored.file not in handles:
            handles[stored.file] = open_files.enter_context(safe_open(stored.file, framework="pt"))
        whole = handles[stored.file].get_slice(stored.name)
        if stored.scales is not None:
            whole = MXFP4Slice(whole, self._slice(stored.scales, handles, open_files))
        return whole if stored.part is None else PartSlice(whole, stored.part)

    def read(self, name: str) -> Tensor:
        """Reads a whole tensor. The file is closed again: pages of a mapped file count as memory of the process."""
        stored = self.tensors[name]
        try:
            with ExitStack() as open_files:
                tensor: Tensor = self._slice(stored, {}, open_files)[:]
                return tensor
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{stored.file}: cannot read {name} ({error})") from error

    def index_problems(self) -> list[str]:
        """Returns every tensor that is in two files, or in another file than the index says."""
        problems: list[str] = []
        file_of: dict[str, str] = {}
        for file, header in self.headers.items():
            for name in header:
                if name in file_of:
                    problems.append(f"{name} is in two files, the second {file}")
                if self.index is not None and name not in self.index:
                    problems.append(f"{name} of {file} is not in the index")
                elif self.index is not None and self.index[name] != file:
                    problems.append(f"{name}: the index says {self.index[name]}, it is in {file}")
                file_of[name] = file
        if self.index is not None and not problems:
            lost = [name for name in self.index if name not in file_of]
            problems += [f"{name}: the index says {self.index[name]}, it is in no file" for name in lost]
        return problems

    def check_model(self, arch: Architecture) -> None:
        """Raise WeightsError unless the folder has exactly this architecture's tensors."""
        self.check(hf_shapes(arch), {"lm_head.weight"} if arch.tied else set(), arch.is_extra)

    def check(
        self, expected: Mapping[str, tuple[int, ...]], optional: set[str], is_extra: Callable[[str], bool] | None = None
    ) -> None:
        """Raise WeightsError that lists missing, unexpected and misshapen tensors, 20 at most."""
        shapes = {name: stored.shape for name, stored in self.tensors.items()}
        if problems := tensor_problems(shapes, expected, optional, is_extra):
            shown = "\n  ".join(problems[:20])
            more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
            raise WeightsError(f"model folder {str(self.folder)!r} does not hold this model:\n  {shown}{more}")


def tensor_problems(
    shapes: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    optional: Collection[str],
    is_extra: Callable[[str], bool] | None = None,
) -> list[str]:
    """Returns the tensors of a folder that are missing, unexpected or of another shape than the model's.

    `optional`: tensors of the model that may be missing. `is_extra`: other tensors that may be there and are not read.
    """
    problems = [f"missing {name}" for name in expected if name not in shapes and name not in optional]
    unexpected = (n for n in shapes if n not in expected and n not in optional and not n.endswith(OLD_BUFFERS))
    problems += [f"unexpected {name}" for name in unexpected if is_extra is None or not is_extra(name)]
    for name, shape in expected.items():
        if name in shapes and shapes[name] != shape:
            problems.append(f"{name} has shape {shapes[name]}, expected {shape}")
    return problems


def _stacks_of(folder: Path) -> tuple[str, int]:
    """Returns model_type and hidden size of a model whose files have stacks of experts; ("", 0) for others, and adapters."""
    try:
        config = read_json(folder / "config.json")
        kind, hidden = config["model_type"], int(config.get("text_config", config)["hidden_size"])
        return (kind, hidden) if kind in STACKS else ("", 0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # reported where the config is read
        return "", 0


def _add_once(tensors: dict[str, StoredTensor], new: dict[str, StoredTensor]) -> None:
    """Adds `new`. Raises WeightsError where another tensor of the files, by its name there, is the same one of the model."""
    for name, tensor in new.items():
        if name in tensors and tensors[name].name != tensor.name:
            raise WeightsError(
                f"{tensor.file}: {tensor.name} and {tensors[name].name} are the same tensor of the model ({name});"
                " remove one of them"
            )
    tensors |= new


def _mxfp4_joined(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors with one in bfloat16, [E, columns, rows], in place of blocks [E, rows, n, 16] and their scales."""
    out = dict(stored)
    for name, blocks in stored.items():
        whole, is_blocks, _ = name.partition("_blocks")
        scales = stored.get(f"{whole}_scales") if is_blocks else None
        if scales is None or {blocks.dtype, scales.dtype} != {"U8"}:
            continue
        if len(scales.shape) == 3 and blocks.shape == (*scales.shape, 16):
            experts, rows, count = scales.shape
            out[whole] = blocks._replace(dtype="BF16", shape=(experts, 32 * count, rows), scales=scales)
            del out[name], out[f"{whole}_scales"]
    return out


def _read_index(path: Path) -> dict[str, str] | None:
    """Name -> file of an index; None without one. Raises WeightsError for a name that is no file of its folder."""
    if not path.exists():
        return None
    try:
        index = dict(read_json(path)["weight_map"].items())
        names = sorted({*index.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path}: not a readable index ({type(error).__name__}: {error})") from error
    outside = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if outside:
        raise WeightsError(f"{path}: weight_map names {outside[0]!r}, which is no *.safetensors file of this folder")
    return index


def check_hf(folder: Path, arch: Architecture) -> None:
    """Raise WeightsError unless the folder has exactly this architecture's tensors. Reads headers only."""
    with SafetensorsFolder(folder) as files:
        files.check_model(arch)


WeightReader = Callable[[SafetensorsFolder, str], Any]  # of a tensor by its name, or of what reads a part when indexed


@torch.no_grad()
def load_hf(
    model: torch.nn.Module,
    folder: Path,
    arch: Architecture,
    mesh: Mesh,
    read: WeightReader = SafetensorsFolder.slice,
) -> None:
    """Set this rank's parameters from a Hugging Face folder. Reads only the slices of this rank. Raises WeightsError.

    `read`: of a tensor by its name. A tied model with several stages has a copy of its embedding as the last stage's head.
    Both are set here.
    """
    rows = model_rows(arch)
    with SafetensorsFolder(folder) as files:
        files.check_model(arch)
        for name, parameter in global_parameters(model).items():
            if name == HEAD and arch.tied:
                name = EMBEDDING
            set_parameter(parameter, rows[name].shard(functools.partial(read, files), arch, mesh.tp_rank, mesh.tp))


def read_head_rows(folder: Path, arch: Architecture, first: int, end: int) -> Tensor:
    """Reads rows [first, end) of a model's output head, which may be its embedding. Raises WeightsError."""
    (name,) = model_rows(arch)[EMBEDDING if arch.tied else HEAD].hf
    with SafetensorsFolder(folder) as files:
        files.check_model(arch)
        rows: Tensor = files.slice(name)[first:end]
        return rows


# -- writing a folder that transformers and vLLM load ------------------------------------------------------------------

GENERATION_CONFIG, END_KEY = "generation_config.json", "eos_token_id"
MODEL_COMPANIONS = (GENERATION_CONFIG, *PROCESSOR_FILES, "video_preprocessor_config.json")
COMPANIONS = (  # files that are copied with the weights, where the source folder has them
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    *MODEL_COMPANIONS,
)


@dataclass(frozen=True)
class Serving:
    """The settings with which a server ends answers and renders chats as training did. Empty: the source's files are copied.

    `chat_template`: `data.chat_template`, instead of the tokenizer's own. `end_token_ids`: every token that ends an answer.
    `image_pixels`: the fewest and the most of an image, of a model that reads images.
    """

    chat_template: str | None = None
    end_token_ids: Sequence[int] = ()
    image_pixels: tuple[int, int] | None = None

    def write(self, folder: Path, source: Path) -> None:
        """Complete the exported folder, which has the companions of the model in `source`."""
        if self.chat_template is not None:  # this file takes precedence over tokenizer_config.json
            (folder / "chat_template.jinja").write_text(self.chat_template)
            (folder / "chat_template.json").unlink(missing_ok=True)  # which a processor would prefer
        if self.image_pixels is not None:
            write_processor(folder, read_json(source / "config.json"), *self.image_pixels)
        if not self.end_token_ids:
            return
        path = folder / GENERATION_CONFIG
        settings = json.loads(path.read_text()) if path.exists() else {}
        named = settings.get(END_KEY)
        if sorted(self.end_token_ids) != sorted(named if isinstance(named, list) else [named], key=str):
            ids = list(self.end_token_ids)
            settings[END_KEY] = ids[0] if len(ids) == 1 else ids
            path.write_text(json.dumps(settings, indent=2) + "\n")


def save_hf(
    stream: Iterator[WeightBucket],
    source: Path,
    tokenizer_source: Path,
    target: Path,
    mesh: Mesh,
    shard_bytes: int = 4 << 30,
    serving: Serving = Serving(),
    arch: Architecture | None = None,
) -> None:
    """Read `stream` to its end on every rank, and write `target` on rank 0. Collective. The folder is complete or absent.

    config.json is that of `source`, with the dtype of the tensors. `arch`: tensors of `source` of layers after the last one go
    along, as they are. `serving` completes the other files. An existing `target`
    is replaced. Raises RankError on every rank when rank 0 cannot write.
    """
    task = f"cannot write {target}"
    with contextlib.ExitStack() as stack:  # after an error it removes what was written
        writer = _ShardWriter(target, shard_bytes)
        on_first_rank(mesh, task, functools.partial(writer.start, stack, source, arch))
        for bucket in stream:
            on_first_rank(mesh, task, functools.partial(writer.add, bucket))
        if arch is not None and arch.has_extras and any(source.glob("*.safetensors")):
            on_first_rank(mesh, task, functools.partial(writer.add_extras, source, arch))
        on_first_rank(mesh, task, functools.partial(writer.finish, source, tokenizer_source, serving))
        on_first_rank(mesh, task, stack.close)


class _ShardWriter:
    """Rank 0's part of `save_hf`. Every method may raise OSError."""

    def __init__(self, target: Path, shard_bytes: int) -> None:
        self.target, self.shard_bytes = target, shard_bytes
        self.folder = target  # the partial folder, once it exists
        self.waiting: dict[str, Tensor] = {}
        self.parts: dict[str, Tensor] = {}  # of stacks that are not complete
        self.names: dict[str, str] = {}  # of the table -> of the files
        self.stacks: dict[str, FileTensor] = {}
        self.shards: list[list[str]] = []
        self.total, self.dtype = 0, "float32"

    def start(self, stack: contextlib.ExitStack, source: Path, arch: Architecture | None) -> None:
        """Create the partial folder. Closing `stack` publishes it."""
        self.config = json.loads((source / "config.json").read_text())
        in_files = file_tensors(hf_shapes(arch) if arch is not None else {}, self.config["model_type"])
        self.stacks = {name: tensor for name, tensor in in_files.items() if tensor.layout is not None}
        self.names = {part: name for name, tensor in self.stacks.items() for part in tensor.parts}
        self.folder = stack.enter_context(new_folder(self.target))

    def add(self, bucket: WeightBucket) -> None:
        for name, tensor in bucket:
            copy = tensor.detach().to("cpu", copy=True)
            if name in self.names:
                self.parts[name] = copy
                stack = self.stacks[self.names[name]]
                if name == stack.parts[-1]:
                    self.waiting[self.names[name]] = stack.join(self.parts.pop)
            else:
                self.waiting[name_in_file(name, self.config["model_type"])] = copy
            if tensor.dim() > 1:  # not the float32 biases of a router
                self.dtype = str(tensor.dtype).removeprefix("torch.")
        if sum(tensor.nbytes for tensor in self.waiting.values()) >= self.shard_bytes:
            self._write_shard()

    def add_extras(self, source: Path, arch: Architecture) -> None:
        """Add the tensors of layers after the last one."""
        trained = self.dtype
        with SafetensorsFolder(source) as files:
            for name in filter(arch.is_extra, files.tensors):
                self.add([(name, files.read(name))])
        self.dtype = trained

    def _write_shard(self) -> None:
        """Write a shard under a numbered name. The final name contains the number of shards, which is still unknown."""
        path = self.folder / f"{len(self.shards)}.safetensors"
        write_tensors(path, self.waiting, {"format": "pt"})
        self.total += sum(tensor.nbytes for tensor in self.waiting.values())
        self.shards.append(list(self.waiting))
        self.waiting = {}

    def finish(self, source: Path, tokenizer_source: Path, serving: Serving) -> None:
        """Write the last shard, then the final names, the index, config.json and the companions."""
        if self.waiting:
            self._write_shard()
        count = len(self.shards)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        for i, name in enumerate(names):
            (self.folder / f"{i}.safetensors").rename(self.folder / name)
        if count > 1:
            weight_map = {t: name for name, tensors in zip(names, self.shards, strict=True) for t in tensors}
            index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            (self.folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        config = {
            key: value for key, value in self.config.items() if key not in ("torch_dtype", "quantization_config")
        } | {"dtype": self.dtype}
        (self.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        write_companions(self.folder, source, tokenizer_source, serving)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file that others may read as the umask says; the library gives it 0600. Raises OSError."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata)
    except SafetensorError as error:  # how the library reports a full disk
        raise OSError(str(error)) from error
    path.chmod(mode)


def write_companions(target: Path, source: Path, tokenizer_source: Path, serving: Serving) -> None:
    """Copy the tokenizer, processor and generation config into the exported folder, and complete them. Raises OSError."""
    for name in COMPANIONS:
        folder = source if name in MODEL_COMPANIONS else tokenizer_source
        if (folder / name).exists():
            shutil.copyfile(folder / name, target / name)
    serving.write(target, source)
