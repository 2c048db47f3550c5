"""inspect: describes the model in a folder from headers alone, or with every hash compared."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from grpo_megatron.convert.conversion import companions, model_layout_problems
from grpo_megatron.convert.layout import further_options, tracked_folder, unsupported_there
from grpo_megatron.convert.output import Progress, format_bytes
from grpo_megatron.convert.source import FLOATS, Source, dtype_name, row_blocks
from grpo_megatron.models.heads.folder import WHAT
from grpo_megatron.storage.manifest import MANIFEST_FILE, Verification, read_manifest

KINDS = {"hf": "Hugging Face safetensors", "megatron": "Megatron-Core distributed checkpoint (torch_dist)"}


def describe_model(source: Source, hashes: bool = False) -> str:
    """About fifteen lines of text. With `hashes` every file is read; raises StorageError for files that have changed."""
    arch = source.arch
    rope = f"theta {arch.rope_theta:g}"
    rope += f", llama3 x{arch.rope_factor:g}" if arch.rope_factor else ""
    rope += f", linear x{arch.rope_linear_factor:g}" if arch.rope_linear_factor else ""
    rope += f", yarn x{arch.rope_yarn.factor:g}" if arch.rope_yarn else ""
    counts = Counter(source.dtypes.values()).most_common()
    stored = sum(p.stat().st_size for p in source.data_folder.rglob("*") if p.is_file())
    num_in_head = sum(math.prod(row.local_shape(arch, 1)) for row in source.head_rows)
    lines = {
        "folder": str(source.folder),
        "format": KINDS[source.kind],
        "family": f"{arch.family} ({source.config.get('model_type')}), {_output(source)}",
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
        lines["Megatron-LM"] = _megatron_lm_options(source)
    if arch.num_experts:
        lines["experts"] = f"{arch.num_experts} per layer; ep {_sizes(source, 'ep')}"
    lines["hashes"] = _hashes(source, hashes)
    width = max(map(len, lines))
    return "\n".join(f"{key.ljust(width)}  {text}" for key, text in lines.items())


def _megatron_lm_options(source: Source) -> str:
    options = " ".join(filter(None, [f"--load {source.folder} --use-checkpoint-args", further_options(source.arch)]))
    missing = unsupported_there(source.arch)
    return options + (f" ({missing})" if missing else "")


def _output(source: Source) -> str:
    if source.head is None:
        return f"{'tied' if source.arch.tied else 'untied'} embeddings"
    return f"scalar head ({WHAT[source.head]})"


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
        return f"sha256 of {len(files)} files agree{listed}"
    return f"sha256 of {len(files)} files in {MANIFEST_FILE} (compare them with --hashes)"


# -- verify: compares two models, each in any format and layout, tensor by tensor under their Hugging Face names -------
# By default tensors of one dtype are compared bit by bit. With `dtype`, both are rounded to it first: a bfloat16 export equals
# the float32 model that it was made of. With `tolerance`, elements may differ by so much.

INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass
class TensorComparison:
    """One tensor of both models: `differing` of `count` elements. Equal dtypes: bits are compared, otherwise values.

    `tolerance`: the largest difference that counts as none. None: bits, and the dtypes, must be equal.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype]
    count: int = 0
    differing: int = 0
    largest: float = 0.0
    tolerance: float | None = None

    @property
    def is_equal(self) -> bool:
        return not self.differing and (self.tolerance is not None or self.dtypes[0] == self.dtypes[1])

    def add(self, a: Tensor, b: Tensor) -> None:
        self.count += a.numel()
        if a.dtype == b.dtype:
            bits = INTEGERS[a.dtype.itemsize]
            if torch.equal(a.view(bits), b.view(bits)):
                return
            unequal = a.view(bits) != b.view(bits)
        else:
            unequal = a.float() != b.float()
        if not unequal.any():
            return
        gap = (a[unequal].double() - b[unequal].double()).abs().nan_to_num(torch.inf, torch.inf)
        if self.tolerance is not None:
            gap = gap[gap > self.tolerance]
        self.differing += gap.numel()
        self.largest = max(self.largest, float(gap.max())) if gap.numel() else self.largest


def different_settings(a: Source, b: Source) -> list[str]:
    """The architecture fields that differ."""
    pairs = ((f.name, getattr(a.arch, f.name), getattr(b.arch, f.name)) for f in fields(a.arch))
    return [f"{name}: {left!r} != {right!r}" for name, left, right in pairs if left != right]


def compare_models(
    a: Source, b: Source, quiet: bool = False, *, dtype: str | None = None, tolerance: float | None = None
) -> tuple[list[TensorComparison], list[str]]:
    """(the tensors that both models have with the same shape, the differences in names and shapes).

    `dtype`: to which both are rounded first, constants excepted. `tolerance`: see TensorComparison.
    """
    rounded = [source.result_dtypes(FLOATS[dtype]) if dtype else source.dtypes for source in (a, b)]
    left, right = a.shapes(), b.shapes()
    structure = [f"only in {a.folder}: {name}" for name in left if name not in right]
    structure += [f"only in {b.folder}: {name}" for name in right if name not in left]
    both = [name for name in left if name in right]
    structure += [f"{n}: shape {list(left[n])} != {list(right[n])}" for n in both if left[n] != right[n]]
    out: list[TensorComparison] = []
    total = sum(source.num_bytes(next(iter(source.dtypes.values()))) for source in (a, b))
    with Progress("verify", total, quiet) as progress:
        for name in both:
            if left[name] != right[name]:
                continue
            kinds = (rounded[0][name], rounded[1][name])
            out.append(TensorComparison(name, left[name], kinds, tolerance=tolerance))
            tensors = (a.read(name), b.read(name))
            for first, last in row_blocks(left[name]):
                out[-1].add(tensors[0][first:last].to(kinds[0]), tensors[1][first:last].to(kinds[1]))
            progress.add(tensors[0].nbytes + tensors[1].nbytes)
    return out, structure


def comparison_table(tensors: list[TensorComparison]) -> str:
    """One line per kind of tensor (all layers and experts together), and one per tensor that differs."""
    groups: dict[str, list[TensorComparison]] = {}
    for tensor in tensors:
        groups.setdefault(re.sub(r"\.\d+\.", ".*.", tensor.name), []).append(tensor)
    lines = [("tensor", "number", "shape", "dtype", "result")]
    for name, group in groups.items():
        wrong = [t for t in group if not t.is_equal]
        result = "equal" if not wrong else f"{len(wrong)} of {len(group)} differ"
        lines.append((name, str(len(group)), str(list(group[0].shape)), _dtypes(group[0]), result))
        for tensor in wrong:
            difference = "values equal, dtypes not"
            if tensor.differing:
                difference = f"{tensor.differing} of {tensor.count} elements, largest {tensor.largest:.3g}"
            lines.append((f"  {tensor.name}", "", str(list(tensor.shape)), _dtypes(tensor), difference))
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[4]]) for line in lines)


def _dtypes(tensor: TensorComparison) -> str:
    return "/".join(dict.fromkeys(dtype_name(dtype) for dtype in tensor.dtypes))
