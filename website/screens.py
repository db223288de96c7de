"""Takes the pictures of the terminal view and of a report: docs/assets/terminal.svg and docs/assets/report.png.

python -m website.screens        # needs Chromium, chromedriver and the packages selenium and pillow

Both show one real run of examples/digits.py on three workers, of which one is killed.
"""

from __future__ import annotations

import base64
import io
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from unisono.cli.looking import look
from unisono.record.history import History
from unisono.record.overview import Overview
from unisono.views.watch.terminal.drawing import draw
from unisono.views.watch.terminal.text import Line, width
from website.pictures import ASSETS

__all__ = ["main", "terminal"]

REPOSITORY: Final = Path(__file__).resolve().parents[1]
COLUMNS: Final = 80
ROWS: Final = 22
CHARACTER: Final = 8.4
"""Width of a character in pixels."""
LINE: Final = 18
EPOCHS: Final = 30
KILLED_AT: Final = 90
DRAWN_AT: Final = 230
WORDS: Final = re.compile(r"[\u2800-\u28ff]+|[^\s\u2800-\u28ff]+(?: [^\s\u2800-\u28ff]+)*")
"""Dots of a curve, and words with single spaces between them: SVG drops all others."""
TOP_OF: Final = (
    "return [...document.querySelectorAll('h2')].find((each) => each.textContent.includes(arguments[0]))"
    ".getBoundingClientRect().top + scrollY"
)
HOST: Final = re.compile(re.escape(socket.gethostname()) + r"(-[0-9a-f]{8,})?")
"""This machine, whose name is nobody's business."""
COLOURS: Final = {
    "good": "#3fb950",
    "green": "#3fb950",
    "warning": "#d29922",
    "yellow": "#d29922",
    "error": "#ff7b72",
    "red": "#ff7b72",
    "cyan": "#39c5cf",
    "blue": "#58a6ff",
    "magenta": "#bc8cff",
    "dim": "#8b949e",
}


def terminal(lines: Sequence[Line], title: str) -> str:
    """Return lines of the terminal view as SVG: each run of characters at its own column."""
    wide, high = COLUMNS * CHARACTER + 24, len(lines) * LINE + 24
    parts = [
        f'<svg class="picture" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high}" width="{wide:g}" '
        f'role="img" aria-label="{title}">',
        f'<rect width="{wide:g}" height="{high}" rx="8" fill="#0d1117"/>',
        '<g font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace" font-size="14" '
        'fill="#e6edf3" xml:space="preserve">',
    ]
    for row, line in enumerate(lines):
        column = 0
        for text, style in line:
            bold = ' font-weight="600"' if style in ("bold", "error") else ""
            fill = f' fill="{COLOURS[style]}"' if style in COLOURS else ""
            for found in WORDS.finditer(text):
                left = 12 + (column + width(text[: found.start()])) * CHARACTER
                if "\u2800" <= found[0][0] <= "\u28ff":
                    parts.append(f'<path d="{_dots(found[0], left, 12 + row * LINE)}"{fill}/>')
                    continue
                shown = found[0].replace("&", "&amp;").replace("<", "&lt;")
                place = f'x="{left:g}" y="{26 + row * LINE}" textLength="{width(found[0]) * CHARACTER:g}"'
                parts.append(f'<text {place} lengthAdjust="spacingAndGlyphs"{fill}{bold}>{shown}</text>')
            column += width(text)
    return "\n".join([*parts, "</g>", "</svg>"]) + "\n"


def _dots(text: str, left: float, top: float) -> str:
    """Return a path of the dots of braille characters, which few fonts have in one width."""
    found = []
    for column, character in enumerate(text):
        for bit, (x, y) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]):
            if ord(character) >> bit & 1:
                across, down = left + (column + x / 2) * CHARACTER + 1, top + y * LINE / 4 + 1
                found.append(f"M{across:g} {down:g}h2v2h-2z")
    return "".join(found)


def _trained(directory: Path) -> Overview:
    """Train, kill a worker on the way, and return what a view shows after some more steps."""
    words = ["run", "examples/digits.py", "--workers", "3", "--run-dir", str(directory), "--overwrite"]
    command = subprocess.Popen(
        [sys.executable, "-m", "unisono", *words, "--", "--epochs", str(EPOCHS)],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    found = None
    is_killed = False
    while not (directory / "token").exists() and command.poll() is None:
        time.sleep(0.1)
    for seen in look(str(directory)):
        if seen.overview is not None and seen.overview.step >= KILLED_AT and not is_killed:
            w1 = next(each for each in History(directory).past().workers if each.worker_id == "w1")
            os.kill(w1.pid, signal.SIGKILL)
            is_killed = True
        if seen.overview is not None and seen.overview.state == "training" and seen.overview.step >= DRAWN_AT:
            found = found or seen.overview
        if seen.is_over:
            break
    if command.wait() or found is None:
        raise SystemExit("the run has failed, or was over before a picture was taken")
    text = HOST.sub("lab", msgspec.json.encode(found).decode()).replace(str(directory), "runs/digits")
    return msgspec.json.decode(text, type=Overview)


def _report(directory: Path, file: Path) -> None:
    """Photograph the part of a report that lies below its curves."""
    from PIL import Image
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    page = directory / "report.html"
    subprocess.run([sys.executable, "-m", "unisono", "report", str(directory), "-o", str(page)], check=True)
    page.write_text(HOST.sub("lab", page.read_text()))
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    try:
        metrics = {"width": 960, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        driver.get(page.as_uri())
        top, end = (driver.execute_script(TOP_OF, title) - 20 for title in ("Result", "Who was there"))
        clip = {"x": 0, "y": top, "width": 960, "height": end - top - 30, "scale": 1}
        found = driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
        picture = Image.open(io.BytesIO(base64.b64decode(found["data"])))
        picture.convert("RGB").quantize(64).save(file, optimize=True)
    finally:
        driver.quit()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "digits"
        overview = _trained(directory)
        title = (
            "The terminal view of a run of digits.py: progress, loss, and three workers, one of which replaced another"
        )
        (ASSETS / "terminal.svg").write_text(terminal(draw(overview, COLUMNS, ROWS), title))
        _report(directory, ASSETS / "report.png")


if __name__ == "__main__":
    main()
