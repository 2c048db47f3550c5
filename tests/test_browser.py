"""The test of the tests' browser: it sees every fault that a page can have. (Pages without one are in tests/report.)"""

from __future__ import annotations

from pathlib import Path

from tests.browser import DESKTOP, PHONE, Browser

HEAD = '<!doctype html><meta name="viewport" content="width=device-width, initial-scale=1"><title>t</title>'
WIDE = '<div style="width:500px;height:9px">wide</div>'


def write(folder: Path, body: str, head: str = HEAD) -> Path:
    path = folder / "page.html"
    path.write_text(head + body)
    return path


FAULTS = {  # markup -> what the browser must say about it on a phone
    WIDE: "div from 8 to 508 of 390 px",
    f'<div style="width:450px;overflow-x:auto">{WIDE}</div>': "div from 8 to 458 of 390 px",
    '<svg viewBox="0 0 50 9"><text x="40">too long</text></svg>': 'the text "too long" of svg is cut off',
    '<img src="https://example.com/a.png">': "asks for https://example.com/a.png",
    "<script>fetch('file:///other').catch(() => 0)</script>": "asks for file:///other",
    "<script>new WebSocket('ws://example.com')</script>": "asks for ws://example.com/",
    "<script>throw new Error('broken')</script>": "error: Error: broken",
    "<script>console.error('bad', 7)</script>": "error: bad 7",
}


def test_every_fault_is_seen(browser: Browser, tmp_path: Path) -> None:
    with browser.open(write(tmp_path, "".join(FAULTS)), PHONE) as page:
        found = page.faults()
    for fault in FAULTS.values():
        assert any(fault in text for text in found), (fault, found)


def test_a_page_that_is_not_made_for_phones_is_seen(browser: Browser, tmp_path: Path) -> None:
    path = write(tmp_path, WIDE, "<!doctype html>")
    with browser.open(path, PHONE) as page:
        assert page.overflowing() == ["the page is laid out 980 px wide on a screen of 390 px"]
    with browser.open(path, DESKTOP) as page:
        assert page.faults() == []
