"""A headless Chromium that opens local pages at the width of a desktop or of a phone, and says what is wrong with them.

    def test_page(browser: Browser, tmp_path: Path) -> None:
        for width in WIDTHS:
            with browser.open(tmp_path / "page.html", width) as page:
                assert page.faults() == []

`faults` lists requests that leave the page, errors of its console, elements that reach out of it sideways, and texts of
figures that are cut off. The browser is driven over a pipe by the Chrome DevTools Protocol, without another package. It
resolves no host name: a page that asks for the network is found out and gets nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

DESKTOP, PHONE = 1280, 390  # CSS pixels
WIDTHS = (DESKTOP, PHONE)
HEIGHT = {DESKTOP: 900, PHONE: 844}
HANG_S = 120.0  # ends a test that hangs; never reached on a machine that is only slow
NAMES = ("chromium", "chromium-browser", "google-chrome")
ANY_PLACE = frozenset(("data", "blob", "about"))  # schemes that leave nothing
FLAGS = (
    *("--headless", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
    *("--no-first-run", "--no-default-browser-check", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--disable-extensions", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"),
)

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
    """The reason why there is no Chromium here, or None. As root, installs Debian's package if it can."""
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
    """A context manager: leaving it ends the browser's processes. `folder` is for its files."""

    def __init__(self, folder: Path) -> None:
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (read, write)]  # not 3 or 4 yet
        arguments = [*FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else []), f"--user-data-dir={folder}"]
        name = program()
        assert name is not None
        self._pid = os.posix_spawn(
            name,
            [name, *arguments],
            {**os.environ, "HOME": str(folder)},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                *((os.POSIX_SPAWN_DUP2, end, number) for end, number in zip(ends, (3, 4), strict=True)),
            ],
            setpgroup=0,
        )
        for end in (read, write, *ends):
            os.close(end)
        self._unread, self._number = b"", 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The result of a command. Events that come before it are kept in `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._write, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def wait_for(self, method: str, session: str) -> None:
        """Until the event has come, if it has not yet."""
        while not any(event["method"] == method and event.get("sessionId") == session for event in self.events):
            self.events.append(self._receive())

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            assert select.select([self._read], [], [], HANG_S)[0], f"the browser has not answered for {HANG_S:g} s"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has ended"
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    @contextmanager
    def open(
        self, path: Path | str, width: int = DESKTOP, fragment: str = "", within: Path | str | None = None
    ) -> Iterator[Page]:
        """A file or an address in a tab of its own, loaded and drawn. It may load what is in the folder `within`."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        try:
            page = Page(self, session, address_of(path) + fragment, width, within and f"{address_of(within)}/")
            page.load()
            yield page
        finally:
            self.call("Target.closeTarget", targetId=target)
            self.events.clear()


def address_of(place: Path | str) -> str:
    return place if isinstance(place, str) else place.resolve().as_uri()


class Page:
    def __init__(self, browser: Browser, session: str, url: str, width: int, within: str | None) -> None:
        self._browser, self._session, self.url, self._width, self._within = browser, session, url, width, within

    def load(self) -> None:
        """Open the address as a screen of this width does. Phones are touched."""
        self._take_width()
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call("Page.navigate", url=self.url)
        self._browser.wait_for("Page.loadEventFired", self._session)
        self.settle()

    def resize(self, width: int) -> None:
        """The page that is open, on a screen of another width: a quarter of the time of opening it again."""
        self._width = width
        self._take_width()
        self.settle()

    def _take_width(self) -> None:
        phone = self._width <= PHONE
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=self._width,
            height=HEIGHT.get(self._width, 900),
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        self._call("Emulation.setTouchEmulationEnabled", enabled=phone)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def settle(self) -> None:
        """Until what has changed is laid out and drawn."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))).then(() => 0)")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, or of its promise, as plain data. Asserts that it does not throw."""
        answer = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def hover(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Move the pointer over the first element of the selector; `x`, `y`: where in it, as shares of its size."""
        self._mouse("mouseMoved", *self._place(selector, x, y))

    def click(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        place = self._place(selector, x, y)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._mouse(kind, *place)

    def tap(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """With a finger, on a phone."""
        left, top = self._place(selector, x, y)
        self._call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": left, "y": top}])
        self._call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.settle()

    def _place(self, selector: str, x: float, y: float) -> tuple[float, float]:
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            " e.scrollIntoView({ block: 'center', behavior: 'instant' });"
            " const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
        )
        assert box is not None, f"the page has no {selector}"
        return box[0] + x * box[2], box[1] + y * box[3]

    def _mouse(self, kind: str, x: float, y: float) -> None:
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="none" if kind == "mouseMoved" else "left",
                   clickCount=0 if kind == "mouseMoved" else 1)  # fmt: skip
        self.settle()

    def text(self, selector: str = "body") -> str:
        """What a reader sees of the first element of the selector."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    # -- what is wrong -------------------------------------------------------------------------------------------------

    def faults(self) -> list[str]:
        """Everything that no page of ours may do, so far."""
        return [
            *(f"asks for {url}" for url in self.requests()),
            *(f"error: {text}" for text in self.errors()),
            *(f"overflow: {text}" for text in self.overflowing()),
        ]

    def overflowing(self) -> list[str]:
        """Elements that reach out of the page sideways. Those in a box that scrolls or clips, and is in the page, do not."""
        found: Sequence[str] = self.evaluate(f"{OVERFLOWING}({self._width})")
        return list(found)

    def requests(self) -> list[str]:
        """Addresses that the page has asked for besides itself, whether it got them or not."""
        urls = [event["request"]["url"] for event in self._events("Network.requestWillBeSent")]
        urls += [event["url"] for event in self._events("Network.webSocketCreated")]
        own = self.url.partition("#")[0]
        inside = self._within
        return [
            url
            for url in urls
            if url.partition("#")[0] != own
            and url.partition(":")[0] not in ANY_PLACE
            and not (inside and url.startswith(inside))
        ]

    def errors(self) -> list[str]:
        """Exceptions, console.error, and what the browser itself reports as an error, such as a blocked request."""
        self.evaluate("0")  # receives what has come since
        texts = []
        for event in self._events("Runtime.exceptionThrown"):
            details = event["exceptionDetails"]
            texts.append(details.get("exception", {}).get("description", details["text"]))
        for event in self._events("Runtime.consoleAPICalled"):
            said = " ".join(str(item.get("value", item.get("description", ""))) for item in event["args"])
            texts += [said] if event["type"] in ("error", "assert") else []
        entries = [event["entry"] for event in self._events("Log.entryAdded")]
        texts += [entry["text"] for entry in entries if entry["level"] == "error"]
        return texts

    def _events(self, method: str) -> Iterator[dict[str, Any]]:
        for event in self._browser.events:
            if event["method"] == method and event.get("sessionId") == self._session:
                yield event["params"]
