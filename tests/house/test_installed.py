"""The wheel as a user installs it: in an environment that has what the wheel asks for, and nothing else."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import unisono
from tests.house.built import built_once, needs_hatchling  # a fixture among them  # noqa: F401
from tests.waiting import WAIT_S
from unisono.record.journal import compare

pytestmark = needs_hatchling

TRAINING = """
import torch
import unisono

draw = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(32, 6, generator=draw), torch.randn(32, 1, generator=draw))
run = unisono.Run(seed=1)
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(data, batch_size=16, microbatches=4, epochs=2):
    for inputs, wanted in step:
        torch.nn.functional.mse_loss(model(inputs), wanted).backward()
    optimizer.step()
"""

IMPORT_ALL = """
import importlib, pkgutil, unisono
names = [one.name for one in pkgutil.walk_packages(unisono.__path__, "unisono.") if not one.name.endswith("__main__")]
names = [name for name in names if not name.startswith(("unisono.interop.", "unisono.testing.plugin"))]  # need more
for name in names:
    importlib.import_module(name)
for name in unisono.__all__:
    getattr(unisono, name)
print(unisono.__file__, len(names))
"""


def needed(distribution: str) -> Iterator[Requirement]:
    """What an installed distribution asks for here, without extras."""
    for text in importlib.metadata.requires(distribution) or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def link_needed(wheel: Path, site: Path) -> set[str]:
    """Link what a wheel's metadata asks for, and what that asks for, into a folder of packages. Returns the names."""
    (information,) = importlib.metadata.distributions(path=[str(wheel)])
    todo = [Requirement(text) for text in information.requires or [] if "extra ==" not in text]
    linked: set[str] = set()
    while todo:
        requirement = todo.pop()
        installed = importlib.metadata.distribution(requirement.name)
        assert requirement.specifier.contains(installed.version, prereleases=True), requirement
        if (name := canonicalize_name(requirement.name)) in linked:
            continue
        linked.add(name)
        todo += needed(requirement.name)
        for top in {file.parts[0] for file in installed.files or [] if file.parts[0] != ".."} - {"__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(installed.locate_file(top))))
    return linked


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment's programs."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], timeout=WAIT_S, check=True)
    (wheel,) = built.glob("*.whl")
    (site,) = folder.glob("lib/python*/site-packages")
    linked = link_needed(wheel, site)
    assert "numpy" not in linked  # it is the examples' only
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(command, env=clean(folder), timeout=WAIT_S, check=True)
    return folder / "bin"


def clean(home: Path) -> dict[str, str]:
    """Environment variables without what leads to this source tree."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "PIP"))}
    return {**kept, "HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def called(folder: Path, *command: str | Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=clean(folder), capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_the_wheel_asks_for_is_enough_to_import_all_of_it(environment: Path, tmp_path: Path) -> None:
    file, number = called(tmp_path, environment / "python", "-c", IMPORT_ALL).split()
    assert Path(file).is_relative_to(environment.parent)
    assert int(number) > 200


def test_the_installed_command_trains_from_an_empty_folder(environment: Path, tmp_path: Path) -> None:
    """With the bits of the script alone."""
    assert called(tmp_path, environment / "unisono", "--version").startswith(f"unisono {unisono.__version__} (torch ")
    (tmp_path / "train.py").write_text(TRAINING)
    for workers in ("1", "2"):
        called(tmp_path, environment / "unisono", "run", "train.py", "--workers", workers, "--run-dir", workers)
    assert compare(tmp_path / "1", tmp_path / "2").startswith("identical: 4 steps")
