"""A real browser: Debian's chromium, driven over chromedriver's W3C protocol with plain HTTP.

The protocol is a dozen paths; a client for it would bring more packages than this has lines. The browser gets a profile
of its own, no sandbox (tests run as root in containers), and is ended by its pid.
"""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx2

WAIT_S = 60.0  # until a test gives up; nothing is measured
TAB, ENTER, SPACE = "\ue004", "\ue007", " "

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--password-store=basic", "--hide-scrollbars", "--window-size=1360,900"),
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the standard's name for one

T = TypeVar("T")


@dataclass
class Browser:
    """One browser with one window."""

    url: str  # of its session at the driver
    sent: dict[str, str] = field(default_factory=dict)  # addresses that pages of servers asked for, by request

    def _call(self, method: str, path: str, body: object = None) -> Any:
        content = None if method != "POST" else json.dumps(body or {})
        found = httpx2.request(method, self.url + path, content=content, timeout=WAIT_S, trust_env=False)
        value = found.json()["value"]
        assert found.status_code == 200, value
        return value

    def open(self, url: str) -> None:
        """Load a page; returns when it has loaded."""
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """What a function body returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """What a person sees of an element; empty if it is hidden or not there."""
        seen = "const e = document.querySelector(arguments[0]); return e && e.checkVisibility() ? e.innerText : ''"
        return str(self.run(seen, selector))

    def press(self, *keys: str) -> None:
        """Press and release keys, wherever the focus is."""
        ups = [[{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}] for key in keys]
        actions = [one for pair in ups for one in pair]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def click(self, selector: str) -> None:
        """Click where an element is, as a person would."""
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{found[_ELEMENT]}/click")

    def until(self, holds: Callable[[], T]) -> T:
        """Wait until something holds, and say what it was."""
        end = time.monotonic() + WAIT_S
        while not (found := holds()):
            assert time.monotonic() < end, f"it did not come to that: {self.text('body')[:2000]}"
            time.sleep(0.05)
        return found

    def prefer(self, scheme: str) -> None:
        """Prefer `light` or `dark`."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.cdp("Emulation.setEmulatedMedia", features=[feature])

    def cdp(self, command: str, **parameters: object) -> Any:
        """One of the browser's own commands."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def screenshot(self) -> bytes:
        """The whole page, as PNG."""
        found = self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    def complaints(self) -> list[str]:
        """What the console says at warning level or above, and requests that failed, since the last call."""
        told = [str(one["message"]) for one in self._log("browser") if one["level"] in ("WARNING", "SEVERE")]
        for method, facts in self._network():
            url = self.sent.get(facts["requestId"])  # none: the browser's own
            if url is not None and method == "Network.responseReceived" and facts["response"]["status"] >= 400:
                told.append(f"{facts['response']['status']} {url}")
            if url is not None and method == "Network.loadingFailed" and not facts.get("canceled"):
                told.append(f"{facts['errorText']} {facts.get('blockedReason', '')} {url}")
        return told

    def requested(self) -> list[str]:
        """Addresses of all requests of pages, since the browser began."""
        self._network()
        return list(self.sent.values())

    def _network(self) -> list[tuple[str, dict[str, Any]]]:
        found = []
        for entry in self._log("performance"):
            message = json.loads(entry["message"])["message"]
            method, facts = message["method"], message["params"]
            if method == "Network.requestWillBeSent" and facts["documentURL"].startswith("http"):
                self.sent[facts["requestId"]] = facts["request"]["url"]
            elif method in ("Network.responseReceived", "Network.loadingFailed"):
                found.append((method, facts))
        return found

    def _log(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._call("POST", "/se/log", {"type": kind})
        return found


@contextmanager
def browsing(directory: Path) -> Iterator[Browser]:
    """A browser with a fresh profile under a directory; it is gone at the end, and so is its driver."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert chromium is not None, "the tests need Debian's chromium and chromium-driver: make servers"
    assert driver is not None, "the tests need Debian's chromium and chromium-driver: make servers"
    log = directory / "chromedriver.log"
    with log.open("wb") as out:
        process = subprocess.Popen([driver, "--port=0"], stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    browser_pid = None
    try:
        end = time.monotonic() + WAIT_S
        while (found := re.search(r"started successfully on port (\d+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        driver_url = f"http://127.0.0.1:{found[1]}"
        options = {"binary": chromium, "args": [*_FLAGS, f"--user-data-dir={directory / 'profile'}"]}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            "timeouts": {"script": 60_000, "pageLoad": 60_000},
        }
        body = json.dumps({"capabilities": {"alwaysMatch": wanted}})
        begun = httpx2.post(f"{driver_url}/session", content=body, timeout=2 * WAIT_S, trust_env=False)
        value = begun.json()["value"]
        assert begun.status_code == 200, value
        browser_pid = value["capabilities"].get("goog:processID")
        session = f"{driver_url}/session/{value['sessionId']}"
        try:
            yield Browser(session)
        finally:
            with suppress(httpx2.HTTPError):
                httpx2.delete(session, timeout=WAIT_S, trust_env=False)
    finally:
        process.terminate()
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(WAIT_S)
        if browser_pid is not None:
            with suppress(ProcessLookupError):
                os.kill(browser_pid, signal.SIGKILL)
        shutil.rmtree(directory / "profile", ignore_errors=True)
