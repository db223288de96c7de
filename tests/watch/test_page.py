"""The web page, in a real browser: what it shows, what it asks for, and what it does not let happen."""

from __future__ import annotations

import hashlib
import http.client
import itertools
import json
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.waiting import WAIT_S
from tests.watch.browser import TOKEN, Browser, Serving, chromium
from tests.watch.long_run import make_long_run
from tests.watch.recorded import HOSTILE, Recording, record
from tests.workers.conftest import Unisono
from tests.workers.gates import Gates
from unisono.cli import watch as watch_command
from unisono.cluster.trust.invitation import Invitation
from unisono.cluster.trust.secret import reader_token
from unisono.record.journal import read
from unisono.views.page import site
from unisono.views.page.directory_server import run

__all__ = ["chromium"]

STATIC = Path(site.__file__).parent / "static"
SMALL = Path(__file__).parents[1] / "workers" / "small_training.py"
WIDTHS = (320, 375, 768, 1280)


@pytest.fixture
def browser(chromium: WebDriver) -> Iterator[Browser]:
    """A browser whose page must be quiet: no errors, and nothing from elsewhere."""
    found = Browser(chromium)
    yield found
    origin = found.run("return location.host")
    asked = found.asked_for()
    # A test may have ended its server before the page is left, which calls it again then.
    errors = [error for error in found.errors() if "net::ERR_CONNECTION_REFUSED" not in error]
    chromium.get("about:blank")
    assert errors == []
    foreign = [url for url in asked if not re.match(rf"(https?|wss?)://{re.escape(origin)}/|about:blank", url)]
    assert foreign == []


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("finished") / "digits", num_workers=8, num_gpus=1)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hostile") / "<img src=x onerror=alert(1)>"
    return record(directory, num_steps=120, bad=HOSTILE, ok=False, nan_at=60)


LOSS = "[...window.unisono.charts].find(chart => chart.title === 'Loss')"
CHARTS = "return [...window.unisono.charts].map(c => [c.title, c.plot ? c.plot.data[0].length : 0])"


# -- what is shown -----------------------------------------------------------------------------------


def test_a_finished_run_opens_from_its_directory_and_is_drawn(browser: Browser, finished: Path) -> None:
    with Serving(finished) as serving:
        browser.open(serving.url)
        browser.loaded()
        drawn = dict(browser.run(CHARTS))
        assert drawn["Loss"] == 600
        assert {title for title, points in drawn.items() if points} >= {
            *("Loss", "Samples per second", "Time of a step, by part", "accuracy", "accuracy (evaluation)"),
            *("Processor", "Memory", "GPUs", "GPU memory", "Network, sent", "Network, received"),
        }
        assert browser.text("#run-name") == "digits"
        assert browser.text("#state") == "finished"
        assert browser.text("#progress-text") == "600 of 600 steps"
        assert len(browser.driver.find_elements(By.CSS_SELECTOR, "#workers-table tbody tr")) == 9
        assert "w8 joins on node-00" in browser.text("#event-list")
        assert "batch_size" in browser.text("#facts")


def test_the_loss_is_on_the_canvas_in_the_colour_of_its_run(browser: Browser, finished: Path) -> None:
    """Not only in the chart's data: a canvas that nothing has painted looks the same to a script."""
    with Serving(finished) as serving:
        browser.open(serving.url)
        browser.loaded()
        painted = browser.run("""
            const canvas = document.querySelector('#chart-loss canvas');
            const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
            let count = 0;
            for (let i = 0; i < data.length; i += 4)
              count += Math.abs(data[i] - 0x1f) + Math.abs(data[i + 1] - 0x66) + Math.abs(data[i + 2] - 0xd6) < 60;
            return count;
        """)
        assert painted > 500


def test_numbers_on_an_axis_tell_neighbours_apart_and_have_room(browser: Browser, tmp_path: Path) -> None:
    """A learning rate of 0.001 that stays the same was drawn between two that were both called 0.001."""
    with Serving(record(tmp_path / "small", num_steps=40)) as serving:
        browser.open(serving.url)
        browser.loaded()
        shown = browser.run(r"""
            const format = await import('./format.js');
            const tick = (value, step) => format.tick(value, step).replace(/\u2212/g, '-');
            const around = (from, step, count) => Array.from({length: count}, (_, i) => tick(from + i * step, step));
            return [around(0.00095, 2.5e-5, 5), around(0.0005, 5e-4, 3), around(2e-5, 2e-5, 3), around(0.1, 0.05, 3),
                    [1e-5, 1e-4, 2e-3].map(y => tick(y, y))];
        """)
        assert shown == [
            ["9.50e-4", "9.75e-4", "1.000e-3", "1.025e-3", "1.050e-3"],
            ["5e-4", "0.0010", "0.0015"],
            ["2e-5", "4e-5", "6e-5"],
            ["0.10", "0.15", "0.20"],
            ["1e-5", "1e-4", "0.002"],
        ]
        room = browser.run(f"""
            const chart = {LOSS};
            const axis = chart.plot.axes[1];
            return ['0', '1.050e-3'].map(text => axis.size(chart.plot, [text]));
        """)
        assert room[0] == 54
        assert room[1] > 60


def test_a_copy_of_a_run_has_its_own_name(browser: Browser, finished: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(finished, tmp_path / "copied")
    with Serving(copy) as serving:
        browser.open(serving.url)
        browser.loaded()
        assert browser.text("#run-name") == "copied"


def test_what_went_wrong_is_said_with_the_path_of_the_evidence(browser: Browser, finished: Path) -> None:
    with Serving(finished) as serving:
        browser.open(serving.url)
        browser.loaded()
        shown = browser.text("#problems")
        assert "The loss of step 230 is not a number" in shown
        assert str(finished / "problems" / "nan-1.txt") in shown


def test_the_timeline_says_who_came_and_went_and_why(browser: Browser, finished: Path) -> None:
    with Serving(finished) as serving:
        browser.open(serving.url)
        browser.loaded()
        assert "9 workers in all, on 2 machines, 3 generations, 1 lost" in browser.text("#timeline-card .say")
        browser.run("document.querySelector('#timeline-card details').open = true")
        browser.until("return document.querySelectorAll('#timeline-card table tr').length > 1")
        rows = browser.run("return [...document.querySelectorAll('#timeline-card table tr')].map(row => row.innerText)")
        lost = next(row for row in rows if row.startswith("w0"))
        assert "lost" in lost
        assert "was killed by signal 9 (SIGKILL)" in lost


def test_a_loss_that_is_not_a_number_is_marked(browser: Browser, tmp_path: Path) -> None:
    directory = record(tmp_path / "run", num_steps=60, num_workers=2, nan_at=40)
    with Serving(directory) as serving:
        browser.open(serving.url)
        browser.loaded()
        assert browser.run(f"return {LOSS}.shown.lines[0].odd") == [40]


def test_64_workers_are_rows_and_a_map_and_the_slowest_is_named(browser: Browser, tmp_path: Path) -> None:
    directory = record(tmp_path / "run", num_steps=40, num_workers=64, num_hosts=8)
    with Serving(directory) as serving:
        browser.open(serving.url)
        browser.loaded()
        rows = browser.driver.find_elements(By.CSS_SELECTOR, "#workers-table tbody tr")
        assert len(rows) == 65
        assert rows[0].find_element(By.TAG_NAME, "th").text == "w63"
        assert "64 of them mostly for w63" in browser.text("#workers-say")
        rows_of_the_map = browser.run("return window.unisono.app.workers.heat.order.length")
        assert rows_of_the_map == 65
        height = browser.run("return document.querySelector('#heat .heat canvas').clientHeight")
        assert height >= 65 * 5


def test_several_runs_lie_over_each_other(browser: Browser, finished: Path, tmp_path: Path) -> None:
    other = record(tmp_path / "other", num_steps=300, num_workers=2, seed=4)
    with Serving(finished, other) as serving:
        browser.open(serving.url)
        browser.loaded()
        lines = f"return {LOSS}.shown.lines"
        assert browser.run(f"{lines}.map(line => [line.label, line.x.length])") == [["digits", 600], ["other", 300]]
        assert len(set(browser.run(f"{lines}.map(line => line.colour)"))) == 2
        browser.driver.find_element(By.ID, "run-shown-1").click()
        browser.until(f"{lines}.length === 1")
        browser.driver.find_element(By.ID, "run-chosen-1").click()
        browser.until("return document.getElementById('run-name').textContent === 'other'")
        assert browser.text("#progress-text") == "300 of 300 steps"
        rows = browser.run("return [...document.querySelectorAll('#differences tr')].map(row => row.innerText)")
        assert rows == ["\tdigits\tother", "recipe · microbatches\t16\t4"]


# -- it is asked for more ----------------------------------------------------------------------------


def test_a_part_of_the_run_is_asked_for_in_more_detail(browser: Browser, tmp_path: Path) -> None:
    directory = record(tmp_path / "run", num_steps=2000, num_workers=1, num_hosts=1)
    with Serving(directory) as serving:
        browser.open(serving.url)
        browser.loaded()
        points = f"return {LOSS}.plot.data[0]"
        assert len(browser.run(points)) < 2000
        has_band = f"return Boolean({LOSS}.shown.lines[0].low)"
        assert browser.run(has_band)
        plot = browser.driver.find_element(By.CSS_SELECTOR, "#chart-loss .u-over")
        drag = ActionChains(browser.driver).move_to_element_with_offset(plot, -100, 0).click_and_hold()
        drag.move_by_offset(50, 0).move_by_offset(50, 0).release().perform()
        browser.until("return window.unisono.app.range !== null")
        first, last = browser.run("return window.unisono.app.range")
        assert 0 < first < last < 1999
        browser.until(f"{points}.length === arguments[0]", last - first + 1)
        assert not browser.run(has_band)
        assert browser.run(points) == list(range(first, last + 1))
        browser.driver.find_element(By.ID, "zoom-reset").click()
        browser.until(f"{points}[0] === 0")


def test_a_long_run_is_drawn_in_few_points_that_keep_its_extremes(browser: Browser, tmp_path: Path) -> None:
    steps = 100_000
    directory = make_long_run(tmp_path / "long", steps=steps, workers=8)
    with Serving(directory) as serving:
        browser.open(serving.url)
        browser.loaded()
        assert browser.run(f"return {LOSS}.plot.data[0].length") <= 1000
        losses = [float(line["loss"]) for line in read(directory) if line["kind"] == "step"]
        finite = [loss for loss in losses if math.isfinite(loss)]
        drawn = browser.run(f"const [line] = {LOSS}.shown.lines; return [line.low, line.high].flat()")
        assert max(value for value in drawn if value is not None) == max(finite)
        assert min(value for value in drawn if value is not None) == min(finite)
        assert browser.text("#progress-text") == "100,000 of 100,000 steps"


def test_steps_can_be_typed(browser: Browser, finished: Path) -> None:
    with Serving(finished) as serving:
        browser.open(serving.url)
        browser.loaded()
        for name, value in (("range-first", "100"), ("range-last", "120")):
            field = browser.driver.find_element(By.ID, name)
            field.send_keys(Keys.CONTROL, "a")
            field.send_keys(value)
        browser.driver.find_element(By.ID, "range-last").send_keys(Keys.ENTER)
        browser.until("return String(window.unisono.app.range) === '100,120'")


# -- while the run goes on ---------------------------------------------------------------------------


def test_a_real_run_is_followed_to_its_end(browser: Browser, unisono: Unisono, tmp_path: Path) -> None:
    """Without a reload, and by the library's own files."""
    directory = tmp_path / "run"
    with Gates(tmp_path / "gates", (3, 6)) as gates:
        command = unisono(
            *("run", SMALL, "--workers", 2, "--run-dir", directory, "--", "--steps", 8, "--gates", gates.folder)
        )
        gates.wait(3, workers=2)
        with Serving(directory) as serving:
            browser.open(serving.url)
            browser.loaded()
            browser.until("return document.getElementById('progress-text').textContent === '3 of 8 steps'")
            browser.until("return document.getElementById('state').innerText === 'training'")
            gates.open(3)
            gates.wait(6, workers=2)
            browser.until("return document.getElementById('progress-text').textContent === '6 of 8 steps'")
            loss = f"return {LOSS}.plot?.data[0].length"
            browser.until(f"{loss} === 6")
            gates.open(6)
            assert command.wait() == 0
            browser.until("return document.getElementById('state').innerText === 'finished'")
            browser.until(f"{loss} === 8")
            assert browser.run("return performance.getEntriesByType('navigation').length") == 1


@pytest.fixture
def going(tmp_path: Path) -> Recording:
    """A run of 50 steps that has done 10."""
    recording = Recording(tmp_path / "run", num_workers=1, num_hosts=1, num_steps=50)
    recording.begin()
    recording.steps(0, 10)
    return recording


def test_a_lost_connection_is_said_and_comes_back(chromium: WebDriver, going: Recording) -> None:
    browser = Browser(chromium)
    with Serving(going.directory) as serving:
        port = serving.port
        browser.open(serving.url)
        browser.loaded()
    browser.until("return document.getElementById('banners').innerText.includes('cannot be reached')")
    assert browser.text("#connection") == "no connection"
    assert browser.text("#progress-text") == "10 of 50 steps"
    going.steps(10, 20)
    with Serving(going.directory, port=port):
        browser.until("return document.getElementById('progress-text').textContent === '20 of 50 steps'")
        browser.until("return document.getElementById('banners').innerText === ''")
        chromium.get("about:blank")


def test_the_number_beside_a_curve_is_that_of_its_newest_step(browser: Browser, going: Recording) -> None:
    with Serving(going.directory) as serving:
        browser.open(serving.url)
        browser.loaded()
        browser.until(f"return {LOSS}.plot?.data[0].length === 10")
        before = browser.run(f"return {LOSS}.values[0].textContent")
        going.steps(10, 20)
        browser.until(f"return {LOSS}.plot.data[0].length === 20")
        newest = browser.run(f"return {LOSS}.format({LOSS}.shown.lines[0].y.at(-1))")
        assert browser.run(f"return {LOSS}.values[0].textContent") == newest != before


def test_silence_of_the_server_is_said(browser: Browser, going: Recording) -> None:
    with Serving(going.directory) as serving:
        browser.open(serving.url)
        browser.loaded()
        browser.until("return document.getElementById('connection').dataset.state === 'live'")
        browser.run("window.unisono.app.link.pushedAt -= 60000; window.unisono.app.push = () => {}")
        browser.until("return document.getElementById('connection').innerText.startsWith('no news for')")


def test_a_run_that_is_resumed_from_a_checkpoint_is_drawn_anew(browser: Browser, going: Recording) -> None:
    with Serving(going.directory) as serving:
        browser.open(serving.url)
        browser.loaded()
        browser.until(f"return {LOSS}.plot?.data[0].length === 10")
        going.back_to(4)
        going.steps(4, 7)
        browser.until("return document.getElementById('progress-text').textContent === '7 of 50 steps'")
        browser.until(f"return {LOSS}.plot?.data[0].length === 7")


# -- bad input ---------------------------------------------------------------------------------------


def test_what_cannot_be_read_is_said_and_the_rest_is_shown(browser: Browser, tmp_path: Path) -> None:
    directory = record(tmp_path / "run", num_steps=60, num_workers=2)
    journal = directory / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[20] = b"\x00\xff no line\n"
    journal.write_bytes(b"".join(lines)[:-30])
    (directory / "journal.index").unlink(missing_ok=True)
    (directory / "run.json").write_text("{")
    with Serving(directory) as serving:
        browser.open(serving.url)
        browser.loaded()
        said = browser.text("#banners")
        assert "1 line of" in said
        assert "run.json cannot be read" in said
        assert browser.run(f"return {LOSS}.plot.data[0].length") == 59


def test_a_directory_without_a_run_is_said_to_be_one(browser: Browser, tmp_path: Path) -> None:
    with Serving(tmp_path) as serving:
        browser.open(serving.url)
        browser.loaded()
        assert f"there is no {tmp_path / 'journal.jsonl'}" in browser.text("#banners")


# -- hostile words -----------------------------------------------------------------------------------


def test_names_and_errors_that_look_like_markup_are_text(browser: Browser, hostile: Path) -> None:
    with Serving(hostile) as serving:
        browser.open(serving.url)
        browser.loaded()
        browser.run("document.querySelectorAll('details').forEach(fold => { fold.open = true })")
        browser.drawn()
        browser.driver.find_element(By.ID, "metric-choice")
        assert browser.run("return window.hacked") is None
        assert browser.run("return document.querySelectorAll('img, iframe, object, embed').length") == 0
        scripts = browser.run("return [...document.scripts].map(s => new URL(s.src).pathname)")
        assert sorted(scripts) == ["/main.js", "/uplot/uPlot.iife.min.js"]
        shown = browser.text("body")
        assert "<img src=x onerror=window.hacked=1>" in shown
        assert "\u202e" not in shown
        assert "\x1b" not in shown


def test_the_page_makes_text_in_one_way_only() -> None:
    """No script of it can make markup of a string, or run one."""
    ways = (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        r"document\.write",
        r"\beval\b",
        "new Function",
        "DOMParser",
    )
    forbidden = "|".join((*ways, "srcdoc", r"\bimport\(", "setTimeout\\([\"'`]"))
    found = [
        f"{path.name}: {line.strip()}"
        for path in STATIC.glob("*.js")
        for line in path.read_text().splitlines()
        if re.search(forbidden, line)
    ]
    assert found == []


def test_the_chart_library_is_the_one_that_was_published() -> None:
    """Version 1.6.32 of uPlot, as it is in the registry; with a newline at the end of the style sheet."""
    published = {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    found = {name: (STATIC / "uplot" / name).read_bytes() for name in published}
    found["uPlot.min.css"] = found["uPlot.min.css"].removesuffix(b"\n")
    assert {name: hashlib.sha256(data).hexdigest() for name, data in found.items()} == published
    assert "MIT" in (STATIC / "uplot" / "LICENSE").read_text()


def test_no_file_of_the_page_names_another_site() -> None:
    """But the name of a format, which nothing is fetched from."""
    texts = {path: path.read_text() for path in STATIC.rglob("*") if path.suffix in (".js", ".css", ".html", ".svg")}
    assert len(texts) > 10
    urls = {
        url for text in texts.values() for url in re.findall(r"(?:https?|wss?):?//[\w.]+|@import|url\([^)]*\)", text)
    }
    assert urls <= {"http://www.w3.org", "https://github.com"}  # the second: in the comment on top of uPlot


# -- keys, screen readers, eyes ----------------------------------------------------------------------


def test_all_can_be_done_by_keyboard(browser: Browser, finished: Path) -> None:
    with Serving(finished) as serving:
        browser.open(serving.url)
        browser.loaded()
        browser.keys(Keys.TAB)
        assert browser.focused() == "skip"
        seen = []
        for _ in range(80):
            browser.keys(Keys.TAB)
            seen.append(browser.focused())
            if seen[-1] == "body":
                break
        wanted = {
            "theme",
            "help-open",
            "range-first",
            "zoom-in",
            "axis",
            "log-scale",
            "smoothing",
            "plot",
            "workers-order",
        }
        assert wanted <= set(seen)
        browser.run("document.querySelector('#chart-loss .plot').focus()")
        browser.keys(Keys.ARROW_LEFT)
        assert browser.text("#chart-loss .at") == "step 599"
        browser.keys(Keys.ARROW_LEFT)
        assert browser.text("#chart-loss .at") == "step 598"
        assert browser.run("return document.getElementById('spoken').textContent").startswith("step 598:")
        browser.keys("+")
        browser.until("return window.unisono.app.range !== null")
        browser.keys("0")
        browser.until("return window.unisono.app.range === null")


def test_the_focus_can_be_seen(browser: Browser, finished: Path) -> None:
    with Serving(finished) as serving:
        browser.open(serving.url)
        browser.loaded()
        unseen = []
        for _ in range(40):
            browser.keys(Keys.TAB)
            if browser.run("return getComputedStyle(document.activeElement).outlineStyle") == "none":
                unseen.append(browser.focused())
        assert unseen == []


def test_single_keys_are_shortcuts_that_can_be_turned_off(browser: Browser, finished: Path) -> None:
    with Serving(finished) as serving:
        browser.open(serving.url)
        browser.loaded()
        browser.keys("?")
        assert browser.run("return document.getElementById('help').open")
        assert browser.focused() != "body"
        browser.keys(Keys.ESCAPE)
        assert not browser.run("return document.getElementById('help').open")
        before = browser.run("return document.documentElement.dataset.theme")
        browser.keys("t")
        browser.keys("t")
        assert browser.run("return document.documentElement.dataset.theme") != before
        browser.keys("t")
        browser.keys("l")
        assert browser.run("return window.unisono.app.log")
        browser.keys("?")
        browser.driver.find_element(By.ID, "keys-on").click()
        browser.keys(Keys.ESCAPE)
        browser.keys("l")
        assert browser.run("return window.unisono.app.log")
        browser.run("localStorage.clear()")


CONTROLS = {"button", "link", "checkbox", "textbox", "combobox", "slider"}
NAMED = CONTROLS | {"progressbar", "img", "region", "table", "navigation"}


def test_everything_has_a_name_for_a_screen_reader(browser: Browser, finished: Path, tmp_path: Path) -> None:
    other = record(tmp_path / "other", num_steps=30, num_workers=2)
    with Serving(finished, other) as serving:
        browser.open(serving.url)
        browser.loaded()
        nodes = browser.accessible()
        nameless = [node for node in nodes if node["role"] in NAMED and not node["name"].strip()]
        assert nameless == []
        roles = [node["role"] for node in nodes]
        assert roles.count("main") == 1
        assert {"banner", "navigation", "contentinfo", "status"} <= set(roles)
        loss = next(node["name"] for node in nodes if node["name"].startswith("Loss."))
        assert re.search(r"digits: last [\d.]+, lowest [\d.]+ step \d+, highest [\d.]+ step \d+", loss)


def test_the_document_is_in_order(browser: Browser, finished: Path) -> None:
    with Serving(finished) as serving:
        browser.open(serving.url)
        browser.loaded()
        ids = browser.run("return [...document.querySelectorAll('[id]')].map(node => node.id)")
        assert len(ids) == len(set(ids))
        assert browser.run("return document.documentElement.lang") == "en"
        levels = browser.run("return [...document.querySelectorAll('h1, h2, h3')].map(h => Number(h.tagName[1]))")
        assert levels.count(1) == 1
        assert levels[0] == 1
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
        broken = browser.run("""
            const names = ['aria-labelledby', 'aria-describedby', 'aria-controls'];
            const isBroken = (node, name) => !document.getElementById(node.getAttribute(name));
            return names.flatMap(name => [...document.querySelectorAll(`[${name}]`)]
              .filter(node => isBroken(node, name)).map(node => node.id));
        """)
        assert broken == []


CONTRAST = """
const luminance = ([r, g, b]) => {
  const [x, y, z] = [r, g, b].map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const parse = text => { const n = text.match(/[\\d.]+/g).map(Number); return n.length === 3 ? [...n, 1] : n; };
const behind = node => {
  for (; node; node = node.parentElement) {
    const colour = parse(getComputedStyle(node).backgroundColor);
    if (colour[3] === 1) return colour;
  }
  return [255, 255, 255, 1];
};
const found = [];
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const node = walk.currentNode.parentElement;
  if (!walk.currentNode.data.trim() || !node.checkVisibility({opacityProperty: true})) continue;
  if (node.closest('.unseen, script, noscript, dialog:not([open]), option, [disabled], .skip')) continue;
  const style = getComputedStyle(node);
  const [a, b] = [luminance(parse(style.color)), luminance(behind(node))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  const isLarge = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
  if (ratio < (isLarge ? 3 : 4.5)) found.push([walk.currentNode.data.trim().slice(0, 40), ratio]);
}
return found;
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_all_text_can_be_read(browser: Browser, finished: Path, *, dark: bool) -> None:
    """4.5 to 1, as WCAG 2 AA asks for."""
    with Serving(finished) as serving:
        browser.open(serving.url, dark=dark)
        browser.loaded()
        assert browser.run("return document.documentElement.dataset.theme") == ("dark" if dark else "light")
        assert browser.run(CONTRAST) == []


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_screen(browser: Browser, finished: Path, hostile: Path, width: int) -> None:
    with Serving(hostile, finished) as serving:
        browser.open(serving.url, width=width)
        browser.loaded()
        assert browser.run("return document.documentElement.scrollWidth") <= width
        small = browser.run("""
            return [...document.querySelectorAll('button, select, input, summary')].filter(node =>
              node.checkVisibility() && node.getBoundingClientRect().height < 13 && !node.matches('.unseen-submit'))
              .map(node => node.id || node.textContent);
        """)
        assert small == []


# -- colours -----------------------------------------------------------------------------------------

Rgb = tuple[float, float, float]
SEEN_BY = {
    "everybody": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
"""Machado, Oliveira and Fernandes (2009), of full severity; on linear RGB."""


def colours(theme: str) -> dict[str, Rgb]:
    """The colours of the style sheet by name, as linear RGB."""
    light, dark = re.findall(r":root(?:\[data-theme=\"dark\"\])? \{(.*?)\}", (STATIC / "style.css").read_text(), re.S)[
        :2
    ]
    text = light if theme == "light" else dark
    return {name: linear(value) for name, value in re.findall(r"--([\w-]+): (#[0-9a-f]{6});", text)}


def linear(value: str) -> Rgb:
    red, green, blue = (int(value[at : at + 2], 16) / 255 for at in (1, 3, 5))
    r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (red, green, blue))
    return r, g, b


def luminance(colour: Rgb) -> float:
    return 0.2126 * colour[0] + 0.7152 * colour[1] + 0.0722 * colour[2]


def contrast(one: Rgb, other: Rgb) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def lab(colour: Rgb) -> Rgb:
    r, g, b = (min(1.0, max(0.0, part)) for part in colour)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047,
        luminance((r, g, b)),
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883,
    )
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def seen(colour: Rgb, matrix: tuple[Rgb, ...]) -> Rgb:
    r, g, b = (sum(a * c for a, c in zip(row, colour, strict=True)) for row in matrix)
    return lab((r, g, b))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_and_areas_stand_out_from_what_is_behind_them(theme: str) -> None:
    found = colours(theme)
    drawn = {name: colour for name, colour in found.items() if name.startswith(("part-", "run-"))}
    assert len(drawn) == 15
    faint = {name: round(contrast(colour, found["card"]), 2) for name, colour in drawn.items()}
    assert min(faint.values()) >= 3.0, faint


@pytest.mark.parametrize("people", SEEN_BY)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_parts_of_a_step_are_told_apart_without_seeing_all_colours(theme: str, people: str) -> None:
    drawn = {name: colour for name, colour in colours(theme).items() if name.startswith("part-")}
    near = {
        (one, other): round(math.dist(seen(drawn[one], SEEN_BY[people]), seen(drawn[other], SEEN_BY[people])), 1)
        for one, other in itertools.combinations(drawn, 2)
    }
    assert min(near.values()) >= 9.0, min(near.items(), key=lambda pair: pair[1])


# -- who may look ------------------------------------------------------------------------------------


def test_without_the_token_the_page_says_what_is_missing(browser: Browser, finished: Path) -> None:
    with Serving(finished) as serving:
        browser.open(serving.url.partition("#")[0])
        browser.run("sessionStorage.clear()")
        browser.open(serving.url.partition("#")[0])
        browser.until("return document.getElementById('banners').innerText.includes('token is missing or wrong')")
        assert browser.run("return window.unisono.app.runs.length") == 0


def test_the_token_leaves_the_address_bar_and_holds_for_a_reload(browser: Browser, finished: Path) -> None:
    with Serving(finished) as serving:
        browser.open(serving.url)
        browser.loaded()
        assert TOKEN not in browser.driver.current_url
        browser.driver.refresh()
        browser.loaded()
        assert browser.text("#run-name") == "digits"


Spawn = Callable[[list[str]], subprocess.Popen[str]]


def get(port: int, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.putrequest("GET", path, skip_host=True)
    for name, value in {"Host": f"127.0.0.1:{port}", **headers}.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer


def test_a_name_that_somebody_elses_dns_points_here_is_refused(finished: Path) -> None:
    """DNS rebinding: another site's page may ask, but the browser says in whose name."""
    with Serving(finished) as serving:
        assert get(serving.port, "/").status == 200
        assert get(serving.port, "/", Host=f"localhost:{serving.port}").status == 200
        assert get(serving.port, "/", Host=f"evil.example:{serving.port}").status == 421
        assert get(serving.port, "/", Host="127.0.0.1.evil.example").status == 421
        assert get(serving.port, "/", Host="127.0.0.1:9000").status == 200  # by `ssh -L 9000:...`


def answer_of(socket: ClientConnection) -> str:
    """The next answer, after what is told unasked."""
    while "id" not in json.loads(text := socket.recv(WAIT_S)):
        pass
    return str(text)


def test_a_page_of_another_site_gets_no_socket(finished: Path) -> None:
    with Serving(finished) as serving:
        url = f"ws://127.0.0.1:{serving.port}/watch?token={TOKEN}"
        for origin in ("http://evil.example", "null", "http://localhost:1", f"https://127.0.0.1:{serving.port}"):
            with pytest.raises(InvalidStatus) as refused:
                connect(url, origin=origin)  # type: ignore[arg-type]
            assert refused.value.response.status_code == 403
        with connect(url) as socket:
            socket.send('{"id": 7, "get": "runs"}')
            assert '"id":7,"runs":[{"run":0,"name":"digits"' in answer_of(socket)


def test_a_socket_without_the_token_is_closed_with_a_code_that_a_page_sees(finished: Path) -> None:
    with Serving(finished) as serving, connect(f"ws://127.0.0.1:{serving.port}/watch?token=wrong") as socket:
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(WAIT_S)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4401


@pytest.mark.parametrize(
    "path", ["/../answers.py", "/%2e%2e/answers.py", "/static/main.js", "//etc/passwd", "/uplot", "/x"]
)
def test_only_files_of_the_page_are_served(finished: Path, path: str) -> None:
    with Serving(finished) as serving:
        assert get(serving.port, path).status == 404


def test_files_come_with_a_strict_policy_and_are_asked_for_once(finished: Path) -> None:
    with Serving(finished) as serving:
        answer = get(serving.port, "/main.js")
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert answer.headers["Content-Type"].startswith("text/javascript")
        assert get(serving.port, "/main.js", If_None_Match=answer.headers["ETag"]).status == 304


def test_what_is_no_question_is_answered_with_an_error_and_the_next_one_is_answered(finished: Path) -> None:
    with Serving(finished) as serving, connect(f"ws://127.0.0.1:{serving.port}/watch?token={TOKEN}") as socket:
        for text in (
            "",
            "{",
            "[]",
            "null",
            '{"get": "everything"}',
            '{"get": "series"}',
            '{"get": "overview", "run": 9}',
            50_000 * "[",
        ):
            socket.send(text)
            assert "error" in json.loads(answer_of(socket))
        socket.send('{"id": 1, "get": "names"}')
        assert '"id":1,"names":{"names":["loss"' in answer_of(socket)


def test_the_server_prints_the_link_and_ends_with_ctrl_c(finished: Path, spawn: Spawn) -> None:
    serve = f"sys.exit(run([pathlib.Path({str(finished)!r})]))"
    code = f"import pathlib, sys; from unisono.views.page.directory_server import run; {serve}"
    process = spawn([sys.executable, "-c", code])
    assert process.stdout is not None
    (file,) = re.findall(r"file://(\S+)", process.stdout.readline())  # no terminal: others may read what is written
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    found = re.search(r"url=http://127\.0\.0\.1:(\d+)/#token=([^\"]+)", Path(file).read_text())
    assert found
    assert len(found[2]) >= 32
    assert get(int(found[1]), "/").status == 200
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 0
    assert not os.path.exists(file)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_browser_gets_the_address_of_a_head_by_a_private_file(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other users read the arguments of a browser, and perhaps what is written into a file; the token is in neither."""
    address = Invitation("ws://127.0.0.1:4000", "token").page
    opened: list[str] = []

    def browser(url: str) -> bool:
        path = Path(url.removeprefix("file://"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert f'url={address}"' in path.read_text()
        opened.append(url)
        return True

    monkeypatch.setattr("webbrowser.open", browser)
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    monkeypatch.setattr(watch_command, "_page_of_head", lambda run: address)
    monkeypatch.setattr(watch_command, "_has_browser", lambda: True)
    monkeypatch.setattr(watch_command, "READ_S", 0)
    assert watch_command._web(("runs/a",), 0) == 0
    (url,) = opened
    assert reader_token("token") not in url
    assert not Path(url.removeprefix("file://")).exists()
    assert (address in capsys.readouterr().out) is is_terminal


def test_a_port_that_is_taken_is_said(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Serving(finished) as serving:
        assert run([finished], serving.port) == 2
        assert f"port {serving.port} of 127.0.0.1 cannot be used" in capsys.readouterr().err


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    started: list[subprocess.Popen[str]] = []

    def start(command: list[str]) -> subprocess.Popen[str]:
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
