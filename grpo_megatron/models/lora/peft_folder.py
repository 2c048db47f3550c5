"""A PEFT folder: adapter_config.json and adapter_model.safetensors, as `peft`, `transformers` and vLLM load it.

The factors are canonical and have PEFT's names, so that import and export change no bit. (A model in another dtype than the
file rounds what it reads once.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_megatron.config import LoraConfig
from grpo_megatron.config.model import peft_values
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.lora.merge import merge
from grpo_megatron.models.lora.table import PEFT_PREFIX, adaptable_layers, factors_of_weights, lora_rows
from grpo_megatron.models.weights.hf_folder import (
    SafetensorsFolder,
    Serving,
    WeightReader,
    write_companions,
    write_tensors,
)
from grpo_megatron.models.weights.stream import WeightsError, global_parameters
from grpo_megatron.parallel.mesh import Mesh, on_first_rank
from grpo_megatron.storage.files import new_folder
from grpo_megatron.untrusted import read_json, shown, special_file_in

if TYPE_CHECKING:
    from grpo_megatron.models.lora.layers import Lora
    from grpo_megatron.models.policy import Policy

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MODEL_DTYPE = "model_dtype"  # in the weight file's metadata: the dtype of the model that the factors were trained with
UNDERSTOOD = {  # keys of peft's LoraConfig that are read, or that change no weight
    *(
        "peft_type",
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
    ),
    *("r", "lora_alpha", "use_rslora", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "bias", "init_lora_weights", "runtime_config", "megatron_config", "megatron_core"),
    *("qalora_group_size", "ensure_weight_tying", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}
CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # values of init_lora_weights
MERGE_FIRST = "let PEFT merge them (merge_and_unload) and set model.path to the whole model"


def is_peft_folder(folder: Path) -> bool:
    """Returns whether a folder has adapters, and not the full model."""
    return (folder / ADAPTER_CONFIG).exists() and (
        (folder / ADAPTER_WEIGHTS).exists() or not (folder / "config.json").exists()
    )


class PeftFolder:
    """Reads adapter_config.json and the weight file's header. Raises WeightsError.

    `lora`: rank, scale and targets, which are the layers that the weight file names. `base`: the path or the name of the
    base model. `model_dtype`: of the model that the factors were trained with; None: the file does not say.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, file = folder, folder / ADAPTER_CONFIG
        if folder.is_dir() and (special := special_file_in(folder)):
            raise WeightsError(f"{str(folder)!r} holds {special}; remove it")
        try:
            settings = dict(read_json(file))
        except (OSError, ValueError, TypeError) as error:
            raise WeightsError(f"{file}: not a readable PEFT config ({error})") from error
        self._check_supported(settings, file)
        self.base = str(settings.get("base_model_name_or_path") or "")
        if not (folder / ADAPTER_WEIGHTS).is_file():
            raise WeightsError(f"{str(folder)!r} has no {ADAPTER_WEIGHTS}; save the adapter as safetensors")
        self.files = SafetensorsFolder(folder)
        if tower := next((name for name in self.files.tensors if ".visual." in name), None):
            layer = tower.removeprefix(PEFT_PREFIX).partition(".lora_")[0]
            raise WeightsError(
                f"{str(folder)!r} has adapters of the vision tower, such as {layer}; here only the decoder has some:"
                f" {MERGE_FIRST}"
            )
        layers = sorted({name.removeprefix(PEFT_PREFIX).partition(".lora_")[0] for name in self.files.tensors})
        self.model_dtype = self.files.metadata.get(MODEL_DTYPE)
        values = {key: value for key, value in peft_values(settings).items() if key != "exclude_modules"}
        try:
            self.lora = LoraConfig.model_validate({**values, "target_modules": layers})
            assert self.lora.rank is not None
        except (ValueError, AssertionError) as error:
            found = f"r={shown(values['rank'])}, lora_alpha={shown(values['alpha'])}"
            raise WeightsError(f"{file}: {found} are no rank and scale of adapters") from error

    def _check_supported(self, settings: Mapping[str, Any], file: Path) -> None:
        """Refuses every key that makes the model more, or other, than W0 + s B A, and every unknown one that is set."""
        unsupported = [key for key, value in settings.items() if value and key not in UNDERSTOOD]
        unsupported += ["peft_type"] if settings.get("peft_type") != "LORA" else []
        unsupported += ["bias"] if settings.get("bias", "none") != "none" else []
        unsupported += (
            ["init_lora_weights"] if str(settings.get("init_lora_weights")).startswith(CHANGE_THE_BASE) else []
        )
        if unsupported:
            given = ", ".join(f"{key}={shown(settings.get(key))}" for key in unsupported)
            of_layers = not set(unsupported) - {"rank_pattern", "alpha_pattern"}
            what = "one rank and one alpha of all layers are" if of_layers else "W0 + s B A of linear layers is"
            raise WeightsError(f"{file}: {given}: only {what} supported, without more; {MERGE_FIRST}")

    def check(self, arch: Architecture, lora: LoraConfig | None = None) -> None:
        """Raise WeightsError unless the factors are finite, and those of the model with `lora`, in rank, scale and layers.

        `lora` None: any. Reads the whole file.
        """
        stored = self.lora
        if lora is not None and (lora.rank, lora.scale) != (stored.rank, stored.scale):
            changes = [n for n in ("rank", "alpha", "use_rslora") if getattr(lora, n) != getattr(stored, n)]
            wanted = ", ".join(f"{name}={getattr(stored, name)}" for name in changes)
            raise WeightsError(f"it has adapters of rank {stored.rank} and scale {stored.scale:g}; set {wanted}")
        shapes = factor_shapes(arch, lora or stored)
        try:
            self.files.check(shapes, set())
        except WeightsError as error:
            raise WeightsError(f"{error}\n  target_modules must name its layers") from error
        largest: dict[str, float] = {}  # layer -> a bound of s B A
        for name in shapes:
            tensor = self.files.read(name)
            if tensor.is_floating_point() and tensor.itemsize == 1:
                kind = str(tensor.dtype).removeprefix("torch.")
                raise WeightsError(
                    f"{self.folder / ADAPTER_WEIGHTS}: {name} is in {kind}; save the adapters in bfloat16"
                )
            if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
                raise WeightsError(f"{self.folder / ADAPTER_WEIGHTS}: {name} has values that are no finite numbers")
            layer = name.partition(".lora_")[0]
            largest[layer] = largest.get(layer, stored.scale * (stored.rank or 1)) * float(tensor.abs().max())
            if ".lora_B." in name and largest[layer] > torch.finfo(torch.bfloat16).max:
                raise WeightsError(
                    f"{self.folder / ADAPTER_WEIGHTS}: s B A of {layer} may overflow: its factors are too large"
                )

    def read(self, name: str) -> Tensor:
        """Reads a factor, as it is stored."""
        return self.files.read(name)

    def merged(self, arch: Architecture, dtype: torch.dtype) -> WeightReader:
        """Returns the reader of a base's weights, in `dtype` and with the adapters where they have some, for `load_hf`."""
        factors = factors_of_weights(arch, self.lora)

        def read(base: SafetensorsFolder, name: str) -> Any:
            if name not in factors:
                return base.slice(name)
            a, b = map(self.read, factors[name])
            return merge(base.read(name).to(dtype), a, b, self.lora.scale)

        return read


def factor_shapes(arch: Architecture, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Returns PEFT's name of every factor -> its shape."""
    rows = lora_rows(arch, lora).values()
    return {name: shape for row in rows for name, shape in zip(row.hf, row.hf_shapes(arch), strict=True)}


# -- writing -----------------------------------------------------------------------------------------------------------


def write_peft(
    folder: Path, tensors: Mapping[str, Tensor], lora: LoraConfig, arch: Architecture, base: Path, model_dtype: str
) -> None:
    """Write both files into the existing `folder`. `tensors`: every factor on the CPU, by PEFT's name. Raises OSError."""
    metadata = {"format": "pt", MODEL_DTYPE: model_dtype}
    named = {_module_name(name, arch): tensor.contiguous() for name, tensor in tensors.items()}
    write_tensors(folder / ADAPTER_WEIGHTS, named, metadata)
    alpha = lora.rank if lora.alpha is None else lora.alpha
    assert alpha is not None
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": os.path.abspath(base),
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": lora.use_rslora,
        "lora_dropout": lora.dropout,
        "target_modules": _targets(arch, lora),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n")


def _targets(arch: Architecture, lora: LoraConfig) -> list[str]:
    """Returns the last parts of the adapted layers' names, or whole names where these would match others, too."""
    adapted = {name for row in lora_rows(arch, lora).values() for name in row.layer_names}
    if arch.vision is not None:  # a tower has layers with the same last parts
        return sorted(_module_name(name, arch) for name in adapted)
    last = {name.rpartition(".")[2] for name in adapted}
    same = {name for name in adaptable_layers(arch) if name.rpartition(".")[2] in last}
    return sorted(last if same == adapted and not arch.num_experts else adapted)


def _module_name(name: str, arch: Architecture) -> str:
    """Returns the name that transformers' module has, and so PEFT's file."""
    return name if arch.vision is None else name.replace("model.layers.", "model.language_model.layers.")


def save_peft(policy: Policy, base: Path, tokenizer_source: Path, target: Path, serving: Serving) -> None:
    """Writes the policy's adapters as a PEFT folder, with the tokenizer, on rank 0. Collective. Raises RankError."""
    assert policy.lora is not None
    with policy.readable_weights():
        tensors = _gathered(policy.ddp, policy.lora, policy.arch, policy.mesh)
    dtype = str(next(policy.ddp.parameters()).dtype).removeprefix("torch.")

    def write() -> None:
        with new_folder(target) as folder:
            write_peft(folder, tensors, policy.actor.lora, policy.arch, base, dtype)
            write_companions(folder, base, tokenizer_source, serving)

    on_first_rank(policy.mesh, f"cannot write {target}", write)


def _gathered(model: torch.nn.Module, lora: Lora, arch: Architecture, mesh: Mesh) -> dict[str, Tensor]:
    """Gathers every full factor by PEFT's name on rank 0; empty on the others. Collective."""
    local: dict[str, Tensor] = {}
    if (mesh.dp_rank, mesh.cp_rank) == (0, 0):  # the first of the ranks with the same parameters
        parameters = global_parameters(model)
        names = (name for name, row in lora.rows.items() if row.split_dim is not None or mesh.tp_rank == 0)
        local = {name: parameters[name].detach().cpu() for name in names}
    gathered, out = mesh.gather(local), dict[str, Tensor]()
    for name, row in lora_rows(arch, lora.config).items() if gathered else ():
        shards = [
            factors[name] for factors in gathered if name in factors
        ]  # in the order of their tensor-parallel ranks
        out.update(zip(row.hf, row.merge(shards, arch), strict=True))
    return out
