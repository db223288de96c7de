"""What a worker knows of the error that ends its script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.core.errors import DivergenceError
from unisono.core.messages import Failed
from unisono.record.problems.kinds import kind_of
from unisono.system.stacks import in_one_line, trimmed_traceback

__all__ = ["Failures"]


@dataclass(frozen=True)
class _Raised:
    """An error of the script's, and the micro-batch that raised it."""

    error: BaseException
    step: int
    microbatch: int
    samples: list[int]
    retry: bool


class Failures:
    """What was found out about errors while they were on their way out of the script."""

    def __init__(self) -> None:
        self._raised: _Raised | None = None
        self._explained: tuple[BaseException | None, str, str, str] = (None, "", "", "")

    def raised_in(self, error: BaseException, step: int, microbatch: int, samples: Sequence[int], retry: bool) -> None:
        """Note the micro-batch that raised an error.

        Args:
            retry: if that ends the script, another worker tries the micro-batch.
        """
        self._raised = _Raised(error, step, microbatch, list(samples), retry)

    def explained(self, error: BaseException, kind: str, detail: str, advice: str) -> None:
        """Note what was found out about an error."""
        self._explained = (error, kind, detail, advice)

    def report(self, error: BaseException, exit_code: int) -> Failed:
        """Return what the head is told about the error that has ended the script."""
        raised = self._raised if self._raised is not None and self._raised.error is error else None
        known, kind, detail, advice = self._explained
        if known is not error:
            kind, detail, advice = kind_of(error), "", ""
        return Failed(
            error=in_one_line(error),
            traceback="" if isinstance(error, SystemExit) else trimmed_traceback(error),
            step=raised.step if raised is not None else -1,
            microbatch=raised.microbatch if raised is not None else -1,
            samples=raised.samples if raised is not None else [],
            retry=raised is not None and raised.retry,
            exit_code=exit_code,
            sound=error.sound if isinstance(error, DivergenceError) else -1,
            goes_on=isinstance(error, DivergenceError) and error.goes_on,
            kind=kind,
            detail=detail,
            advice=advice,
        )
