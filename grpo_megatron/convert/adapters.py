"""A model with adapters: a PEFT folder, or a training step of LoRA, on the Hugging Face folder of its base.

It is read as the full model. Each weight is merged when it is read: `to-megatron`, `merge`, verify and evaluation get the bits
of the run's engine. `to-hf` of a training step writes the adapters alone, as the end of the run does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from grpo_megatron.convert import ConvertError, listing_error
from grpo_megatron.convert.megatron import MegatronFolder
from grpo_megatron.convert.source import FLOATS, HFFolder, Source, dtype_name
from grpo_megatron.models.lora.merge import merge
from grpo_megatron.models.lora.peft_folder import PeftFolder, is_peft_folder, write_peft
from grpo_megatron.models.lora.table import factors_of_weights
from grpo_megatron.models.weights.stream import WeightsError
from grpo_megatron.storage.files import sha256_of
from grpo_megatron.storage.hub import model_folder
from grpo_megatron.untrusted import ReadError


class AdaptedModel(Source):
    """`of`: the adapters. `hf`: the base's folder; None: the one that they name. Raises ConvertError."""

    kind = "adapters"

    def __init__(self, of: PeftFolder | MegatronFolder, hf: Path | None = None, family: str | None = None) -> None:
        self.adapters, self.folder = of, of.folder
        if isinstance(of, MegatronFolder):
            assert of.lora is not None
            self.lora, base, self.data_folder = of.lora, of.hf_folder, of.data_folder
            family, dtype = family or of.origin.family(), of.origin.dtype()
        else:
            self.lora, base, self.data_folder, dtype = of.lora, hf or _base_folder(of), of.folder, of.model_dtype
        if is_peft_folder(base):
            raise ConvertError(f"{str(base)!r}, the base of {of.folder}, is itself an adapter; merge that one first")
        self.base = HFFolder(base, family=family)
        self.hf_folder, self.arch, self.config = base, self.base.arch, self.base.config
        has_tokenizer = (self.folder / "tokenizer_config.json").exists() or (self.folder / "tokenizer.json").exists()
        self.tokenizer_folder = self.folder if has_tokenizer else base
        if isinstance(of, MegatronFolder):
            self.arch, self.head, self.head_rows = of.arch, of.head, of.head_rows
            self.tokenizer_folder = of.tokenizer_folder
        else:
            try:
                of.check(self.arch)
            except WeightsError as error:
                raise ConvertError(str(error)) from error
        self._model_dtype = FLOATS[dtype] if dtype in FLOATS else self.base.dtype()
        self.dtypes = self.result_dtypes(self._model_dtype)
        self._names = factors_of_weights(self.arch, self.lora)
        self.num_files, self.layout = self.base.num_files, f"adapters of rank {self.lora.rank} on {base}"

    def check_base(self) -> None:
        """Compares the base's files with the hashes that a training step has recorded. Reads them."""
        recorded = self.adapters.origin.base_files() if isinstance(self.adapters, MegatronFolder) else {}
        changed = [
            f"{path} has another sha256"
            for path, sha256 in (
                (self.hf_folder / Path(name).name, entry["sha256"]) for name, entry in recorded.items()
            )
            if path.suffix == ".safetensors" and (not path.exists() or sha256_of(path) != sha256)
        ]
        if changed:
            raise listing_error(f"{self.folder} has adapters of another base than {self.hf_folder}:", changed)

    @property
    def is_step(self) -> bool:
        """True for the adapters of a training step, false for a PEFT folder."""
        return isinstance(self.adapters, MegatronFolder)

    @property
    def weight_folders(self) -> tuple[Path, ...]:
        return self.data_folder, self.hf_folder

    def read(self, name: str) -> Tensor:
        if any(name in row.hf for row in self.head_rows):
            return self.adapters.read(name)
        base = self.base.read(name)
        if name not in self._names:
            return base.to(self.dtypes[name])
        a, b = map(self.adapters.read, self._names[name])
        return merge(base.to(self._model_dtype), a, b, self.lora.scale)

    def config_text(self, dtype: torch.dtype) -> bytes:
        return super().config_text(dtype) if self.head is None else self.adapters.config_text(dtype)  # type: ignore[union-attr]

    def check_content(self) -> bool:
        return isinstance(self.adapters, MegatronFolder) and self.adapters.check_content()

    @contextlib.contextmanager
    def checked(self, wanted: bool = True) -> Iterator[None]:
        if wanted:
            self.check_base()
        with super().checked(wanted):
            yield

    def complete(self, folder: Path) -> None:
        if isinstance(self.adapters, MegatronFolder):
            self.adapters.complete(folder)

    def write_adapters(self, folder: Path, dtype: torch.dtype | None) -> int:
        """Writes the adapters into the existing `folder`, in `dtype` or as they are stored. Returns their bytes."""
        tensors = {name: self.adapters.read(name).to(dtype) for pair in self._names.values() for name in pair}
        write_peft(folder, tensors, self.lora, self.arch, self.hf_folder, dtype_name(dtype or self._model_dtype))
        return sum(tensor.nbytes for tensor in tensors.values())


def _base_folder(adapters: PeftFolder) -> Path:
    with contextlib.suppress(ReadError):
        if adapters.base and (folder := model_folder(Path(adapters.base))).is_dir():
            return folder
    named = f"its base {adapters.base!r} is no folder here, and cannot be fetched"
    raise ConvertError(f"{adapters.folder}: {named}; name the base model with --hf")
