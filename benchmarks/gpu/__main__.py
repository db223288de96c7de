"""Check and measure the library on the GPUs of this machine, and write one report: ``make gpu-check``.

    python -m benchmarks.gpu                    all of it, some 20 minutes on one GPU
    python -m benchmarks.gpu --only same-bits   a part of it
    python -m benchmarks.gpu --device cpu       the same programme on the CPU, with small sizes

``gpu-report.json`` and ``gpu-report.txt`` have the versions, the GPUs, what passed and what was measured. No names of
hosts, users or folders are in them. A check that fails or takes too long does not end the others.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.gpu import checks, speed
from benchmarks.gpu.report import Report, machine, text_of, write
from benchmarks.gpu.training import CASES

PARTS = ("exchanges", "same-bits", "speed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", choices=PARTS, nargs="*", default=PARTS)
    parser.add_argument("--cases", choices=CASES, nargs="*", help="of same-bits; default: all")
    parser.add_argument("--teams", type=int, default=0, help="so many numbers of workers of each case; default: all")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the report")
    parser.add_argument("--limit-s", type=float, default=600.0, help="of one check")
    arguments = parser.parse_args()
    found = machine(arguments.device)
    if arguments.device == "cuda" and not found["gpus"]:
        parser.error("torch sees no GPU here (torch.cuda.is_available() is False); --device cpu tries the programme")
    report = Report(arguments.device, found)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unisono-gpu-") as folder:
        place = checks.Place(arguments.device, len(found["gpus"]), Path(folder), arguments.limit_s)
        todo = []
        if "exchanges" in arguments.only:
            todo += [checks.exchanges(place)]
        if "same-bits" in arguments.only:
            todo += checks.same_bits(place, arguments.cases, arguments.teams)
        if "speed" in arguments.only:
            todo += [speed.speed(place)]
        for each in todo:
            for result in each:
                report.add(result)
                print(f"{result.outcome:8} {result.name}{f': {result.words}' if result.words else ''}", flush=True)
                write(report, arguments.out)  # what there is, also if this is interrupted
    print(text_of(report))
    print(f"please send {arguments.out / 'gpu-report.json'} and {arguments.out / 'gpu-report.txt'}")
    return int(report.num_failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
