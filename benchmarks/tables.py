"""Writes the tables and sentences of the documentation that show measurements, from the results of `benchmarks.night`.

    python -m benchmarks.tables            # `make figures` does this first, and then draws the figures from the tables

On a page such a part stands between ``<!-- results: NAME -->`` and ``<!-- /results -->``, in lines of its own or within
a sentence. `PARTS` has what each shows: a function of the newest results, by benchmark. Where a benchmark has no result
yet, or only one with less in it than the part needs, the part stays as it is. `tests/docs/test_results.py` compares
pages and results.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.figures import LOST
from benchmarks.night import BENCHMARKS, RESULTS, newest
from benchmarks.report import ROOT, Interval, median_interval

__all__ = ["CURVES", "PARTS", "curves", "main", "pages", "written"]

Result = Mapping[str, Any]
Results = Mapping[str, Result]
REGION: Final = re.compile(r"<!-- results: (?P<name>\w+) -->(?P<text>.*?)<!-- /results -->", re.DOTALL)
CASES: Final = {"cnn": "CNN", "mlp": "MLP", "transformer": "transformer"}
CURVES: Final = ROOT / "docs" / "assets" / "curves.json"
LINKS: Final = {"100m": "100 Mbit/s", "100m_20ms": "100 Mbit/s + 20 ms", "1g": "1 Gbit/s", "10g": "10 Gbit/s"}


class LacksError(LookupError):
    """A result that a part needs is not there."""


def of(results: Results, name: str, *, full: bool = False) -> Result:
    """Return the result of a benchmark.

    Args:
        full: a quick one does not have what is asked for.

    Raises:
        LacksError: there is none.
    """
    found = results.get(name)
    if found is None or (full and found["size"] != "full"):
        raise LacksError(name)
    return found


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as the pages have it."""
    lines = [header, *rows]
    if not rows:
        raise LacksError("no rows")
    separator = "|" + "---|" * len(header)
    shown = [re.sub(r"\|  (?=\|)", "| ", "| " + " | ".join(row) + " |") for row in lines]
    return "\n".join([shown[0], separator, *shown[1:]])


def ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Return the median of the ratios of neighbours in time, with its interval."""
    return median_interval([a / b for a, b in zip(above, below, strict=True)])


def short(found: Interval, digits: int = 2) -> str:
    return f"{found.median:.{digits}f} ({found.low:.{digits}f}-{found.high:.{digits}f})"


def middle(values: Sequence[float]) -> float:
    return statistics.median(values)


def ms(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


# -- a step ----------------------------------------------------------------------------------------------


def _steps(results: Results) -> list[Result]:
    runs: list[Result] = [run for run in of(results, "step_time")["runs"] if run["workers"] == 2]
    return runs


def step_time(results: Results) -> str:
    rows, ratios = [], []
    for run in _steps(results):
        step, cpu, memory = run["step_ms"], run["cpu_ms"], run["peak_mib"]
        ratios.append(found := ratio(step["unisono"], step["ddp"]))
        rows.append(
            [
                f"{CASES[run['case']]}, M = {run['microbatches']}",
                *(ms(middle(step[side])) for side in ("unisono", "ddp")),
                short(found),
                " / ".join(f"{middle(cpu[side]):.0f}" for side in ("unisono", "ddp")),
                " / ".join(f"{memory[side]:.0f}" for side in ("unisono", "ddp")),
            ]
        )
    header = ("case", "step, ms", "DDP, ms", "ratio (95%)", "CPU ms, Unisono / DDP", "memory of a worker, MiB")
    said = f"**A step takes {_range(ratios)} of the time of DDP with gloo and the same micro-batches.**"
    return f"{said}\n\n{markdown(header, rows)}"


def _range(ratios: Sequence[Interval]) -> str:
    medians = [each.median for each in ratios]
    return f"{min(medians):.2f} to {max(medians):.2f}"


def step_range(results: Results) -> str:
    return _range([ratio(run["step_ms"]["unisono"], run["step_ms"]["ddp"]) for run in _steps(results)])


PEERS: Final = {
    "compute": "loops alone",
    "in_step": "loops in step",
    "ddp": "DDP",
    "ddp_whole": "DDP, batch not cut",
    "zero": "DDP + ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "torchft": "torchft",
    "deepspeed": "DeepSpeed, shared memory",
}
FROM_STEPS: Final = ("compute", "in_step", "ddp", "ddp_whole")
PEERS_M: Final = 8


def _to_peers(results: Results) -> dict[str, dict[str, Interval]]:
    """Return Unisono's time to that of each peer, by case."""
    own = {run["case"]: run for run in _steps(results) if run["microbatches"] == PEERS_M}
    others = {run["case"]: run for run in of(results, "peers")["runs"]}
    found: dict[str, dict[str, Interval]] = {}
    for side in PEERS:
        for case in CASES:
            step = (own if side in FROM_STEPS else others).get(case, {}).get("step_ms", {})
            if side in step:
                found.setdefault(side, {})[case] = ratio(step["unisono"], step[side])
    return found


def behind(results: Results) -> str:
    slower = [
        f"{PEERS[side]} ({', '.join(f'{CASES[case]} {each.median:.2f}' for case, each in cases.items())})"
        for side, by_case in _to_peers(results).items()
        if (cases := {case: each for case, each in by_case.items() if each.low > 1})
    ]
    return f"Steps whose whole interval is above 1, of the time of {'; '.join(slower) or 'no peer'}."


def peers(results: Results) -> str:
    rows = [
        [PEERS[side], *(short(found[case]) if case in found else "" for case in CASES)]
        for side, found in _to_peers(results).items()
    ]
    measured = of(results, "peers")
    header = ("Unisono's time to that of", *(f"{words}, M = {PEERS_M}" for words in CASES.values()))
    lacking = "".join(f"\n\n{PEERS[side]} took no part: {_plain(why)}." for side, why in measured["left_out"].items())
    return markdown(header, rows) + lacking


def _plain(why: str) -> str:
    return why.strip().splitlines()[0].rstrip(".")


def others(results: Results) -> str:
    alone = of(results, "one_worker")["runs"]
    words = [
        f"{middle([a / b for a, b in zip(run['cpu_ms']['unisono'], run['cpu_ms']['plain'], strict=True)]):.2f} "
        f"({CASES[run['case']]}, M = {run['microbatches']})"
        for run in alone
    ]
    start = of(results, "start_time")["runs"][0]["seconds"]
    watched = of(results, "watching")["figures"]
    overhead = Interval(watched["overhead"], watched["overhead_low"], watched["overhead_high"])
    return "\n".join(
        [
            f"- **One worker beside a plain loop**, same allocator, processor time: {', '.join(words)}.",
            f"- **Start**: {middle(start['unisono']):.1f} s to the end of the first step with 2 workers, "
            f"{middle(start['torchrun']):.1f} s with torchrun.",
            "- **Watching**: live view, journal, events, page and Prometheus together cost "
            f"{short(overhead, 3)} of the processor time.",
        ]
    )


# -- losses and unequal workers ----------------------------------------------------------------------------


RECOVERY: Final = {
    "recover_ms.median": "Unisono: delay beyond the lost worker's own micro-batches, median",
    "recover_ms.worst": "Unisono: the longest of these delays",
    **LOST,
    "admit_ms.median": "Unisono: members wait so long when a replacement is admitted, median",
}


def recovery(results: Results) -> str:
    figures = of(results, "recovery")["figures"]
    return markdown(
        ("one of four workers", "time"), [[words, f"{figures[name]:,.0f} ms"] for name, words in RECOVERY.items()]
    )


UNEVEN: Final = {
    "two_2x": "one of 2 slowed 2x",
    "two_4x": "one of 2 slowed 4x",
    "four_2x": "one of 4 slowed 2x",
    "four_4x": "one of 4 slowed 4x",
    "changing": "one of 2 slowed 4x and fast again, by turns",
    "equal": "equal workers, against `balance=False`",
}


def uneven(results: Results) -> str:
    rows = []
    for run in of(results, "uneven")["runs"]:
        name, turns = run["case"], run["turns"]
        own = [turn["unisono"] for turn in turns]
        if name == "equal":
            cost = ratio([turn["unbalanced"] for turn in turns], own)
            rows.append([UNEVEN[name], str(run["microbatches"]), "", "", short(cost, 3)])
            continue
        ideal = ratio([turn["ideal"] for turn in turns], own)
        to_ddp = ratio([turn["ddp"] for turn in turns], own)
        whole = middle([turn["ideal"] / turn["whole"] for turn in turns])
        speed = f"{to_ddp.median:.2f}x ({to_ddp.low:.2f}-{to_ddp.high:.2f})"
        rows.append([UNEVEN[name], str(run["microbatches"]), short(ideal, 3), f"{whole:.3f}", speed])
    return markdown(("case", "M", "of the ideal", "whole micro-batches allow", "against DDP"), rows)


# -- hosts and strategies ----------------------------------------------------------------------------------


def _links(results: Results) -> list[Result]:
    runs: list[Result] = [
        run
        for name in ("network", "network_large", "network_members")
        for run in (of(results, name)["runs"] if name == "network" else results.get(name, {}).get("runs", []))
    ]
    order = [*LINKS]
    return sorted(runs, key=lambda run: (run["members"], order.index(_link(run)), run["hosts"], run["gradient_bytes"]))


def _link(run: Result) -> str:
    return str(run["comparison"]).partition(".")[0]


def _place(run: Result) -> tuple[str, str]:
    members = f" with {run['members']} workers each" if run["members"] > 1 else ""
    return f"{LINKS[_link(run)]}, {run['hosts']}{members}", run["comparison"].split(".")[2].replace("mb", " MB")


def network(results: Results) -> str:
    rows = []
    for run in _links(results):
        step = run["step_ms"]
        times = [f"{middle(step[side]):.0f} ms" for side in ("unisono", "ddp")]
        rows.append([*_place(run), *times, short(ratio(step["unisono"], step["ddp"]))])
    return markdown(("link, hosts", "gradients", "step", "DDP", "to DDP (95%)"), rows)


def half_the_bytes(results: Results) -> str:
    rows = []
    for run in _links(results):
        step = run["step_ms"]
        if "unisono-bf16" in step:
            times = [f"{middle(step[side]):.0f} ms" for side in ("unisono", "unisono-bf16")]
            theirs = short(ratio(step["ddp-bf16"], step["ddp"])) if "ddp-bf16" in step else ""
            rows.append([*_place(run), *times, short(ratio(step["unisono-bf16"], step["unisono"])), theirs])
    header = ("link, hosts", "gradients", "step, fp32", "step, bf16", "ratio (95%)", "the same for DDP")
    return markdown(header, rows)


def rounding(results: Results) -> str:
    runs = of(results, "rounding", full=True)["runs"]
    losses = "; ".join(
        f"M = {run['microbatches']}: "
        + " and ".join(", ".join(f"{each[wire]:.4f}" for each in run["losses"]) for wire in ("fp32", "bf16"))
        for run in runs
    )
    return f"Test loss of a small transformer with fp32 and bf16, {len(runs[0]['losses'])} seeds: {losses}."


SIDES: Final = {
    "ddp": "DDP",
    "unisono": "`run.steps`",
    "unisono shard 2": "`unisono.shard(copies=2)`",
    "unisono shard 1": "`unisono.shard(copies=1)`",
    "unisono shard 1 owners": '`unisono.shard(copies=1, gradients="owners")`',
    "ddp zero": "DDP + ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2",
    "unisono bf16": '`wire="bf16"`',
    "ddp bf16": "DDP that sends bfloat16",
    "unisono delay 1": "`delay=1`",
    "unisono local fresh": 'local steps, `inner_state="fresh"`',
    "unisono local": "local steps, two copies of states",
    "unisono diloco int8": 'local steps, Nesterov, `delta="int8"`',
    "unisono diloco": "local steps, Nesterov",
    "torch local": "local SGD of torch",
    "torchft local": "local SGD of torchft",
}


def _loss(result: Result, side: str) -> str:
    loss = result["figures"].get(f"loss.{side.replace(' ', '_')}")
    return "" if loss is None else f"{loss:.3f}"


def _by_side(result: Result, setting: str) -> dict[str, Result]:
    found = {run["side"]: run for run in result["runs"] if run["setting"] == setting}
    return {side: found[side] for side in SIDES if side in found}


def strategies_host(results: Results) -> str:
    result = of(results, "strategies")
    found = _by_side(result, "host")
    theirs = [run["step_ms"]["ddp"] for run in found.values()]
    if not theirs:
        raise LacksError("strategies")
    times = " to ".join(f"{pick(map(middle, theirs)):.0f}" for pick in (min, max))
    peak = middle([run["peak_mib"]["ddp"] for run in found.values()])
    rows = [["DDP", times, "1", f"{peak:.0f}", _loss(result, "ddp")]]
    for side, run in found.items():
        step = run["step_ms"]
        cells = [f"{middle(step[side]):.0f}", short(ratio(step[side], step["ddp"])), f"{run['peak_mib'][side]:.0f}"]
        rows.append([SIDES[side], *cells, _loss(result, side)])
    header = ("one host, 25 million parameters", "step, ms", "to DDP (95%)", "peak of a worker, MiB", "loss")
    return markdown(header, rows)


def strategies_hosts(results: Results) -> str:
    result = of(results, "strategies", full=True)
    both = [_by_side(result, setting) for setting in ("1g", "100m")]
    rows = []
    for side in SIDES:
        cells = []
        for found in both:
            step = found[side]["step_ms"] if side in found else None
            cells += [f"{middle(step[side]):.0f}", f"{ratio(step[side], step['ddp']).median:.2f}"] if step else ["", ""]
        if any(cells):
            rows.append([SIDES[side], *cells, _loss(result, side)])
    links = [f"{link}: step, ms" for link in ("1 Gbit/s", "100 Mbit/s")]
    return markdown(("four hosts, 4 MB of gradients", links[0], "to DDP", links[1], "to DDP", "loss"), rows)


def stalls(results: Results) -> str:
    found = _by_side(of(results, "strategies", full=True), "stalls")
    words = [
        f"{SIDES[side]} {short(ratio(run['step_ms'][side], run['step_ms']['ddp']))}" for side, run in found.items()
    ]
    return f"With each worker held up for 60 ms in one of eight steps, to DDP's time: {', '.join(words)}."


STAGES: Final = {
    "1": "`--workers 1`",
    "1x2": "`--workers 1x2`",
    "1x4": "`--workers 1x4`",
    "2x2": "`--workers 2x2`",
    "1s": "4 shards in one stage, `--workers 1`",
    "1x2s": "4 shards in one stage, `--workers 1x2`",
    "1x4s": "4 shards in one stage, `--workers 1x4`",
    "dtensor": "DTensor, 4 processes",
    "1f1b": "`torch.distributed.pipelining`, 1F1B, 4 processes",
    "fsdp2": "FSDP2, 4 processes, 2 micro-batches each",
}


def model_parallel(results: Results) -> str:
    run = of(results, "model_parallel")["runs"][0]
    formula = "[by the formula](memory.md#how-much-memory)"
    rows = [
        [
            STAGES[side],
            f"{max(run['peak_mib'][side]):.0f}",
            f"{max(run['expected_mib'][side]):.0f}" if side in run["expected_mib"] else "",
            f"{max(run['sent_mb'][side]):.2f}",
            short(ratio(times, run["step_ms"]["1"])) if side != "1" else "1",
        ]
        for side, times in run["step_ms"].items()
    ]
    shape = (
        "A transformer of width {width} and depth {depth}, "
        "{microbatches} micro-batches of {microbatch_size} x {length} tokens:"
    )
    table = markdown(("", "peak, MiB", formula, "MB sent per step by one process, at most", "step (95%)"), rows)
    return f"{shape.format_map(run['shape'])}\n\n{table}"


# -- data, checkpoints, forecasts, many workers ------------------------------------------------------------

LOADERS: Final = {
    "unisono": "`unisono.TarShards`, 8 streams, shuffled",
    "webdataset": "WebDataset in a `DataLoader`, shuffled",
    "mosaicml-streaming": "mosaicml-streaming in a `DataLoader`, its own format, shuffled",
    "DataLoader": "`DataLoader` over the same reader, not shuffled",
}


def loading(results: Results) -> str:
    result = of(results, "loading")
    by_side = {run["side"]: run for run in result["runs"]}
    rows = []
    for side in (each for each in LOADERS if each in by_side):
        ratios = by_side[side]["ratios"]
        to_side = "" if side == "unisono" else f"{middle(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append([LOADERS[side], f"{middle(by_side[side]['rates']):,.0f}", to_side])
    lacking = "".join(f"\n\n{side} took no part: it is not installed." for side in result["left_out"])
    return markdown(("side", "samples/s", "samples/s of Unisono / side"), rows) + lacking


def checkpoint(results: Results) -> str:
    result = of(results, "checkpoint")
    sizes = [run["size"] for run in result["runs"]]
    figures = {
        "stall_to_copy": "how long training stands still, to one copy of the state in memory",
        "stall_to_dcp": "the same, to `torch.distributed.checkpoint.async_save`",
        "bandwidth_to_disk": "bandwidth until complete, to writing a plain file",
        "resume_to_read": "time until the first step after resuming, to reading the files",
    }
    rows = [
        [words, *(f"{result['figures'][f'{name}.{size}']:.2f}" for size in sizes)] for name, words in figures.items()
    ]
    done = ["complete, seconds: Unisono / DCP"]
    done += [f"{middle(run['write']):.1f} / {middle(run['dcp_done']):.1f}" for run in result["runs"]]
    return markdown(("figure", *(f"{size[:-2]} {size[-2:]}" for size in sizes)), [*rows, done])


def planning(results: Results) -> str:
    figures = of(results, "planning", full=True)["figures"]
    rows = []
    for place in (name.removeprefix("step_ms.") for name in figures if name.startswith("step_ms.")):
        case, link, workers = place.split(".")
        rows.append(
            [
                f"`{case}`",
                LINKS.get(link, "one host"),
                workers,
                f"{figures[f'step_ms.{place}']:.0f} ms",
                f"{figures[f'spread.{place}']:.0%}",
                *(f"{figures[f'{error}.{place}']:+.1%}" for error in ("error", "error_unseen")),
            ]
        )
    return markdown(("model", "link", "workers", "came", "spread", "error", "unseen"), rows)


def planning_simulated(results: Results) -> str:
    forecasts = of(results, "planning_simulated", full=True)["runs"][0]["simulated"]
    by_link = {link: {row["workers"]: row for row in forecasts if row["link"] == link} for link in ("1g", "10g")}
    rows = []
    for workers, slow in by_link["1g"].items():
        if workers in ("4", "8", "16", "64", "256", "1024"):
            both = (slow, by_link["10g"][workers])
            cells = [cell for row in both for cell in (row["step ms"], row["efficiency"], row["network"])]
            rows.append([workers, slow["hosts"], *cells])
    step, network_ = "{}: step", "network"
    links = [LINKS[link] for link in by_link]
    header = ("workers", "hosts", *(word for link in links for word in (step.format(link), "efficiency", network_)))
    return markdown(header, rows)


def membership(results: Results) -> str:
    head = of(results, "membership", full=True)["figures"]
    return (
        f"A new generation takes {head['generation_s']:.2f} s, the notice of a lost worker {head['loss_s']:.2f} s, "
        f"heartbeats {100 * head['heartbeat_cpu']:.1f}% of a core, the head {head['head_mb']:.0f} MB; a new head has "
        f"all workers after {head['head_loss_s']:.1f} s."
    )


# -- what losses say -----------------------------------------------------------------------------------------


def local_quality(results: Results) -> str:
    runs = of(results, "quality", full=True)["runs"]
    found = {(str(run["replicas"]), run["inner_steps"], run["outer"]): run["loss"] for run in runs}
    columns = [(outer, inner) for outer in ("average", "nesterov") for inner in (1, 10, 50)]
    rows = [
        [str(replicas), *(f"{found[str(replicas), inner, outer]:.3f}" for outer, inner in columns)]
        for replicas in (1, 2, 4, 8)
    ]
    header = [f"H = {inner}{', Nesterov' if outer == 'nesterov' else ''}" for outer, inner in columns]
    return markdown(("replicas K", *header), rows)


OPTIMIZERS: Final = {
    "adamw": "AdamW (lr 1e-3, 3e-3)",
    "sgd": "SGD with momentum 0.9 (lr 0.1, 0.3)",
    "muon": "Muon for the matrices (lr 1e-2, 3e-2)",
}


def staleness(results: Results) -> str:
    figures = of(results, "staleness", full=True)["figures"]
    rows = []
    for name in ("0", "1", "1.predicted", "2", "2.predicted"):
        cells = []
        for optimizer in OPTIMIZERS:
            loss, none = (figures[f"loss.{optimizer}.delay{each}"] for each in (name, "0"))
            cells.append(f"{loss:.3f}" if name == "0" else f"{loss:.3f} ({loss - none:+.2f})")
        rows.append([name.replace(".predicted", ", `predict=True`"), *cells])
    return markdown(("delay", *OPTIMIZERS.values()), rows)


# -- the night itself ----------------------------------------------------------------------------------------


def night(results: Results) -> str:
    if not results:
        raise LacksError("no results")
    said, nights = [], dict[tuple[str, ...], list[Result]]()
    for result in results.values():
        machine = result["machine"]
        commit = result["commit"] + ("" if result["clean"] else ", with changes")
        words = (
            f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB, kernel {machine['kernel']}"
        )
        words += f", Python {machine['python']}, torch {machine['torch']}"
        nights.setdefault((result["date"][:10], commit, result["size"], words), []).append(result)
    for (date, commit, size, words), own in sorted(nights.items()):
        loads = [each["load"]["before"][0] for each in own]
        names = "all" if len(own) == len(BENCHMARKS) else ", ".join(f"`{each['benchmark']}`" for each in own)
        said.append(
            f"Measured on {date} ({size}), commit {commit}: {words}; load before each {min(loads):.1f} to "
            f"{max(loads):.1f}: {names}."
        )
    if lacking := [f"`{name}`" for name in BENCHMARKS if name not in results]:
        said.append(f"Not measured by a night yet: {', '.join(lacking)}.")
    return "\n\n".join(said)


PARTS: Final[dict[str, Callable[[Results], str]]] = {
    each.__name__: each
    for each in (
        *(night, step_time, step_range, behind, peers, others, recovery, uneven, network, half_the_bytes, rounding),
        *(strategies_host, strategies_hosts, stalls, model_parallel, loading, checkpoint, planning, planning_simulated),
        *(membership, local_quality, staleness),
    )
}
"""What stands between the marks of that name."""


def written(page: str, results: Results) -> str:
    """Return a page with the parts for which there are results."""

    def part(found: re.Match[str]) -> str:
        try:
            text = PARTS[found["name"]](results)
        except LacksError:
            return found[0]
        space = "\n\n" if found["text"].startswith("\n") else ""
        return f"<!-- results: {found['name']} -->{space}{text}{space}<!-- /results -->"

    return REGION.sub(part, page)


def curves(results: Results) -> str:
    """Return the record from which `website.pictures` draws the loss curves."""
    return json.dumps(of(results, "curves")["runs"][0]) + "\n"


def pages() -> list[Path]:
    """Return the pages that have such parts."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in every if REGION.search(page.read_text())]


def main() -> None:
    results = newest(RESULTS)
    if "curves" in results:
        CURVES.write_text(curves(results))
    for page in pages():
        page.write_text(written(page.read_text(), results))
        print(page)


if __name__ == "__main__":
    main()
