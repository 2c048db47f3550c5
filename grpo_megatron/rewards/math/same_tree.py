r"""Whether two trees are one answer. Order counts in tuples, intervals and matrices, and not in sets and lists.

A leading name (`x =`, `f(x) =`) counts only where both sides have one. `x = 3, y = 5` is also `(3,5)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from grpo_megatron.rewards.math.tree import Node


def same_tree(answer: Node, prediction: Node, equal: Callable[[str, str], bool]) -> bool:
    """Whether two trees are one answer; `equal` compares single values."""
    if answer.name and prediction.name and _bare_name(answer.name) != _bare_name(prediction.name):
        return False
    kinds = {answer.kind, prediction.kind}
    if kinds == {"list", "union"}:  # x < 1 or x > 3
        return _same_unordered(answer.parts, prediction.parts, equal)
    if kinds == {"list", "set"} or kinds == {"set"}:
        return _same_unordered(_distinct(answer.parts, equal), _distinct(prediction.parts, equal), equal)
    if answer.kind == "()" and prediction.kind == "list" and all(part.name for part in prediction.parts):
        return _same_ordered(answer.parts, prediction.parts, equal)  # x = 3, y = 5 for (3,5)
    if answer.kind != prediction.kind:
        return False
    if answer.kind == "value":
        return equal(answer.text, prediction.text)
    if answer.kind in ("list", "union"):
        if answer.kind == "list" and _has_several_names(answer) and not any(part.name for part in prediction.parts):
            return _same_ordered(answer.parts, prediction.parts, equal)  # 3, 5 for x = 3, y = 5
        return _same_unordered(answer.parts, prediction.parts, equal)
    if answer.columns != prediction.columns or answer.columns < 0:
        return False
    return _same_ordered(answer.parts, prediction.parts, equal)


def _has_several_names(node: Node) -> bool:
    """Whether the parts have several different names."""
    return len({part.name for part in node.parts}) > 1


def _bare_name(name: str) -> str:
    return re.sub(r"\\text|[{}\s_]", "", name)


def _same_ordered(answer: Sequence[Node], prediction: Sequence[Node], equal: Callable[[str, str], bool]) -> bool:
    if len(answer) != len(prediction):
        return False
    return all(same_tree(one, other, equal) for one, other in zip(answer, prediction, strict=True))


def _same_unordered(answer: Sequence[Node], prediction: Sequence[Node], equal: Callable[[str, str], bool]) -> bool:
    left = list(prediction)
    for part in answer:
        found = next((index for index, other in enumerate(left) if same_tree(part, other, equal)), None)
        if found is None:
            return False
        del left[found]
    return not left


def _distinct(parts: Sequence[Node], equal: Callable[[str, str], bool]) -> list[Node]:
    kept: list[Node] = []
    for part in parts:
        if not any(same_tree(other, part, equal) for other in kept):
            kept.append(part)
    return kept
