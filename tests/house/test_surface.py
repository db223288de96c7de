"""The public names, and that what the project says of itself agrees."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import unisono
from tests.house.rooms import ROOT, modules
from tests.waiting import WAIT_S
from unisono.core.old_names import OldNameWarning

PUBLIC = [
    "BucketSampler",
    "Carried",
    "CheckpointError",
    "Checkpoints",
    "DeadlineExceeded",
    "DivergenceError",
    "LaunchError",
    "LocalRound",
    "LossError",
    "PeerLost",
    "ProtocolError",
    "RecipeError",
    "Run",
    "RunDirectoryError",
    "RunStopped",
    "Stages",
    "StateLost",
    "Step",
    "StepError",
    "Streams",
    "TarShards",
    "UnisonoError",
    "UsageError",
    "assemble",
    "clip_grad_norm_",
    "clip_grad_value_",
    "launch",
    "load_weights",
    "parallelize",
    "shard",
    "whole",
]


def test_the_public_names_are_these() -> None:
    """A new name is a promise: it is added here on purpose, and to CHANGELOG.md."""
    assert sorted(unisono.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(unisono, name)
    assert callable(value)
    assert value.__doc__
    assert name in dir(unisono)


def test_the_reference_has_all_public_names() -> None:
    reference = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in PUBLIC if f"\n::: unisono.{name}\n" not in reference] == []


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        unisono.no_such_name  # noqa: B018


def test_the_old_names_work_in_this_version_and_say_the_new_ones(tmp_path: Path) -> None:
    """The warning is one that Python shows, and names the line of the script."""
    with warnings.catch_warnings(record=True) as found, unisono.Run(tmp_path / "run") as run:
        warnings.simplefilter("always", OldNameWarning)
        assert unisono.load_model is unisono.load_weights  # type: ignore[attr-defined]
        assert unisono.Checkpoints(on_signal=75).exit_code_on_sigterm == 75
        assert unisono.Checkpoints(on_signal=None).exit_code_on_sigterm is None
        assert run.gather(3) == [3]
        assert run.pending == []
    told = [str(one.message) for one in found if one.category is OldNameWarning]
    assert {one.filename for one in found} == {__file__}
    assert [text.partition(":")[0] for text in told] == [
        "unisono.load_model is now called unisono.load_weights",
        *["Checkpoints(on_signal=...) is now called Checkpoints(exit_code_on_sigterm=...)"] * 2,
        "run.gather is now called run.all_gather",
        "run.pending is now called run.pending_evaluations",
    ]
    assert not issubclass(OldNameWarning, DeprecationWarning)
    assert unisono.Checkpoints().exit_code_on_sigterm == 143


def test_a_star_import_gives_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from unisono import *", names)
    assert sorted(set(names) - {"__builtins__"}) == PUBLIC


def test_launch_stays_a_function_whatever_was_imported() -> None:
    """An imported submodule would take the place of a name of the facade."""
    below = [name for name in modules() if name.startswith("launch")]
    code = (
        "import importlib, unisono\n"
        f"for name in {below}:\n    importlib.import_module('unisono.' + name)\n"
        "assert callable(unisono.launch)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)


def _with_its_framework(module: str) -> object:
    """Modules of ``interop`` import a framework, which is not there in `make test`."""
    return pytest.param(module, marks=[pytest.mark.more] if module.startswith("interop.") else [])


@pytest.mark.parametrize("module", [_with_its_framework(name) for name in modules() if not name.endswith("__main__")])
def test_what_a_module_exports_is_there(module: str) -> None:
    loaded = importlib.import_module(f"unisono.{module}")
    for name in getattr(loaded, "__all__", []):
        assert hasattr(loaded, name), f"unisono.{module}.__all__ names {name}, which is not there"


def test_the_version_is_one() -> None:
    assert f"\nversion: {unisono.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {unisono.__version__}" in (ROOT / "CHANGELOG.md").read_text()
