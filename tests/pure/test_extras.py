"""What a missing optional package is answered with: a command that installs it, wherever this library came from."""

from __future__ import annotations

import importlib.metadata
import tomllib

import pytest

from tests.house.rooms import ROOT
from unisono.core.errors import UsageError
from unisono.system.extras import install_words, need, needs_torch

EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def as_metadata(quote: str) -> list[str]:
    """The lines that an installer finds; those who build packages differ in their quotes."""
    return ["click>=8", *(f"{each}; extra == {quote}{extra}{quote}" for extra in EXTRAS for each in EXTRAS[extra])]


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("quote", ["'", '"'])
def test_the_packages_of_an_extra_are_named(extra: str, quote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: as_metadata(quote))
    command = " ".join(["pip install", *(f"'{each}'" for each in EXTRAS[extra])])
    assert install_words(extra) == command or (extra == "torch" and install_words(extra).startswith(f"{command} "))


def test_torch_is_named_with_its_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Linux the one of the usual index brings CUDA; elsewhere there is one build only."""
    (torch,) = EXTRAS["torch"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: as_metadata("'"))
    monkeypatch.setattr("sys.platform", "linux")
    said = install_words("torch")
    assert f"pip install '{torch}' --index-url https://download.pytorch.org/whl/cpu is the build for " in said
    assert f"; pip install '{torch}' includes CUDA" in said
    monkeypatch.setattr("sys.platform", "darwin")
    assert install_words("torch") == f"pip install '{torch}'"


def test_torch_that_is_missing_is_said_and_another_module_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"unisono\.Run needs the package torch: pip install ") as missing:
        with needs_torch("unisono.Run"):
            raise ModuleNotFoundError(name="torch")
    assert isinstance(missing.value, UsageError)
    with pytest.raises(ModuleNotFoundError), needs_torch("unisono.Run"):
        raise ModuleNotFoundError(name="numpy")


def test_a_source_that_was_not_installed_names_the_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert install_words("ray") == "pip install '.[ray]' in a clone of unisono"


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(UsageError, match=r"W&B needs the package no_such_thing: pip install '(wandb>=|\.\[wandb\])"):
        need("no_such_thing.sub", "W&B", "wandb")
    need("json.decoder", "JSON", "json")
