"""Draws the figures of the documentation from its tables, or from what a benchmark has written.

    python -m benchmarks.figures                                 # all of them, into docs/assets
    python -m benchmarks.figures --step-time mine.json --out .   # one's own `benchmarks.step_time --json mine.json`
    python -m benchmarks.figures --recovery mine.json --out .    # and of `benchmarks.recovery`

A table stands in one place, where `benchmarks.tables` writes it from the results of `benchmarks.night`, and its figure
follows it: no number is in this file.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["FIGURES", "draw", "fingerprint", "main", "numbers", "table"]

ROOT: Final = Path(__file__).resolve().parents[1]
BLUE, ORANGE, GREEN, VIOLET = "#3b6fd4", "#d9822b", "#2f9e6e", "#8e5bd0"
INK: Final = "#123456"
"""Stands for the colour of the text around the figure, until the file is written."""
Row = dict[str, str]


def table(page: str, *header: str, number: int = 0) -> list[Row]:
    """Return the rows of a table of docs/, by the names of its columns.

    Args:
        header: the beginnings of the names of its first columns.
        number: which of the tables that have such a header, from 0.

    Raises:
        LookupError: the page has no such table.
    """
    lines = (ROOT / "docs" / page).read_text().splitlines()
    found = -1
    for at, line in enumerate(lines):
        names = _split(line)
        if not (line.startswith("|") and all(map(str.startswith, names, header)) and len(names) >= len(header)):
            continue
        found += 1
        if found < number:
            continue
        rows = []
        for row in lines[at + 2 :]:
            if not row.startswith("|"):
                break
            rows.append(dict(zip(_unlike(names), _split(row), strict=True)))
        return rows
    raise LookupError(f"docs/{page} has no table with the header {header} (number {number})")


def _split(line: str) -> list[str]:
    return [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]


def _unlike(names: Sequence[str]) -> list[str]:
    """Tell columns of the same name apart: "efficiency", "efficiency 2"."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(f"{name} {seen[name]}" if seen[name] > 1 else name)
    return found


def numbers(cell: str) -> list[float]:
    """All numbers of a cell, as "0.90 (0.64-0.92)" has three; a range has no negative number in it."""
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", cell)]


Axes = Any


def step_time(axes: Axes, given: Mapping[str, float] | None = None) -> None:
    """Time of a step relative to DDP, with its interval."""
    if given is None:
        rows = table("benchmarks.md", "case", "step, ms", "DDP, ms", "ratio (95%)")
        values = {f"{row['case']}\n{row['step, ms']} ms": numbers(row["ratio (95%)"]) for row in rows}
    else:
        places = [name.partition(".")[2] for name in given if name.startswith("ratio_to_ddp.")]
        values = {place: [given[f"ratio_to_ddp{part}.{place}"] for part in ("", "_low", "_high")] for place in places}
    for y, (median, low, high) in enumerate([*values.values()][::-1]):
        axes.barh([y], [median], color=BLUE, height=0.6)
        axes.plot([low, high], [y, y], color=INK, linewidth=1.5)
        axes.annotate(f"{median:.2f}", (high, y), xytext=(6, 0), textcoords="offset points", va="center", color=INK)
    _one(axes, [*values][::-1])
    axes.set_xlim(0, 1.12)
    axes.set_xlabel("time of a step of Unisono, DistributedDataParallel = 1 (median, 95%)")


def _one(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows, and draw the line of the side that is 1."""
    axes.axvline(1.0, color=INK, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(names)), names)


def _intervals(axes: Axes, values: Mapping[str, Sequence[float]]) -> None:
    names = list(values)[::-1]
    for y, name in enumerate(names):
        median, low, high = values[name]
        axes.plot([low, high], [y, y], color=BLUE, linewidth=3, alpha=0.45, solid_capstyle="round")
        axes.plot([median], [y], "o", color=BLUE, markersize=8)
    _one(axes, names)


LOST: Final = {
    "lost_ms.unisono": "Unisono: all the time lost, mean",
    "lost_ms.torchft_tuned": "torchft, deadlines of 1 s: all the time lost, mean",
    "lost_ms.torchft": "torchft, deadlines of 5 s: all the time lost, mean",
    "lost_ms.torchrun": "torchrun, a snapshot every 50 steps: all the time lost, mean",
}
"""By figure of `benchmarks.recovery`: its name in the table of the documentation."""


def recovery(axes: Axes, given: Mapping[str, float] | None = None) -> None:
    """Time lost by the death of a worker."""
    if given is None:
        found = {
            row["one of four workers"]: row["time"] for row in table("benchmarks.md", "one of four workers", "time")
        }
        given = {name: numbers(found[words])[0] for name, words in LOST.items()}
    names = {"unisono": "Unisono", "torchft_tuned": "torchft, short deadlines", "torchft": "torchft",
             "torchrun": "torchrun, snapshot\nevery 50 steps"}  # fmt: skip
    shown = [(words, given[f"lost_ms.{name}"] / 1e3) for name, words in names.items() if f"lost_ms.{name}" in given]
    for y, (words, value) in enumerate(shown[::-1]):
        axes.barh([y], [value], color=BLUE if words == "Unisono" else ORANGE, height=0.6)
        axes.annotate(f"{value:.2g} s", (value, y), xytext=(6, 0), textcoords="offset points", va="center", color=INK)
    axes.set_yticks(range(len(shown)), [words for words, _ in shown[::-1]])
    axes.margins(x=0.12)
    axes.set_xlabel("time lost when one of four workers is killed, seconds")


def workers(axes: Axes) -> None:
    """Speed of more workers on one machine."""
    rows = [row for row in table("benchmarks.md", "model", "link", "workers", "came") if row["link"] == "one host"]
    names = {"cnn": "CNN, 94,000 parameters", "transformer": "transformer, 5.7 million", "mlp": "MLP, 25 million"}
    for (model, name), colour in zip(names.items(), (GREEN, BLUE, ORANGE), strict=True):
        times = {int(row["workers"]): numbers(row["came"])[0] for row in rows if row["model"] == model}
        axes.plot([*times], [times[1] / time for time in times.values()], "o-", color=colour, label=name)
    most = max(int(row["workers"]) for row in rows)
    axes.plot([1, most], [1, most], color=INK, linewidth=1, linestyle=":", label="ideal")
    axes.set_xticks(range(1, most + 1))
    axes.set_xlabel("workers on one machine")
    axes.set_ylabel("speed, 1 worker = 1")
    axes.legend()


def uneven(axes: Axes) -> None:
    """Speed of uneven workers relative to the sum of their speeds, and to DDP."""
    rows = [row for row in table("benchmarks.md", "case", "M", "of the ideal") if row["of the ideal"]][::-1]
    for y, row in enumerate(rows):
        speedup, low, high = numbers(row["against DDP"].replace("x", ""))
        axes.plot([low, high], [y, y], color=BLUE, linewidth=3, alpha=0.45, solid_capstyle="round")
        axes.plot([speedup], [y], "o", color=BLUE, markersize=8)
    axes.axvline(1.0, color=INK, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(rows)), [row["case"].replace(" and fast again,", ",\nfast again") for row in rows])
    axes.set_xlim(left=0)
    axes.margins(y=0.1)
    axes.set_xlabel("speed, DistributedDataParallel = 1 (median, 95%)")


def whole_microbatches(axes: Axes) -> None:
    """What whole micro-batches allow, by M."""
    colours = {"4 equal": GREEN, "3 equal": BLUE, "4, one 2x slow": ORANGE}
    for row in table("choosing_m.md", "workers", "M = 4", "M = 8"):
        if row["workers"] in colours:
            points = [(int(name[4:]), float(value)) for name, value in row.items() if name.startswith("M = ")]
            axes.plot(*zip(*points, strict=True), "o-", color=colours[row["workers"]], label=f"{row['workers']} workers"
                      if "equal" in row["workers"] else f"{row['workers'].replace(',', ' workers,')}")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks([4, 8, 16, 32, 64], ["4", "8", "16", "32", "64"])
    axes.set_ylim(0.4, 1.03)
    axes.set_xlabel("M, micro-batches in a global batch")
    axes.set_ylabel("part of the ideal speed")
    axes.legend()


def efficiency(axes: Axes) -> None:
    """Where a forecast sees the end of efficiency."""
    rows = table("benchmarks.md", "workers", "hosts", "1 Gbit/s: step")
    workers = [int(row["workers"]) for row in rows]
    for link, column, colour in (("10 Gbit/s", "efficiency 2", BLUE), ("1 Gbit/s", "efficiency", ORANGE)):
        axes.plot(workers, [numbers(row[column])[0] for row in rows], "o--", color=colour, label=f"{link}, forecast")
    axes.set_xscale("log", base=2)
    axes.set_xticks(workers, [str(number) for number in workers])
    axes.set_ylim(0, 100)
    axes.set_xlabel("workers, four to a host, one micro-batch each")
    axes.set_ylabel("efficiency, %")
    axes.legend()


def loading(axes: Axes) -> None:
    """Samples in a second relative to other loaders, with the extremes of the turns."""
    rows = [row for row in table("benchmarks.md", "side", "samples/s") if row["samples/s of Unisono / side"]]
    _intervals(axes, {_short(row["side"]): numbers(row["samples/s of Unisono / side"]) for row in rows})
    axes.set_xlim(left=0)
    axes.margins(y=0.2)
    axes.set_xlabel("samples per second of Unisono, other loader = 1 (median, extremes)")


def _short(side: str) -> str:
    return side.split(" in a ")[0].replace(" over the same reader,", ",\n")


def half_the_bytes(axes: Axes) -> None:
    """Time of a step between hosts with bfloat16 on the way, float32 = 1."""
    rows = table("benchmarks.md", "link, hosts", "gradients", "step, fp32")
    names = [f"{row['link, hosts']} hosts, {row['gradients']}" for row in rows]
    names = [name.replace(" with 2 workers each hosts", " hosts of 2 workers") for name in names]
    _intervals(axes, {name: numbers(row["ratio (95%)"]) for name, row in zip(names, rows, strict=True)})
    axes.set_xlim(left=0)
    axes.margins(y=0.1)
    axes.set_xlabel("time of a step with bfloat16, float32 = 1 (median, 95%)")


def staleness(axes: Axes) -> None:
    """What a delay costs in quality, with and without prediction."""
    rows = table("strategies.md", "delay", "AdamW")
    adamw, sgd = list(rows[0])[1:3]
    for column, name, colour in ((adamw, "AdamW", BLUE), (sgd, "SGD with momentum", ORANGE)):
        for predicted in (False, True):
            chosen = [row for row in rows if row["delay"] == "0" or ("predict" in row["delay"]) == predicted]
            points = [(numbers(row["delay"])[0], numbers(row[column])[0]) for row in chosen]
            words = f"{name}, predict=True" if predicted else name
            axes.plot(*zip(*points, strict=True), "o--" if predicted else "o-", color=colour, label=words)
    axes.set_xticks([0, 1, 2])
    axes.set_xlabel("delay, steps")
    axes.set_ylabel("training loss, nats per byte")
    axes.legend()


def local_quality(axes: Axes) -> None:
    """What local steps cost in quality, by replicas and inner steps."""
    rows = table("strategies.md", "replicas K", "H = 1")
    for column, colour in (("H = 1", GREEN), ("H = 10", BLUE), ("H = 50", VIOLET)):
        points = [(int(row["replicas K"]), float(row[column])) for row in rows]
        axes.plot(*zip(*points, strict=True), "o-", color=colour, label=f"{column}, averaged")
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.set_xlabel("replicas K")
    axes.set_ylabel("test loss, nats per byte")
    axes.legend()


FIGURES: Final[dict[str, tuple[Callable[..., None], float, str]]] = {
    "step_time": (step_time, 3.4, "Time of a step beside DistributedDataParallel"),
    "recovery": (recovery, 2.2, "Time lost by a killed worker"),
    "workers": (workers, 3.4, "Speed of 1 to 4 workers on one machine"),
    "uneven": (uneven, 2.9, "Speed with uneven workers beside DistributedDataParallel"),
    "whole_microbatches": (whole_microbatches, 3.4, "Part of the ideal speed that whole micro-batches allow"),
    "efficiency": (efficiency, 3.2, "Forecast of the efficiency by workers"),
    "loading": (loading, 1.9, "Speed of loading beside other loaders"),
    "half_the_bytes": (half_the_bytes, 2.9, "Time of a step with bfloat16 between hosts, relative to float32"),
    "staleness": (staleness, 3.4, "Loss by delay, with and without prediction"),
    "local_quality": (local_quality, 3.4, "Loss by replicas and inner steps"),
}
"""By name of the file: what draws it, its height in inches, what it shows."""


class _Calls:
    """Stands for the axes of matplotlib, and remembers what is drawn."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given, **named: self.made.append(f"{name} {given} {named}")


def fingerprint(name: str, given: Mapping[str, float] | None = None) -> str:
    """Return a digest of all that a figure shows, which its file carries: whether the table has changed since."""
    calls = _Calls()
    one = FIGURES[name][0]
    one(calls, given) if given is not None else one(calls)
    return hashlib.sha256("\n".join(calls.made).encode()).hexdigest()[:16]


def draw(name: str, given: Mapping[str, float] | None = None) -> str:
    """Return a figure as SVG that takes the colour of the text around it."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    one, height, title = FIGURES[name]
    look: Any = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    look |= {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif", "font.size": 10.5}
    look |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "axes.axisbelow": True}
    with mpl.rc_context(look):
        figure, axes = pyplot.subplots(figsize=(7.2, height), layout="constrained")
        axes.grid(alpha=0.25, color=INK, linewidth=0.6)
        one(axes, given) if given is not None else one(axes)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    return _for_pages(written.getvalue(), title, fingerprint(name, given))


def _for_pages(text: str, title: str, shown: str) -> str:
    """Make a picture of a page of matplotlib's SVG: no prologue, the colours and the letters of the page."""
    body = text[text.index("<svg") :]
    opening, _, rest = body.partition(">")
    size = re.search(r'viewBox="[^"]*"', opening)
    assert size is not None
    rest = re.sub(r"<metadata>.*?</metadata>", "", rest, flags=re.DOTALL)
    rest = re.sub(r"font: ([^;\"]*?)px [^;\"]*", r"font: \1px system-ui, sans-serif", rest)
    head = (
        f'<svg class="picture" xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'{size[0]} width="720" role="img" aria-label="{title}" data-shown="{shown}">\n'
        "<style>svg.picture{color:#24292f}@media(prefers-color-scheme:dark){svg.picture{color:#c9d1d9}}</style>"
    )
    lines = (head + rest).replace(INK, "currentColor").splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "assets", help="folder of the figures")
    parser.add_argument(
        "--step-time", type=Path, metavar="JSON", help="draw this run of benchmarks.step_time, and nothing else"
    )
    parser.add_argument(
        "--recovery", type=Path, metavar="JSON", help="draw this run of benchmarks.recovery, and nothing else"
    )
    options = parser.parse_args()
    given = {
        name: json.loads(path.read_text())["figures"]
        for name in ("step_time", "recovery")
        if (path := getattr(options, name))
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for name in given or FIGURES:
        path = options.out / f"{name}.svg"
        path.write_text(draw(name, given.get(name)))
        print(path)


if __name__ == "__main__":
    main()
