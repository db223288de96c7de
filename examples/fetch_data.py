"""Fetches the data of the larger examples into ./data, without installing anything.

    python examples/fetch_data.py                  # both
    python examples/fetch_data.py fashion-mnist    # 60,000 + 10,000 pictures of clothes, 31 MB
    python examples/fetch_data.py english          # the documentation of Python, 11 MB of text

The data come out of Debian packages, so this needs apt-get and dpkg-deb (Debian, Ubuntu), but no root. Elsewhere, put
the files there yourself: the names are in SOURCES.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = {
    # name: Debian package, folder in it, one file that must be there
    "fashion-mnist": ("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist", "train-images-idx3-ubyte.gz"),
    "english": ("python3.11-doc", "usr/share/doc/python3.11/html/_sources", "tutorial/index.rst.txt"),
}


def run(*command: str, cwd: Path) -> None:
    if shutil.which(command[0]) is None:
        sys.exit(
            f"{command[0]} is not on this machine: this script needs Debian or Ubuntu; see the names in {__file__}"
        )
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        last_words = done.stderr.strip() or done.stdout.strip()
        sys.exit(
            f"`{' '.join(command)}` failed with exit status {done.returncode}:\n{last_words}\n"
            "If it does not know the package, `apt-get update` (as root) makes apt read its lists again."
        )


def fetch(name: str, data: Path) -> None:
    package, folder, witness = SOURCES[name]
    target = data / name
    if (target / witness).is_file():
        print(f"{target} is there already")
        return
    data.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename: the target is whole or not there.
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=data) as scratch:
        run("apt-get", "download", package, cwd=Path(scratch))
        (archive,) = Path(scratch).glob("*.deb")
        run("dpkg-deb", "-x", archive.name, "unpacked", cwd=Path(scratch))
        found = Path(scratch) / "unpacked" / folder
        if not (found / witness).is_file():
            sys.exit(f"{archive.name} has no {folder}/{witness}: this is another version of the package")
        found.rename(target)
    print(f"{target} comes from {archive.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch the data of the examples.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{' or '.join(SOURCES)}; both where none is given")
    parser.add_argument("--data", type=Path, default=Path("data"), help="where to put it (default: ./data)")
    arguments = parser.parse_args()
    for name in arguments.names or SOURCES:
        if name not in SOURCES:
            parser.error(f"there is no data set {name!r}; there are {' and '.join(SOURCES)}")
        fetch(name, arguments.data)


if __name__ == "__main__":
    main()
