"""What the tests need is what the README's commands install, in the versions of the one lock."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import BEYOND
from tests.house.rooms import ROOT, foreign_imports, imported_names, modules, third_party

OWN = {"unisono", "tests", "benchmarks", "website", "examples"}
TEST = ("examples", "test")
"""The extras of `make test`."""
BUILD = ("hatchling", "editables")
"""What the Makefile installs besides, to install the project."""


def pinned() -> dict[str, str]:
    """The lock: the version of each distribution."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def asked_for(extras: tuple[str, ...]) -> Iterator[Requirement]:
    """What pyproject.toml asks for: always, and with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [
        *project["dependencies"],
        *(text for extra in extras for text in project["optional-dependencies"][extra]),
    ]:
        requirement = Requirement(text)
        if canonicalize_name(requirement.name) == "unisono":
            yield from asked_for(tuple(requirement.extras))
        else:
            yield requirement


def closure(requirements: Iterator[Requirement]) -> set[str]:
    """The installed distributions that these requirements bring, directly or by what they need themselves."""
    found: set[str] = set()
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for need in map(Requirement, needs):
            wanted = need.marker is None or any(
                need.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)
            )
            if wanted and canonicalize_name(need.name) not in found:
                waiting.append(need)
    return found


def all_extras() -> tuple[str, ...]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return tuple(extra for extra in project["optional-dependencies"] if extra != "gpu")


def test_the_lock_has_all_that_the_extras_bring() -> None:
    """Where they are not installed (`make test` has two of them), by name only."""
    lock = pinned()
    named = {canonicalize_name(requirement.name) for requirement in asked_for(all_extras())}
    assert sorted(named - set(lock)) == []
    brought = closure(asked_for(all_extras()))
    assert {name: metadata.version(name).partition("+")[0] for name in brought} == {
        name: lock[name] for name in brought
    }


def run_by_make_test() -> Iterator[Path]:
    """The files of which `make test` runs at least one test, with those that they use."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        parts = path.relative_to(ROOT / "tests").parts
        if parts[0] in BEYOND or parts[0] == "data":
            continue
        marks = re.search(r"^pytestmark = .*", path.read_text(), re.MULTILINE)
        if not (marks and "mark.more" in marks[0]):
            yield path


def test_make_test_imports_only_what_it_installs() -> None:
    """Where another target has installed more, the import works, and fails for whoever follows the README."""
    provided = metadata.packages_distributions()
    installed = closure(asked_for(TEST)) | set(BUILD)
    missing = {}
    for path in run_by_make_test():
        names = imported_names("tests.any", path)
        packages = third_party({name.partition(".")[0] for name in names}) - OWN
        foreign = {
            package
            for package in packages
            if not installed & {canonicalize_name(name) for name in provided.get(package, [])}
        }
        foreign |= {name for name in names if name.startswith("unisono.interop.")}  # each needs its framework
        if foreign:
            missing[str(path.relative_to(ROOT))] = sorted(foreign)
    assert missing == {}


def test_the_first_commands_of_ci_are_those_of_the_readme() -> None:
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    readme = [line for block in blocks for line in block.splitlines() if line.startswith("make ")]
    ci = re.findall(r"^(make .*?)(?: \|\| .*)?$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert readme
    assert ci[: 1 + len(readme)] == ["make clean", *readme]


def test_the_dependencies_are_those_that_are_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        Requirement(each).name for each in [*project["dependencies"], *project["optional-dependencies"]["torch"]]
    }
    house = {module: path for module, path in modules().items() if not module.startswith("interop.")}  # the extras
    imported = {package for module, path in house.items() for package in foreign_imports(module, path)}
    # numpy is not needed: its generator is seeded where it is there. pytest imports the plugin, and nothing else does.
    assert third_party(imported) - {"numpy", "pytest"} == declared
