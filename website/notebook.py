"""Makes docs/notebook.ipynb from website/cells.py, by executing it.

python -m website.notebook        # `make notebook` makes the environment for it first
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
from pathlib import Path
from typing import Any, Final

__all__ = ["PAGE", "cells", "main"]

SOURCE: Final = Path(__file__).with_name("cells.py")
PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "notebook.ipynb"
LONGEST_S: Final = 600


def cells() -> list[tuple[str, str]]:
    """Return kind ("markdown" or "code") and text of each cell."""
    found = []
    for part in re.split(r"^# %%", SOURCE.read_text(), flags=re.MULTILINE)[1:]:
        words, _, text = part.partition("\n")
        if "[markdown]" in words:
            found.append(("markdown", re.sub(r"^# ?", "", text, flags=re.MULTILINE).strip()))
        else:
            found.append(("code", text.strip()))
    return found


def main() -> None:
    import nbformat
    from nbclient import NotebookClient

    make = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    book = nbformat.v4.new_notebook(
        cells=[make[kind](text, id=f"cell-{index}") for index, (kind, text) in enumerate(cells())]
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(book, timeout=LONGEST_S, resources={"metadata": {"path": folder}}).execute()
    book.metadata = {"language_info": {"name": "python"}, "kernelspec": {"name": "python3", "display_name": "Python 3"}}
    for cell in book.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    nbformat.validate(book)
    PAGE.write_text(nbformat.writes(book, indent=1).rstrip() + "\n")


def _joined(outputs: list[Any]) -> list[Any]:
    """Make one output of what was printed piece by piece, without the time of day and the name of the machine."""
    joined: list[Any] = []
    for output in outputs:
        if "text" in output:
            output.text = re.sub(r"^\d{4}-\d\d-\d\d [\d:]+ ", "", output.text, flags=re.MULTILINE)
            output.text = output.text.replace(socket.gethostname(), "desk")
        if joined and "text" in output and joined[-1].get("name") == output.get("name"):
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


if __name__ == "__main__":
    main()
