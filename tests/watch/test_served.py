"""The page on the port of a head, in a real browser, by TLS."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.waiting import WAIT_S
from tests.workers.conftest import Unisono
from tests.workers.gates import Gates
from unisono.cli.reach import find

SCRIPT = Path(__file__).parents[1] / "workers" / "small_training.py"
Browser = webdriver.Chrome


@contextlib.contextmanager
def browser_with(*arguments: str) -> Iterator[Browser]:
    # In a folder with a short name: the path of a socket has 108 characters at most.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="b", ignore_cleanup_errors=True) as folder:
        options = webdriver.ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        own = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--user-data-dir={folder}/profile")
        for argument in (*own, *arguments):
            options.add_argument(argument)
        browser = Browser(
            options=options, service=Service("/usr/bin/chromedriver", env={**os.environ, "TMPDIR": folder})
        )
        try:
            yield browser
        finally:
            browser.quit()


@pytest.mark.usefixtures("nursery")
def test_a_browser_opens_the_page_of_a_head_and_only_wonders_who_vouches_for_it(
    unisono: Unisono, tmp_path: Path
) -> None:
    """And it stays open when the head dies and another one follows."""
    run_dir = tmp_path / "run"
    with Gates(tmp_path / "gates", (5, 7)) as gates, browser_with() as browser:
        place = ("--run-dir", run_dir, "--tls", "--", "--steps", 8, "--gates", gates.folder)
        command = unisono("run", SCRIPT, "-n", 1, *place)
        gates.wait(5)
        invitation = find(str(run_dir))
        browser.get(invitation.page)
        # The handshake is done: the browser takes the key, and only does not know who vouches for it.
        assert "NET::ERR_CERT_AUTHORITY_INVALID" in browser.find_element(By.TAG_NAME, "body").text
        browser.find_element(By.ID, "details-button").click()
        browser.find_element(By.ID, "proceed-link").click()
        WebDriverWait(browser, WAIT_S).until(lambda it: it.current_url.endswith("/") and "62 %" in it.title)
        assert invitation.for_looking.token not in browser.current_url
        assert browser.execute_script("return document.cookie") == "", "scripts do not see the cookie"
        (cookie,) = browser.get_cookies()
        assert (cookie["httpOnly"], cookie["secure"], cookie["sameSite"]) == (True, True, "Strict")
        assert browser.execute_async_script(ASK)["step"] == 4
        assert severe(browser) == []

        os.kill(json.loads((run_dir / "head.json").read_text())["pid"], signal.SIGKILL)
        command.line("another one takes over")
        gates.open(5)
        gates.wait(7)
        WebDriverWait(browser, WAIT_S).until(lambda it: "87 %" in it.title)
        gates.open(7)
        assert command.wait() == 0, command.err


def severe(browser: Browser) -> list[str]:
    """What the browser complains of."""
    found = browser.get_log("browser")  # type: ignore[no-untyped-call]
    return [line["message"] for line in found if line["level"] == "SEVERE"]


ASK = """
const done = arguments[0];
const socket = new WebSocket(`wss://${location.host}/watch`);
socket.onmessage = (event) => {
  const { overview } = JSON.parse(event.data);
  if (overview?.step >= 4) done(overview); // pushed once a second: what comes first may be older than the page's answer
};
socket.onclose = () => done({});
"""
