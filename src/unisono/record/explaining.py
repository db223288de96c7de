"""Explanation of two runs that differ: both have computed the same step again, and noted everything about it.

Values in, sentences out. What is compared comes in the order in which a step needs it: the state before the step, the
data of its micro-batches, the outputs of the model's modules in the order of the forward pass, the loss, the gradients.
The first of these that differs is where the two runs part.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from unisono.core.fingerprints import other_arithmetic
from unisono.core.words import count, listed, script_in

__all__ = ["Dissected", "Dissection", "Leaf", "causes", "changed_lines", "parting", "unequal"]

MOST_NAMED = 3
MOST_SHOWN = 5
_HARMLESS: Final = re.compile(r"""#.*|(?<=\bRun\()\s*(["']).*?\1|\s+""")
"""A comment, blanks, and the directory of a run: what may differ between two scripts that compute the same."""


class Dissection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of the inspector ``dissect``."""

    run: str
    """Directory of the run."""
    name: str
    """What the user calls it."""
    step: int
    result: str
    """The file that the result is written to."""


class Leaf(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a micro-batch that was computed again."""

    name: str
    """``micro-batch 3``, or with its replica, its step in the round and its pass."""
    changed: dict[str, str] = {}
    """The parameters and buffers at its beginning as text, by path, that are not as they were before the step."""
    batch: dict[str, str]
    """The values of the batch as text (tensors: shape and digest), by path."""
    modules: list[tuple[str, str]]
    """(module, digest of its output), in the order of the forward pass."""
    loss: str
    weight: str
    gradients: dict[str, str]
    """Digests of the gradients, and of the changes of buffers, by name."""


class Dissected(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a run that was computed again."""

    run: str
    """The run's directory, as the user has named it."""
    step: int
    state: dict[str, str] = {}
    """The tracked state before the step as text (tensors: shape and digest), by path."""
    leaves: list[Leaf] = []
    digest: str = ""
    """Of the step; "" where the step was not reached."""
    drift: str = ""
    """What of the computation differs first from the run's own journal, in words; "" if nothing does."""
    fingerprint: dict[str, str] = {}
    """What the arithmetic of this computation depends on."""
    untracked: int = -1
    """The step of the checkpoint from which the run is not what it was, though it is from the beginning; -1: there is
    none."""
    failure: str = ""
    """Why it could not be computed again; "" if it could."""


# -- where they part ---------------------------------------------------------------------------------


def parting(a: Dissected, b: Dissected, journals: tuple[str, str]) -> list[str]:
    """Return where two runs part, in sentences; the first names the place.

    Args:
        journals: the digest of the step in the journal of each run; "" where it is unknown.
    """
    broken = [f"{one.run} cannot be recomputed here: {one.failure}" for one in (a, b) if one.failure]
    if broken:
        return [*broken, *_until_failure(a, b)]
    said = _not_reproduced(a, b, journals)
    found = _in_state(a, b) or _in_leaves(a, b)
    if found:
        return [*said, *found]
    if a.digest != b.digest:
        return [
            *said,
            f"all micro-batches of step {a.step} are equal, but their sums are not: the two runs sum them differently "
            "(a different number of micro-batches, weights, or wire=)",
        ]
    if said:
        return said
    return [
        f"recomputed here, everything about step {a.step} is equal in both runs, including its digest. So the "
        "difference comes after it, in the update or in what the script does then, or the runs cannot be reproduced "
        "here"
    ]


def _until_failure(a: Dissected, b: Dissected) -> list[str]:
    """Return what differs in what both have computed of a step that one of them has not brought to its end."""
    if not a.state or not b.state:
        return []
    names = {one.name for one in a.leaves} & {one.name for one in b.leaves}
    mine, theirs = (
        msgspec.structs.replace(one, leaves=[leaf for leaf in one.leaves if leaf.name in names]) for one in (a, b)
    )
    if found := _in_state(mine, theirs) or _in_leaves(mine, theirs):
        return found
    return [f"the state before step {a.step} is equal in both runs, and so are the micro-batches of it that both have"]


def _not_reproduced(a: Dissected, b: Dissected, journals: tuple[str, str]) -> list[str]:
    """Return sentences about a run that does not give its own journal when it is computed again."""
    said = []
    for one, other, journal, theirs in ((a, b, journals[0], journals[1]), (b, a, journals[1], journals[0])):
        if not one.drift:
            continue
        words = f"{one.run}, recomputed here, does not match its own journal: {one.drift}"
        if one.digest and one.digest == theirs != journal:
            words += f". Its step {one.step} is now that of {other.run}"
        said.append(words)
    return said


def _in_state(a: Dissected, b: Dissected) -> list[str]:
    """Return what differs in the state before the step; empty if nothing does."""
    different = unequal(a.state, b.state)
    if not different:
        return []
    missing = [path for path in different if path not in a.state or path not in b.state]
    common = [path for path in different if path not in missing]
    plain = [path for path in common if not a.state[path].startswith("a tensor")]
    tensors = [path for path in common if path not in plain]
    said = []
    if missing:
        where = a.run if missing[0] in a.state else b.run
        said.append(f"the runs do not track the same objects: only {where} has {missing[0]}{_more(missing)}")
        if not common:
            return [*said, *_in_leaves(a, b)]
    if plain:
        first = plain[0]
        said.append(
            f"before step {a.step}, {first} is {a.state[first]} in {a.run} and {b.state[first]} in {b.run}"
            f"{_more(plain)}"
        )
    if tensors and a.step == 0:
        said.append(
            f"the runs begin with different states: the first tensor is {tensors[0]}{_more(tensors)}. So the models "
            "were made differently, before the first step"
        )
    elif tensors:
        said.append(
            f"before step {a.step} the states differ already, though all gradients before were equal: the first tensor "
            f"is {tensors[0]}{_more(tensors)}. So the updates differ, or something done between the steps"
        )
    return said


def _in_leaves(a: Dissected, b: Dissected) -> list[str]:
    """Return what differs first in the micro-batches; empty if nothing does."""
    ours, theirs = {one.name: one for one in a.leaves}, {one.name: one for one in b.leaves}
    if list(ours) != list(theirs):
        return [f"the runs cut step {a.step} differently: into {len(ours)} and {len(theirs)} micro-batches"]
    for name, mine in ours.items():
        if found := _in_leaf(mine, theirs[name], a, b):
            differing = [other for other in ours if _in_leaf(ours[other], theirs[other], a, b)]
            if len(differing) > 1:
                found.append(
                    f"{len(differing)} of the {len(ours)} micro-batches of the step differ: {_first(differing)}"
                )
            return found
    return []


def _in_leaf(mine: Leaf, theirs: Leaf, a: Dissected, b: Dissected) -> list[str]:
    where = f"{mine.name} of step {a.step}"
    if paths := unequal(mine.changed, theirs.changed):
        return [
            f"{where} is the first that differs: the state before the step was equal in both runs, but when the "
            f"micro-batch begins it is not: the first tensor is {paths[0]}{_more(paths)}. So something changes it "
            "between the start of the step and the micro-batch"
        ]
    if paths := unequal(mine.batch, theirs.batch):
        first = paths[0]
        return [
            f"{where} is the first that differs, because its data do: {first} is {mine.batch.get(first, 'not there')} "
            f"in {a.run} and {theirs.batch.get(first, 'not there')} in {b.run}"
        ]
    gradients = [name for name in mine.gradients if mine.gradients[name] != theirs.gradients.get(name)]
    lost = f". The first gradient that differs is that of {gradients[0]}{_more(gradients)}" if gradients else ""
    modules = _in_modules(mine, theirs)
    if modules:
        return [f"{where} is the first that differs, with the same data and the same state: {modules}{lost}"]
    if mine.loss != theirs.loss:
        return [
            f"{where} is the first that differs: all modules give the same, and the loss is {mine.loss} in {a.run} and "
            f"{theirs.loss} in {b.run}. So the loss is computed differently{lost}"
        ]
    if mine.weight != theirs.weight:
        return [f"{where} weighs {mine.weight} in {a.run} and {theirs.weight} in {b.run}; its loss is the same"]
    if gradients:
        return [f"{where} is the first that differs: its loss is the same, but its backward pass is not{lost}"]
    return []


def unequal(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    return [path for path in dict.fromkeys((*mine, *theirs)) if mine.get(path) != theirs.get(path)]


def _in_modules(mine: Leaf, theirs: Leaf) -> str:
    """Return which module's output differs first, in words; "" if none does."""
    for number, ((name, digest), (other, other_digest)) in enumerate(zip(mine.modules, theirs.modules, strict=False)):
        if name != other:
            return f"the forward pass calls {name} in one run and {other} in the other, as its call number {number + 1}"
        if digest != other_digest:
            return f"the first module whose output differs, in the order of the forward pass, is {name}"
    if len(mine.modules) != len(theirs.modules):
        return f"the forward pass calls {len(mine.modules)} modules in one run and {len(theirs.modules)} in the other"
    return ""


# -- why ---------------------------------------------------------------------------------------------


def causes(
    a: Dissected,
    b: Dissected,
    facts_a: Mapping[str, Any],
    facts_b: Mapping[str, Any],
    texts: tuple[str, str] = ("", ""),
) -> list[str]:
    """Return what probably makes two runs differ, in sentences, the most probable first.

    Args:
        facts_a, facts_b: the descriptions of the runs (``run.json``).
        texts: of the scripts, where they are still there as the runs have used them; "": they are not.
    """
    found: list[str] = []
    harmless: list[str] = []
    recipe = _other(facts_a, facts_b, "recipe")
    if recipe:
        found.append(f"the recipes differ: {_said(recipe)}")
    environment = _other(facts_a, facts_b, "environment")
    if "script" in environment:
        changes = _changes(texts)
        is_harmless = bool(changes) and all(each.is_harmless for each in changes)
        (harmless if is_harmless else found).append(
            _of_scripts(environment["script"], facts_a, facts_b, changes if all(texts) else ())
        )
    arithmetic = _other(facts_a, facts_b, "fingerprint")
    if arithmetic:
        found.append(f"the arithmetic differs: {_said(arithmetic)}")
    versions = {
        name: pair for name, pair in environment.items() if name not in ("script", "hash seed", "host", "system")
    }
    versions = {name: pair for name, pair in versions.items() if name not in arithmetic}
    if versions:
        found.append(f"the versions differ: {_said(versions)}")
    command = _arguments(facts_a), _arguments(facts_b)
    if command[0] != command[1]:
        first, second = (" ".join(words) or "(no arguments)" for words in command)
        found.append(f"the scripts were called differently: {first}; {second}")
    found += _untracked(a, b, facts_a, facts_b)
    is_guessed = not found and _is_in_data(a, b)
    if is_guessed and "hash seed" in environment:
        seeds = [value or "random" for value in environment["hash seed"]]
        found.append(
            f"PYTHONHASHSEED was {seeds[0]} and {seeds[1]}: the order of the data may come from a set or a hash of "
            "strings; sort it"
        )
    elif is_guessed:
        found.append("the data themselves may have changed between the runs, or come from a random source of their own")
    found += harmless
    if not found:
        found.append(
            "recipes, scripts, arguments and environments are the same. So the script depends on something that is not "
            "tracked (a counter, a generator of its own, the clock, the order of a set), its data have changed, or a "
            "machine computes wrong values"
        )
    return found


def _is_in_data(a: Dissected, b: Dissected) -> bool:
    """Return whether two runs part in the data of a micro-batch."""
    if a.failure or b.failure or _in_state(a, b) or [one.name for one in a.leaves] != [one.name for one in b.leaves]:
        return False
    pairs = zip(a.leaves, b.leaves, strict=True)
    return next((mine.batch != theirs.batch for mine, theirs in pairs if _in_leaf(mine, theirs, a, b)), False)


class _Change(NamedTuple):
    """A place at which two scripts differ: their lines there, and the numbers of the first ones."""

    mine: list[str]
    theirs: list[str]
    at: tuple[int, int]

    @property
    def is_harmless(self) -> bool:
        """Whether only comments, blanks or the directory of the run differ."""
        first, second = ("".join(_HARMLESS.sub("", line) for line in each) for each in (self.mine, self.theirs))
        return first == second

    def said(self, scripts: tuple[str, str]) -> str:
        found = [
            f"line {at + 1} is `{lines[0].strip()}` in {script}"
            for at, lines, script in zip(self.at, (self.mine, self.theirs), scripts, strict=True)
            if lines
        ]
        return f"{', and '.join(found)}{' only' if len(found) == 1 else ''}"


def _changes(texts: tuple[str, str]) -> list[_Change]:
    """Return the places at which two scripts differ, the harmless ones last."""
    mine, theirs = (text.splitlines() for text in texts)
    matcher = difflib.SequenceMatcher(None, mine, theirs, autojunk=False)
    found = []
    for kind, first, stop, other, other_stop in matcher.get_opcodes():
        if kind == "equal":
            continue
        while first < stop and other < other_stop:  # lines in a row that differ may differ for several reasons
            found.append(_Change(mine[first : first + 1], theirs[other : other + 1], (first, other)))
            first, other = first + 1, other + 1
        if first < stop or other < other_stop:
            found.append(_Change(mine[first:stop], theirs[other:other_stop], (first, other)))
    return sorted(found, key=lambda each: each.is_harmless)


def _of_scripts(
    checksums: tuple[str, str], facts_a: Mapping[str, Any], facts_b: Mapping[str, Any], changes: Sequence[_Change]
) -> str:
    """Return a sentence about two scripts that are not the same text."""
    words = f"the script's text was different in the two runs (its checksum was {checksums[0]} and {checksums[1]})"
    if facts_a.get("command") == facts_b.get("command"):
        return f"{words}; it was edited in between, and both runs were recomputed with the current text"
    if not changes:
        return words
    return f"{words}: {_changes_words(changes, (_script(facts_a), _script(facts_b)))}"


def changed_lines(texts: tuple[str, str], names: tuple[str, str]) -> str:
    """Return the places at which two scripts differ, in words, harmless ones last; "" if there are none.

    Args:
        names: what the scripts are called.
    """
    changes = _changes(texts)
    return _changes_words(changes, names) if changes else ""


def _changes_words(changes: Sequence[_Change], scripts: tuple[str, str]) -> str:
    shown = [each.said(scripts) for each in changes[:MOST_SHOWN]]
    more = f"; and {len(changes) - MOST_SHOWN} more" if len(changes) > MOST_SHOWN else ""
    differ = f"{count(len(changes), 'place')} differ{'s' if len(changes) == 1 else ''}"
    return f"{differ}: {'; '.join(shown)}{more}"


def _untracked(a: Dissected, b: Dissected, facts_a: Mapping[str, Any], facts_b: Mapping[str, Any]) -> list[str]:
    """Return what follows for a run that is not what it was, on a machine with its own arithmetic."""
    said = []
    for one, facts in ((a, facts_a), (b, facts_b)):
        if one.untracked >= 0:
            said.append(
                f"the script of {one.run} has state that is not tracked: recomputed from the checkpoint of step "
                f"{one.untracked}, its steps differ from the journal's; recomputed from the beginning, they match"
            )
        if not one.drift:
            continue
        before = facts.get("fingerprint")
        differs = isinstance(before, Mapping) and bool(one.fingerprint and other_arithmetic(before, one.fingerprint))
        if differs:
            said.append(
                f"{one.run} was computed with arithmetic that differs from this machine's, so it cannot be reproduced "
                "here"
            )
        else:
            said.append(
                f"{one.run} does not reproduce with the same arithmetic: its script or its data have changed since "
                "then, the script depends on something that is not tracked, or a machine of the run computed wrong "
                "values"
            )
    return said


def _other(a: Mapping[str, Any], b: Mapping[str, Any], name: str) -> dict[str, tuple[str, str]]:
    """Return the values of a part of two descriptions that differ and are known in both, or differ by their absence."""
    mine, theirs = a.get(name), b.get(name)
    if not isinstance(mine, Mapping) or not isinstance(theirs, Mapping):
        return {}
    keys = [key for key in dict.fromkeys((*mine, *theirs)) if mine.get(key) != theirs.get(key)]
    known = [key for key in keys if key not in ("script", "hash seed") or (key in mine and key in theirs)]
    return {key: (str(mine.get(key, "none")), str(theirs.get(key, "none"))) for key in known}


def _said(pairs: Mapping[str, tuple[str, str]]) -> str:
    return "; ".join(f"{name} is {mine} and {theirs}" for name, (mine, theirs) in pairs.items())


def _script(facts: Mapping[str, Any]) -> str:
    """Return the script of a run, as it was called."""
    match facts.get("command"):
        case {"arguments": [*words]}:
            return script_in(words)
    return "its script"


def _arguments(facts: Mapping[str, Any]) -> list[str]:
    """Return the arguments of the script of a run, without the script; empty if they are unknown."""
    match facts.get("command"):
        case {"arguments": ["-m", str(), *words]} | {"arguments": [str(), *words]}:
            return [str(word) for word in words]
    return []


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _first(names: Sequence[str]) -> str:
    if len(names) <= MOST_NAMED:
        return listed(names)
    return f"{', '.join(names[:MOST_NAMED])} and {len(names) - MOST_NAMED} more"
