"""inspect: describes the model in a folder from headers alone, or with every hash compared. verify: compares two models."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from grpo_megatron.config.problems import counted
from grpo_megatron.convert import ConvertError
from grpo_megatron.convert.conversion import (
    check_model_layout,
    companions,
    hf_to_megatron,
    megatron_to_hf,
    model_layout_problems,
    open_source,
)
from grpo_megatron.convert.layout import further_options, tracked_folder, unsupported_there
from grpo_megatron.convert.options import ConvertOptions, InspectOptions, ToHfOptions, ToMegatronOptions, VerifyOptions
from grpo_megatron.convert.output import Progress, format_bytes
from grpo_megatron.convert.source import FLOATS, Source, dtype_name, row_blocks
from grpo_megatron.models.architecture import UnsupportedModel
from grpo_megatron.models.heads.reward_folder import WHAT
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.files import MANIFEST_FILE, Verification, read_manifest
from grpo_megatron.untrusted import cut, visible

KINDS = {"hf": "Hugging Face safetensors", "megatron": "Megatron-Core distributed checkpoint (torch_dist)"}
KINDS["adapters"] = "adapters, and the Hugging Face safetensors of their base"


def describe_model(options: InspectOptions) -> str:
    """About fifteen lines of text. With `hashes` every file is read; raises StorageError for files that have changed."""
    source = open_source(options.source, hf=options.hf, family=options.family)
    arch = source.arch
    check_model_layout(arch, options.tp, options.pp, options.ep)
    rope = f"theta {arch.rope_theta:g}"
    rope += f", llama3 x{arch.rope_factor:g}" if arch.rope_factor else ""
    rope += f", linear x{arch.rope_linear_factor:g}" if arch.rope_linear_factor else ""
    rope += f", yarn x{arch.rope_yarn.factor:g}" if arch.rope_yarn else ""
    rope += f", of {arch.rotary_share:g} of each head" if arch.rotary_share < 1 else ""
    output = f"{'tied' if arch.tied else 'untied'} embeddings"
    if source.head is not None:
        output = f"scalar head ({WHAT[source.head]})"
    counts = Counter(source.dtypes.values()).most_common()
    stored = sum(p.stat().st_size for p in source.data_folder.rglob("*") if p.is_file())
    num_in_head = sum(math.prod(row.local_shape(arch, 1)) for row in source.head_rows)
    lines = {
        "folder": str(source.folder),
        "format": KINDS[source.kind],
        "family": f"{arch.family} ({source.config.get('model_type')}), {output}",
        "parameters": f"{arch.num_parameters() + num_in_head:,}",
        "layers": f"{arch.num_layers} of hidden size {arch.hidden_size}, intermediate {arch.ffn_hidden_size}",
        "attention": f"{arch.num_attention_heads} heads of {arch.head_dim}, {arch.num_query_groups} key-value groups",
        "rope": rope,
        "vocabulary": f"{arch.vocab_size} (stored padded to {arch.padded_vocab_size(1)} by tp 1)",
        "dtype": ", ".join(f"{dtype_name(dtype)} ({count} tensors)" for dtype, count in counts),
        "layout": source.layout,
        "can be divided": f"tp {_sizes(source, 'tp')}; pp {_sizes(source, 'pp')}",
        "on disk": format_bytes(stored),
        "copied along": ", ".join(p.name for p in companions(source.tokenizer_folder)) or "nothing",
    }
    if source.kind == "megatron" and source.head is None and tracked_folder(source.folder) is not None:
        command = " ".join(filter(None, [f"--load {source.folder} --use-checkpoint-args", further_options(arch)]))
        missing = unsupported_there(arch)
        lines["Megatron-LM"] = command + (f" ({missing})" if missing else "")
    if arch.num_experts:
        lines["experts"] = f"{arch.num_experts} per layer; ep {_sizes(source, 'ep')}"
    lines["hashes"] = _hashes(source, options.hashes)
    width = max(map(len, lines))
    return "\n".join(f"{key.ljust(width)}  {text}" for key, text in lines.items())


def _sizes(source: Source, axis: str) -> str:
    return ", ".join(str(n) for n in range(1, 129) if not model_layout_problems(source.arch, **{axis: n}))


def _hashes(source: Source, check: bool) -> str:
    files = read_manifest(source.folder)
    if files is None:
        if check and source.check_content():
            return f"no {MANIFEST_FILE}; checksums of all chunks agree"
        return f"no {MANIFEST_FILE}: nothing to compare with"
    if check:
        Verification(source.folder).finish()
        listed = "".join(f"\n  {entry['sha256']}  {name}" for name, entry in files.items())
        return f"sha256 of {counted(len(files), 'file')} compared: equal{listed}"
    return f"sha256 of {counted(len(files), 'file')} in {MANIFEST_FILE} (compare them with --hashes)"


# -- verify ------------------------------------------------------------------------------------------------------------
# Two models in any format and layout are compared under Hugging Face names. By default tensors of one dtype are compared bit by
# bit. With `dtype`, both are rounded to it first: a bfloat16 export equals its float32 model. With `tolerance`, elements may
# differ by so much.

INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass
class TensorComparison:
    """One tensor of both models: `differing` of `count` elements. Equal dtypes: bits are compared, otherwise values.

    `tolerance`: the largest difference that counts as none. None: bits, and the dtypes, must be equal.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype]
    tolerance: float | None
    differing: int = 0
    largest: float = 0.0

    @property
    def is_equal(self) -> bool:
        return not self.differing and (self.tolerance is not None or self.dtypes[0] == self.dtypes[1])

    @property
    def dtype_names(self) -> str:
        return "/".join(dict.fromkeys(map(dtype_name, self.dtypes)))

    def add(self, a: Tensor, b: Tensor) -> None:
        if a.dtype == b.dtype:
            bits = INTEGERS[a.dtype.itemsize]
            unequal = a.view(bits) != b.view(bits)
        else:
            unequal = a.float() != b.float()
        if not unequal.any():
            return
        gap = (a[unequal].double() - b[unequal].double()).abs().nan_to_num(torch.inf, torch.inf)
        if self.tolerance is not None:
            gap = gap[gap > self.tolerance]
        if gap.numel():
            self.differing += gap.numel()
            self.largest = max(self.largest, float(gap.max()))


def verify(options: VerifyOptions) -> int:
    """Compare two models and print the differences; returns 1 if there is one. One model: its family and transformers."""
    if options.b is None:
        from grpo_megatron.convert.family import prove_family  # Megatron-Core, which no other action imports

        return prove_family(options.a, options.family, options.changes or {})
    a, b = (open_source(path, hf=options.hf, family=options.family) for path in (options.a, options.b))
    pairs = ((f.name, getattr(a.arch, f.name), getattr(b.arch, f.name)) for f in fields(a.arch))
    other = [f"{name}: {left!r} != {right!r}" for name, left, right in pairs if left != right]
    left, right = a.shapes(), b.shapes()
    other += [f"only in {a.folder}: {name}" for name in left if name not in right]
    other += [f"only in {b.folder}: {name}" for name in right if name not in left]
    other += [f"{n}: shape {list(left[n])} != {list(right[n])}" for n in left if left[n] != right.get(n, left[n])]
    with a.checked(not options.no_hashes), b.checked(not options.no_hashes):
        tensors = _compared(a, b, [name for name in left if left[name] == right.get(name)], options)
    print(visible("\n".join(filter(None, [_table(tensors), *other]))))
    differing = sum(not tensor.is_equal for tensor in tensors)
    how = f" in {options.dtype}" if options.dtype else ""
    how += "" if options.tolerance is None else f" {_agreement(options.tolerance)}"
    verdict = "DIFFERENT" if differing or other else "the same"
    print(f"{len(tensors)} tensors compared{how}, {differing} differ: the models are {verdict}")
    return int(bool(differing or other))


def _compared(a: Source, b: Source, names: list[str], options: VerifyOptions) -> list[TensorComparison]:
    """Compares the tensors `names`, which have the same shape in both models. `dtype` does not round constants."""
    rounded = [source.result_dtypes(FLOATS[options.dtype]) if options.dtype else source.dtypes for source in (a, b)]
    out: list[TensorComparison] = []
    total = sum(source.num_bytes(next(iter(source.dtypes.values()))) for source in (a, b))
    with Progress("verify", total, options.quiet) as progress:
        for name in names:
            tensors, dtypes = (a.read(name), b.read(name)), (rounded[0][name], rounded[1][name])
            out.append(TensorComparison(name, tuple(tensors[0].shape), dtypes, options.tolerance))
            for first, last in row_blocks(tuple(tensors[0].shape)):
                out[-1].add(tensors[0][first:last].to(dtypes[0]), tensors[1][first:last].to(dtypes[1]))
            progress.add(tensors[0].nbytes + tensors[1].nbytes)
    return out


def _agreement(tolerance: float | None) -> str:
    return "equal" if tolerance is None else f"within {tolerance:g}"


def _table(tensors: list[TensorComparison]) -> str:
    """Returns one line per kind of tensor (all layers and experts together), and one per tensor that differs."""
    groups: dict[str, list[TensorComparison]] = {}
    for tensor in tensors:
        groups.setdefault(re.sub(r"\.\d+\.", ".*.", tensor.name), []).append(tensor)
    lines = [("tensor", "number", "shape", "dtype", "result")] if tensors else []
    for name, group in groups.items():
        wrong = [t for t in group if not t.is_equal]
        result = f"{len(wrong)} of {len(group)} differ" if wrong else _agreement(group[0].tolerance)
        lines.append((name, str(len(group)), str(list(group[0].shape)), group[0].dtype_names, result))
        for tensor in wrong:
            difference = "values equal, dtypes not"
            if tensor.differing:
                count = math.prod(tensor.shape)
                difference = f"{tensor.differing} of {count} elements, largest {tensor.largest:.3g}"
            lines.append((f"  {tensor.name}", "", str(list(tensor.shape)), tensor.dtype_names, difference))
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(4)]
    return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[4]]) for line in lines)


# -- The command. Exit codes: 0; 1 verify has found a difference; 2 an error; 130 interrupted ---------------------------


def convert(options: ConvertOptions) -> int:
    """Run the chosen action. Returns the exit code; errors are printed."""
    try:
        if isinstance(options, VerifyOptions):
            return verify(options)
        if isinstance(options, ToMegatronOptions):
            hf_to_megatron(options)
        elif isinstance(options, ToHfOptions):
            megatron_to_hf(options)
        elif isinstance(options, InspectOptions):
            print(visible(describe_model(options)))
    except (ConvertError, StorageError, UnsupportedModel) as error:
        print("\n".join(cut(line, 2000) for line in visible(f"error: {error}").splitlines()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0
