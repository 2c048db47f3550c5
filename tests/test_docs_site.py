"""The documentation as a site: every page in a browser, at the width of a desktop and of a phone, and its search.

`make docs` builds the site, and `make test` does so before the tests. Where it is not built, these tests are skipped. A server
of this process has it on 127.0.0.1: the search does not run in a page from a file.
"""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import DESKTOP, WIDTHS, Browser

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "outputs" / "site"

pytestmark = pytest.mark.skipif(not (SITE / "index.html").exists(), reason="the site is not built; make docs builds it")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.soak
def test_every_page_of_the_site_is_right_at_both_widths(browser: Browser, address: str) -> None:
    """Of the pages that show a file of the project, the three largest: all have one form."""
    faults, pages = {}, {path.name for path in SITE.glob("*.html")}
    assert {f"{path.stem}.html" for path in ROOT.glob("docs/*.md")} <= pages
    shown = sorted((SITE / "files").rglob("*.html"), key=lambda path: path.stat().st_size)[-3:]
    for name in sorted(pages) + [path.relative_to(SITE).as_posix() for path in shown]:
        with browser.open(f"{address}/{name}", within=address) as page:
            for width in WIDTHS:
                page.resize(width)
                cut = "[...document.querySelectorAll('.commands code')].filter((e) => e.scrollWidth > e.clientWidth)"
                if found := page.faults() + page.evaluate(f"{cut}.map((e) => e.textContent)"):
                    faults[f"{name} at {width} px"] = found
    assert faults == {}


def test_the_search_finds_a_page(browser: Browser, address: str) -> None:
    with browser.open(f"{address}/index.html", DESKTOP, "?q=pre-emption", within=address) as page:
        found = "document.querySelector('.md-search-result__item')"
        page.evaluate(f"new Promise((done) => setInterval(() => {found} && done(0), 50))")
        assert "pre-emp" in page.text(".md-search-result__list").lower() and page.errors() == []
