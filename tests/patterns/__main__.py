"""``python -m tests.patterns [NAME...]``: runs the patterns, and prints what came of each and how many are of a class.

The exit code is 1 where one is of another class than `expected` says.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.patterns.corpus import load
from tests.patterns.expected import EXPECTED
from tests.patterns.measure import measure, table
from tests.workers.conftest import run_nursery


def main() -> int:
    names = sys.argv[1:] or list(load())
    if unknown := set(names) - set(load()):
        print(f"there is no pattern {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    os.environ["OMP_NUM_THREADS"] = "1"
    verdicts = {}
    with tempfile.TemporaryDirectory() as folder, run_nursery(f"{folder}/socket"):
        os.environ["UNISONO_NURSERY"] = f"{folder}/socket"
        for name in names:
            verdicts[name] = measure(name, Path(folder, name))
            print(f"{verdicts[name].kind:9}  {name}", file=sys.stderr, flush=True)
    print(table(verdicts, EXPECTED))
    return int(any(EXPECTED.get(name) != verdict.kind for name, verdict in verdicts.items()))


if __name__ == "__main__":
    sys.exit(main())
