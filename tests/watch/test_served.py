"""The page on the port of a head, in a real browser, by TLS."""

from __future__ import annotations

import contextlib
import os
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
from unisono.invitation import Invitation

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


@pytest.fixture
def going(unisono: Unisono, tmp_path: Path) -> Iterator[Invitation]:
    """A run that is going, at its fifth step."""
    with Gates(tmp_path / "gates", (5,)) as gates:
        place = ("--run-dir", tmp_path / "run", "--tls", "--", "--steps", 8, "--gates", gates.folder)
        command = unisono("run", SCRIPT, "-n", 1, *place)
        gates.wait(5)
        yield find(str(tmp_path / "run"))
        gates.open(5)
        assert command.wait() == 0


@pytest.mark.usefixtures("nursery")
def test_a_browser_opens_the_page_of_a_head_and_only_wonders_who_vouches_for_it(going: Invitation) -> None:
    with browser_with() as browser:
        browser.get(going.page)
        # The handshake is done: the browser takes the key, and only does not know who vouches for it.
        assert "NET::ERR_CERT_AUTHORITY_INVALID" in browser.find_element(By.TAG_NAME, "body").text
        browser.find_element(By.ID, "details-button").click()
        browser.find_element(By.ID, "proceed-link").click()
        WebDriverWait(browser, WAIT_S).until(lambda it: it.current_url.endswith("/") and it.title != "Privacy error")
        assert going.for_looking.token not in browser.current_url
        assert browser.execute_script("return document.cookie") == "", "scripts do not see the cookie"
        (cookie,) = browser.get_cookies()
        assert (cookie["httpOnly"], cookie["secure"], cookie["sameSite"]) == (True, True, "Strict")
        body = browser.find_element(By.TAG_NAME, "body")
        WebDriverWait(browser, WAIT_S).until(lambda _: "small_training" in body.text or "5 of" in body.text)
        answer = browser.execute_async_script(ASK)
        assert answer["step"] == 4
        errors = [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]  # type: ignore[no-untyped-call]
        assert errors == []


ASK = """
const done = arguments[0];
const socket = new WebSocket(`wss://${location.host}/watch`);
socket.onmessage = (event) => done(JSON.parse(event.data).overview);
socket.onclose = () => done({});
"""
