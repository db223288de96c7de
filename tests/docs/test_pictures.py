"""Pictures, figures and the notebook of the documentation are those that their sources give today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import figures
from tests.house.rooms import ROOT
from website import hooks, notebook, pictures

pytestmark = pytest.mark.more

ASSETS = ROOT / "docs" / "assets"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_what_its_script_draws(name: str) -> None:
    assert (ASSETS / name).read_text() == pictures.PICTURES[name](), "`make figures` draws it again"


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_shows_the_numbers_of_its_table(name: str) -> None:
    shown = f'data-shown="{figures.fingerprint(name)}"'
    assert shown in (ASSETS / f"{name}.svg").read_text(), "its table has changed: `make figures` draws it again"


def test_another_number_is_another_figure() -> None:
    values = {"lost_ms.unisono": 43.0, "lost_ms.torchrun": 8577.0}
    assert figures.fingerprint("recovery", values) != figures.fingerprint("recovery", {**values, "lost_ms.unisono": 44})


def test_every_picture_is_on_a_page() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert [path.name for path in ASSETS.glob("*.svg") if f"](assets/{path.name})" not in pages] == []


def test_the_notebook_was_executed_as_its_source_is_today() -> None:
    book = json.loads(notebook.PAGE.read_text())
    written = [(cell["cell_type"], "".join(cell["source"])) for cell in book["cells"]]
    assert written == notebook.cells(), "`make notebook` executes it again"
    outputs = [output for cell in book["cells"] for output in cell.get("outputs", [])]
    assert outputs
    assert [output for output in outputs if output["output_type"] == "error"] == []
    assert [cell["execution_count"] for cell in book["cells"] if cell["cell_type"] == "code"] == [1, 2, 3, 4, 5, 6]
    words = hooks.cells(notebook.PAGE)
    assert words.count("identical: 40 steps") == 2
    assert "was killed by signal 9" in words


def test_cells_become_markdown(tmp_path: Path) -> None:
    printed = {"output_type": "stream", "name": "stdout", "text": ["1\n", "2\n"]}
    result = {"output_type": "execute_result", "data": {"text/plain": ["3"]}}
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {"cell_type": "code", "source": ["one()\n", "two()"], "outputs": [printed, result]},
        {"cell_type": "code", "source": ["silent()"], "outputs": []},
    ]
    path = tmp_path / "book.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    assert hooks.cells(path) == (
        '# Title\n\n```python\none()\ntwo()\n```\n\n```text title="output"\n1\n2\n3\n```\n\n```python\nsilent()\n```'
    )
