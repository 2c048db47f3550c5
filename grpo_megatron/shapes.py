"""Shapes in annotations, `Float[Tensor, " B R"]`, by jaxtyping. Only tests need the package: they check every call.

A name is a size: equal names in one signature are equal sizes. B rows of a batch, R response tokens, N targets and T tokens of a
pack, h hidden size, V vocabulary. Annotations are never evaluated in a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:
        Bool = Float = Int = Any

__all__ = ["Bool", "Float", "Int"]
