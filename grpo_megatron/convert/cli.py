"""The command `convert`: to-megatron, to-hf, verify, inspect.

Exit codes: 0; 1 verify has found a difference; 2 an error; 130 interrupted.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Literal

from grpo_megatron.config.options import Argument, Option, Options
from grpo_megatron.reading import cut

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
PICKLE_HELP = "read *.bin weights: unpickling can run code of their author, whom you must trust"


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    if not found or not int(found[1]):
        raise ValueError(f"{text!r} is not a size such as 500M or 5G")
    return int(found[1]) * UNITS[found[2].upper()]


# -- options -----------------------------------------------------------------------------------------------------------

_Dtype = Literal["float32", "bfloat16", "float16"]
_Family = Annotated[str | None, Option("your own model family, as model.family names it", "MODULE:FAMILY")]
_HfFolder = Annotated[
    Path | None, Option("folder with config.json and tokenizer, for a checkpoint without them", "DIR")
]
_OutputDtype = Annotated[_Dtype | None, Option("default: the dtype of the stored tensors")]
_Force = Annotated[bool, Option("replace an output that this tool has written")]
_NoHashes = Annotated[bool, Option("do not compare the input with its sha256")]
_AllowPickle = Annotated[bool, Option(PICKLE_HELP)]
_Quiet = Annotated[bool, Option("no progress")]
_Parallel = Annotated[int, Option("refuse if %(dest)s N cannot load it", "N", low=1)]


class ConvertOptions(Options):
    """The command `convert`, whose actions have the options."""

    program = "convert"
    description = "Hugging Face <-> Megatron-Core checkpoints, on a CPU, in bounded memory."
    epilog = "Exit codes: 0; 1 if verify has found a difference; 2 an error; 130 interrupted."

    def run(self) -> int:
        """Do what the action says; returns the exit code."""
        raise NotImplementedError


class ToMegatronOptions(ConvertOptions):
    """The options of `convert to-megatron`, which are those of `convert.to_megatron`."""

    summary = "Hugging Face folder -> Megatron-Core distributed checkpoint"
    source: Annotated[Path, Argument("the folder to read", "HF_DIR")]
    target: Annotated[Path, Argument("the checkpoint to write", "OUT")]
    allow_pickle: _AllowPickle = False
    dtype: _OutputDtype = None
    force: _Force = False
    no_hashes: _NoHashes = False
    tp: _Parallel = 1
    pp: _Parallel = 1
    ep: _Parallel = 1
    family: _Family = None
    quiet: _Quiet = False

    def run(self) -> int:
        """Convert, unless the model cannot be loaded in the layout."""
        from grpo_megatron.convert.conversion import to_megatron

        to_megatron(
            self.source,
            self.target,
            dtype=self.dtype,
            layout=(self.tp, self.pp, self.ep),
            force=self.force,
            allow_pickle=self.allow_pickle,
            check_hashes=not self.no_hashes,
            quiet=self.quiet,
            family=self.family,
        )
        return 0


class ToHfOptions(ConvertOptions):
    """The options of `convert to-hf`, which are those of `convert.to_hf`."""

    summary = "distributed checkpoint, training step, or its critic/ or reward_model/ -> Hugging Face folder"
    source: Annotated[Path, Argument("such as outputs/run/checkpoints/step_000020", "CKPT")]
    target: Annotated[Path, Argument("the folder to write", "OUT")]
    shard_size: Annotated[int, Option("of one file (default 5G)", "SIZE", read=_bytes)] = 5 << 30
    hf: _HfFolder = None
    dtype: _OutputDtype = None
    force: _Force = False
    no_hashes: _NoHashes = False
    family: _Family = None
    quiet: _Quiet = False

    def run(self) -> int:
        """Convert."""
        from grpo_megatron.convert.conversion import to_hf

        to_hf(
            self.source,
            self.target,
            dtype=self.dtype,
            shard_bytes=self.shard_size,
            hf=self.hf,
            force=self.force,
            check_hashes=not self.no_hashes,
            quiet=self.quiet,
            family=self.family,
        )
        return 0


class VerifyOptions(ConvertOptions):
    """The options of `convert verify`."""

    summary = "compare two models, Hugging Face or Megatron, tensor by tensor"
    a: Annotated[Path, Argument("a folder or checkpoint", "A")]
    b: Annotated[Path, Argument("the other one", "B")]
    allow_pickle: _AllowPickle = False
    no_hashes: Annotated[bool, Option("compare tensors only")] = False
    dtype: Annotated[_Dtype | None, Option("round both to this dtype first (default: compare bits)")] = None
    tolerance: Annotated[
        float | None, Option("the largest difference of two elements that counts as none", "X", low=0)
    ] = None
    hf: _HfFolder = None
    family: _Family = None
    quiet: _Quiet = False

    def run(self) -> int:
        """Compare and print the differences; returns 1 if there is one."""
        from grpo_megatron.convert.conversion import open_source
        from grpo_megatron.convert.inspection import compare_models, comparison_table, different_settings

        a, b = (
            open_source(path, hf=self.hf, allow_pickle=self.allow_pickle, family=self.family)
            for path in (self.a, self.b)
        )
        settings, hashes = different_settings(a, b), not self.no_hashes
        with a.checked(hashes), b.checked(hashes):
            tensors, structure = compare_models(a, b, self.quiet, dtype=self.dtype, tolerance=self.tolerance)
        print(comparison_table(tensors))
        for line in [*settings, *structure]:
            print(line)
        differing = sum(not tensor.is_equal for tensor in tensors)
        is_same = not (differing or settings or structure)
        how = f" in {self.dtype}" if self.dtype else ""
        how += f" within {self.tolerance:g}" if self.tolerance is not None else ""
        verdict = "the same" if is_same else "DIFFERENT"
        print(f"{len(tensors)} tensors compared{how}, {differing} differ: the models are {verdict}")
        return 0 if is_same else 1


class InspectOptions(ConvertOptions):
    """The options of `convert inspect`."""

    summary = "print family, sizes, layout, dtype, parameters, hashes of a model"
    source: Annotated[Path, Argument("a folder or checkpoint", "X")]
    hashes: Annotated[bool, Option("read every file and compare its sha256")] = False
    allow_pickle: _AllowPickle = False
    hf: _HfFolder = None
    tp: _Parallel = 1
    pp: _Parallel = 1
    ep: _Parallel = 1
    family: _Family = None

    def run(self) -> int:
        """Print what the model is."""
        from grpo_megatron.convert.conversion import check_model_layout, open_source
        from grpo_megatron.convert.inspection import describe_model

        source = open_source(self.source, hf=self.hf, allow_pickle=self.allow_pickle, family=self.family)
        check_model_layout(source.arch, self.tp, self.pp, self.ep)
        print(describe_model(source, self.hashes))
        return 0


ConvertOptions.actions = {
    "to-megatron": ToMegatronOptions,
    "to-hf": ToHfOptions,
    "verify": VerifyOptions,
    "inspect": InspectOptions,
}


def convert(options: ConvertOptions) -> int:
    """Run the chosen action. Returns the exit code; errors are printed."""
    from grpo_megatron.convert import ConvertError
    from grpo_megatron.models.architecture import UnsupportedModel
    from grpo_megatron.storage import StorageError

    try:
        return options.run()
    except (ConvertError, StorageError, UnsupportedModel) as error:
        print("\n".join(cut(line, 2000) for line in f"error: {error}".splitlines()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
