"""The options of the command `convert`: to-megatron, to-hf, merge, verify, inspect. From Python they are keywords."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from grpo_megatron.config.options import Argument, Option, Options

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    if not match or not int(match[1]):
        raise ValueError(f"{text!r} is not a size such as 500M or 5G")
    return int(match[1]) * UNITS[match[2].upper()]


_Dtype = Literal["float32", "bfloat16", "float16"]
_OutputDtype = Annotated[_Dtype | None, Option("default: the dtype of the stored tensors")]
_HfFolder = Annotated[
    Path | None, Option("folder with config.json and tokenizer, for a checkpoint without them", "DIR")
]
_Force = Annotated[bool, Option("replace an output that this tool has written")]
_NoHashes = Annotated[bool, Option("do not compare the input with its sha256")]
_Parallel = Annotated[int, Option("refuse if %(dest)s N cannot load it", "N", ge=1)]
_Quiet = Annotated[bool, Option("no progress")]


class ConvertOptions(Options):
    """The command `convert`, whose actions have the options."""

    program = "convert"
    description = "Hugging Face <-> Megatron-Core checkpoints, on a CPU, in bounded memory."
    epilog = "Exit codes: 0; 1 if verify has found a difference; 2 an error; 130 interrupted."
    family: Annotated[
        str | None, Option("your own model family, as model.family names it", "MODULE:FAMILY", place=1)
    ] = None


class ToMegatronOptions(ConvertOptions):
    """The options of `convert to-megatron`. The layout is only checked: the result can be loaded in any layout."""

    summary = "Hugging Face folder -> Megatron-Core distributed checkpoint"
    source: Annotated[Path, Argument("the folder to read", "HF_DIR")]
    target: Annotated[Path, Argument("the checkpoint to write", "OUT")]
    dtype: _OutputDtype = None
    force: _Force = False
    no_hashes: _NoHashes = False
    tp: _Parallel = 1
    pp: _Parallel = 1
    ep: _Parallel = 1
    quiet: _Quiet = False


class ToHfOptions(ConvertOptions):
    """The options of `convert to-hf`. A model with a scalar head is written as the end of its run exports it."""

    summary = "distributed checkpoint, training step, or its critic/ or reward_model/ -> Hugging Face folder"
    source: Annotated[Path, Argument("such as outputs/run/checkpoints/step_000020", "CKPT")]
    target: Annotated[Path, Argument("the folder to write", "OUT")]
    shard_size: Annotated[int, Option("of one file (default 5G)", "SIZE", read=_bytes)] = 5 << 30
    hf: _HfFolder = None
    dtype: _OutputDtype = None
    force: _Force = False
    no_hashes: _NoHashes = False
    quiet: _Quiet = False


class MergeOptions(ToHfOptions):
    """The options of `convert merge`."""

    summary = (
        "adapters (PEFT folder, or training step of LoRA) and their base -> Hugging Face folder of the whole model"
    )
    source: Annotated[Path, Argument("such as outputs/run/hf", "ADAPTERS")]
    hf: Annotated[Path | None, Option("the base model; default: the one that the adapters name", "DIR")] = None


class VerifyOptions(ConvertOptions):
    """The options of `convert verify`."""

    summary = "compare two models tensor by tensor, or a family with transformers on small random weights"
    a: Annotated[Path, Argument("a folder or checkpoint; without B, a folder with a config.json", "A")]
    b: Annotated[Path | None, Argument("the other one", "B")] = None
    changes: Annotated[
        dict[str, Any] | None, Option("without B: values of config.json that make the model small", "JSON")
    ] = None
    no_hashes: Annotated[bool, Option("compare tensors only")] = False
    dtype: Annotated[_Dtype | None, Option("round both to this dtype first (default: compare bits)")] = None
    tolerance: Annotated[
        float | None, Option("the largest difference of two elements that counts as none", "X", ge=0)
    ] = None
    hf: _HfFolder = None
    quiet: _Quiet = False


class InspectOptions(ConvertOptions):
    """The options of `convert inspect`."""

    summary = "print family, sizes, layout, dtype, parameters, hashes of a model"
    source: Annotated[Path, Argument("a folder or checkpoint", "X")]
    hashes: Annotated[bool, Option("read every file and compare its sha256")] = False
    hf: _HfFolder = None
    tp: _Parallel = 1
    pp: _Parallel = 1
    ep: _Parallel = 1


ConvertOptions.actions = {
    "to-megatron": ToMegatronOptions,
    "to-hf": ToHfOptions,
    "merge": MergeOptions,
    "verify": VerifyOptions,
    "inspect": InspectOptions,
}
