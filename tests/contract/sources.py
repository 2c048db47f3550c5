"""Names, arguments and members of a package, read from its source files with `ast`. The package is never imported."""

from __future__ import annotations

import ast
import functools
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Symbol:
    """Something that a module defines at its top level, or a module (`node` is None)."""

    module: str
    name: str
    node: ast.stmt | None


@dataclass
class Signature:
    """What a call may pass. `positional` are names in order, `self` left out."""

    positional: list[str]
    keywords: set[str]  # all names that may be passed by keyword
    required: set[str]
    any_positional: bool = False
    any_keyword: bool = False


@dataclass(eq=False)
class Package:
    """Packages below one folder (site-packages, or an unpacked wheel). `read` collects the files that were consulted."""

    folder: Path
    read: dict[str, str] = field(default_factory=dict)  # file relative to the folder -> its sha256

    def file(self, module: str) -> Path | None:
        path = self.folder.joinpath(*module.split("."))
        for candidate in (path / "__init__.py", path.with_suffix(".py")):
            if candidate.exists():
                return candidate
        return path if path.is_dir() else None  # a namespace package, as `megatron` is

    @functools.cache  # noqa: B019 - a handful of packages per test run
    def names(self, module: str) -> dict[str, ast.stmt]:
        """Top-level name -> the statement that binds it; the last one outside of an `except` or `else` wins."""
        file = self.file(module)
        if file is None or file.is_dir():
            return {}
        self.read[file.relative_to(self.folder).as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()
        found: dict[str, ast.stmt] = {}
        _bind(self.tree(file).body, found)
        return found

    @functools.cache  # noqa: B019
    def tree(self, file: Path) -> ast.Module:
        return ast.parse(file.read_bytes())

    def find(self, module: str, name: str, depth: int = 0) -> Symbol | None:
        """Where `from module import name` leads, through re-exports and tables of lazy attributes."""
        if depth > 8 or self.file(module) is None:
            return None
        bound = self.names(module)
        node = bound.get(name)
        if isinstance(node, ast.ImportFrom):
            source = self.absolute(module, node)
            if self.file(source) is None and self.file(source.split(".")[0]) is None:
                return Symbol(module, name, node)  # from a package outside of the folder: taken on trust
            original = next((a.name for a in node.names if (a.asname or a.name) == name), name)
            if self.file(f"{source}.{original}") and (source == module or original not in self.names(source)):
                return Symbol(f"{source}.{original}", "", None)
            return self.find(source, original, depth + 1)
        if isinstance(node, ast.Import):
            alias = next(a for a in node.names if (a.asname or a.name.split(".")[0]) == name)
            target = alias.name if alias.asname else name
            return Symbol(target, "", None) if self.file(target) else None
        if node is not None:
            return Symbol(module, name, node)
        if self.file(f"{module}.{name}"):
            return Symbol(f"{module}.{name}", "", None)
        for key, star in bound.items():
            if key.startswith("* ") and isinstance(star, ast.ImportFrom):
                symbol = self.find(self.absolute(module, star), name, depth + 1)
                if symbol is not None:
                    return symbol
        return self._lazy(module, name, depth)

    def absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        file = self.file(module)
        parts = module.split(".")
        keep = len(parts) - node.level + (1 if file is not None and file.name == "__init__.py" else 0)
        return ".".join([*parts[:keep], *([node.module] if node.module else [])])

    def _lazy(self, module: str, name: str, depth: int) -> Symbol | None:
        """vLLM's MODULE_ATTRS: {"LLM": ".entrypoints.llm:LLM"}."""
        for node in self.names(module).values():
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                for key, value in zip(node.value.keys, node.value.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Constant):
                        where, _, attribute = str(value.value).partition(":")
                        return self.find(module + where if where.startswith(".") else where, attribute, depth + 1)
        return None

    # -- classes -------------------------------------------------------------------------------------------------------

    def bases(self, symbol: Symbol) -> list[Symbol]:
        """The class and its bases as far as they are in these packages, nearest first."""
        chain, waiting = [], [symbol]
        while waiting:
            current = waiting.pop(0)
            if not isinstance(current.node, ast.ClassDef) or current in chain:
                continue
            chain.append(current)
            for base in current.node.bases:
                expression = base.value if isinstance(base, ast.Subscript) else base
                root, *rest = ast.unparse(expression).split(".")
                found = self.find(current.module, root)
                for part in rest:
                    found = self.find(found.module, part) if found is not None and found.node is None else None
                if found is not None:
                    waiting.append(found)
        return chain

    def member(self, symbol: Symbol, name: str) -> ast.stmt | None:
        """The statement that gives the class or one of its bases the attribute: a method, a field or `self.name = ...`."""
        for owner in self.bases(symbol):
            assert isinstance(owner.node, ast.ClassDef)
            found: dict[str, ast.stmt] = {}
            _bind(owner.node.body, found)
            if name in found:
                return found[name]
            for node in ast.walk(owner.node):
                if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store):
                    return owner.node
        return None

    # -- signatures ----------------------------------------------------------------------------------------------------

    def signature(self, symbol: Symbol, method: str = "") -> Signature | None:
        """Of a function, of a class's constructor, or of a method. None if anything may be passed."""
        node: Any = self.member(symbol, method) if method else symbol.node
        if isinstance(node, ast.FunctionDef):
            marks = {ast.unparse(mark) for mark in node.decorator_list}
            return _signature(node, bound=bool(method) and "staticmethod" not in marks)
        if not isinstance(node, ast.ClassDef) or method:
            return None
        constructor = self.member(symbol, "__init__")
        if isinstance(constructor, ast.FunctionDef):
            return _signature(constructor, bound=True)
        owners = [base for base in self.bases(symbol) if isinstance(base.node, ast.ClassDef)]
        if any("UserDict" in ast.unparse(base) for owner in owners for base in owner.node.bases):  # type: ignore[union-attr]
            return None  # Python's own constructor
        if any(
            "dataclass" in ast.unparse(mark) for mark in node.decorator_list
        ):  # other bases' annotations are no fields
            owners = [base for base in owners if isinstance(base.node, ast.ClassDef) and base.node.decorator_list]
        fields = dict(f for owner in reversed(owners) for f in _fields(owner.node))
        return Signature(list(fields), set(fields), {name for name, has_default in fields.items() if not has_default})


def _bind(body: list[ast.stmt], found: dict[str, ast.stmt]) -> None:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            overload = any(ast.unparse(mark).endswith("overload") for mark in node.decorator_list)
            if not overload:
                found[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                key = f"* {getattr(node, 'module', '')}" if alias.name == "*" else alias.asname or alias.name
                found[key if isinstance(node, ast.ImportFrom) or alias.asname else key.split(".")[0]] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                found |= {part.id: node for part in ast.walk(target) if isinstance(part, ast.Name)}
        elif isinstance(node, ast.If | ast.Try | ast.With):
            others: dict[str, ast.stmt] = {}
            for part in [*getattr(node, "handlers", []), node]:
                _bind([*getattr(part, "orelse", []), *(part.body if part is not node else [])], others)
            _bind(node.body, found)
            for name, other in others.items():
                found.setdefault(name, other)


def _signature(node: ast.FunctionDef, bound: bool) -> Signature:
    arguments = node.args
    ordered = [*arguments.posonlyargs, *arguments.args]
    with_default = {a.arg for a in ordered[len(ordered) - len(arguments.defaults) :]} if arguments.defaults else set()
    names = [a.arg for a in ordered][1 if bound else 0 :]
    only = {a.arg: d is not None for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)}
    required = {n for n in names if n not in with_default} | {n for n, default in only.items() if not default}
    keywords = {*names, *only} - {a.arg for a in arguments.posonlyargs}
    return Signature(names, keywords, required, arguments.vararg is not None, arguments.kwarg is not None)


def _fields(node: ast.stmt | None) -> list[tuple[str, bool]]:
    """(name, whether it has a default) of the annotated fields of a class: a dataclass, or msgspec's or pydantic's."""
    assert isinstance(node, ast.ClassDef)
    annotated = [f for f in node.body if isinstance(f, ast.AnnAssign) and "ClassVar" not in ast.unparse(f.annotation)]
    return [(f.target.id, f.value is not None) for f in annotated if isinstance(f.target, ast.Name)]


def bound_names(body: list[ast.stmt]) -> set[str]:
    """Names that the statements bind, in whatever branch."""
    found: dict[str, ast.stmt] = {}
    _bind(body, found)
    return set(found)


# -- whether a package has what a use names ----------------------------------------------------------------------------


def problem(package: Package, use: str) -> str | None:
    kind, target, *words = use.split(" ")
    if kind == "module":
        return None if package.file(target) or _found(package, target) else f"there is no module {target}"
    found = _resolve(package, target)
    if isinstance(found, str):
        return found
    symbol, method = found
    if symbol is None:
        return None  # an attribute of a value whose type the source does not tell
    if kind == "field":
        signature = package.signature(symbol)
        known = signature is None or signature.any_keyword or words[0] in signature.keywords
        return None if known else f"{target} has no field {words[0]}"
    if kind == "call":
        return _call_problem(package, symbol, method, target, words)
    assert kind == "name", use
    return None


def _found(package: Package, dotted: str) -> bool:
    module, _, name = dotted.rpartition(".")
    return bool(module) and package.find(module, name) is not None


def _resolve(package: Package, target: str) -> tuple[Symbol | None, str] | str:
    """(class or function, member), or what is missing. (None, "") if the source does not tell the type."""
    module, _, path = target.partition(":")
    if package.file(module) is None:
        return f"there is no module {module}"
    symbol = Symbol(module, "", None)
    rest = path.split(".")
    while rest and symbol.node is None:
        step = package.find(symbol.module, rest[0])
        if step is None:
            return f"{symbol.module} has no {rest[0]}"
        symbol, rest = step, rest[1:]
    if not rest:
        return symbol, ""
    if not isinstance(symbol.node, ast.ClassDef):
        return None, ""
    if package.member(symbol, rest[0]) is None:
        return f"{symbol.module}:{symbol.name} has no {rest[0]}"
    return (symbol, rest[0]) if len(rest) == 1 else (None, "")


def _call_problem(package: Package, symbol: Symbol, method: str, target: str, words: list[str]) -> str | None:
    signature = package.signature(symbol, method)
    if signature is None:
        return None
    is_open, keywords = "*" in words, {word for word in words[1:] if word != "*"}
    unknown = keywords - signature.keywords
    if unknown and not signature.any_keyword:
        return f"{target} takes no argument {sorted(unknown)}"
    positional = signature.positional[: int(words[0])]
    if int(words[0]) > len(signature.positional) and not signature.any_positional:
        return f"{target} takes {len(signature.positional)} positional arguments, and we pass {words[0]}"
    missing = signature.required - keywords - set(positional)
    return f"{target} also needs {sorted(missing)}" if missing and not is_open else None
