"""Statements of a script: what each reads and writes, and on which of them gradients can depend.

A statement's **paths** are the names and chains of attributes in it: ``count``, ``self.mean``, ``model.head.scale``.
What lies behind an index counts for the container: ``cache[key]`` reads ``cache`` and ``key``.

A statement **matters** if what it does can reach a gradient, an update or the order of what is computed. It is found
backwards from calls like ``loss.backward()`` and ``optimizer.step()``: whatever writes what a statement that matters
reads, matters too. This does not follow values through scopes (Weiser's slices, "Program slicing", 1981, do): a name is
one thing in the whole file, so too many statements may matter, and not too few.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["SourceStatement", "Statements", "key_of", "read_script", "read_scripts"]

_SINKS = {"backward", "step", "steps", "local_steps", "track", "evaluate", "load_state_dict", "register_buffer"}
"""Methods that act on gradients, on the state or on what is computed."""
_CALLED = {"forward", "__call__", "__getitem__", "__getitems__", "__len__", "__iter__", "__next__"}
"""Methods that torch or Unisono calls."""
_TRAINED = {"parameters", "named_parameters", "param_groups", "buffers"}
"""What gives the parts of models and optimizers."""
_HARMLESS = {"print", "repr", "len", "str", "isinstance", "exit"}
"""Functions that change nothing of what they are given."""
_SHUFFLES = {"shuffle", "sort", "copyto"}
_MODULES = {"torch", "np", "numpy", "random", "os", "sys", "time", "math", "logging", "json", "F", "nn", "unisono"}
_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_JUMPS = (ast.Continue, ast.Break)


@dataclass
class SourceStatement:
    """A statement, or the head of one that has statements in it (``if``, ``for`` ...).

    Attributes:
        line: on which it begins.
        last_line: on which it, or its head, ends.
        text: the first of its lines.
        loads: the paths that it reads.
        stores: the paths that it may write.
        calls: the last part of the names of what it calls.
        is_branch: it decides which statements follow.
        parts: the paths of which it writes a part, in place.
        parents: the statements that it stands in.
        function: the name of the function that it stands in.
        is_result: it gives a value to who has called the function.
        is_jump: it leaves out the rest of a loop.
        is_sink: it acts on gradients or on the state by itself.
        is_alias: what it writes is a part of what it reads, or the same.
        matters: gradients can depend on it.
    """

    line: int
    last_line: int
    text: str
    loads: tuple[str, ...]
    stores: tuple[str, ...]
    calls: frozenset[str]
    is_branch: bool
    matters: bool = False
    parents: tuple[SourceStatement, ...] = ()
    function: str = ""
    is_result: bool = False
    is_jump: bool = False
    is_sink: bool = False
    is_alias: bool = False
    parts: frozenset[str] = frozenset()

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths in it."""
        return tuple(dict.fromkeys((*self.loads, *self.stores)))


@dataclass
class Statements:
    """The statements of one file."""

    statements: list[SourceStatement] = field(default_factory=list)
    _by_line: dict[int, SourceStatement] = field(default_factory=dict)

    def at(self, line: int) -> SourceStatement | None:
        """Return the statement on a line; None where there is none."""
        return self._by_line.get(line)


def read_script(text: str) -> Statements:
    """Return the statements of a file, and which of them matter. A file that Python cannot read has none."""
    return read_scripts({"": text})[""]


def read_scripts(texts: Mapping[str, str]) -> dict[str, Statements]:
    """Return the statements of files that belong together, by path; what matters is found in all of them at once."""
    scripts = {path: _read(text) for path, text in texts.items()}
    _mark([statement for script in scripts.values() for statement in script.statements])
    return scripts


def _read(text: str) -> Statements:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return Statements()
    modules = _MODULES | set(_imported(tree))
    script = Statements(list(_statements(tree.body, text.splitlines(), modules, (), "")))
    for statement in script.statements:
        for line in range(statement.line, statement.last_line + 1):
            script._by_line[line] = statement  # an inner statement comes later than the one around it
    return script


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((each.asname or each.name).partition(".")[0] for each in node.names)


def _statements(
    body: Sequence[ast.stmt], lines: list[str], modules: set[str], parents: tuple[SourceStatement, ...], function: str
) -> Iterator[SourceStatement]:
    for node in body:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            own = node.name if isinstance(node, _FUNCTIONS) else function
            yield from _statements(node.body, lines, modules, (), own)
            continue
        statement = _statement(node, lines, modules, parents, function)
        yield statement
        inner = (*parents, statement)
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, name, []), lines, modules, inner, function)
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body, lines, modules, inner, function)
        for case in getattr(node, "cases", []):
            yield from _statements(case.body, lines, modules, inner, function)


def _statement(
    node: ast.stmt, lines: list[str], modules: set[str], parents: tuple[SourceStatement, ...], function: str
) -> SourceStatement:
    heads = list(_heads(node))
    last = max((getattr(part, "end_lineno", None) or node.lineno for part in heads), default=node.lineno)
    if not isinstance(node, _BLOCKS):
        last = node.end_lineno or node.lineno
    loads, stores, calls = _Paths(modules).of(node, heads)
    return SourceStatement(
        line=node.lineno,
        last_line=last,
        text=lines[node.lineno - 1].strip(),
        loads=tuple(dict.fromkeys(loads)),
        stores=tuple(dict.fromkeys(stores)),
        calls=frozenset(calls),
        is_branch=isinstance(node, (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Match)),
        parents=parents,
        function=function,
        is_result=isinstance(node, ast.Return)
        or any(isinstance(part, (ast.Yield, ast.YieldFrom)) for part in _walk(heads)),
        is_jump=isinstance(node, _JUMPS),
        is_sink=_is_sink(heads),
        is_alias=isinstance(node, (ast.For, ast.AsyncFor))
        or (isinstance(node, ast.Assign) and isinstance(node.value, (ast.Name, ast.Attribute, ast.Subscript))),
        parts=frozenset(_parts(node, heads)),
    )


def _heads(node: ast.stmt) -> Iterator[ast.AST]:
    """Yield what belongs to a statement itself, and not to the statements in it."""
    match node:
        case ast.If() | ast.While():
            yield node.test
        case ast.For() | ast.AsyncFor():
            yield node.target
            yield node.iter
        case ast.With() | ast.AsyncWith():
            yield from node.items
        case ast.Match():
            yield node.subject
        case ast.Try():
            return
        case _:
            yield node


def _walk(parts: Sequence[ast.AST]) -> Iterator[ast.AST]:
    for part in parts:
        yield from ast.walk(part)


def _parts(node: ast.stmt, heads: Sequence[ast.AST]) -> Iterator[str]:
    if isinstance(node, ast.AugAssign):
        yield _base(node.target)  # in place, where it is a tensor
    for part in _walk(heads):
        if isinstance(part, ast.Subscript) and not isinstance(part.ctx, ast.Load):
            yield _base(part)


def _is_sink(heads: Sequence[ast.AST]) -> bool:
    for node in _walk(heads):
        if isinstance(node, ast.Call):
            name = _last_name(node.func)
            if name in _SINKS or (name.endswith("_") and not name.startswith("_")):
                return True
            if name == "add" and node.keywords:  # step.add(right=...)
                return True
    return False


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _path(node: ast.AST) -> str:
    """Return a chain of attributes as text; "" for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(names)])


class _Paths:
    """Collects the paths of a statement."""

    def __init__(self, modules: set[str]) -> None:
        self._modules = modules
        self.loads: list[str] = []
        self.stores: list[str] = []
        self.calls: list[str] = []

    def of(self, node: ast.stmt, heads: Sequence[ast.AST]) -> tuple[list[str], list[str], list[str]]:
        """Return the paths that a statement reads, those that it may write, and the names of what it calls."""
        for part in heads:
            self._visit(part)
        if isinstance(node, ast.AugAssign):
            self.loads += [path for path in (_base(node.target),) if path]
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            self._acts(node.value)
        for call in _walk(heads):
            if isinstance(call, ast.Call) and _last_name(call.func) in _SHUFFLES:
                self.stores += [path for argument in call.args if (path := _base(argument))]
        return self.loads, self.stores, self.calls

    def _acts(self, call: ast.Call) -> None:
        """Note what a call may write whose value nobody takes."""
        if isinstance(call.func, ast.Attribute):
            path = _base(call.func.value)
            if path and path.partition(".")[0] not in self._modules:
                self.stores.append(path)
        elif isinstance(call.func, ast.Name) and call.func.id not in _HARMLESS:
            self.stores += [path for argument in call.args if (path := _base(argument))]

    def _visit(self, node: ast.AST) -> None:
        match node:
            case ast.Attribute() | ast.Name():
                path = _path(node)
                if path:
                    (self.loads if isinstance(node.ctx, ast.Load) else self.stores).append(path)
                    return
            case ast.Subscript() if not isinstance(node.ctx, ast.Load):
                if path := _base(node):
                    self.stores.append(path)
                    self.loads.append(path)
            case ast.Call():
                self._visit_call(node)
                return
            case ast.Lambda():
                self._visit(node.body)
                return
        for child in ast.iter_child_nodes(node):
            self._visit(child)

    def _visit_call(self, node: ast.Call) -> None:
        self.calls.append(_last_name(node.func))
        if isinstance(node.func, ast.Attribute):
            self._visit(node.func.value)
        else:
            self._visit(node.func)
        for child in (*node.args, *node.keywords):
            self._visit(child)


def _base(node: ast.AST) -> str:
    """Return the path of what is written where ``node`` is: that of the container, for a place in it."""
    while isinstance(node, (ast.Subscript, ast.Starred, ast.Call)):
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Attribute):
                return ""
            node = node.func.value
        else:
            node = node.value
    return _path(node)


def key_of(path: str) -> str:
    """Return by which a path is the same in another function: its last attribute, or its name."""
    head, dot, last = path.rpartition(".")
    return f".{last}" if dot else head or last


def _mark(statements: list[SourceStatement]) -> None:
    """Mark the statements that matter."""
    needed: set[str] = set(_TRAINED)
    called: set[str] = set(_CALLED)
    aliases = _aliases(statements)
    is_new = True
    while is_new:
        is_new = False
        for statement in statements:
            if statement.matters or not _matters(statement, needed, called, aliases, statements):
                continue
            is_new = True
            for one in (statement, *statement.parents):
                one.matters = True
                needed |= {key_of(path) for path in one.loads}
                needed |= {path.partition(".")[0] for path in one.loads if not path.startswith("self.")}
                called |= one.calls | {path.rpartition(".")[2] for path in one.loads}


def _matters(
    statement: SourceStatement,
    needed: set[str],
    called: set[str],
    aliases: dict[str, set[str]],
    all_: list[SourceStatement],
) -> bool:
    if statement.is_sink or (statement.is_result and statement.function in called):
        return True
    if statement.is_jump:
        return any(one.matters for one in all_ if statement.parents and statement.parents[0] in one.parents)
    for path in statement.stores:
        root, dot, _ = path.partition(".")
        if key_of(path) in needed or (dot and root != "self" and root in needed):
            return True
        if (dot or path in statement.parts) and aliases.get(root, set()) & needed:
            return True  # group["lr"] = ..., where `for group in optimizer.param_groups`
    return False


def _aliases(statements: list[SourceStatement]) -> dict[str, set[str]]:
    """Return, by name, the names of what it may be a part of: ``group`` of ``optimizer.param_groups``."""
    found: dict[str, set[str]] = {}
    for statement in statements:
        if statement.is_alias:
            names = {name for each in statement.loads for name in each.split(".") if name != "self"}
            for path in statement.stores:
                found.setdefault(path, set()).update(names | statement.calls)
    return found
