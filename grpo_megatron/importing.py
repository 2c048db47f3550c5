"""Imports large libraries with garbage collection paused. A rank starts in 8.0 s instead of 9.2 s (measured)."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib.util
import logging
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection, which many new objects would start."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def large_imports() -> Iterator[None]:
    """Use around imports of many modules. Objects that exist at its end are not collected before the process exits."""
    with collection_paused():
        try:
            yield
        finally:
            gc.freeze()
            # Without this, C++ bindings report the frozen objects as leaks on the console when the process exits.
            atexit.register(gc.unfreeze)


@contextlib.contextmanager
def without(packages: Iterable[str]) -> Iterator[None]:
    """Imports of these optional packages raise ImportError here, as if they were not installed. Those imported already stay."""
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: see the docs of `sys.modules`
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Inside, these attributes of a module or class of another package have other values.

    Process-wide, like the attributes. Raises AttributeError where `owner` has no such attribute: another version of it.
    """
    own = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name in values.keys() - own.keys():
        getattr(owner, name)  # inherited; AttributeError otherwise
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)


@contextlib.contextmanager
def silent_imports() -> Iterator[None]:
    """`large_imports` in a process that has no console of its own: what libraries log would come between others' lines."""
    logging.disable(logging.WARNING)
    try:
        with large_imports(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


# -- Transformer Engine ------------------------------------------------------------------------------------------------
# Transformer Engine: whether this process can use it. That is decided before Megatron-Core is imported.
#
# Megatron-Core imports Transformer Engine if it is installed, and handles no error but ImportError. An installation that does
# not fit raises others: FileNotFoundError without its torch part, AssertionError if its parts have different versions, OSError
# if a library does not load. `import megatron` would then fail, although no layer of Transformer Engine was requested. So an
# unusable installation is hidden: the entry None in `sys.modules` turns every later import of it into an ImportError, and
# Megatron-Core runs as if it were not installed. `import grpo_megatron` installs the finder that does this in time.

Version = tuple[int, ...]
TE_PACKAGE = "transformer_engine"
TE_RANGE: tuple[Version, Version] = (
    (2, 9),
    (2, 12),
)  # Megatron-Core 0.16's own: from the first to below the second
TE_REQUIREMENT = "Transformer Engine >=2.9,<2.12"
TE_INSTALL = "pip install --no-build-isolation 'grpo-megatron[gpu]'"


def parse_version(text: str) -> Version:
    """The first two numbers of a version: "2.20.2+abc" -> (2, 20)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:2])


@functools.cache
def examine_transformer_engine() -> tuple[Version | None, str | None]:
    """The version of Transformer Engine and None, or None and why it cannot be used. Imports it, or hides it.

    The reason completes a sentence: "it is not installed", "2.20 is installed", "2.11.0 is installed, but ...".
    """
    if importlib.util.find_spec(TE_PACKAGE) is None:
        return None, "it is not installed"
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version(TE_PACKAGE)
    except PackageNotFoundError:
        installed = "an unknown version"
    parsed = parse_version(installed)
    lowest, limit = TE_RANGE
    problem = None
    if not lowest <= parsed < limit:
        problem = f"{installed} is installed"
    else:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import transformer_engine.pytorch  # noqa: F401
        except Exception as error:  # noqa: BLE001 - whatever it raises, it cannot be used
            reason = str(error).partition("\n")[0]
            problem = f"{installed} is installed, but its import raises {type(error).__name__}: {reason}"
    if problem is None:
        return parsed, None
    _hide_transformer_engine()
    return None, problem


def _hide_transformer_engine() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in (TE_PACKAGE, f"{TE_PACKAGE}_torch")]:
        del sys.modules[name]
    sys.modules[TE_PACKAGE] = None  # type: ignore[assignment]


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
    """If `torch.version.cuda` is None: see UncompiledMegatron. Does nothing once Megatron-Core is imported."""
    if cuda_version is None and "megatron.core" not in sys.modules:
        sys.meta_path.insert(0, UncompiledMegatron())


def examine_transformer_engine_before_megatron() -> None:
    """Let the first `import megatron` of this process call `examine_transformer_engine`."""
    if "megatron.core" not in sys.modules:
        sys.meta_path.insert(0, MegatronFinder())
