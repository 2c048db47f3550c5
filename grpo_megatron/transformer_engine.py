"""Transformer Engine: whether this process can use it, decided before Megatron-Core is imported.

Megatron-Core imports Transformer Engine if it is installed, and handles no error but ImportError. An installation that does
not fit raises others: FileNotFoundError without its torch part, AssertionError if its parts have different versions, OSError
if a library does not load. So an unusable installation is hidden: the entry None in `sys.modules` turns later imports of it
into an ImportError, and Megatron-Core runs without it. `import grpo_megatron` installs the finder that does this in time.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

Version = tuple[int, ...]
TE_PACKAGE = "transformer_engine"
TE_RANGE = (2, 9), (2, 12)  # Megatron-Core 0.16's own: from the first to below the second
TE_REQUIREMENT = "Transformer Engine >=2.9,<2.12"
TE_INSTALL = "pip install --no-build-isolation 'grpo-megatron[gpu]'"
FLASH_ATTENTION = (
    "flash-attn>=2.7.3,<=2.8.3"  # TE 2.11's own range from sm100 on; on older GPUs it takes earlier ones, too
)


def attention_gap(capability: Version | None, *, deterministic: bool = False) -> str | None:
    """Says what cuDNN cannot do on a GPU that Transformer Engine's layers need. None: nothing, or there is no GPU.

    TE 2.11 offers cuDNN's attention for packed sequences ("thd") from sm90 on (`nvte_get_fused_attn_backend` of
    common/fused_attn/fused_attn.cpp), but not on sm120, and not from sm100 on where the backward pass must be deterministic
    (`get_attention_backend` of pytorch/attention/dot_product_attention/utils.py). Then it takes flash-attn. Without that it
    takes `UnfusedDotProductAttention`, which has a matrix of [sequences, heads, longest, longest].
    """
    if capability is None or (9, 0) <= capability < ((10, 0) if deterministic else (12, 0)):
        return None
    kind = "deterministic attention" if deterministic else "attention"
    return f"cuDNN has no {kind} over packed sequences with compute capability {capability[0]}.{capability[1]}"


def packed_attention_problem(capability: Version | None, *, deterministic: bool = False) -> str | None:
    """Says why Transformer Engine would have no fused attention over packed sequences in this process. None: it has."""
    gap = attention_gap(capability, deterministic=deterministic)
    if gap is None:
        return None
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("flash-attn")
    except PackageNotFoundError:
        installed = ""
    low, high = (tuple(map(int, re.findall(r"\d+", bound))) for bound in FLASH_ATTENTION.split(","))
    if low <= tuple(map(int, re.findall(r"\d+", installed)[:3])) <= high:
        return None
    return f"{gap}, and {FLASH_ATTENTION} is not installed{f' ({installed} is)' if installed else ''}"


def parse_version(text: str) -> Version:
    """Reads the first two numbers of a version: "2.20.2+abc" -> (2, 20)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:2])


@functools.cache
def examine_transformer_engine() -> tuple[Version | None, str | None]:
    """Returns (version, None), or (None, why Transformer Engine cannot be used). Imports it, or hides it.

    The reason completes a sentence: "it is not installed", "2.20 is installed", "2.11.0 is installed, but ...".
    """
    if importlib.util.find_spec(TE_PACKAGE) is None:
        return None, "it is not installed"
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version(TE_PACKAGE)
    except PackageNotFoundError:
        installed = "an unknown version"
    parsed, problem = parse_version(installed), f"{installed} is installed"
    if TE_RANGE[0] <= parsed < TE_RANGE[1]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import transformer_engine.pytorch  # noqa: F401

            return parsed, None
        except Exception as error:  # noqa: BLE001 - whatever it raises, it cannot be used
            reason = str(error).partition("\n")[0]
            problem += f", but its import raises {type(error).__name__}: {reason}"
    for name in [name for name in sys.modules if name.split(".")[0] in (TE_PACKAGE, f"{TE_PACKAGE}_torch")]:
        del sys.modules[name]
    sys.modules[TE_PACKAGE] = None  # type: ignore[assignment]
    return None, problem


class MegatronFinder(MetaPathFinder):
    """Finds nothing itself. It sees the first import of Megatron-Core, whichever module makes it."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == "megatron.core":  # `megatron` alone is also looked up where nothing is imported
            sys.meta_path.remove(self)
            examine_transformer_engine()


class UncompiledMegatron(MetaPathFinder):
    """Has Megatron-Core leave its fused functions uncompiled: calls its `disable_jit_fuser` before it defines them.

    It would wrap them by `torch.compile`, which imports torch's compiler: a second of a start. On the CPU none of them is
    called (`transformer_config` switches all fusions off), and compiling would need a C++ compiler.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != "megatron.core.jit":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_disable(module: Any) -> None:
                run(module)
                module.disable_jit_fuser()

            spec.loader.exec_module = run_and_disable  # type: ignore[method-assign]
        return spec


def leave_megatron_uncompiled(cuda_version: str | None) -> None:
    """Acts if `torch.version.cuda` is None: see UncompiledMegatron. Does nothing once Megatron-Core is imported."""
    if cuda_version is None and "megatron.core" not in sys.modules:
        sys.meta_path.insert(0, UncompiledMegatron())


def examine_transformer_engine_before_megatron() -> None:
    """Lets the first `import megatron` of this process call `examine_transformer_engine`."""
    if "megatron.core" not in sys.modules:
        sys.meta_path.insert(0, MegatronFinder())
