"""What a long run leaves on the disk, what a step pays for it, and how long it takes to look at.

    python -m benchmarks.history [--steps 1000000] [--workers 64] [--json FILE] [--directory DIR]

The run never was (`tests.watch.long_run`): its files are those that a run of so many steps leaves. What a step pays is
the processor time of the journal of one worker, while it writes at full speed; a question's time is the processor time
of a reader. Times are in milliseconds, but for a step's: microseconds.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import print_table, write_json
from tests.watch.long_run import make_long_run, step_of, times_of
from unisono.record.history import History
from unisono.record.journal import JOURNAL, Journal
from unisono.record.journal.file import INDEX
from unisono.record.journal.newest import earlier
from unisono.record.journal.times import TIMES
from unisono.record.rundir import USE_FILE

WRITTEN_STEPS = 2000
TURNS = 5


def size_of(path: Path) -> int:
    return sum(each.stat().st_size for each in (path.rglob("*") if path.is_dir() else [path]) if each.is_file())


def best_ms(question: Callable[[], Any]) -> float:
    """Return the processor time of a question, the least of some turns: others use the machine as well."""
    found = []
    for _ in range(TURNS):
        begin = time.process_time()
        question()
        found.append(time.process_time() - begin)
    return 1e3 * min(found)


def step_us(workers: int) -> float:
    """Return what the journal of the worker that writes costs a step."""
    events = [
        step_of(number, WRITTEN_STEPS, times_of(number, WRITTEN_STEPS, workers)) for number in range(WRITTEN_STEPS)
    ]
    found = []
    for _ in range(TURNS):
        with tempfile.TemporaryDirectory() as place:
            journal = Journal(Path(place) / JOURNAL)
            journal.start(writer=True)
            begin = time.process_time()
            for event in events:
                journal.emit(event)
            found.append((time.process_time() - begin) / WRITTEN_STEPS)
    return 1e6 * min(found)


def questions(directory: Path, steps: int) -> dict[str, float]:
    history = History(directory)
    history.overview()
    names = history.names()
    middle = steps // 2

    def open_and_show() -> None:
        opened = History(directory)
        opened.overview()
        opened.series(names)

    return {
        "open, overview, all series": best_ms(open_and_show),
        "overview again": best_ms(history.overview),
        "nothing new": best_ms(history.refresh),
        "loss, whole run": best_ms(lambda: history.series(["loss"])),
        "loss of 50,000 steps": best_ms(lambda: history.series(["loss"], middle, middle + 50_000)),
        "all series of 8,000 steps": best_ms(lambda: history.series(names, middle, middle + 8_000)),
        "loss of 100 steps": best_ms(lambda: history.series(["loss"], middle, middle + 100)),
        "times of all workers, whole run": best_ms(history.times),
        "times of all workers, 1,000 steps": best_ms(lambda: history.times(steps - 1000, steps)),
        "use of the machines": best_ms(history.use),
        "status of the finished run": best_ms(lambda: History(directory).status()),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--directory", type=Path, help="where the run's directory is made, and stays")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    place = options.directory or Path(tempfile.mkdtemp(prefix="unisono-history-"))
    try:
        run = place / f"run-{options.steps}-{options.workers}"
        if not run.exists():
            make_long_run(run, options.steps, options.workers)
        (run / INDEX).unlink(missing_ok=True)
        begin = time.process_time()
        History(run).complete()
        cold_s = time.process_time() - begin
        files = [JOURNAL, INDEX, *(name for path in (TIMES, USE_FILE) for name in (path, earlier(Path(path)).name))]
        megabytes = {name: size_of(run / name) / 1e6 for name in files if (run / name).exists()}
        print_table(
            ("file", "MB"),
            [[name, f"{value:.1f}"] for name, value in (*megabytes.items(), ("all", size_of(run) / 1e6))],
        )
        written = {workers: step_us(workers) for workers in sorted({1, 4, options.workers})}
        print_table(("workers", "us a step"), [[str(workers), f"{value:.0f}"] for workers, value in written.items()])
        asked = questions(run, options.steps)
        asked["without an index, everything"] = 1e3 * cold_s
        print_table(("question", "ms"), [[name, f"{value:.1f}"] for name, value in asked.items()])
        if options.json:
            figures = {
                **{f"mb.{name}": value for name, value in megabytes.items()},
                **{f"step_us.{workers}": value for workers, value in written.items()},
                **{f"ms.{name}": value for name, value in asked.items()},
            }
            write_json(options.json, figures, [{"steps": options.steps, "workers": options.workers}])
    finally:
        if options.directory is None:
            shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
