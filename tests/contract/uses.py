"""What our code uses of the large packages, collected from its own sources with `ast`. A use is one line:

module M                    `import M`, or a string that names a module
name M:N, name M:C.N        a name of a module, or a member of a class
call M:F 2 a b              a call with two positional arguments and the keywords a and b; "*" for the unknown rest
field M:C k                 a key of a dict that becomes keyword arguments

What our subclasses define and patch is not collected: it runs on the CPU with both series of vLLM, whose Python files are
those for CUDA (test_contract.py).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.contract.table import FIELDS, OBJECTS, PACKAGES

MODULE_NAME = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+")


def collect(root: Path) -> dict[str, set[str]]:
    """Use -> "file:line" of every place, over the package's files."""
    found: dict[str, set[str]] = {}
    for path in sorted(root.rglob("*.py")):
        file = path.relative_to(root).as_posix()
        for use, line in Uses(file, ast.parse(path.read_text(encoding="utf-8"))).found:
            found.setdefault(use, set()).add(f"{file}:{line}")
    return found


class Uses(ast.NodeVisitor):
    """The uses of one file, in `found`."""

    def __init__(self, file: str, tree: ast.Module, packages: tuple[str, ...] = PACKAGES) -> None:
        self.file = file
        self.functions: list[str] = []
        self.targets: dict[str, str] = {}  # local name -> "module" or "module:name"
        self.found: list[tuple[str, int]] = []
        for node in ast.walk(tree):  # imports in functions count for the whole file: names are not used twice
            if isinstance(node, ast.Import):
                for alias in (a for a in node.names if a.name.split(".")[0] in packages):
                    self.add(f"module {alias.name}", node)
                    self.targets[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in packages:
                for alias in node.names:
                    self.add(f"name {node.module}:{alias.name}", node)
                    self.targets[alias.asname or alias.name] = f"{node.module}:{alias.name}"
        self.visit(tree)

    def add(self, use: str, node: ast.AST) -> None:
        self.found.append((use, getattr(node, "lineno", 0)))

    def target(self, node: ast.AST) -> str | None:
        """What an expression is: "module:name" or "module:Class.member"; OBJECTS knows what calls return."""
        text = ast.unparse(node)
        objects = OBJECTS.get(self.file, {})
        for key in (*(f"{function}:{text}" for function in reversed(self.functions)), text):
            if key in objects:
                return objects[key]
        if isinstance(node, ast.Name):
            return self.targets.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.target(node.value)
            if owner is not None:
                return f"{owner}.{node.attr}" if ":" in owner else f"{owner}:{node.attr}"
        return None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.functions.append(node.name)
        owner = FIELDS.get(f"{self.file}:{node.name}")
        if owner is not None:
            for key in _keys(node):
                self.add(f"field {owner} {key}", node)
        self.generic_visit(node)
        self.functions.pop()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = self.target(node.value)
        if owner is not None:
            self.add(f"name {owner}.{node.attr}" if ":" in owner else f"name {owner}:{node.attr}", node)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and MODULE_NAME.fullmatch(node.value):
            self.add(f"module {node.value}", node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A part of an f-string, such as "megatron.dtype" behind a prefix, names no module."""
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.visit(part)

    def visit_Call(self, node: ast.Call) -> None:
        target = self.target(node.func)
        if target is not None and ":" in target:
            given = [ast.unparse(a) for a in node.args if not isinstance(a, ast.Starred)]
            words = [str(len(given[1:] if given[:1] == ["self"] else given))]  # Base.method(self, ...)
            words += sorted(k.arg for k in node.keywords if k.arg)
            is_open = any(k.arg is None for k in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args)
            self.add(f"call {target} {' '.join(words)}{' *' if is_open else ''}", node)
        self.generic_visit(node)


def _keys(function: ast.FunctionDef) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(function):
        keys: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            keys = node.keys
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys = [node.slice]
        found |= {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return found
