"""Checks the shapes in annotations (grpo_megatron/shapes.py) in every call of a test's process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

CHECKED = (  # not layers/head_kernel.py: Triton reads the source of its kernels
    "grpo_megatron.algo",
    "grpo_megatron.models.build",
    "grpo_megatron.models.forward",
    "grpo_megatron.models.layers.divergence",
    "grpo_megatron.models.layers.head",
    "grpo_megatron.models.layers.modules",
)
SHAPE = re.compile(r"\b(Bool|Float|Int)\[")


def install() -> bool:
    """Must come before the first import of the checked modules. Returns False without jaxtyping and beartype."""
    try:
        import beartype  # noqa: F401
        from jaxtyping import install_import_hook
    except ImportError:
        return False
    install_import_hook(list(CHECKED), "tests.shapes.checked")
    return True


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A type checker of jaxtyping: beartype, for functions whose annotations have shapes."""
    from beartype import beartype

    has_shapes = any(SHAPE.search(str(annotation)) for annotation in getattr(function, "__annotations__", {}).values())
    return beartype(function) if has_shapes else function
