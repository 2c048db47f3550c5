"""Imports: of what a YAML file names, and of large libraries.

    Registry, FactRegistry   names in a YAML file -> functions: a registered name, or `package.module:function`
    did_you_mean             the end of an error about an unknown name
    large_imports            garbage collection is paused: a rank starts in 8.0 s instead of 9.2 s (measured)
    Transformer Engine       whether this process can use it, decided before Megatron-Core is imported

A `FactRegistry` also holds facts about its entries, declared where the entry is defined. The checks of a config read them, and
so does every part whose behaviour depends on them:

    @policy_losses.register("dpo", paired=True, needs_reference=True)  # in this package: under a name
    @policy_losses.declare(paired=True, needs_reference=True)          # the user's own: `my.module:my_loss`

The facts of a registry are the fields of one frozen dataclass, each with a default. A function without a declaration has the
defaults. An unknown fact is a TypeError where it is declared.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import difflib
import functools
import gc
import importlib
import importlib.util
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

T = TypeVar("T")
F = TypeVar("F")

# -- names in a YAML file ----------------------------------------------------------------------------------------------


def find_modules(config: Path) -> None:
    """Look for the user's modules in the current folder, and beside the config, too. What is found today stays what is found.

    `python -m grpo_megatron` looks in the current folder first, the command `grpo-megatron` nowhere of the user's own.
    Reward workers and environments get the same path from this process.
    """
    for folder in (os.getcwd(), str(config.parent.absolute())):
        if folder not in sys.path and not ("" in sys.path and folder == os.getcwd()):
            sys.path.append(folder)


def import_function(path: str) -> object:
    """Import `package.module:attribute`. Raises ValueError that says which half of the path is wrong.

    Other exceptions of the module are passed on, except one that would end the process: it is a ValueError.
    """
    module_name, _, attribute = path.partition(":")
    try:
        with no_exit(f"{path!r}: importing module {module_name!r}"):
            module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{path!r}: cannot import module {module_name!r} ({error}); put it into the current folder or beside the"
            " config, or its folder on PYTHONPATH"
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(f"{path!r}: module {module_name!r} has no attribute {attribute!r}")
    return getattr(module, attribute)


@contextlib.contextmanager
def no_exit(what: str) -> Iterator[None]:
    """Raises ValueError if a user's code in the block calls `sys.exit`: the run would end as if it had succeeded."""
    try:
        yield
    except SystemExit as error:
        raise ValueError(f"{what} ends the process (exit code {error.code}); take that call out of it") from error


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """What an error about an unknown name ends with: "; did you mean 'PREFIXname'?", or "" where nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {prefix + close[0]!r}?" if close else ""


class Registry(Generic[T]):
    """A table of functions of one kind. `kind` names it in errors ("policy loss", "reward", ...).

    `modules` register further entries. They are imported when a name is first looked up.
    """

    def __init__(self, kind: str, modules: Sequence[str] = ()) -> None:
        self.kind, self._modules = kind, modules
        self._entries: dict[str, T] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """Decorator: `@tasks.register("gsm8k")`. Several names are synonyms."""

        def add(entry: T) -> T:
            for name in names:
                assert name not in self._entries, f"{self.kind} {name!r} is registered twice"
                self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> T:
        """The entry called `name`, or the object at `package.module:attribute`. Raises ValueError."""
        known = self.names()
        if name in self._entries:
            return self._entries[name]
        if ":" in name:
            return import_function(name)  # type: ignore[return-value]
        hint = did_you_mean(name, known)
        raise ValueError(f"unknown {self.kind} {name!r}{hint} (known: {', '.join(known)}; or package.module:function)")

    def names(self) -> list[str]:
        modules, self._modules = self._modules, ()
        for module in modules:
            importlib.import_module(module)
        return sorted(self._entries)


class FactRegistry(Registry[T], Generic[T, F]):
    """A registry whose entries have facts. `defaults` holds the facts of an entry that declares none."""

    def __init__(self, kind: str, defaults: F, modules: Sequence[str] = ()) -> None:
        super().__init__(kind, modules)
        self.defaults = defaults
        self._declared: list[tuple[T, F]] = []  # a list, not a dict: an entry may be unhashable

    def declare(self, **facts: Any) -> Callable[[T], T]:
        """Decorator for a function that a config names as `package.module:function`. Raises TypeError: unknown fact."""
        known = [field.name for field in dataclasses.fields(self.defaults)]  # type: ignore[arg-type]
        if unknown := sorted(set(facts) - set(known)):
            raise TypeError(f"unknown fact of a {self.kind}: {', '.join(unknown)} (known: {', '.join(known)})")
        declared: F = dataclasses.replace(self.defaults, **facts)  # type: ignore[type-var]

        def add(entry: T) -> T:
            assert all(other is not entry for other, _ in self._declared), f"facts of {entry} are declared twice"
            self._declared.append((entry, declared))
            return entry

        return add

    def register(self, *names: str, **facts: Any) -> Callable[[T], T]:
        """Decorator: `@policy_losses.register("gmpo", "geo_mean", geometric_correction=True)`."""
        register, declare = super().register(*names), self.declare(**facts)
        return lambda entry: declare(register(entry))

    def facts_of(self, entry: T) -> F:
        """The facts that were declared for `entry`, else the defaults."""
        return next((facts for other, facts in self._declared if other is entry), self.defaults)

    def facts(self, name: str) -> F:
        """The facts of what `get(name)` returns, or the defaults where it raises: the checks report that as a problem."""
        try:
            return self.facts_of(self.get(name))
        except Exception:  # noqa: BLE001 - whatever the user's module raises while it is imported
            return self.defaults

    def names_with(self, **facts: Any) -> list[str]:
        """The registered names whose facts have these values."""
        return [name for name in self.names() if facts.items() <= vars(self.facts(name)).items()]


# -- large libraries ---------------------------------------------------------------------------------------------------


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
# Megatron-Core imports Transformer Engine if it is installed, and handles no error but ImportError. An installation that does
# not fit raises others: FileNotFoundError without its torch part, AssertionError if its parts have different versions, OSError
# if a library does not load. `import megatron` would then fail, although no layer of Transformer Engine was requested. So an
# unusable installation is hidden: the entry None in `sys.modules` turns every later import of it into an ImportError, and
# Megatron-Core runs as if it were not installed. `import grpo_megatron` installs the finder that does this in time.

Version = tuple[int, ...]
TE_PACKAGE = "transformer_engine"
TE_RANGE = (2, 9), (2, 12)  # Megatron-Core 0.16's own: from the first to below the second
TE_REQUIREMENT = "Transformer Engine >=2.9,<2.12"
TE_INSTALL = "pip install --no-build-isolation 'grpo-megatron[gpu]'"


FLASH_ATTENTION = (
    "flash-attn>=2.7.3,<=2.8.3"  # TE 2.11's own range from sm100 on; on older GPUs it takes earlier ones, too
)


def attention_gap(capability: Version | None, *, deterministic: bool = False) -> str | None:
    """What cuDNN cannot do on a GPU that Transformer Engine's layers need. None: nothing, or there is no GPU.

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
    """Why Transformer Engine would have no fused attention over packed sequences in this process. None: it has."""
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
    """If `torch.version.cuda` is None: see UncompiledMegatron. Does nothing once Megatron-Core is imported."""
    if cuda_version is None and "megatron.core" not in sys.modules:
        sys.meta_path.insert(0, UncompiledMegatron())


def examine_transformer_engine_before_megatron() -> None:
    """Let the first `import megatron` of this process call `examine_transformer_engine`."""
    if "megatron.core" not in sys.modules:
        sys.meta_path.insert(0, MegatronFinder())
