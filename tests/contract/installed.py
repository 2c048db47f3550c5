"""Checks a use (`uses.py` has their form) against a package that can be imported here, with `inspect`."""

from __future__ import annotations

import builtins
import contextlib
import dis
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

TYPELESS = object()  # a value whose type the class does not tell


def module_of(name: str) -> Any:
    """The module, or the attribute of a module, of this dotted name; None if there is none.

    TYPELESS: its file is there, and needs a package that this environment lacks (Triton).
    """
    with contextlib.suppress(ImportError):
        return importlib.import_module(name)
    with contextlib.suppress(ImportError):
        if importlib.util.find_spec(name) is not None:
            return TYPELESS
    owner, _, attribute = name.rpartition(".")
    return getattr(module_of(owner), attribute, None) if owner else None


def member(owner: Any, name: str) -> Any:
    """An attribute of a module or class. TYPELESS: `self.name = ...`, or an annotation. None: there is none."""
    if isinstance(owner, ModuleType):
        found = getattr(owner, name, None) or module_of(f"{owner.__name__}.{name}")
        return TYPELESS if found is None and hasattr(owner, name) else found
    if not inspect.isclass(owner):
        return TYPELESS
    found = inspect.getattr_static(owner, name, None)
    if any(name in vars(base).get("__annotations__", {}) for base in inspect.getmro(owner)):
        return TYPELESS
    if found is not None:
        return getattr(owner, name) if inspect.isroutine(found) or inspect.isclass(found) else TYPELESS
    for base in inspect.getmro(owner):
        with contextlib.suppress(OSError, TypeError):
            if f"self.{name} = " in inspect.getsource(base) or f"self.{name}: " in inspect.getsource(base):
                return TYPELESS
    return None


def parameters(target: Any, bound: bool) -> list[inspect.Parameter] | None:
    """Parameters that a call may pass; None if the source does not tell. `bound`: the first one is `self`."""
    if target is TYPELESS or not callable(target):
        return None
    with contextlib.suppress(ValueError, TypeError):
        found = list(inspect.signature(target).parameters.values())
        return found[1:] if bound and inspect.isfunction(target) else found
    return None


def problem(use: str, files: dict[str, str] | None = None) -> str | None:
    """Says why a use is wrong; None if it is right. `files` gets the sha256 of each source file behind it."""
    kind, target, *words = use.split(" ")
    name, _, path = target.partition(":")
    found = module_of(name)
    if found is None:
        return f"there is no module {name}"
    owner, steps = None, path.split(".") if path else []
    for step in steps:
        owner, found = found, member(found, step)
        if found is None:
            return f"{getattr(owner, '__module__', '') or ''}:{getattr(owner, '__name__', owner)} has no {step}"
    if files is not None:
        _add_file(files, owner if found is TYPELESS else found, name.split(".")[0])
    is_static = inspect.isclass(owner) and isinstance(inspect.getattr_static(owner, steps[-1], None), staticmethod)
    allowed = parameters(found, bound=inspect.isclass(owner) and not is_static) if kind in ("call", "field") else None
    if allowed is None:
        return None
    kinds = {parameter.kind for parameter in allowed}
    keywords = {p.name for p in allowed if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    given = {word for word in words[kind == "call" :] if word != "*"}
    if given - keywords and inspect.Parameter.VAR_KEYWORD not in kinds:
        return f"{target} takes no argument {sorted(given - keywords)}"
    if kind == "field":
        return None
    positional = [p for p in allowed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if int(words[0]) > len(positional) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return f"{target} takes {len(positional)} positional arguments, and we pass {words[0]}"
    rest = [p for p in allowed if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = {p.name for p in rest} - given - {p.name for p in positional[: int(words[0])]}
    return f"{target} also needs {sorted(missing)}" if missing and "*" not in words else None


def _add_file(files: dict[str, str], found: Any, package: str) -> None:
    with contextlib.suppress(TypeError):
        path = Path(inspect.getsourcefile(inspect.unwrap(found) if callable(found) else found) or "")
        root = Path(next(iter(importlib.import_module(package).__path__))).parent
        if path.is_relative_to(root / package):
            files[path.relative_to(root).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()


# -- names that Megatron-Core reads although its guarded import of Transformer Engine has not bound them ---------------

UNUSED = (
    "distributed.fsdp.",
    "inference.",
    "transformer.moe.fused_a2a",
)  # parts of Megatron-Core that nothing here calls


def undefined_names() -> set[str]:
    """ "module:name" of the imported modules of Megatron-Core, read in a function that does not ask for the engine."""
    skipped = tuple(f"megatron.core.{name}" for name in (*UNUSED, "extensions.transformer_engine"))
    found = set()
    for name, module in sorted(sys.modules.items()):
        if not name.startswith("megatron.core.") or name.startswith(skipped):
            continue
        known = {*vars(module), *vars(builtins)}
        for function in _functions(module):
            codes = list(_codes(function.__code__))
            names = {one for code in codes for one in code.co_names}
            if not any(one.startswith("HAVE_") or one == "is_te_min_version" for one in names):
                read = {i.argval for code in codes for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
                found |= {f"{module.__name__}:{one}" for one in read - known}
    return found


def _functions(module: ModuleType) -> Iterator[Any]:
    for value in vars(module).values():
        for one in (value, *(vars(value).values() if inspect.isclass(value) else ())):
            one = inspect.unwrap(getattr(one, "__func__", getattr(one, "fget", one)) or one)
            if inspect.isfunction(one) and one.__module__ == module.__name__:
                yield one


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
