r"""The last `\boxed{...}` of a text, which holds the final answer by the convention of MATH (arXiv 2103.03874).

The last box decides. When its brace is not closed (a truncated response), there is no prediction, even if the text has
an earlier box. `\boxed 7$` ends at the dollar sign or at the end of the line. `\fbox` counts. `\{` and `\}` are characters
of the answer. Of nested boxes the innermost is read. An empty box is the prediction "". Boxes with only `,`, `and` or
`or` between them are one prediction, a list. Time is linear in the text: at most MAX_BOX characters are read after a
box, and at most MAX_BOXES boxes.
"""

from __future__ import annotations

import re

MAX_BOX = 4096  # characters of one answer; MATH's longest has 159
MAX_BOXES = 12  # in one list

_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_LINK = re.compile(r"[\s$.]*(?:,|;|\\text\{\s*(?:,?\s*(?:and|or))\s*\}|,?\s*(?:and|or)\b)[\s$]*")


def last_boxed(text: str, joined: bool = True) -> str | None:
    """The content of the last box, or (`joined`) of the last few boxes; None without one, or if it is not closed."""
    start = box_start(text)
    content, _ = _read_box(text, start) if start >= 0 else (None, 0)
    if content is None:
        return None
    contents = [content]
    while joined and len(contents) < MAX_BOXES:
        previous = box_start(text, max(0, start - MAX_BOX), start)
        before, end = _read_box(text, previous) if previous >= 0 else (None, 0)
        if before is None or end > start or not _LINK.fullmatch(text[end:start]):
            break
        contents.insert(0, before)
        start = previous
    return ", ".join(contents)


def box_start(text: str, low: int = 0, high: int | None = None) -> int:
    """Where the last box of text[low:high] begins; -1 when there is none."""
    high = len(text) if high is None else high
    return max(text.rfind("\\boxed", low, high), text.rfind("\\fbox", low, high))


def _read_box(text: str, start: int) -> tuple[str | None, int]:
    """(content of the box that begins at `start`, or None if it is not closed; where the box ends)."""
    start += len("\\boxed") if text.startswith("\\boxed", start) else len("\\fbox")
    window = text[start : start + MAX_BOX]
    content = window.lstrip()
    start += len(window) - len(content)
    if not content.startswith("{"):
        inner = re.split(r"[$\n]", content, maxsplit=1)[0]
        return inner.strip(), start + len(inner)
    depth = 0
    for brace in _BRACE.finditer(content):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return content[1 : brace.start()].strip(), start + brace.end()
    return None, start
