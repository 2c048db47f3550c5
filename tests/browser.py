"""A headless Chromium that opens local pages at the width of a desktop or of a phone, and says what is wrong with them.

    def test_page(browser: Browser, tmp_path: Path) -> None:
        for width in WIDTHS:
            with browser.open(tmp_path / "page.html", width) as page:
                assert page.faults() == []

Playwright drives the Chromium of this machine, which resolves no host name: a page that asks for the network gets nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DESKTOP, PHONE = 1280, 390  # CSS pixels
WIDTHS = (DESKTOP, PHONE)
HEIGHT = {DESKTOP: 900, PHONE: 844}
HANG_MS = 120_000.0  # ends a test that hangs; never reached on a machine that is only slow
NAMES = ("chromium", "chromium-browser", "google-chrome")
ANY_PLACE = frozenset(("data", "blob", "about"))  # schemes that leave nothing
FLAGS = ("--disable-gpu", "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")

OVERFLOWING = """((screen) => {
  const width = document.documentElement.clientWidth, found = [];
  const name = (e) => [e.tagName.toLowerCase() + (e.id ? "#" + e.id : ""), ...e.classList].join(".");
  const out = (box) => box.right > width + 1 || (box.left < -1 && box.right > 0); // a drawer waits left of the page
  const held = (e) => { // by an ancestor that scrolls or clips, and is within the page itself
    for (let p = e.parentElement; p && p !== document.body; p = p.parentElement)
      if (getComputedStyle(p).overflowX !== "visible" && !out(p.getBoundingClientRect())) return true;
    return false;
  };
  if (width !== screen) found.push(`the page is laid out ${width} px wide on a screen of ${screen} px`);
  const scrolled = document.documentElement.scrollWidth;
  if (scrolled > width) found.push(`the page scrolls sideways: ${scrolled} of ${width} px`);
  for (const e of document.body.querySelectorAll("*")) {
    const box = e.getBoundingClientRect();
    if (!box.width || !box.height || !e.checkVisibility({ visibilityProperty: true })) continue;
    const [left, right] = [Math.round(box.left), Math.round(box.right)];
    if (out(box) && !held(e)) found.push(`${name(e)} from ${left} to ${right} of ${width} px`);
    const svg = e.tagName === "text" && e.ownerSVGElement?.getBoundingClientRect();
    if (svg && (box.left < svg.left - 1 || box.right > svg.right + 1))
      found.push(`the text "${e.textContent}" of ${name(e.ownerSVGElement)} is cut off`);
  }
  return found;
})"""


def missing() -> str | None:
    """Says why there is no browser here, or None. As root, installs Debian's Chromium if it can."""
    if find_spec("playwright") is None:
        return "the package playwright is not installed (requirements/dev.lock has it)"
    if program() is None and os.geteuid() == 0 and shutil.which("apt-get") is not None:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for attempt in (["true"], ["apt-get", "update"]):
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(attempt, env=environment, capture_output=True, timeout=120)
                install = ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]
                subprocess.run(install, env=environment, capture_output=True, timeout=240)
            if program() is not None:
                break
    return None if program() is not None else f"none of {', '.join(NAMES)} here, and apt-get could not install chromium"


def program() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A context manager: leaving it ends the browser."""

    def __init__(self) -> None:
        from playwright.sync_api import sync_playwright

        self._playwright = sync_playwright().start()
        launch = self._playwright.chromium.launch
        self._browser = launch(executable_path=program(), args=FLAGS, chromium_sandbox=os.geteuid() != 0)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception: object) -> None:
        self._browser.close()
        self._playwright.stop()

    @contextmanager
    def open(
        self, path: Path | str, width: int = DESKTOP, fragment: str = "", within: Path | str | None = None
    ) -> Iterator[Page]:
        """Opens a file or an address in a tab of its own, loaded and drawn. It may load what is in the folder `within`."""
        context = self._browser.new_context(viewport=None)
        context.set_default_timeout(HANG_MS)
        try:
            page = Page(context, address_of(path) + fragment, width, within and f"{address_of(within)}/")
            page.load()
            yield page
        finally:
            context.close()


def address_of(place: Path | str) -> str:
    return place if isinstance(place, str) else place.resolve().as_uri()


class Page:
    def __init__(self, context: Any, url: str, width: int, within: str | None) -> None:
        self.url, self._width, self._within = url, width, within
        self._page = context.new_page()
        self._protocol = context.new_cdp_session(self._page)
        self._urls: list[str] = []
        self._errors: list[str] = []
        self._page.on("request", lambda request: self._urls.append(request.url))
        self._page.on("websocket", lambda socket: self._urls.append(socket.url))
        self._page.on("pageerror", lambda error: self._errors.append(f"{error.name}: {error.message}"))
        self._page.on("console", self._read_console)

    def _read_console(self, message: Any) -> None:  # also what the browser itself reports, such as a blocked request
        if message.type in ("error", "assert"):
            self._errors.append(message.text)

    def load(self) -> None:
        """Opens the address as a screen of this width does. Phones are touched."""
        self._take_width()
        self._page.goto(self.url)
        self.settle()

    def resize(self, width: int) -> None:
        """Puts the page that is open on a screen of another width: a quarter of the time of opening it again."""
        self._width = width
        self._take_width()
        self.settle()

    def _take_width(self) -> None:
        phone = self._width <= PHONE
        metrics = {"width": self._width, "height": HEIGHT.get(self._width, 900), "mobile": phone}
        metrics["deviceScaleFactor"] = 2 if phone else 1
        self._protocol.send("Emulation.setDeviceMetricsOverride", metrics)
        self._protocol.send("Emulation.setTouchEmulationEnabled", {"enabled": phone})

    def prefer(self, scheme: str) -> None:
        """Asks for a "light" or a "dark" page, as the reader's system does."""
        self._page.emulate_media(color_scheme=scheme)
        self.settle()

    def settle(self) -> None:
        """Waits until what has changed is laid out and drawn."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))).then(() => 0)")

    def evaluate(self, expression: str) -> Any:
        """Computes a JavaScript expression, or its promise, as plain data. Raises if it throws."""
        return self._page.evaluate(expression)

    def hover(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Moves the pointer over the first element of the selector; `x`, `y`: where in it, as shares of its size."""
        self._page.mouse.move(*self._place(selector, x, y))
        self.settle()

    def click(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        self._page.mouse.click(*self._place(selector, x, y))
        self.settle()

    def tap(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Taps with a finger, on a phone."""
        left, top = self._place(selector, x, y)
        point = {"touchPoints": [{"x": left, "y": top}]}
        self._protocol.send("Input.dispatchTouchEvent", {"type": "touchStart", **point})
        self._protocol.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        self.settle()

    def _place(self, selector: str, x: float, y: float) -> tuple[float, float]:
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            " e.scrollIntoView({ block: 'center', behavior: 'instant' });"
            " const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
        )
        assert box is not None, f"the page has no {selector}"
        return box[0] + x * box[2], box[1] + y * box[3]

    def text(self, selector: str = "body") -> str:
        """Reads the first element of the selector as a reader sees it."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    # -- what is wrong -------------------------------------------------------------------------------------------------

    def faults(self) -> list[str]:
        """Lists requests that leave the page, errors of its console, elements that reach out of it, texts that are cut off."""
        return [
            *(f"asks for {url}" for url in self.requests()),
            *(f"error: {text}" for text in self.errors()),
            *(f"overflow: {text}" for text in self.overflowing()),
        ]

    def overflowing(self) -> list[str]:
        """Lists elements that reach out of the page sideways, but for those in a box in the page that scrolls or clips."""
        return list(self.evaluate(f"{OVERFLOWING}({self._width})"))

    def requests(self) -> list[str]:
        """Lists the addresses that the page has asked for besides itself, whether it got them or not."""
        inside, address = self._within, self.url.partition("#")[0]
        others = [
            url for url in self._urls if url.partition("#")[0] != address and url.partition(":")[0] not in ANY_PLACE
        ]
        return [url for url in others if not (inside and url.startswith(inside))]

    def errors(self) -> list[str]:
        """Lists exceptions, console.error, and what the browser itself reports as an error."""
        self.evaluate("0")  # receives what has come since
        return self._errors
