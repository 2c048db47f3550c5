"""Whether a package's sources have what a use (see uses.py) names. A problem is one line; None means that all is there."""

from __future__ import annotations

import ast

from tests.contract.sources import Package, Symbol


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
    if kind == "override":
        node = package.member(symbol, method)
        signature = package.signature(symbol, method) if isinstance(node, ast.FunctionDef) else None
        if signature is None:
            return f"{target} is not a method"
        unknown = [word for word in words if word not in signature.keywords]
        return f"{target} has no parameter {unknown}" if unknown and not signature.any_keyword else None
    if kind == "abstract":
        remaining = package.abstract(symbol) - set(words)
        return f"{target} has the abstract methods {sorted(remaining)}" if remaining else None
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
