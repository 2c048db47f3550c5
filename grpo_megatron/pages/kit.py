"""The kit of all HTML pages: one template (page/base.html), one stylesheet, one set of charts (page/kit.js), one sanitiser.

A page is one file that needs no network; a content security policy forbids every request. A model may write anything, and
none of it can become markup: jinja2 escapes the texts of the template, and all other texts are JSON in a script element, with
<, > and & escaped, which the page adds as text nodes. TeX is shown as TeX.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

PAGE_PARTS = Path(__file__).parent / "page"
# Control characters but the line end and the tab; marks that turn the direction of writing; halves of surrogate pairs.
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Show characters that steer a terminal, or reorder its text, as <U+001B>."""
    return STEERING.sub(lambda match: f"<U+{ord(match[0]):04X}>", text)


def visible_line(text: str) -> str:
    """Make the text visible, in one line."""
    return " ".join(visible(text).split())


def html_page(kind: str, title: str, data: Any, **parts: Any) -> str:
    """Fill the template page/KIND.html; the script page/KIND.js reads `data`. `parts` is for the template.

    The page ends with a script element, without closing tags, so that further ones can be appended to the file.
    """
    environment = _environment(is_html=True)
    texts = {"title": visible(title), "kind": kind, "data": embedded_json(data)}
    return environment.get_template(f"{kind}.html").render(**texts, **parts) + "\n"


def text_page(kind: str, **parts: Any) -> str:
    """Fill the template page/KIND.txt, for the terminal. Nothing is escaped; texts are made visible."""
    return _environment(is_html=False).get_template(f"{kind}.txt").render(**parts)


def embedded_json(value: Any) -> str:
    """JSON that can stand in a script element of a template, whatever strings `value` has. The strings are made visible."""
    text = json.dumps(_all_visible(value), ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _all_visible(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {_all_visible(key): _all_visible(one) for key, one in value.items()}
    return [_all_visible(one) for one in value] if isinstance(value, list | tuple) else value


@functools.cache
def _environment(*, is_html: bool) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    options: dict[str, Any] = {"autoescape": is_html, "undefined": StrictUndefined, "trim_blocks": is_html}
    environment = Environment(loader=FileSystemLoader(PAGE_PARTS), finalize=_finalized, **options)
    environment.globals["source"] = lambda name: (PAGE_PARTS / name).read_text(encoding="utf-8")
    return environment


def _finalized(value: Any) -> Any:
    """What the template prints: texts are made visible, markup of our own stays."""
    return visible(value) if type(value) is str else value
