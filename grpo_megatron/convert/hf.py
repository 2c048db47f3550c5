"""A Hugging Face folder: read as a source, and written shard by shard.

Headers and index must agree with each other and with the weight table before anything is read.
"""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_megatron.convert import ConvertError, listing_error
from grpo_megatron.convert.output import HashedFiles, Progress
from grpo_megatron.convert.source import (
    FLOATS,
    Source,
    dtype_name,
    head_of_folder,
    head_rows,
    read_start,
    row_blocks,
)
from grpo_megatron.models.families import architecture_of, read_config
from grpo_megatron.models.heads.reward_folder import HEAD_BIAS
from grpo_megatron.models.weights.hf_folder import INDEX_FILE, SafetensorsFolder, published_name, tensor_problems
from grpo_megatron.models.weights.stream import WeightsError

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
Shapes = dict[str, tuple[int, ...]]
Dtypes = dict[str, torch.dtype]


class _Stored(NamedTuple):
    """`dtype` is a name where torch does not have it. `data`: after unpickling, the tensor, which torch has mapped."""

    dtype: torch.dtype | str
    shape: tuple[int, ...]
    data: Tensor | None = None


class HFFolder(Source):
    """Reads headers only. Raises ConvertError, which names every tensor that is wrong, or UnsupportedModel."""

    kind = "hf"

    def __init__(self, folder: Path, allow_pickle: bool = False, family: str | None = None) -> None:
        self.folder = self.data_folder = self.hf_folder = self.tokenizer_folder = folder
        try:
            self.config = read_config(folder)
        except ValueError as error:
            raise ConvertError(str(error)) from error
        self.head = head_of_folder(self.config)
        start = None if self.head is None else read_start(folder, self.head, family)
        self.arch = architecture_of(self.config, family) if start is None else start.arch
        if quantized := self.config.get("quantization_config"):
            method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
            raise ConvertError(
                f"{folder}: quantization_config ({method}) is not supported; convert the unquantized model"
            )
        self.tensors = self._pickled(allow_pickle) or self._safetensors()
        if start is not None:  # transformers writes token classes without a bias, too
            self.head_rows = head_rows(start.num_labels, has_bias=start.has_bias and HEAD_BIAS in self.tensors)
        self._check()
        self.dtypes = {name: self.tensors[name].dtype for name in self.shapes()}  # type: ignore[misc] # `_check` has seen them
        self.layout = f"{self.num_files} file{'s' if self.num_files > 1 else ''}"

    def read(self, name: str) -> Tensor:
        if (data := self.tensors[name].data) is not None:
            return data
        try:
            return self._files.read(name)
        except WeightsError as error:
            raise ConvertError(str(error)) from error

    def check_content(self) -> bool:
        return False  # safetensors has no checksums

    def _safetensors(self) -> dict[str, _Stored]:
        try:
            self._files = files = SafetensorsFolder(self.folder)
        except WeightsError as error:
            raise ConvertError(str(error)) from error
        if problems := files.index_problems():
            raise listing_error(f"{self.folder}: its safetensors files do not belong together:", problems)
        self.num_files = len(files.files)
        return {n: _Stored(TORCH_DTYPES.get(t.dtype, t.dtype), t.shape) for n, t in files.tensors.items()}

    def _pickled(self, allowed: bool) -> dict[str, _Stored] | None:
        if (self.folder / INDEX_FILE).exists() or any(self.folder.glob("*.safetensors")):
            return None
        files = sorted([*self.folder.glob("pytorch_model*.bin"), *self.folder.glob("pytorch_model*.pt")])
        if not files:
            return None
        if not allowed:
            raise ConvertError(
                f"{self.folder} has only pickled weights ({', '.join(p.name for p in files)}), and unpickling can run code"
                " of their author: get the safetensors, or pass --allow-pickle if you trust the author"
            )
        tensors: dict[str, _Stored] = {}
        for file in files:
            try:  # with torch's restricted unpickler, which accepts tensors and containers only
                table = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
                tensors.update({published_name(n): _Stored(t.dtype, tuple(t.shape), t) for n, t in table.items()})
            except (RuntimeError, pickle.UnpicklingError, AttributeError, OSError, EOFError) as error:
                raise ConvertError(f"{file}: not a readable table of tensors ({str(error).splitlines()[0]})") from error
        self.num_files = len(files)
        return tensors

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        expected, stored = self.shapes(), {name: tensor.shape for name, tensor in self.tensors.items()}
        problems = tensor_problems(stored, expected, ["lm_head.weight"] if self.arch.tied else [], self.arch.is_extra)
        for name in expected.keys() & stored.keys():
            if (dtype := self.tensors[name].dtype) not in FLOATS.values():
                problems.append(f"{name} has dtype {dtype_name(dtype)}, supported: {', '.join(FLOATS)}")
        if problems:
            raise listing_error(f"{self.folder} does not hold the model of its config.json:", problems)
        has_copy = self.arch.tied and self.head is None and "lm_head.weight" in self.tensors
        if has_copy and not torch.equal(self.read("lm_head.weight"), self.read("model.embed_tokens.weight")):
            raise ConvertError(
                f"{self.folder}: config.json ties the embeddings, but lm_head.weight differs from"
                " model.embed_tokens.weight; set tie_word_embeddings=false, or remove lm_head.weight"
            )


# -- writing -----------------------------------------------------------------------------------------------------------


def plan_shards(shapes: Shapes, dtypes: Dtypes, shard_bytes: int) -> dict[str, Shapes]:
    """File -> tensors, in stream order. A file has at most `shard_bytes`, or one tensor."""
    groups, filled = list[Shapes]([{}]), 0
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * dtypes[name].itemsize
        if groups[-1] and filled + nbytes > shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = shape
        filled += nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups)}


def safetensors_header(shapes: Shapes, dtypes: Dtypes) -> bytes:
    """Returns the start of a safetensors file: the length of the JSON, then the JSON, padded to a multiple of 8 bytes."""
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtypes[name].itemsize
        entries[name] = {"dtype": names[dtypes[name]], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shards(
    source: Source, folder: Path, dtype: torch.dtype, shard_bytes: int, progress: Progress
) -> dict[str, str]:
    """Write all tensors of `source` as shards into `folder`, with an index if there are several. Returns file -> sha256.

    The library's own writer needs all tensors of a shard in memory. Here a shard's header is computed before its first
    byte is written.
    """
    dtypes = source.result_dtypes(dtype)
    shards = plan_shards(source.shapes(), dtypes, shard_bytes)
    with HashedFiles(folder) as files:
        for file_name, shard in shards.items():
            files.begin(file_name)
            files.write(safetensors_header(shard, dtypes))
            for name, shape in shard.items():
                tensor = source.read(name)
                for first, last in row_blocks(shape):
                    block = tensor[first:last].to(dtypes[name]).contiguous().view(-1).view(torch.uint8)
                    files.write(memoryview(block.numpy()))  # type: ignore[arg-type]
                    progress.add(block.nbytes)
                files.wait()
                del tensor, block  # before the next one is read
    if len(shards) > 1:
        total = source.num_bytes(dtype)
        weight_map = {name: file_name for file_name, shard in shards.items() for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return files.hashes
