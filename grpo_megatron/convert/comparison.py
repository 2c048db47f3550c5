"""verify: two models, each in any form and layout, compared tensor by tensor in Hugging Face terms."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from grpo_megatron.convert.progress import Progress
from grpo_megatron.convert.source import Source, short

INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass
class Compared:
    """One tensor. `differing` elements of `count`; bits are compared where the dtypes agree, else values."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype]
    count: int = 0
    differing: int = 0
    largest: float = 0.0

    @property
    def is_equal(self) -> bool:
        return not self.differing and self.dtypes[0] == self.dtypes[1]

    def add(self, a: Tensor, b: Tensor) -> None:
        self.count += a.numel()
        if a.dtype == b.dtype:
            bits = INTEGERS[a.dtype.itemsize]
            if torch.equal(a.view(bits), b.view(bits)):
                return
            unequal = a.view(bits) != b.view(bits)
        else:
            unequal = a.float() != b.float()
        if unequal.any():
            self.differing += int(unequal.sum())
            gap = (a[unequal].double() - b[unequal].double()).abs()
            self.largest = max(self.largest, float(gap.nan_to_num(torch.inf).max()))


def different_settings(a: Source, b: Source) -> list[str]:
    """Architecture fields in which two models differ."""
    pairs = ((f.name, getattr(a.arch, f.name), getattr(b.arch, f.name)) for f in fields(a.arch))
    return [f"{name}: {left!r} != {right!r}" for name, left, right in pairs if left != right]


def compare(a: Source, b: Source, quiet: bool = False) -> tuple[list[Compared], list[str]]:
    """(tensors of both with the same shape, names and shapes in which they differ)."""
    left, right = a.shapes(), b.shapes()
    structure = [f"only in {a.folder}: {name}" for name in left if name not in right]
    structure += [f"only in {b.folder}: {name}" for name in right if name not in left]
    both = [name for name in left if name in right]
    structure += [f"{n}: shape {list(left[n])} != {list(right[n])}" for n in both if left[n] != right[n]]
    out: list[Compared] = []
    with Progress("verify", sum(x.num_bytes(x.dtypes[next(iter(x.dtypes))]) for x in (a, b)), quiet) as progress:
        for name in both:
            if left[name] != right[name]:
                continue
            out.append(Compared(name, left[name], (a.dtypes[name], b.dtypes[name])))
            for ours, theirs in zip(a.blocks(name, left[name]), b.blocks(name, left[name]), strict=True):
                out[-1].add(ours, theirs)
                progress.add(ours.nbytes + theirs.nbytes)
    return out, structure


def table(tensors: list[Compared]) -> str:
    """A line for each kind of tensor (layers and experts together), and one for each tensor that differs."""
    groups: dict[str, list[Compared]] = {}
    for tensor in tensors:
        groups.setdefault(re.sub(r"\.\d+\.", ".*.", tensor.name), []).append(tensor)
    lines = [("tensor", "number", "shape", "dtype", "result")]
    for name, group in groups.items():
        wrong = [t for t in group if not t.is_equal]
        result = "equal" if not wrong else f"{len(wrong)} of {len(group)} differ"
        lines.append((name, str(len(group)), str(list(group[0].shape)), _dtypes(group[0]), result))
        for t in wrong:
            how = (
                f"{t.differing} of {t.count} elements, largest {t.largest:.3g}"
                if t.differing
                else "values equal, dtypes not"
            )
            lines.append((f"  {t.name}", "", str(list(t.shape)), _dtypes(t), how))
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[4]]) for line in lines)


def _dtypes(tensor: Compared) -> str:
    return "/".join(dict.fromkeys(short(dtype) for dtype in tensor.dtypes))
