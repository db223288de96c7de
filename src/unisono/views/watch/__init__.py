"""Sinks, which show, store or forward the events of a run. The training never asks a sink anything.

A new sink is one file in this folder, with a class that satisfies `Sink`, and one row in `SINKS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Final, Protocol, cast, runtime_checkable

from unisono.core.errors import UsageError
from unisono.core.events import Event
from unisono.views.watch.queued import print_error

__all__ = ["SINKS", "EventStream", "Sink", "is_of_agents", "known", "make", "named"]

SINKS: Final = {
    "relay": "unisono.views.watch.relay:Relay",
    "terminal": "unisono.views.watch.terminal:terminal",
    "logging": "unisono.views.watch.logging:Logging",
    "mlflow": "unisono.views.watch.mlflow:MLflow",
    "opentelemetry": "unisono.views.watch.opentelemetry:OpenTelemetry",
    "tensorboard": "unisono.views.watch.tensorboard:TensorBoard",
    "wandb": "unisono.views.watch.wandb:WandB",
    "webhook": "unisono.views.watch.webhook:Webhook",
}
"""Name of a sink -> module and function that makes it, imported when it is asked for."""

_OF_COMMANDS: Final = ("relay", "terminal")
"""Sinks of ``unisono run`` and of agents, which have no name on the command line."""
_OF_AGENTS: Final = ("webhook",)
"""Sinks that the agent of the machine with the head has; all others are for the worker that writes the journal."""


@runtime_checkable
class Sink(Protocol):
    """Receiver of events. A sink ignores events that it does not know: later versions have more of them."""

    def emit(self, event: Event) -> None:
        """Receive an event. In a worker this is called by the training loop, so it returns at once (a sink that has to
        wait for something does so in a thread of its own) and leaves the global random generators alone.
        """

    def close(self) -> None:
        """No event follows. Called once."""


def make(name: str, *arguments: str) -> Sink:
    """Make the sink of that name in `SINKS`."""
    return cast("Sink", _load(SINKS[name])(*arguments))


def known() -> list[str]:
    """Return the names of the sinks that ``--sink`` takes."""
    return sorted(set(SINKS) - set(_OF_COMMANDS))


def is_of_agents(text: str) -> bool:
    """Return whether agents have the sink that ``--sink NAME[=ARGUMENT]`` asks for, and workers have not."""
    return text.partition("=")[0] in _OF_AGENTS


def named(text: str, *, is_here: bool = True) -> Sink | None:
    """Make the sink that ``--sink NAME[=ARGUMENT]`` asks for; NAME is in `SINKS`, or is MODULE:FUNCTION.

    Args:
        is_here: this process has the modules of the script; else a function of such a module is not called.

    Raises:
        UsageError: there is no such sink, or a package that it needs is missing.
    """
    name, has_argument, argument = text.partition("=")
    arguments = (argument,) if has_argument else ()
    if name in SINKS and name not in _OF_COMMANDS:
        return make(name, *arguments)
    module, _, function = name.partition(":")
    if not (module and function):
        raise UsageError(
            f"there is no sink {name!r}; known are {', '.join(known())}, and MODULE:FUNCTION for one of your own (a "
            "function that returns an object with emit(event) and close())"
        )
    if not is_here:
        return None
    try:
        made = _load(name)(*arguments)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"the sink {name} of the command line cannot be made: {error}") from error
    if not isinstance(made, Sink):
        raise UsageError(f"the sink {name} of the command line has no emit(event) and close(): {made!r}")
    return made


def _load(place: str) -> Callable[..., object]:
    module, _, function = place.partition(":")
    found: Callable[..., object] = getattr(importlib.import_module(module), function)
    return found


class EventStream:
    """Gives each event to several sinks, in their order. A sink that raises is reported once, closed and dropped: it
    never ends a run.

    Args:
        report: gets the sentence about a sink that raised.
    """

    def __init__(self, sinks: Iterable[Sink], report: Callable[[str], None] = print_error) -> None:
        self._sinks = list(sinks)
        self._report = report

    def add(self, sink: Sink) -> None:
        """Give events to one more sink from now on."""
        self._sinks.append(sink)

    @property
    def has_sinks(self) -> bool:
        """Whether a sink is left."""
        return bool(self._sinks)

    def emit(self, event: Event) -> None:
        """Give an event to all sinks."""
        for sink in self._sinks.copy():
            try:
                sink.emit(event)
            except Exception as error:
                self._sinks.remove(sink)
                self._say(sink, f"emit({type(event).__name__})", error)
                self._close(sink)

    def close(self) -> None:
        """Close all sinks, each once."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            self._close(sink)

    def _close(self, sink: Sink) -> None:
        try:
            sink.close()
        except Exception as error:
            self._say(sink, "close()", error)

    def _say(self, sink: Sink, call: str, error: Exception) -> None:
        self._report(
            f"the sink {type(sink).__qualname__} gets no more events: its {call} raised {type(error).__name__}: "
            f"{error}; the run continues"
        )
