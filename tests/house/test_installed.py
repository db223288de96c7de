"""The wheel as a user installs it: in an environment that has what the wheel asks for, and nothing else; with the extra
that computes, and without it.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import unisono
from tests.house.built import built_once, needs_hatchling  # a fixture among them  # noqa: F401
from tests.house.rooms import ROOT
from tests.waiting import WAIT_S, wait_until
from unisono.cli import COMMANDS
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


def link_needed(wheel: Path, site: Path, *extras: str) -> set[str]:
    """Link what a wheel's metadata asks for, and what that asks for, into a folder of packages. Returns the names."""
    (information,) = importlib.metadata.distributions(path=[str(wheel)])
    todo = [
        requirement
        for requirement in map(Requirement, information.requires or [])
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    ]
    done: set[str] = set()
    while todo:
        requirement = todo.pop()
        version = importlib.metadata.version(requirement.name)
        assert requirement.specifier.contains(version, prereleases=True), requirement
        if (name := canonicalize_name(requirement.name)) in done:
            continue
        done.add(name)
        todo += needed(requirement.name)
        linked(name, site)
    return done


def linked(name: str, site: Path) -> None:
    """Link an installed distribution into a folder of packages."""
    found = importlib.metadata.distribution(name)
    for top in {file.parts[0] for file in found.files or [] if file.parts[0] != ".."} - {"__pycache__"}:
        if not (site / top).exists():
            (site / top).symlink_to(Path(str(found.locate_file(top))))


def emptied(folder: Path) -> tuple[Path, Path]:
    """Make an environment without packages; return the folder of its programs and that of its packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], timeout=WAIT_S, check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    return folder / "bin", site


def installed(built: Path, folder: Path, *extras: str) -> tuple[Path, set[str]]:
    """Make an environment; return the folder of its programs, and the names of what the wheel has asked for."""
    programs, site = emptied(folder)
    (wheel,) = built.glob("*.whl")
    found = link_needed(wheel, site, *extras)
    python = programs / "python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(command, env=clean(folder), timeout=WAIT_S, check=True)
    return programs, found


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment with torch."""
    programs, found = installed(built, tmp_path_factory.mktemp("environment"), "torch")
    assert "torch" in found
    assert "numpy" not in found  # it is the examples' only
    return programs


@pytest.fixture(scope="module")
def bare(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment without torch, as `uvx --from WHEEL unisono` makes it."""
    programs, found = installed(built, tmp_path_factory.mktemp("bare"))
    assert not found & {"torch", "numpy", "sympy"}
    return programs


def clean(home: Path) -> dict[str, str]:
    """Environment variables without what leads to this source tree."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "PIP"))}
    return {**kept, "HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def called(folder: Path, *command: str | Path, codes: tuple[int, ...] = (0,)) -> str:
    """What a command prints; what it says of an error, where it ends with one of the other codes."""
    done = subprocess.run(
        command, cwd=folder, env=clean(folder), capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout if done.returncode == 0 else done.stdout + done.stderr


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


HOW_TO_GET_IT = (
    "needs the package torch: pip install 'torch<2.16,>=2.6' --index-url https://download.pytorch.org/whl/cpu"
)


def test_without_torch_what_computes_says_how_to_get_the_right_build(bare: Path, tmp_path: Path) -> None:
    """The class is also Python's own for what cannot be imported, so that `try: ... except ImportError` works."""
    code = (
        "import unisono\n"
        "unisono.Checkpoints(every_steps=1)\n"
        "try:\n    from unisono import Run\n"
        "except ImportError as error:\n    print(type(error).__mro__[1].__name__, error)\n"
    )
    said = called(tmp_path, bare / "python", "-c", code)
    assert said.startswith(f"UsageError unisono.Run {HOW_TO_GET_IT} ")
    (tmp_path / "train.py").write_text(TRAINING)
    shutil.copytree(ROOT / "tests" / "data" / "run-0.1", tmp_path / "run")
    for command, what in {
        "run train.py --workers 2": "a worker",
        "check train.py": "a worker",
        "plan train.py": "a worker",
        "replay run --step 3 train.py": "a worker",
        "checkpoints run export weights.pt": "this command",
    }.items():
        said = called(tmp_path, bare / "unisono", *command.split(), codes=(2,))
        assert said.splitlines()[-1].startswith(f"unisono: {what} {HOW_TO_GET_IT} "), command
        assert "Traceback" not in said
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "run"}, "nothing was started"


def test_runs_are_looked_at_without_torch(bare: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(ROOT / "tests" / "data" / "run-0.1", run)
    unisono_command = bare / "unisono"
    assert "(torch is not installed, " in called(tmp_path, unisono_command, "--version")
    for name in COMMANDS:
        assert "Usage: " in called(tmp_path, unisono_command, name, "--help")
    assert called(tmp_path, unisono_command, "compare", "run", "run").startswith("identical: ")
    assert "report written to " in called(tmp_path, unisono_command, "report", "run")
    assert (run / "report.html").stat().st_size > 10_000
    assert "loss" in called(tmp_path, unisono_command, "watch", "run")
    assert "loss" in called(tmp_path, unisono_command, "watch", "--once", "run")
    assert "step" in called(tmp_path, unisono_command, "checkpoints", "run")
    said = called(tmp_path, unisono_command, "doctor", codes=(1,))
    assert "will hurt  versions: " in said
    assert HOW_TO_GET_IT.partition(": ")[2] in said
    assert "open files: " in said, "the other checks as well"


GOES_ON = TRAINING.replace("epochs=2", "epochs=10**6")
"""Until it is stopped."""


def test_a_run_of_others_is_watched_stopped_and_verified_without_torch(
    environment: Path, bare: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(GOES_ON)
    command = [environment / "unisono", "run", "train.py", "--workers", "1", "--run-dir", "run"]
    with (
        open(tmp_path / "output", "wb") as output,
        subprocess.Popen(
            command, cwd=tmp_path, env=clean(tmp_path), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ) as training,
    ):
        try:
            journal = tmp_path / "run" / "journal.jsonl"
            wait_until(lambda: journal.exists() or training.poll() is not None, "a journal")
            assert training.poll() is None, (tmp_path / "output").read_text()
            assert "w0" in called(tmp_path, bare / "unisono", "watch", "--once", "run")
            called(tmp_path, bare / "unisono", "stop", "run")
            assert training.wait(WAIT_S) == 0, (tmp_path / "output").read_text()
        finally:
            training.terminate()
    called(tmp_path, bare / "unisono", "certify", "run")
    verify = (bare / "unisono", "verify", "run/certificate.json", "--run", "run", "--any-signer")
    assert "journal" in called(tmp_path, *verify)
    again = called(tmp_path, *verify, "--segments", "1", "train.py", codes=(2,))
    assert again.splitlines()[-1].startswith(f"unisono: this command {HOW_TO_GET_IT} ")
