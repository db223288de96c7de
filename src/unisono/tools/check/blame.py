"""The statement that made two computations of the same thing differ.

Two workers, perhaps of two trials, have run the same statements on what should be the same values. The statements are
gone through side by side, those that matter only. The first difference is one of three:

- a statement **reads** another value: something remembers more than it may. The statement that wrote it last is the
  culprit;
- a statement reads the same and **writes** another value: it takes it from elsewhere (the clock, the order of a set);
- **another statement** follows: the branch before decided otherwise.

A set, a listing of a folder, a dict made of these: what takes their order does so long before the loop, and the order
reaches it through objects whose content is not known (a dataset). So where the first step differs, the first statement
before it that reads the same and makes another list, array or dict goes before what the loop shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from unisono.tools.check.records import Section, StatementEvent, Where
from unisono.tools.check.statements import SourceStatement, Statements, key_of

__all__ = ["Culprit", "FindStatements", "blame"]

SETUP: Final = Where(-1, "setup")
COLLECTIONS: Final = ("list ", "tuple ", "dict ", "deque ", "array ", "tensor ")
"""How the texts of values begin (`unisono.tools.check.value_texts`) that have an order."""

FindStatements = Callable[[str], Statements]
"""The statements of a file, by its path."""


@dataclass(frozen=True)
class Culprit:
    """A statement that broke the promise.

    Attributes:
        kind: reads, writes or branches; or changes a parameter, whatever another computation does.
        path: what was read or written; "" for a branch.
        values: of both computations, where they differ in one value.
        reader: (file, line) of the statement that noticed it, where that is another one.
    """

    kind: Literal["reads", "writes", "branches", "changes"]
    file: str
    line: int
    text: str
    path: str = ""
    values: tuple[str, str] = ("", "")
    reader: tuple[str, int] | None = None


def blame(
    ours: Sequence[Section],
    theirs: Sequence[Section],
    places: Sequence[Where],
    script: FindStatements,
    *,
    aside: bool = False,
) -> Culprit | None:
    """Return the first statement that differs in the first of ``places`` that has one; None: there is none.

    Args:
        ours, theirs: the sections of two workers, each in the order of time.
        places: where to look, in this order.
        aside: the second worker has computed the micro-batch only to compare it.
    """
    for where in places:
        mine = _at(ours, where, aside=False)
        other = _at(theirs, where, aside=aside and where.leaf >= 0)
        if mine is None or other is None:
            continue
        found = _first(_begun(ours[mine]), _begun(theirs[other]), script)
        if found is None:
            continue
        if where.step <= 0 and (taken := _order_taken(ours, theirs, script)) is not None:
            return taken
        if found.kind != "reads":
            return found
        return _writer(found, ours[: mine + 1], theirs[: other + 1], script) or found
    return None


def _at(sections: Sequence[Section], where: Where, *, aside: bool) -> int | None:
    found = (index for index, each in enumerate(sections) if each.where == where and each.aside == aside)
    return next(found, None)


def _order_taken(ours: Sequence[Section], theirs: Sequence[Section], script: FindStatements) -> Culprit | None:
    """Return the first statement before the steps that reads the same and makes another collection; None: there is
    none. Others that differ there, as the clock, need not have to do with the steps.
    """
    mine, other = _at(ours, SETUP, aside=False), _at(theirs, SETUP, aside=False)
    if mine is None or other is None:
        return None
    reads: dict[int, bool] = {}  # by depth, whether the statement that runs there reads the same
    pairs = zip(_that_matter(ours[mine].events, script), _that_matter(theirs[other].events, script), strict=False)
    for a, b in pairs:
        if (a.file, a.line, a.is_end) != (b.file, b.line, b.is_end):
            return None
        if not a.is_end:
            reads[a.depth] = all(a.values[path] == b.values[path] for path in a.values.keys() & b.values.keys())
        elif reads.get(a.depth, True):
            for path in dict.fromkeys((*a.values, *b.values)):
                values = a.values.get(path, "nothing"), b.values.get(path, "nothing")
                if values[0] != values[1] and all(each.startswith(COLLECTIONS) for each in values):
                    return _culprit("writes", a, script, path, values)
    return None


def _first(ours: Sequence[StatementEvent], theirs: Sequence[StatementEvent], script: FindStatements) -> Culprit | None:
    """Return the first difference of two sections; None: there is none."""
    mine, other = list(_that_matter(ours, script)), list(_that_matter(theirs, script))
    for index, (a, b) in enumerate(zip(mine, other, strict=False)):
        if (a.file, a.line, a.is_end) != (b.file, b.line, b.is_end):
            return _culprit("branches", _decision(mine[:index], min(a.depth, b.depth), script) or a, script)
        for path in dict.fromkeys((*a.values, *b.values)):
            values = a.values.get(path, "nothing"), b.values.get(path, "nothing")
            if values[0] != values[1] and _is_known(path, a, b):
                return _culprit("writes" if a.is_end else "reads", a, script, path, values)
    if len(mine) != len(other):
        common, longer = min(len(mine), len(other)), max(mine, other, key=len)
        last = longer[common]
        return _culprit("branches", _decision(longer[:common], last.depth, script) or last, script)
    return None


def _decision(events: Sequence[StatementEvent], depth: int, script: FindStatements) -> StatementEvent | None:
    """Return what has decided which statement of a function follows: the last branch in it, or the call of it.

    Args:
        events: that both computations have in common.
        depth: of the function.
    """
    for event in reversed(events):
        if event.depth < depth and not event.is_end:
            return event
        statement = _statement(event, script)
        if event.depth == depth and statement is not None and statement.is_branch:
            return event
    return events[-1] if events else None


def _begun(section: Section) -> Sequence[StatementEvent]:
    """Return the events of a section, without the end of the inner loop, whose variables are those of the worker's last
    micro-batch: it belongs to what lies before the section.
    """
    events = section.events
    return events[1:] if events and events[0].is_end and section.where.leaf < 0 else events


def _is_known(path: str, a: StatementEvent, b: StatementEvent) -> bool:
    """Return whether a value can be compared: where only one of two has changed it, both must know it."""
    return a.is_end or (path in a.values and path in b.values)


def _that_matter(events: Sequence[StatementEvent], script: FindStatements) -> Iterator[StatementEvent]:
    for event in events:
        statement = _statement(event, script)
        if statement is not None and statement.matters:
            yield event


def _statement(event: StatementEvent, script: FindStatements) -> SourceStatement | None:
    return script(event.file).at(event.line)


def _culprit(
    kind: Literal["reads", "writes", "branches"],
    event: StatementEvent,
    script: FindStatements,
    path: str = "",
    values: tuple[str, str] = ("", ""),
) -> Culprit:
    statement = _statement(event, script)
    text = statement.text if statement is not None else ""
    return Culprit(kind=kind, file=event.file, line=event.line, text=text, path=path, values=values)


def _writer(
    culprit: Culprit, ours: Sequence[Section], theirs: Sequence[Section], script: FindStatements
) -> Culprit | None:
    """Return the culprit with the statement that wrote last what was read, in either of the two computations: one of
    the same function rather than of another, and one of the steps rather than one before them.
    """
    best: tuple[tuple[bool, bool], StatementEvent, SourceStatement] | None = None
    reader = script(culprit.file).at(culprit.line)
    for sections in (ours, theirs):
        for section, event in _backwards(sections):
            if not _writes(event, culprit) or (statement := _statement(event, script)) is None:
                continue
            is_own = reader is not None and (event.file, statement.function) == (culprit.file, reader.function)
            rank = (is_own or "." in culprit.path, section.where.step >= 0)
            if best is None or rank > best[0]:
                best = rank, event, statement
            if all(rank):
                break
    if best is None:
        return None
    _, event, statement = best
    reads = culprit.file, culprit.line
    return replace(culprit, file=event.file, line=event.line, text=statement.text, reader=reads)


def _backwards(sections: Sequence[Section]) -> Iterator[tuple[Section, StatementEvent]]:
    for section in reversed(sections):
        for event in reversed(section.events):
            yield section, event


def _writes(event: StatementEvent, culprit: Culprit) -> bool:
    key = key_of(culprit.path)
    is_same_name = any(key_of(path) == key for path in event.changed)
    return event.is_end and is_same_name and (event.file == culprit.file or key.startswith("."))
