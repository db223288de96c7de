"""`unisono.launch` in a real kernel: one line of progress that changes in its place, and errors with a cell's line."""

from __future__ import annotations

import os
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest

from tests.house.rooms import ROOT
from tests.waiting import WAIT_S

pytest.importorskip("ipykernel", reason="ipykernel is not installed; `make figures` installs it")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed; `make figures` installs it")
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed; `make figures` installs it")

TRAINING = """
import torch, unisono
from torch import nn

def train(steps, fails):
    run = unisono.Run(seed=7)
    data = torch.utils.data.TensorDataset(torch.rand(64, 2))
    model = nn.Linear(2, 1)
    run.track(model=model)
    for step in run.steps(data, batch_size=16, microbatches=4, epochs=steps // 4):
        for (x,) in step:
            loss = model(x).mean()
            if fails:
                loss = loss + [].pop()  # the line that fails
            loss.backward()
        if run.is_main and step.number == 1:
            print("a worker's own line")
    return step.number
""".strip()  # IPython counts from the first line that is not empty


def executed(folder: Path, *cells: str, allow_errors: bool = False) -> list[list[dict[str, Any]]]:
    """The outputs of each cell."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    client = nbclient.NotebookClient(
        book, timeout=WAIT_S, allow_errors=allow_errors, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    return [cell.outputs for cell in book.cells]


def test_progress_of_two_processes_is_one_line_that_changes(tmp_path: Path) -> None:
    _, outputs = executed(tmp_path, TRAINING, 'unisono.launch(train, 40, False, workers=2, run_dir="run")')
    shown = [output["data"]["text/plain"] for output in outputs if output["output_type"] == "display_data"]
    assert len(shown) == 1
    assert "unisono: 40 of 40 steps  loss " in shown[0]
    printed = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    assert "[w0] a worker's own line\n" in printed
    assert "unisono: finished: 40 steps" in printed
    assert "of 40 steps  loss" not in printed
    assert outputs[-1]["data"]["text/plain"] == "39"


def test_an_error_has_the_line_of_the_cell(tmp_path: Path) -> None:
    cells = TRAINING, 'unisono.launch(train, 4, True, workers=2, run_dir="run")'
    _, outputs = executed(tmp_path, *cells, allow_errors=True)
    (error,) = [output for output in outputs if output["output_type"] == "error"]
    assert error["ename"] == "LaunchError"
    assert "IndexError: pop from empty list" in error["evalue"]
    line = TRAINING.splitlines().index("                loss = loss + [].pop()  # the line that fails") + 1
    assert (
        f"  Cell In[1], line {line}, in train\n    loss = loss + [].pop()  # the line that fails\n" in error["evalue"]
    )
    assert "ipykernel_" not in error["evalue"]


ON_CARDS = """
import os, torch, unisono
from torch import nn

def train(emulated):
    if emulated:
        os.environ["EMULATED_CARD"] = f"GPU-{os.getpid()}"  # a card for each process
        import tests.emulated.library
    run = unisono.Run(seed=7, device="emu" if emulated else "cpu")
    model = nn.Linear(2, 1).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.rand(64, 2))
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data, batch_size=16, microbatches=4, epochs=2):
        for (x,) in step:
            model(x).square().mean().backward()
        optimizer.step()
    return run.device.type, run.num_workers, step.loss
""".strip()


def test_two_processes_with_a_card_each_have_the_bits_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cards are emulated, and known by their ids: as on a notebook's machine with two."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src")]))
    launches = (f'unisono.launch(train, {on}, workers={n}, run_dir="r{n}")' for on, n in ((False, 1), (True, 2)))
    _, *launched = executed(tmp_path, ON_CARDS, *launches)
    alone, both = (literal_eval(outputs[-1]["data"]["text/plain"]) for outputs in launched)
    assert alone[:2] == ("cpu", 1)
    assert both[:2] == ("emu", 2)
    assert both[2] == alone[2]
