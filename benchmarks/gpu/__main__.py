"""Check and measure the library on the GPUs of this machine, and write one report: ``make gpu-check``.

    python -m benchmarks.gpu                        all of it, some 30 minutes on one GPU
    python -m benchmarks.gpu --only same-bits       a part of it
    python -m benchmarks.gpu --within-s 540         as much of it as 9 minutes allow; the same command goes on
    python -m benchmarks.gpu --device cpu           the same programme on the CPU, with small sizes

``gpu-report.html``, ``.txt`` and ``.json`` have the versions, the GPUs, what passed and what was measured. No names of
hosts, users or folders are in them. A check that fails or takes too long does not end the others. A report that is
there is gone on with: only what has failed, and what is missing, is checked. Nothing is installed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

from benchmarks.gpu import checks, speed, together
from benchmarks.gpu.checks import Check, OutOfTime, Place
from benchmarks.gpu.report import NAME, Report, code, machine, read, text_of, write
from benchmarks.gpu.training import CASES
from unisono.system.lifetime import scratch_folder

PARTS: Final = ("exchanges", "same-bits", "recovery", "speed", "together")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="", help="e.g. cuda, xpu or cpu; default: the accelerator of torch")
    parser.add_argument("--import", dest="module", default="", help="a module that makes the device known to torch")
    parser.add_argument("--only", choices=PARTS, nargs="*", default=PARTS)
    parser.add_argument("--cases", choices=CASES, nargs="*", help="of same-bits; default: all")
    parser.add_argument("--teams", type=int, default=0, help="so many numbers of workers of each case; default: all")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the report")
    parser.add_argument("--limit-s", type=float, default=300.0, help="of one command of a check")
    parser.add_argument("--within-s", type=float, default=0.0, help="of all that is checked now; default: no limit")
    parser.add_argument("--anew", action="store_true", help="check again what an earlier call has checked")
    arguments = parser.parse_args()
    ends = time.monotonic() + arguments.within_s if arguments.within_s else float("inf")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what is under way ends with its contexts
    os.environ["PYTHONPATH"] = os.pathsep.join([str(checks.ROOT / "src"), str(checks.ROOT)])
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        found = machine(arguments.device, arguments.module)
    except ValueError as error:
        parser.error(str(error))
    device = str(found["device"])
    if not device or (device != "cpu" and not found["gpus"]):
        parser.error("torch sees no accelerator here; --device cpu tries the programme")
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    try:
        report = None if arguments.anew else read(out)
    except ValueError as error:
        parser.error(f"{error}; give --anew, or another folder by --out")
    if report is not None and (report.device, report.machine) != (device, found):
        parser.error(f"{out / NAME}.json is of another machine or other versions; give --anew, or --out")
    report = report or Report(device, found)
    with scratch_folder("unisono-gpu-") as folder:
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            os.environ.setdefault(name, str(folder / "compiled"))
        place = Place(device, len(found["gpus"]), folder, arguments.limit_s, arguments.module, ends)
        left = _check(_todo(place, arguments), report, out)
    print(text_of(report))
    if left:
        print(f"not checked yet: {', '.join(left)}; the same command goes on")
    if report.results:
        print(f"please send {arguments.out / NAME}.json; {arguments.out / NAME}.html is for you")
    return int(report.num_failed > 0)


def _todo(place: Place, arguments: argparse.Namespace) -> list[Check]:
    parts = {
        "exchanges": lambda: [checks.exchanges(place)],
        "same-bits": lambda: checks.same_bits(place, arguments.cases, arguments.teams),
        "recovery": lambda: [checks.recovery(place)],
        "speed": lambda: [speed.speed(place)],
        "together": lambda: together.together(place),
    }
    return [check for name in PARTS if name in arguments.only for check in parts[name]()]


def _check(todo: list[Check], report: Report, out: Path) -> list[str]:
    """Do all checks that the report does not have; return the names of those for which no time was left."""
    version, left = code(checks.ROOT), []
    for check in todo:
        if report.is_done(check.name):
            print(f"{check.name}: was checked before", flush=True)
            continue
        results = []
        try:
            for result in check.results():
                results.append(result)
                print(f"{result.verdict:8} {result.name}{f': {result.words}' if result.words else ''}", flush=True)
        except OutOfTime:
            left.append(check.name)
            continue
        report.add(check.name, results, version)
        write(report, out)  # what there is, also if this is interrupted
    return left


if __name__ == "__main__":
    raise SystemExit(main())
