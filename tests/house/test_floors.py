"""Imports point down. What stands on a floor may use the floors below it, never those above, and few neighbours."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
import tomllib

import pytest

from tests.house.rooms import ROOT, foreign_imports, modules, own_imports, parse, third_party
from tests.waiting import WAIT_S

WINGS = -1

FLOORS = {
    # 0, words: what things are called. The standard library and msgspec.
    "errors": 0,
    "events": 0,
    "messages": 0,
    "words": 0,
    "spec": 0,
    # 1, decisions: values in, values out. No I/O, no clock, no torch.
    "problems": 1,
    "decisions.tree": 1,
    "decisions.plan": 1,
    "decisions.cursor": 1,
    "decisions.delivery": 1,
    "decisions.orders": 1,
    "decisions.streams": 1,
    "decisions.following": 1,
    "decisions.sides": 1,
    "decisions.membership": 1,
    "decisions.policy": 1,
    "decisions.balance": 1,
    "decisions.cadence": 1,
    "decisions.checks": 1,
    "decisions.audits": 1,
    "decisions.clocks": 1,
    "decisions.layout": 1,
    "decisions.replaying": 1,
    "decisions.explaining": 1,
    "decisions.copies": 1,
    "decisions.groups": 1,
    "decisions.ownership": 1,
    "overview": 1,
    "telemetry": 1,
    "decisions.signals": 1,
    "decisions.idleness": 1,
    "decisions.efficiency": 1,
    "decisions.account": 1,
    "decisions.asides": 1,
    "decisions.usefulness": 1,
    "decisions.interruptions": 1,
    "decisions.advice": 1,
    "decisions.links": 1,
    "decisions.fitting": 1,
    "decisions.forecast": 1,
    "decisions.strategies": 1,
    "decisions.wires": 1,
    # 2, effects: one outside thing each.
    "problems.failures": 2,
    "problems.witness": 2,
    "problems.limits": 2,
    "problems.writing": 2,
    "checking": 2,
    "faults": 2,
    "exchange.flat": 2,
    "exchange": 2,
    "store": 2,
    "journal": 2,
    "rundir": 2,
    "chronicle": 2,
    "usage": 2,
    "gpus": 2,
    "checkpoint.files": 2,
    "member": 2,
    "connection": 2,
    "outbox": 2,
    "progress": 2,
    "stacks": 2,
    "storecalls": 2,
    "evaluationcalls": 2,
    "link": 2,
    "invitation": 2,
    "secret": 2,
    "owned": 2,
    "certificate": 2,
    "records": 2,
    "interfaces": 2,
    "packed": 2,
    "beatpage": 2,
    "dialing": 2,
    "fingerprint": 2,
    "capacity": 2,
    "seats": 2,
    "tasks": 2,
    "traces": 2,
    "unwatched": 2,
    "rendezvous": 2,
    "lifetime": 2,
    "trialrun": 2,
    "controlgroups": 2,
    "platforms": 2,
    "extras": 2,
    "training.length": 2,
    "training.life": 2,
    "process": 2,
    "state.packing": 2,
    "page.client": 2,
    "page.site": 2,
    "page.opening": 4,
    # 3, strategies: what a step means.
    "state": 3,
    "microbatch": 3,
    "problems.memory": 3,
    "checkpoint.copies": 3,
    "checkpoint.snapshot": 3,
    "checkpoint.writer": 3,
    "training.recording": 3,
    "training.settings": 3,
    "training.modes": 3,
    "checkpoint.saving": 3,
    "checkpoint.loading": 3,
    "history": 3,
    "planning.found": 2,
    "planning.measuring": 3,
    "planning.plans": 3,
    "planning.told": 3,
    "page": 3,
    # 4, runtime: what runs a step, and what runs what runs it.
    "rounds": 4,
    "page.local": 4,
    "planning.probe": 4,
    "training.upcoming": 4,
    "training.talking": 4,
    "training.calls": 4,
    "training.batches": 4,
    "training.begun": 4,
    "training.beside": 4,
    "training.evaluating": 4,
    "training.requests": 4,
    "training.evaluator": 4,
    "training.step": 4,
    "training.steps": 4,
    "training.bookmarking": 4,
    "training.streamed": 4,
    "training.schedule": 4,
    "training.sharing": 4,
    "training.strategies": 4,
    "training.local": 4,
    "training.audited": 4,
    "training.delayed": 4,
    "training.localround": 4,
    "training.lateround": 4,
    "training.laterresult": 4,
    "training.overlapped": 4,
    "training.resuming": 4,
    "training.keeping": 4,
    "training.profiling": 4,
    "training.notes": 4,
    "training.troubles": 4,
    "training.ending": 4,
    "training.checked": 4,
    "training.inspecting": 4,
    "training.replaying": 4,
    "training.hunting": 3,
    "training.dissecting": 4,
    "training.loop": 4,
    "training.trainings": 4,
    "training.run": 4,
    "machine.worker": 4,
    "machine.inspected": 4,
    "machine.scratch": 4,
    "machine.nursery": 4,
    "machine.agent": 4,
    "machine.following": 4,
    "machine.headprocess": 4,
    "machine.inviting": 4,
    "machine.beats": 4,
    "machine.metering": 4,
    "machine.children": 4,
    "machine.descendants": 4,
    "machine.holder": 4,
    "machine.shipped": 4,
    "machine.placement": 4,
    "machine.idleness": 4,
    "machine.places": 4,
    "machine.plain": 4,
    "machine.workers": 4,
    "head": 4,
    # 5, the doors: the command line, and launching from Python.
    "launcher": 5,
    "launchers": 5,
    "doctor": 5,
    "report": 5,
    "planning": 5,
    "cli": 5,
    "kubernetes": 5,
    "interop": 5,
    "__main__": 5,
    # Wings: they stand beside the house and see floors 0 and 1 and the journal.
    "watch": WINGS,
    "testing": WINGS,
}

NEIGHBOURS = {
    # Rooms of one floor do not know each other, except:
    "messages": {"errors", "events"},
    "decisions.plan": {"decisions.tree"},
    "decisions.orders": {"decisions.cursor"},
    "decisions.replaying": {"decisions.audits"},
    "decisions.streams": {"decisions.cursor", "decisions.orders"},
    "decisions.balance": {"decisions.plan", "decisions.tree"},
    "decisions.advice": {"decisions.balance", "decisions.plan"},
    "decisions.forecast": {
        "decisions.advice",
        "decisions.balance",
        "decisions.plan",
        "decisions.tree",
        "decisions.wires",
    },
    "decisions.strategies": {"decisions.forecast", "decisions.wires"},
    "decisions.checks": {"decisions.plan"},
    "decisions.groups": {"decisions.plan"},
    "decisions.sides": {"decisions.following"},
    "decisions.audits": {"decisions.cursor", "decisions.plan"},
    "decisions.membership": {
        "decisions.efficiency",
        "decisions.following",
        "decisions.layout",
        "decisions.policy",
        "problems",
    },
    "telemetry": {"decisions.cadence"},  # a checkpoint report is part of it
    "exchange": {"faults", "exchange.flat"},
    "member": {
        "beatpage",
        "connection",
        "evaluationcalls",
        "invitation",
        "outbox",
        "problems.failures",
        "problems.witness",
        "progress",
        "stacks",
        "storecalls",
    },
    "connection": {"beatpage", "invitation", "lifetime", "link", "outbox"},
    "outbox": {"link"},
    "problems.failures": {"stacks"},
    "problems.witness": {"stacks"},
    "problems.writing": {"rundir"},
    "link": {"certificate", "invitation", "lifetime", "packed", "records"},
    "certificate": {"invitation", "secret"},
    "invitation": {"secret"},
    "capacity": {"controlgroups", "seats"},  # what other runs hold cannot be had
    "rendezvous": {"lifetime", "owned"},
    "trialrun": {"lifetime"},
    "beatpage": {"lifetime"},
    "dialing": {"link"},
    "page.client": {"invitation", "link", "page.site"},
    "store": {"member"},
    "storecalls": {"packed"},
    "training.life": {"process", "stacks"},
    "rundir": {"journal"},
    "chronicle": {"journal", "rundir"},
    "usage": {"capacity", "controlgroups"},
    "problems.limits": {"controlgroups"},
    "gpus": {"capacity"},
    "microbatch": {"state"},
    "training.recording": {"watch"},  # the script's own sinks get what the journal gets
    "watch": {"extras", "tasks"},
    "__main__": {"cli"},
    "launcher": {"cli"},  # it is `unisono run` for a function
    "cli": {"doctor", "kubernetes", "launchers", "planning", "report"},
    "head": {"watch"},  # its overview as text for Prometheus
    "page": {"history"},
    "page.local": {"page.opening"},
    "page.opening": {"machine.scratch"},
    "machine.agent": {  # what its workers say goes to the screen
        "machine.beats",
        "machine.children",
        "machine.descendants",
        "machine.following",
        "machine.headprocess",
        "machine.inviting",
        "machine.metering",
        "machine.idleness",
        "machine.plain",
        "machine.holder",
        "machine.workers",
        "watch",
    },
    "machine.following": {"machine.children", "machine.headprocess"},
    "machine.headprocess": {"machine.children"},
    "machine.inviting": {"machine.headprocess"},
    "machine.inspected": {"machine.placement", "machine.worker"},  # a script runs there as in a worker
    "machine.holder": {"machine.descendants"},
    "machine.workers": {"machine.children", "machine.placement", "machine.places"},
    "machine.placement": {"machine.children", "machine.nursery"},  # the second: the messages between the two
    "machine.nursery": {"training.run", "machine.worker"},  # it imports them before it forks
    "checking": {"faults", "journal", "lifetime", "trialrun"},  # its trials are runs with a fault
    "testing": {"faults", "lifetime"},  # the run that it starts ends with its caller
    "training.talking": {"rounds"},
    "training.calls": {"training.talking"},
    "training.begun": {"rounds"},
    "training.requests": {"rounds"},
    "training.beside": {"rounds", "training.begun", "training.requests"},
    "training.batches": {"rounds"},
    "training.evaluating": {
        "rounds",
        "training.batches",
        "training.begun",
        "training.beside",
        "training.requests",
        "training.talking",
    },
    "training.evaluator": {
        "rounds",
        "training.begun",
        "training.beside",
        "training.loop",
        "training.requests",
        "training.step",
        "training.talking",
    },
    "training.upcoming": {"rounds"},
    "training.step": {"rounds"},
    "training.audited": {"rounds", "training.strategies"},
    "training.steps": {"training.step"},
    "training.strategies": {"rounds", "training.step", "training.upcoming"},
    "training.delayed": {"rounds", "training.laterresult", "training.step", "training.upcoming"},
    "training.local": {"rounds", "training.localround", "training.upcoming"},
    "training.localround": {"rounds", "training.step"},
    "training.laterresult": {"rounds", "training.step"},
    "training.lateround": {"rounds", "training.laterresult", "training.localround", "training.step"},
    "training.overlapped": {
        "rounds",
        "training.lateround",
        "training.local",
        "training.localround",
        "training.upcoming",
    },
    "training.keeping": {"rounds", "training.resuming", "training.sharing"},
    "training.sharing": {"rounds"},
    "training.loop": {
        "rounds",
        "training.keeping",
        "training.step",
        "training.strategies",
        "training.upcoming",
    },
    "training.notes": {"training.step"},
    "training.troubles": {"rounds", "training.loop"},
    "problems.memory": {"state"},
    "training.ending": {
        "rounds",
        "training.keeping",
        "training.loop",
        "training.notes",
        "training.steps",
        "training.troubles",
    },
    "training.profiling": {"rounds"},
    "training.trainings": {
        "rounds",
        "training.delayed",
        "training.local",
        "training.localround",
        "training.loop",
        "training.overlapped",
        "training.schedule",
        "training.step",
        "training.steps",
        "training.streamed",
        "training.strategies",
    },
    "training.checked": {"rounds"},
    "planning.measuring": {"history"},
    "planning.told": {"planning.plans"},
    "planning.probe": {"rounds"},
    "training.inspecting": {"rounds"},
    "training.replaying": {"rounds"},
    "training.dissecting": {"rounds", "training.replaying"},
    "training.bookmarking": {"rounds"},
    "training.streamed": {"rounds", "training.bookmarking"},
    "training.schedule": {"rounds", "training.streamed"},  # the same for streams
    "training.run": {
        "rounds",
        "training.audited",
        "training.batches",
        "training.ending",
        "training.evaluating",
        "training.evaluator",
        "training.inspecting",
        "training.keeping",
        "training.loop",
        "training.notes",
        "training.profiling",
        "training.requests",
        "training.schedule",
        "training.step",
        "training.steps",
        "training.strategies",
        "training.streamed",
        "training.calls",
        "training.talking",
        "training.trainings",
        "training.troubles",
        "watch",
    },  # the sinks of a script
    "checkpoint.writer": {"checkpoint.copies", "checkpoint.snapshot"},
    "checkpoint.saving": {"checkpoint.copies", "checkpoint.snapshot", "checkpoint.writer"},
}

PURE = {
    *("__future__", "abc", "bisect", "collections", "dataclasses", "enum", "fractions", "functools", "heapq"),
    *("itertools", "json", "math", "operator", "re", "statistics", "string", "struct", "types", "typing", "msgspec"),
    "signal",  # its names of numbers only: signal.Signals(9).name
    *("array", "difflib", "hashlib"),  # values, and functions of values
}

WITHOUT_TORCH = (
    *("cli", "doctor", "head", "kubernetes", "launchers", "machine.agent", "machine.headprocess", "page", "watch"),
    *("decisions.membership", "decisions.cadence", "planning.probing", "planning.finder", "planning.told"),
    *("events", "messages", "journal", "rundir", "lifetime", "testing", "training.recording"),
    *("checkpoint.copies", "checkpoint.files", "extras"),
)


def room_of(module: str) -> str:
    """The longest entry of FLOORS that holds the module, itself or a package that it lies in."""
    names = module.split(".")
    prefixes = [".".join(names[:count]) for count in range(len(names), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in FLOORS), module)


def floor_of(module: str) -> int:
    assert room_of(module) in FLOORS, f"unisono.{module} stands on no floor; see test_every_module_has_a_floor"
    return FLOORS[room_of(module)]


@pytest.mark.parametrize("module", modules())
def test_every_module_has_a_floor(module: str) -> None:
    assert room_of(module) in FLOORS, (
        f"unisono.{module} stands on no floor: add {room_of(module)!r} to FLOORS in {__file__}, "
        "on the lowest floor that its imports allow (docs/design.md says what each floor is for)"
    )


@pytest.mark.parametrize("module", [name for name in modules() if room_of(name) in FLOORS])
def test_imports_point_down(module: str) -> None:
    room, floor = room_of(module), floor_of(module)
    for other in sorted(own_imports(module, modules()[module])):
        assert other, f"unisono.{module} imports the facade: import the module that has the name"
        below = room_of(other)
        if below == room:
            continue
        if floor == WINGS:
            allowed = floor_of(other) in (0, 1) or below == "journal" or below in NEIGHBOURS.get(room, set())
            assert allowed, (
                f"unisono.{module} is in a wing: it may use floors 0 and 1 and the journal, not unisono.{other}"
            )
            continue
        if floor_of(other) == WINGS:
            allowed = floor == max(FLOORS.values()) or below in NEIGHBOURS.get(room, set())
            assert allowed, f"unisono.{module} uses unisono.{other}: only the command line may use a wing"
            continue
        assert floor_of(other) <= floor, (
            f"unisono.{module} (floor {floor}) uses unisono.{other} (floor {floor_of(other)})"
        )
        assert floor_of(other) < floor or below in NEIGHBOURS.get(room, set()), (
            f"unisono.{module} and unisono.{other} are both on floor {floor} and not NEIGHBOURS: "
            "let the caller pass the value, or say in NEIGHBOURS why they belong together"
        )


def test_no_two_modules_need_each_other() -> None:
    graph = {module: own_imports(module, path) for module, path in modules().items()}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_nothing_is_listed_that_is_gone() -> None:
    """A row of NEIGHBOURS that nothing uses would quietly allow what it was written against."""
    used = {
        (room_of(module), room_of(other)) for module, path in modules().items() for other in own_imports(module, path)
    }
    listed = {(room, other) for room, others in NEIGHBOURS.items() for other in others}
    assert listed - used == set()
    assert set(FLOORS) - {room_of(module) for module in modules()} == set()


@pytest.mark.parametrize("module", [name for name in modules() if FLOORS.get(room_of(name)) in (0, 1)])
def test_words_and_decisions_are_pure(module: str) -> None:
    path = modules()[module]
    assert foreign_imports(module, path) <= PURE, "no I/O, no clock, no threads, no torch: pass the value in"
    calls = {
        node.func.id for node in ast.walk(parse(path)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"open", "print", "input", "exec", "eval", "__import__"}


def test_the_dependencies_are_those_that_are_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {name.partition(">=")[0] for name in project["dependencies"]}
    house = {module: path for module, path in modules().items() if not module.startswith("interop.")}  # the extras
    imported = {package for module, path in house.items() for package in foreign_imports(module, path)}
    # numpy is not needed: its generator is seeded where it is there.
    assert third_party(imported) - {"numpy"} == declared


def test_what_need_not_compute_does_not_import_torch() -> None:
    """Really imported, because what an import of an import does cannot be seen in one file."""
    names = [f"unisono.{name}" for name in modules() if room_of(name) in WITHOUT_TORCH]
    code = (
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'importing {name} imports torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
