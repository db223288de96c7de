"""The settings of a run and of a worker, from the one who makes them to the one who reads them."""

from __future__ import annotations

import msgspec
import pytest

from unisono.core.settings import RunSettings
from unisono.core.spec import RunSpec, WorkerSpec

GIVEN = RunSettings(threads=2, resume_anyway=("microbatches",), sources={"threads": "command line"})
RUN = RunSpec(arguments=("träin.py", "--lr", "1"), folder="/data", settings=GIVEN)
SPEC = WorkerSpec(run=RUN, head="ws://lab:1", worker_id="w3", host="lab", agent=7, local_rank=1, token="hidden")


def test_a_worker_reads_the_settings_that_its_agent_has_made() -> None:
    assert WorkerSpec.decode(SPEC.encode(), "hidden") == SPEC


def test_the_token_is_shown_nowhere() -> None:
    import rich.pretty

    for shown in (repr(SPEC), str(SPEC), rich.pretty.pretty_repr(SPEC), SPEC.encode().decode()):
        assert "w3" in shown
        assert "hidden" not in shown


def test_settings_of_another_version_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `colour`"):
        WorkerSpec.decode(b'{"worker_id": "w0", "colour": "red"}', "")


def test_the_command_that_a_resumed_run_starts_again() -> None:
    found = msgspec.json.decode(RUN.command())
    settings = found.pop("settings")
    assert found == {"folder": "/data", "arguments": ["träin.py", "--lr", "1"]}
    assert settings["threads"] == ["2", "command line"]
    assert RunSpec().command() == ""
    assert RunSpec(arguments=("--callable", "/proc/1/fd/3", "/proc/1/fd/4")).command() == ""
