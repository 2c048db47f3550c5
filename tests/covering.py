"""Finds the tests of a file: `python -m tests.covering grpo_megatron/models/forward.py`, `make test FILE=...`.

A test file covers a module that it imports, directly or through a module of tests/; and one that it is named after. A module that
no test imports is covered by the tests of the modules that import it.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@cache
def tree(path: Path) -> ast.Module:
    """Returns the syntax of a file, which is parsed once."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports_of(module: str) -> frozenset[str]:
    """Modules of the package and of tests/ that a module of tests/ imports, in functions too."""
    names: set[str] = set()
    for node in ast.walk(tree(source_of(module))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(
        name for name in names if name.startswith(("tests.", "grpo_megatron.")) and source_of(name).is_file()
    )


def source_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def reached(module: str) -> set[str]:
    """Returns what a module of tests/ imports, directly or through other modules of tests/."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        new = imports_of(waiting.pop()) - found
        found |= new
        waiting += [name for name in new if name.startswith("tests.")]
    return found


@cache
def users_of(module: str) -> frozenset[str]:
    """Modules of the package that import a module, or name it in a text: the commands' table, programs of processes."""
    name = re.compile(rf"\b{re.escape(module.removeprefix('grpo_megatron.'))}\b")
    package = [module_of(path.relative_to(ROOT)) for path in (ROOT / "grpo_megatron").rglob("*.py")]
    return frozenset(
        user
        for user in package
        if user != module and (module in imports_of(user) or name.search(source_of(user).read_text(encoding="utf-8")))
    )


def covering(file: Path) -> list[Path]:
    """The test files that cover `file`, a path below the root; those named after it first."""
    module, room = module_of(file), file.parts[1:-1]
    tests = [test.relative_to(ROOT) for test in sorted((ROOT / "tests").rglob("test_*.py"))]
    named = [test for test in tests if test.stem == f"test_{file.stem}" and test.parts[1:-1] == room]
    modules = {module}
    while modules:
        direct = [test for test in tests if test not in named and modules & reached(module_of(test))]
        if named or direct:
            return named + direct
        modules = frozenset().union(*(users_of(name) for name in modules))
    return []


if __name__ == "__main__":
    files = covering(Path(sys.argv[1]))
    if not files:
        sys.exit(f"no test imports {sys.argv[1]}")
    print(*files)
