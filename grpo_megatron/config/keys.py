"""All keys of the config, with what is written beside them in the sources of this room."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticUndefined

from grpo_megatron.config.section import Resume, ResumeClass, Section


@dataclass(frozen=True)
class ConfigKey:
    """One key that holds a value: `actor.optim.lr`."""

    name: str
    kind: str  # its type, as in the sources: `float`, `list[Path]`
    default: Any  # None if it has none, see `is_required`
    is_required: bool
    comment: str
    resume: ResumeClass = "applies"  # what a change means for a run that resumes

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]


def config_keys(config: type[Section], prefix: str = "", resume: ResumeClass | None = None) -> Iterator[ConfigKey]:
    """The keys of a section and of the sections in it, in the order of the sources. `resume`: the class of them all."""
    kinds, comments = _written(config)
    for name, field in config.model_fields.items():
        inner = field.annotation
        own = resume or next((mark.kind for mark in field.metadata if isinstance(mark, Resume)), None)
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from config_keys(inner, f"{prefix}{name}.", own)
            continue
        is_required = field.default is PydanticUndefined
        default = None if is_required else field.default
        written = kinds.get(name, ""), default, is_required, comments.get(name, "")
        yield ConfigKey(prefix + name, *written, resume=own or "applies")


@functools.cache
def _written(section: type[Section]) -> tuple[dict[str, str], dict[str, str]]:
    """Field -> its type, and field -> its comment: beside it, within its brackets, or in the lines above it."""
    lines = inspect.getsource(section).splitlines()
    tree = ast.parse("\n".join(lines)).body[0]
    assert isinstance(tree, ast.ClassDef)
    kinds, comments = {}, {}
    for node in tree.body:
        if not isinstance(node, ast.AnnAssign):
            continue
        name = ast.unparse(node.target)
        kinds[name] = re.sub(r"^(?:Fixed|Schedule)\[(.*)\]$", r"\1", ast.unparse(node.annotation))
        above = list(itertools.takewhile(lambda line: line.strip().startswith("#"), reversed(lines[: node.lineno - 1])))
        comments[name] = " ".join(
            filter(None, map(_comment, [*reversed(above), *lines[node.lineno - 1 : node.end_lineno]]))
        )
    return kinds, comments


def _comment(line: str) -> str:
    found = re.search(r"#\s(.*)$", line)
    return found[1].strip() if found else ""
