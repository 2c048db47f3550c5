"""Names that a module of Megatron-Core reads although its guarded import of Transformer Engine has not bound them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.contract.sources import Package, bound_names

ENGINE = ("transformer_engine", "megatron.core.extensions.transformer_engine")


def reachable(package: Package, start: set[str]) -> set[str]:
    """The modules of Megatron-Core that these import, directly or not."""
    done: set[str] = set()
    waiting = set(start)
    while waiting:
        module = waiting.pop()
        file = package.file(module)
        if module in done or file is None or not file.is_file() or not module.startswith("megatron."):
            continue
        done.add(module)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                waiting |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                source = package.absolute(module, node)
                waiting |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
    return done - set(ENGINE)


def undefined_names(package: Package, module: str) -> Iterator[str]:
    """Names bound only where Transformer Engine imports, and read in a function that does not ask whether it did."""
    file = package.file(module)
    assert file is not None
    tree = ast.parse(file.read_text(encoding="utf-8"))
    guarded: set[str] = set()
    safe: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Try) and _imports_engine(node.body):
            guarded |= bound_names(node.body)
            safe |= {name for handler in node.handlers for name in bound_names(handler.body)}
        elif isinstance(node, ast.If) and "HAVE_TE" in ast.unparse(node.test):
            guarded |= bound_names(node.body)
            safe |= bound_names(node.orelse)
        else:
            safe |= bound_names([node])
    for function in _outer_functions(tree) if guarded - safe else ():
        text = ast.unparse(function)
        if "HAVE_TE" in text or "is_te_min_version" in text:
            continue
        local = {
            node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        local |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
        local |= bound_names([n for n in ast.walk(function) if isinstance(n, ast.ImportFrom)])
        read = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        yield from sorted(read & (guarded - safe) - local)


def _imports_engine(body: list[ast.stmt]) -> bool:
    for node in body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(ENGINE):
            return True
        if isinstance(node, ast.Import) and any(alias.name.startswith(ENGINE) for alias in node.names):
            return True
    return False


def _outer_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from (n for n in node.body if isinstance(n, ast.FunctionDef))
