"""What a package keeps to itself may change with each of its releases: where this library uses such names, the package
has an upper bound, and what is installed is below it.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from websockets.asyncio.messages import Assembler
from websockets.asyncio.server import ServerConnection

from tests.house.rooms import ROOT, imported_names, modules, parse
from unisono.cluster.head.door import Caller

ROOMS = {
    "interop.lightning.metrics": "torchmetrics",
    "interop.lightning": "lightning",
    "interop.huggingface": "transformers",
    "cluster.launchers.ray": "ray",
    "cluster.head.door": "websockets",
    "views.page.viewers": "websockets",
    "": "torch",
}
"""Whose private names the modules of a room use; the first that fits."""

BESIDE = {"websockets": "the methods that `Caller` overrides"}
"""What is used of a package besides names with an underscore."""

TORCH = Path(torch.__file__).parent
BY_NAME = {"_fields", "_version"}
"""Of namedtuples, which are documented; asked for, of anybody's logger."""


def package_of(module: str) -> str:
    return next(package for room, package in ROOMS.items() if f"{module}.".startswith(f"{room}." if room else ""))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def own_names() -> frozenset[str]:
    """Every name with an underscore that this library gives to something itself."""
    found = set()
    for path in modules().values():
        for node in ast.walk(parse(path)):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    found.add(name)
    return frozenset(found)


@functools.cache
def foreign_names() -> tuple[tuple[str, str, str], ...]:
    """Package, name and place of each private name of others: imported, taken from an object, or asked for by name."""
    return tuple(_foreign_names(own_names()))


def _foreign_names(own: frozenset[str]) -> Iterator[tuple[str, str, str]]:
    for module, path in modules().items():
        package = package_of(module)
        for name in imported_names(module, path):
            if not name.startswith("unisono.") and any(map(is_private, name.split("."))):
                yield name.partition(".")[0], name, module
        for node in ast.walk(parse(path)):
            match node:
                case ast.Attribute(value=ast.Name(id="os" | "sys" | "libc")):
                    pass  # documented
                case ast.Attribute(attr=name) if is_private(name) and name not in own:
                    yield package, name, f"{module}:{node.lineno}"
                case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
                    if is_private(name) and name not in own | BY_NAME:
                        yield package, name, f"{module}:{node.lineno}"


class Taken(NamedTuple):
    """What a line takes from a package by a name that begins at one of its modules."""

    name: str
    """``torch._C._is_cached_tensor``, however the module calls torch."""
    place: str
    is_unknown_to_mypy: bool
    """The line tells mypy to say nothing about it."""


@functools.cache
def taken_from(package: str) -> frozenset[Taken]:
    return frozenset(_taken_from(package))


def _taken_from(package: str) -> Iterator[Taken]:
    for module, path in modules().items():
        lines = path.read_text().splitlines()
        known = {}
        for node in ast.walk(parse(path)):
            match node:
                case ast.Import(names=names):
                    known |= {each.asname or each.name.partition(".")[0]: each.asname and each.name for each in names}
                case ast.ImportFrom(module=str(start), level=0, names=names):
                    known |= {each.asname or each.name: f"{start}.{each.name}" for each in names}
        known = {name: whole or name for name, whole in known.items() if f"{whole or name}.".startswith(f"{package}.")}
        for name in known.values():
            yield Taken(name, module, False)
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Attribute):
                parts, at = [node.attr], node.value
                while isinstance(at, ast.Attribute):
                    parts, at = [at.attr, *parts], at.value
                if isinstance(at, ast.Name) and at.id in known:
                    is_unknown = "type: ignore[attr-defined]" in lines[node.lineno - 1]
                    yield Taken(".".join([known[at.id], *parts]), f"{module}:{node.lineno}", is_unknown)


def lacking_in(name: str) -> list[str]:
    """Return the parts of a full name from the first on that the installed packages lack."""
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for at, part in enumerate(parts[1:], 1):
        try:
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(".".join(parts[: at + 1]))
        except ImportError:
            return parts[at:]
    return []


def bounds() -> dict[str, Requirement]:
    """What pyproject.toml asks for, of the packages that have an upper bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [
        *project["dependencies"],
        *(text for texts in project["optional-dependencies"].values() for text in texts),
    ]
    return {
        found.name: found for found in map(Requirement, listed) if any(each.operator == "<" for each in found.specifier)
    }


def complaint(package: str, version: str) -> str:
    """What to do about a version that is beyond the bound of its package; "" for one that is not."""
    bound = bounds()[package]
    if bound.specifier.contains(Version(version).base_version, prereleases=True):
        return ""
    used = sorted({f"{name} ({place})" for found, name, place in foreign_names() if found == package})
    used += [BESIDE[package]] if package in BESIDE else []
    return (
        f"{package} {version} is installed, and pyproject.toml asks for {bound}: this library was read with no such "
        "version. Look in it for what it does not promise to keep, run `make test` and `make test-more`, then change "
        f"the bound: {', '.join(used)}"
    )


def test_a_package_whose_private_names_are_used_has_an_upper_bound() -> None:
    found = {package for package, _, _ in foreign_names()} | set(BESIDE)
    assert found == {"torch", "lightning", "torchmetrics", "transformers", "ray", "websockets"}, (
        "ROOMS says whose they are"
    )
    assert found <= set(bounds())


def _where_it_is_installed(package: str) -> object:
    return pytest.param(package, marks=[] if package in ("torch", "websockets") else [pytest.mark.more])


@pytest.mark.parametrize("package", [_where_it_is_installed(each) for each in dict.fromkeys(ROOMS.values())])
def test_what_is_installed_was_read(package: str) -> None:
    assert not (said := complaint(package, metadata.version(package))), said


@pytest.mark.parametrize(
    ("package", "beyond", "named"),
    [
        ("torch", "2.16.0+cu130", "_is_cached_tensor (engine.microbatch.folding:"),
        ("lightning", "2.7.1", "_data_connector (interop.lightning.trainer_strategy:"),
        ("torchmetrics", "2.0", "_forward_cache (interop.lightning.metrics:"),
        ("transformers", "6.0.0", "_n_gpu (interop.huggingface.arguments:"),
        ("ray", "2.61.0rc1", "_private (cluster.launchers.ray:"),
        ("websockets", "18.0", "the methods that `Caller` overrides"),
    ],
)
def test_a_version_beyond_its_bound_is_named_with_what_to_read_again(package: str, beyond: str, named: str) -> None:
    said = complaint(package, beyond)
    assert said.startswith(f"{package} {beyond} is installed, and pyproject.toml asks for {package}<")
    assert named in said


def test_what_the_head_overrides_is_there() -> None:
    for name in ("data_received", "process_event", "handshake", "connection_made"):
        assert name in vars(Caller)
        assert hasattr(ServerConnection, name)
    assert hasattr(Assembler, "paused") or "paused" in inspect.getsource(Assembler)


def _named_in(pattern: str, wanted: set[str]) -> set[str]:
    """Return which of these names the files of the installed torch have."""
    found: set[str] = set()
    words = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(wanted)))})\b")
    for path in TORCH.rglob(pattern) if wanted else ():
        found.update(words.findall(path.read_text(errors="replace")))
    return found


def test_torch_has_each_name_that_is_taken_from_it() -> None:
    """Mypy is no proof where a line tells it to be quiet, and runs on a CPU none of what only a GPU does."""
    taken = taken_from("torch")
    assert {"torch._C._is_cached_tensor", "torch.utils._pytree.tree_leaves"} <= {each.name for each in taken}
    assert lacking_in("torch._C._cuda_no.such") == ["_cuda_no", "such"]
    lacking = {each: {*parts} for each in taken if (parts := lacking_in(each.name))}
    # What only a build for a device has is in the stubs of every build.
    stubs = _named_in("_C/*.pyi", set().union(*lacking.values()))
    assert not {each for each, parts in lacking.items() if each.is_unknown_to_mypy or not parts <= stubs}


def _autograd_nodes() -> Iterator[torch.autograd.graph.Node]:
    """Nodes of losses: what they have saved is made of derivatives.yaml when torch is built, and in no file of it."""
    x = torch.ones(3, 2, requires_grad=True)
    y = torch.zeros(3, dtype=torch.int64)
    norm = torch.nn.functional.batch_norm(x, None, None, training=True)
    for loss in (
        torch.nn.functional.nll_loss(x, y),
        torch.nn.functional.mse_loss(x, x.detach()),
        norm,
        x / 2,
        x.sum(),
        x.mean(),
    ):
        assert loss.grad_fn is not None
        yield loss.grad_fn


def test_torch_has_each_private_name_that_is_taken_from_an_object_of_it() -> None:
    known = {part for each in taken_from("torch") for part in each.name.split(".")}
    known |= {*dir(torch.Tensor), *dir(torch.nn.Module()), *dir(torch.optim.Optimizer)}
    known |= {name for node in _autograd_nodes() for name in dir(node)}
    used = {name: place for package, name, place in foreign_names() if package == "torch" and "." not in name}
    wanted = {*used} - known
    assert not {(name, used[name]) for name in wanted - _named_in("*.py", wanted)}
