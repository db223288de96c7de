"""Draws the pictures of the README and of docs/why.md as SVG, which take the colour of the text around them.

python -m website.pictures        # writes docs/assets/*.svg

The loss curves are those that `benchmarks.curves` has recorded in docs/assets/curves.json; the others are drawings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

__all__ = ["PICTURES", "main"]

ASSETS: Final = Path(__file__).resolve().parents[1] / "docs" / "assets"
WORKERS: Final = ("#3b6fd4", "#d9822b", "#2f9e6e", "#8e5bd0")
GREY: Final = "#8b949e"
RED: Final = "#cf3d3d"
STYLE: Final = (
    "<style>svg.picture{color:#24292f;font:14px system-ui,sans-serif}"
    "@media(prefers-color-scheme:dark){svg.picture{color:#c9d1d9}}</style>"
)


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    lines = [
        f'<svg class="picture" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'role="img" aria-label="{title}">',
        STYLE,
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def text(x: float, y: float, words: str, *, anchor: str = "middle", fill: str = "currentColor", size: int = 14) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}" font-size="{size}">{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, words: str = "", *, dashed: bool = False) -> str:
    stroke = f' stroke="{RED}" stroke-width="2" stroke-dasharray="5 3"' if dashed else ""
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}"{stroke}/>'
    return shape + (text(x + width / 2, y + height / 2 + 5, words, fill="#fff") if words else "")


def line(x: float, y: float, x2: float, y2: float, *, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<path d="M{x:g} {y:g}L{x2:g} {y2:g}" stroke="currentColor" stroke-width="1.5" fill="none"{dashes}/>'


def tree() -> str:
    """Eight micro-batches under one summation tree, and three ways to share them out."""
    left, pitch = 130, 74
    centres = [left + pitch * index + 30 for index in range(8)]
    parts = []
    for row, (words, owners) in enumerate(
        [("1 worker", "00000000"), ("3 workers", "00011122"), ("4 workers", "00112233")]
    ):
        y = 16 + 40 * row
        parts.append(text(left - 16, y + 20, words, anchor="end"))
        parts += [
            box(centre - 30, y, 60, 30, WORKERS[int(owner)], f"w{owner}")
            for centre, owner in zip(centres, owners, strict=True)
        ]
    y = 158
    parts.append(text(left - 16, y + 5, "gradients", anchor="end"))
    parts += [text(centre, y + 5, f"g{index}") for index, centre in enumerate(centres)]
    parts.append(text(left - 16, y + 85, "fixed tree", anchor="end"))
    level = centres
    while len(level) > 1:
        above = [(level[index] + level[index + 1]) / 2 for index in range(0, len(level), 2)]
        below = y + 55
        for index, centre in enumerate(above):
            parts += [
                line(level[2 * index], y + 14, centre, below - 11),
                line(level[2 * index + 1], y + 14, centre, below - 11),
            ]
            parts.append(
                f'<circle cx="{centre:g}" cy="{below:g}" r="11" fill="{GREY}"/>'
                + text(centre, below + 5, "+", fill="#fff")
            )
        level, y = above, below
    parts.append(text(level[0], y + 34, "the sum, then one division by the total weight"))
    return svg(740, 380, "One summation tree for 1, 3 and 4 workers", parts)


def lost() -> str:
    """A step in which a worker dies: the others compute what it had not finished."""
    left, unit = 70, 62
    rows: Mapping[str, Sequence[tuple[float, str, str]]] = {
        "w0": [(0, "m0", WORKERS[0]), (1, "m1", WORKERS[0]), (2, "m2", WORKERS[0]), (3.4, "m4", WORKERS[0])],
        "w1": [(0, "m3", WORKERS[1])],
        "w2": [(0, "m6", WORKERS[2]), (1, "m7", WORKERS[2]), (2.4, "m3", WORKERS[2]), (3.4, "m5", WORKERS[2])],
    }
    parts = []
    for row, (name, done) in enumerate(rows.items()):
        y = 20 + 50 * row
        parts.append(text(left - 16, y + 20, name, anchor="end"))
        parts += [box(left + unit * at, y, unit - 6, 30, fill, words) for at, words, fill in done]
    y = 20 + 50
    parts.append(box(left + unit, y, unit * 0.45, 30, WORKERS[1], dashed=True))
    parts.append(text(left + unit * 1.45 + 10, y + 20, "killed; m3 was not handed over", anchor="start", fill=RED))
    end = left + unit * 4.4 + 14
    parts.append(line(end, 12, end, 158, dashed=True))
    parts.append(text(end + 12, 82, "commit: all eight are there,", anchor="start"))
    parts.append(text(end + 12, 102, "the sum is that of the tree", anchor="start"))
    return svg(600, 170, "The others compute the micro-batches of a lost worker", parts)


def order() -> str:
    """Why the number of GPUs is part of a sum: the brackets follow it."""
    rows = [
        ("2 processes", "(g0 + g1) + (g2 + g3)", "= 0.699999988", WORKERS[1]),
        ("4 processes, a ring", "((g0 + g1) + g2) + g3", "= 0.700000048", WORKERS[1]),
        ("Unisono, any number", "(g0 + g1) + (g2 + g3)", "= 0.699999988", WORKERS[0]),
    ]
    parts = []
    for row, (who, brackets, note, fill) in enumerate(rows):
        y = 14 + 44 * row
        parts.append(text(170, y + 20, who, anchor="end"))
        parts.append(box(190, y, 220, 30, fill, brackets))
        parts.append(text(426, y + 20, note, anchor="start"))
    return svg(600, 146, "Brackets of a sum", parts)


def curves() -> str:
    """The loss of one training on 1, 4 and 8 workers, with Unisono and with DDP, as it was recorded."""
    record = json.loads((ASSETS / "curves.json").read_text())
    killed = record["killed"]["step"]
    width, height, top, gap = 330, 200, 44, 70
    smooth = {side: {int(workers): _means(losses) for workers, losses in record[side].items()}
              for side in ("unisono", "ddp")}  # fmt: skip
    values = [value for side in smooth.values() for losses in side.values() for value in losses]
    low, high = math.log10(min(values)) - 0.14, math.log10(max(values)) + 0.08
    steps = len(smooth["unisono"][1])
    parts = []
    for column, (side, title) in enumerate({"unisono": "Unisono", "ddp": "DistributedDataParallel"}.items()):
        left = 52 + column * (width + gap)

        def place(step: int, loss: float, left: int = left) -> tuple[float, float]:
            return left + width * step / (steps - 1), top + height * (high - math.log10(loss)) / (high - low)

        parts.append(text(left + width / 2, 22, title, size=16))
        parts += [line(left, top, left, top + height), line(left, top + height, left + width, top + height)]
        for tick in (2.0, 0.5, 0.1, 0.03):
            parts.append(text(left - 8, place(0, tick)[1] + 5, f"{tick:g}", anchor="end", size=12))
        for step in range(0, steps, 100):
            parts.append(text(place(step, 1)[0], top + height + 18, str(step), size=12))
        for (workers, losses), colour, thickness in zip(smooth[side].items(), WORKERS, THICKNESS[side], strict=False):
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in enumerate(losses)))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{thickness}"/>')
            row = list(smooth[side]).index(workers)
            y = top + 12 + 20 * row
            parts.append(f'<path d="M{left + width - 112} {y}h22" stroke="{colour}" stroke-width="{thickness}"/>')
            unit = "worker" if side == "unisono" else "process"
            several = {"worker": "workers", "process": "processes"}
            name = f"{workers} {unit if workers == 1 else several[unit]}"
            parts.append(text(left + width - 84, y + 5, name, anchor="start", size=13))
    x, y = (
        52 + width * killed / (steps - 1),
        top + height * (high - math.log10(smooth["unisono"][4][killed])) / (high - low),
    )
    parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{RED}"/>')
    parts.append(text(x + 8, y - 10, "one of 4 is killed", anchor="start", fill=RED, size=13))
    parts.append(text(52 + width + gap / 2, top + height + 40, "training loss by step, mean of 11 steps", size=13))
    return svg(2 * width + gap + 66, top + height + 52, "Training loss on 1, 4 and 8 workers", parts)


THICKNESS: Final = {"unisono": (8, 4.5, 1.5), "ddp": (2, 2, 2)}
"""Of the curves, so that those that lie on each other can be seen."""


def _means(losses: Sequence[float], number: int = 11) -> list[float]:
    """Return the mean of each loss and those before it: 11 steps are an epoch of that training."""
    found = []
    for index in range(len(losses)):
        newest = losses[max(0, index + 1 - number) : index + 1]
        found.append(sum(newest) / len(newest))
    return found


PICTURES: Final = {"tree.svg": tree, "lost.svg": lost, "order.svg": order, "curves.svg": curves}


def main() -> None:
    ASSETS.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (ASSETS / name).write_text(draw())


if __name__ == "__main__":
    main()
