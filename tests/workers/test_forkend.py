"""A worker that was forked ends as a process of its own would, though it leaves most of its memory to the kernel."""

from __future__ import annotations

import atexit
import gzip
import os
import sys
import types
from pathlib import Path

from unisono.machine.forkend import end_of_worker

IMPORTS = "import atexit, gzip, tempfile, threading\nfrom pathlib import Path\n"
LEAVES = """
main_ends = threading.Event()

def write_late():
    main_ends.wait()
    (folder / "thread").write_text("text")

class Last:
    def __del__(self):
        (folder / "deleted").write_text("text")

opened = open(folder / "open", "w")
opened.write("text")
packed = gzip.open(folder / "packed", "wt")
packed.write("text")
temporary = tempfile.NamedTemporaryFile(dir=folder, prefix="temporary")
last = Last()
last.itself = last
atexit.register((folder / "at-exit").write_text, "text")
threading.Thread(target=write_late).start()
main_ends.set()
"""
HOLDS = """
written, never = threading.Event(), threading.Event()

def hold(file):
    file.write("text")
    written.set()
    never.wait()

threading.Thread(target=hold, args=[open(folder / "held", "w")], daemon=True).start()
written.wait()
"""


def ended(text: str, folder: Path) -> int:
    """Run a script as the nursery's child does, in a fork of this process; its exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            atexit._clear()  # what the tests' own process would do at its end
            shared = frozenset(sys.modules)
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            names = vars(main)
            exec(f"{IMPORTS}folder = Path({str(folder)!r}){text}", names)
            del main, names
            end_of_worker(7, shared)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_files_threads_and_functions_end_as_at_pythons_own_shutdown(tmp_path: Path) -> None:
    assert ended(LEAVES, tmp_path) == 7
    with gzip.open(tmp_path / "packed", "rt") as file:
        assert file.read() == "text"
    left = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file() and path.name != "packed"}
    assert left == dict.fromkeys(("open", "at-exit", "thread", "deleted"), "text"), "and no temporary file"


def test_a_file_is_written_that_something_still_holds(tmp_path: Path) -> None:
    """Python itself writes none of a script's files where a thread that is a daemon lives at the end."""
    assert ended(HOLDS, tmp_path) == 7
    assert (tmp_path / "held").read_text() == "text"
