"""Whether runs of the starters have the published bits: those of `digests.toml`, which lies beside this file.

    unisono run examples/forces.py --workers 3
    python examples/digests.py runs/forces

A digest is the SHA-256 of the trained model, as a safetensors file. It belongs to one arithmetic: a version of torch,
instructions of the processor, threads, and what some operations give here (the probe, docs/guarantees.md). For another
arithmetic, this prints the lines that are missing. Send them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tomllib
from pathlib import Path

FILE = Path(__file__).with_name("digests.toml")
NOT_BITS = ("machine", "processor", "python")  # of a fingerprint: the probe says whether they matter


def look(run: Path) -> tuple[str, dict[str, str], str]:
    """Return the starter and its options, the arithmetic, and the digest of the model of a run's directory.

    Raises:
        SystemExit: there is no run that has finished; says what to do.
    """
    try:
        facts = json.loads((run / "run.json").read_text())
        end = json.loads((run / "journal.jsonl").read_text().splitlines()[-1])
    except (OSError, ValueError, IndexError) as error:
        sys.exit(f"{run} is no run's directory: {error}")
    if end.get("kind") != "end" or not end.get("ok"):
        sys.exit(f"{run} has not finished, so it has no digest; resume it: unisono run --resume {run}")
    script, *words = facts["command"]["arguments"]
    if "--run-dir" in words:
        del words[words.index("--run-dir") :][:2]
    options = [word for word in words if word != "--overwrite"]
    arithmetic = {name: text for name, text in facts["fingerprint"].items() if name not in NOT_BITS}
    arithmetic["probe"] = hashlib.sha256(arithmetic.pop("results").encode()).hexdigest()[:16]
    return " ".join([Path(script).stem, *options]), arithmetic, end["sha256"]["model"]


def published(starter: str, arithmetic: dict[str, str]) -> str | None:
    """Return the published digest of a starter with these options in this arithmetic; None: there is none."""
    for entry in tomllib.loads(FILE.read_text()).get("arithmetic", []):
        if entry["is"] == arithmetic and starter in entry["models"]:
            return entry["models"][starter]
    return None


def lines_to_send(arithmetic: dict[str, str], models: dict[str, str]) -> str:
    """Return an entry of `digests.toml`."""
    tables = {"[arithmetic.is]": arithmetic, "[arithmetic.models]": models}
    lines = ["[[arithmetic]]"]
    for title, table in tables.items():
        lines += ["", title, *(f"{json.dumps(name)} = {json.dumps(text)}" for name, text in table.items())]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="directories of finished runs")
    differ, missing = False, {}
    for run in parser.parse_args().runs:
        starter, arithmetic, digest = look(run)
        known = published(starter, arithmetic)
        print(f"{run}: {starter}: {digest}", end=", ")
        if known is None:
            print("of which none is published for this arithmetic")
            missing.setdefault(json.dumps(arithmetic), {})[starter] = digest
        else:
            print("as published" if known == digest else f"and {known} is published")
            differ |= known != digest
    if missing:
        print("\nSend these lines for examples/digests.toml:\n")
        print("\n\n".join(lines_to_send(json.loads(arithmetic), models) for arithmetic, models in missing.items()))
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
