"""The folders are the layers: what stands in one imports from those below it only."""

from __future__ import annotations

import ast
import graphlib
import re

import pytest

from tests.house.rooms import ROOT, SOURCE, foreign_imports, modules, own_imports, parse

LAYERS = (
    *("core", "system", "record", "membership", "views", "cluster", "engine", "strategies", "script", "tools"),
    *("interop", "cli", "__main__"),
)
"""From the bottom to the top; docs/design.md says what each is for."""

BESIDE = {"testing": {"core", "system", "record", "tools"}}
"""What stands beside the layers, and what it may import."""

PURE = ("core", "membership", "record.overview")
"""Values in, values out: no I/O, no clock, no threads, no torch."""

PURE_IMPORTS = {
    *("__future__", "abc", "bisect", "collections", "dataclasses", "enum", "fractions", "functools", "heapq"),
    *("itertools", "json", "math", "operator", "re", "statistics", "string", "struct", "types", "typing", "msgspec"),
    *("array", "difflib", "hashlib", "signal"),  # of signal only the names of numbers
}

MOST_ENTRIES = 15


def layer_of(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("module", modules())
def test_imports_point_down(module: str) -> None:
    layer = layer_of(module)
    assert layer in (*LAYERS, *BESIDE), f"src/unisono/{layer} is no layer; docs/design.md has the list"
    below = BESIDE[layer] if layer in BESIDE else {*LAYERS[: LAYERS.index(layer)]}
    for other in own_imports(module, modules()[module]):
        assert other, f"unisono.{module} imports the facade: import the module that has the name"
        assert layer_of(other) in {layer, *below}, (
            f"unisono.{module} imports unisono.{other} of a layer above: let the caller pass the value"
        )


def test_no_two_modules_need_each_other() -> None:
    graph = {module: own_imports(module, path) for module, path in modules().items()}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_the_listing_is_short() -> None:
    entries = sorted(path.name for path in SOURCE.iterdir() if path.name not in ("__pycache__", "py.typed"))
    assert len(entries) <= MOST_ENTRIES, entries


def test_the_map_has_all_folders() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    listing = text[text.index("## The listing") :].split("```")[1]
    for folder in sorted(path.parent for path in SOURCE.glob("*/__init__.py")):
        assert re.search(rf"^  {folder.name}/ ", listing, re.MULTILINE), f"the listing of docs/design.md lacks {folder}"
        for below in sorted(path.parent.name for path in folder.glob("*/__init__.py")):
            assert re.search(rf"\b{below}\b", listing), f"the listing of docs/design.md lacks {folder / below}"


@pytest.mark.parametrize("module", [name for name in modules() if f"{name}.".startswith(tuple(f"{p}." for p in PURE))])
def test_rules_and_values_are_pure(module: str) -> None:
    path = modules()[module]
    assert foreign_imports(module, path) <= PURE_IMPORTS, "no I/O, no clock, no threads, no torch: pass the value in"
    calls = {
        node.func.id for node in ast.walk(parse(path)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"open", "print", "input", "exec", "eval", "__import__"}
