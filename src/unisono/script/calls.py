"""Calls by which the workers of a run talk to each other, as the script makes them; `unisono.Run` has them all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch.distributed as dist

from unisono.script.talking import Place, Talk

__all__ = ["Calls"]


class Calls(ABC):
    """The calls; the class that inherits them knows where in the script they are made."""

    _talk: Talk

    @abstractmethod
    def _place(self, what: str) -> Place:
        """Return the place of a call in which all workers take part, in the script."""

    def barrier(self) -> None:
        """Wait until all workers have come to this call. Collective.

        A worker that is lost is not waited for, and one that comes later passes at once.

        Raises:
            UsageError: called within the inner loop. StepError: the workers are at different calls.
        """
        self._talk.barrier(self._place("run.barrier"))

    def broadcast(self, value: Any) -> Any:
        """Return the main worker's value on all workers, also on those that come to this call later. Collective.

        Args:
            value: numbers, strings, bytes, None, tensors (they arrive on the CPU), numpy arrays, and lists, tuples,
                sets and dicts of them. Only that of the main worker counts; the others may give None. Before the first
                step of the run give it on each: when the first worker is lost, the value of the next one counts.

        Raises:
            UsageError: the value cannot be sent, or the call is within the inner loop. StepError: the workers are at
                different calls.
        """
        return self._talk.broadcast(self._place("run.broadcast"), value)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all workers, by rank, on all workers. Collective.

        The list is as long as there were workers. **A script whose training depends on it has other bits with another
        number of workers**; use `evaluate` or ``step.add`` for sums that have not.

        Args:
            value: as of `broadcast`.

        Raises:
            UsageError: the value cannot be sent, or the call is within the inner loop. StepError: the workers are at
                different calls.
        """
        return self._talk.gather(self._place("run.gather"), value)

    def main_first(self) -> AbstractContextManager[bool]:
        """Return a context whose block the main worker runs before all others, e.g. to download data. Collective.

        ::

            with run.main_first() as is_first:
                dataset = MNIST("data", download=is_first)

        Each worker runs the block once, and leaves it when all have run it. The value of the context is True on the
        worker that runs it first. If that worker is lost in the block, the next one runs it first. No other collective
        call may be in it. After it the generators have the same state on all workers, whatever it has drawn.

        Raises:
            UsageError: used within the inner loop. StepError: the workers are at different calls.
        """
        return self._talk.main_first(partial(self._place, "run.main_first"))

    def process_group(self) -> dist.ProcessGroup:
        """Return a group of ``torch.distributed`` that connects the members of the current generation. Collective.

        For experts. What is exchanged through it is the script's own: the bits may depend on the number of workers, and
        no loss is repaired. Ask for it at every step: as long as the members are the same, that costs one small
        exchange and gives the same group. When the members have changed it gives a new group, and when a member is
        lost, collectives of the old one raise ``RuntimeError``.

        Raises:
            UsageError: called outside of ``run.steps``, where members may not have joined yet, or in the inner loop.
        """
        return self._talk.process_group(self._place("run.process_group"))
