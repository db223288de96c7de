"""The public names, and that what the project says of itself agrees."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import unisono
from tests.house.rooms import ROOT, modules
from tests.waiting import WAIT_S

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
