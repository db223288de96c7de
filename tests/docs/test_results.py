"""Tables of the documentation are those of the newest results, and results say what a reader has to know of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.night import BENCHMARKS, RESULTS, newest
from benchmarks.report import compact

MOST_BYTES = 200_000
"""Of a file of results: all of them are in the repository."""
KEYS = {
    *("benchmark", "answers", "command", "size", "status", "reason", "exit_code", "date", "seconds", "load", "machine"),
    *("commit", "clean", "left_out", "figures", "runs"),
}
MACHINE = {"cpu": "a processor", "cores": 2, "memory_gib": 24.0, "kernel": "6.1", "python": "3.11.7", "torch": "2.13.0"}


def result(runs: list[Any], figures: dict[str, float] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "size": "full", "status": "measured", "date": "2026-01-02T03:04:05+00:00", "load": {"before": [0.1, 0.1, 0.1]},
        "machine": MACHINE, "commit": "abc", "clean": True, "left_out": {}, "runs": runs, "figures": figures or {},
        **more,
    }  # fmt: skip


def steps(**sides: float) -> dict[str, Any]:
    """Three turns, in each of which the sides take their time."""
    times = {side: [value, 2 * value, 3 * value] for side, value in sides.items()}
    memory = dict.fromkeys(sides, 100.0)
    return {"workers": 2, "microbatches": 8, "case": "cnn", "step_ms": times, "cpu_ms": times, "peak_mib": memory}


def test_every_table_shows_the_newest_results() -> None:
    results = newest()
    old = [page.name for page in tables.pages() if tables.written(page.read_text(), results) != page.read_text()]
    assert old == [], "`make figures` writes them again"
    if "curves" in results:
        assert tables.CURVES.read_text() == tables.curves(results), "`make figures` writes it again"


def test_every_part_stands_on_one_page() -> None:
    marks = [found["name"] for page in tables.pages() for found in tables.REGION.finditer(page.read_text())]
    assert sorted(marks) == sorted(tables.PARTS)


def test_kept_results_are_small_and_say_how_they_came_about() -> None:
    for path in sorted(RESULTS.glob("*/*.json")):
        kept = json.loads(path.read_text())
        assert kept.keys() == KEYS, path
        assert kept["benchmark"] == path.stem
        assert kept["size"] in ("full", "quick"), f"{path}: what --smoke writes is no measurement"
        assert kept["runs"] or kept["status"] != "measured", f"{path}: every repetition, not only the figures"
        assert path.stat().st_size < MOST_BYTES, path


def test_without_results_a_page_stays_as_it_is() -> None:
    for page in tables.pages():
        assert tables.written(page.read_text(), {}) == page.read_text()


def test_a_part_is_replaced_by_what_was_measured() -> None:
    page = "before\n\n<!-- results: step_time -->\n\n| old |\n\n<!-- /results -->\n\nafter\n"
    new = tables.written(page, {"step_time": result([steps(unisono=10.0, ddp=12.5)])})
    assert "| CNN, M = 8 | 20.0 | 25.0 | 0.80 (0.80-0.80) | 20 / 25 | 100 / 100 |" in new
    assert "takes 0.80 to 0.80 of the time" in new
    assert "old" not in new
    assert new.startswith("before\n")
    assert new.endswith("\nafter\n")
    assert tables.written(new, {"step_time": result([steps(unisono=10.0, ddp=12.5)])}) == new


def test_a_part_within_a_sentence_stays_there() -> None:
    page = "takes <!-- results: step_range -->1 to 2<!-- /results --> of it"
    new = tables.written(page, {"step_time": result([steps(unisono=10.0, ddp=12.5)])})
    assert new == "takes <!-- results: step_range -->0.80 to 0.80<!-- /results --> of it"


def test_a_quick_result_does_not_replace_what_needs_all_of_a_benchmark() -> None:
    page = "<!-- results: membership -->\n\n| old |\n\n<!-- /results -->\n"
    assert tables.written(page, {"membership": result([], size="quick")}) == page


def test_a_peer_that_took_no_part_is_named_with_the_reason() -> None:
    found = {
        "step_time": result([steps(unisono=1.0, compute=0.5, in_step=0.8, ddp=1.0, ddp_whole=2.0)]),
        "peers": result([steps(unisono=1.0, ddp=1.0, zero=4.0)], left_out={"torchft": "torchft is not installed"}),
    }
    text = tables.peers(found)
    assert "| loops in step | 1.25 (1.25-1.25) | | |" in text
    assert "| DDP + ZeroRedundancyOptimizer | 0.25 (0.25-0.25) | | |" in text
    assert text.endswith("torchft took no part: torchft is not installed.")
    assert (
        tables.behind(found) == "Steps whose whole interval is above 1, of the time of loops alone (CNN 2.00); "
        "loops in step (CNN 1.25)."
    )


def test_the_night_says_what_is_measured_where_and_what_is_not() -> None:
    text = tables.night({"step_time": result([], benchmark="step_time")})
    assert text.startswith("Measured on 2026-01-02 (full), commit abc: a processor, 2 cores, 24 GiB, kernel 6.1,")
    assert "`recovery`" in text.partition("Not measured by a night yet: ")[2]
    assert len(BENCHMARKS) - 1 == text.partition("yet: ")[2].count("`") / 2


HOSTS = {
    "comparison": "100m.2.4mb", "hosts": 2, "members": 1, "gradient_bytes": 4e6,
    "step_ms": {side: [1.0, 2.0, 3.0] for side in ("unisono", "ddp", "unisono-bf16", "ddp-bf16")},
}  # fmt: skip
PLACES = ("cnn.host.1", "cnn.1g.2")
FORECASTS = ("step_ms", "spread", "error", "error_unseen")
HEAD = ("generation_s", "loss_s", "heartbeat_cpu", "head_mb", "head_loss_s")


@pytest.mark.parametrize(
    ("part", "results", "shown"),
    [
        ("network", {"network": result([HOSTS])}, "| 100 Mbit/s, 2 | 4 MB | 2 ms | 2 ms | 1.00 (1.00-1.00) |"),
        ("half_the_bytes", {"network": result([HOSTS])}, "| 2 ms | 2 ms | 1.00 (1.00-1.00) | 1.00 (1.00-1.00) |"),
        (
            "rounding",
            {"rounding": result([{"microbatches": 8, "losses": [{"fp32": 2.5, "bf16": 2.6}] * 3}])},
            "3 seeds: M = 8: 2.5000, 2.5000, 2.5000 and 2.6000,",
        ),
        (
            "strategies_hosts",
            {"strategies": result([{**steps(unisono=1.0, ddp=2.0), "setting": "1g", "side": "unisono"}])},
            "| `run.steps` | 2 | 0.50 | | | |",
        ),
        (
            "stalls",
            {"strategies": result([{**steps(unisono=1.0, ddp=2.0), "setting": "stalls", "side": "unisono"}])},
            "`run.steps` 0.50 (0.50-0.50).",
        ),
        (
            "planning",
            {"planning": result([], {f"{name}.{place}": 0.5 for name in FORECASTS for place in PLACES})},
            "| `cnn` | 1 Gbit/s | 2 | 0 ms | 50% | +50.0% | +50.0% |",
        ),
        (
            "planning_simulated",
            {
                "planning_simulated": result(
                    [
                        {
                            "simulated": [
                                {
                                    "link": link, "workers": "4", "hosts": "1", "step ms": "127",
                                    "efficiency": "91%", "network": "0",
                                }
                                for link in ("1g", "10g")
                            ]
                        }
                    ]
                )
            },
            "| 4 | 1 | 127 | 91% | 0 | 127 | 91% | 0 |",
        ),
        ("membership", {"membership": result([], dict.fromkeys(HEAD, 0.5))}, "heartbeats 50.0% of a core"),
        (
            "local_quality",
            {
                "quality": result(
                    [
                        {"replicas": replicas, "inner_steps": inner, "outer": outer, "loss": 2.0}
                        for replicas in (1, 2, 4, 8)
                        for inner in (1, 10, 50)
                        for outer in ("average", "nesterov")
                    ]
                )
            },
            "| 8 | 2.000 |",
        ),
        (
            "staleness",
            {
                "staleness": result(
                    [],
                    {
                        f"loss.{optimizer}.delay{delay}": 2.0
                        for optimizer in ("adamw", "sgd", "muon")
                        for delay in ("0", "1", "2", "1.predicted", "2.predicted")
                    },
                )
            },
            "| 1, `predict=True` | 2.000 (+0.00) |",
        ),
    ],
)  # fmt: skip
def test_a_part_shows_what_a_benchmark_has_found(part: str, results: dict[str, Any], shown: str) -> None:
    assert shown in tables.PARTS[part](results)


def test_a_failed_result_is_not_shown(tmp_path: Path) -> None:
    for day, status in (("2026-01-01", "measured"), ("2026-01-02", "failed")):
        (folder := tmp_path / day).mkdir()
        written = {**result([]), "benchmark": "loading", "status": status, "date": day}
        (folder / "loading.json").write_text(compact(written))
    assert newest(tmp_path)["loading"]["date"] == "2026-01-01"


def test_a_list_of_numbers_is_one_line() -> None:
    value = {"times": [1.0, 2, 3e-9], "names": ["[", "]"], "turns": [[1, 2], [3]]}
    text = compact(value)
    assert json.loads(text) == value
    assert "[1.0, 2, 3e-09]" in text
