"""A real browser, headless, and the page's own server in this process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

from tests.waiting import WAIT_S
from unisono.record.history import History
from unisono.views.page.directory_server import Directories

__all__ = ["TOKEN", "Browser", "Serving", "chromium"]

TOKEN = "a-token-for-looking"
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    """A browser with a profile of its own, for all tests of this process."""
    options = webdriver.ChromeOptions()
    for flag in FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    driver.set_page_load_timeout(WAIT_S)
    driver.set_script_timeout(WAIT_S)
    try:
        yield driver
    finally:
        driver.quit()


class Serving:
    """The page for some directories, served by a thread until the ``with`` is left."""

    def __init__(self, *directories: Path, port: int = 0) -> None:
        self.histories = [History(directory) for directory in directories]
        self._page = Directories(self.histories, port, TOKEN)
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    @property
    def url(self) -> str:
        return self._page.url

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    def __enter__(self) -> Serving:
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        async with self._page.serving():
            self._ready.set()
            await self._over.wait()


class Browser:
    """What a test does with the browser: it opens a page, reads what is shown, and presses keys."""

    def __init__(self, driver: WebDriver) -> None:
        self.driver = driver

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open the page, and wait until it has drawn what it asked for."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(url)

    def loaded(self) -> None:
        """Wait until all that the page shows has come."""
        self.until("return performance.getEntriesByName('unisono-loaded').length > 0")
        self.drawn()

    def drawn(self) -> None:
        """Wait until what has come is drawn."""
        self.until("return window.unisono.app.dirty.size === 0 && !window.unisono.app.drawing")

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page, and return what it returns."""
        return self.driver.execute_script(script, *arguments)

    def until(self, script: str, *arguments: Any) -> Any:
        """Wait until a script returns something true, and return that."""
        return WebDriverWait(self.driver, WAIT_S, poll_frequency=0.05).until(
            lambda driver: driver.execute_script(script, *arguments), message=script
        )

    def text(self, selector: str) -> str:
        """The text of an element, as it is shown."""
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def keys(self, *keys: str) -> None:
        """Press keys, wherever the focus is."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def focused(self) -> str:
        """What has the focus: its id, else its class, else its tag."""
        return str(self.run("const a = document.activeElement; return a.id || a.className || a.tagName.toLowerCase()"))

    def errors(self) -> list[str]:
        """What the console says that is an error or a warning."""
        logged = self.driver.get_log("browser")
        return [entry["message"] for entry in logged if entry["level"] in ("SEVERE", "WARNING")]

    def asked_for(self) -> list[str]:
        """All that the page has asked the network for."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
            elif message["method"] == "Network.webSocketCreated":
                found.append(message["params"]["url"])
        return found

    def accessible(self) -> Sequence[dict[str, Any]]:
        """What a screen reader is told: nodes with ``role`` and ``name``."""
        self.driver.execute_cdp_cmd("Accessibility.enable", {})
        nodes = self.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        return [
            {"role": node["role"]["value"], "name": node.get("name", {}).get("value", "")}
            for node in nodes
            if not node["ignored"] and "role" in node
        ]
