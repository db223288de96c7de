"""A newcomer that computes other values is sent away before any of them counts, and the run goes on without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.workers.conftest import Unisono, served_by
from tests.workers.gates import Gates
from unisono.record.journal import compare
from unisono.testing import Faults, run_workers

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns the directory of a run of one worker, to which nobody comes."""
    found: dict[tuple[str, ...], Path] = {}

    def trained(name: str, *arguments: str) -> Path:
        if (name, *arguments) not in found:
            directory = tmp_path_factory.mktemp("calm") / "run"
            with served_by(standing_nursery):
                outcome = run_workers(HERE / name, 1, directory=directory, arguments=arguments)
            assert outcome.exit_code == 0, outcome.output
            found[name, *arguments] = directory
        return found[name, *arguments]

    return trained


def with_newcomer(
    unisono: Unisono, folder: Path, name: str, workers: int, faults: Faults, arguments: Sequence[str], *before: str
) -> str:
    """Return what a run says which one more worker joins at step 4.

    Args:
        before: what stands before the command that brings the newcomer; (): the run brings it itself.
    """
    armed = ("env", *(f"{key}={value}" for key, value in faults.environment().items()))
    with Gates(folder / "gates", (3,)) as gates:
        options = ("-n", workers, "--run-dir", "run", "--", *arguments, "--gates", gates.folder)
        command = unisono("run", HERE / name, *options, before=armed)
        gates.wait(3)
        if before:
            unisono("join", "run", "--workers", 1, before=(*armed, *before))
        else:
            assert unisono("scale", "run", workers + 1).wait() == 0
        gates.open(3, command.generation(f"w{workers} joins"))
        assert command.wait() == 0, command.err
    return " ".join(command.out + command.err)


SMALL = ("--steps", "12")
GRADIENT = "the gradient of micro-batch 0 of step 4 is not that of w0, which has computed it as well. The loss is the"


@pytest.mark.parametrize(
    ("workers", "name", "arguments", "value", "words"),
    [
        (1, "small_training.py", SMALL, "parameter", "at step 4 its state is not that of w0 (model['0.weight'] is a"),
        (2, "small_training.py", SMALL, "gradient", GRADIENT),
        (1, "delayed_training.py", (*SMALL, "--delay", "2"), "gradient", "the gradient of micro-batch 0 of step 6"),
        (2, "local_training.py", ("--rounds", "7"), "gradient", "the gradient of the first micro-batch of replica 0"),
    ],
    ids=["state", "gradient", "delay", "local"],
)
def test_it_is_sent_away_and_no_bit_changes(
    workers: int,
    name: str,
    arguments: tuple[str, ...],
    value: str,
    words: str,
    calm: Callable[..., Path],
    unisono: Unisono,
    tmp_path: Path,
) -> None:
    faults = Faults().corrupt(f"w{workers}", value, lasting=True)
    said = with_newcomer(unisono, tmp_path, name, workers, faults, arguments)
    assert compare(calm(name, *arguments), tmp_path / "run").startswith("identical: "), said
    assert f"w{workers} computes other values than the members before it: {words}" in said, said
    assert "Nothing that it has computed was summed" in said
    assert "not replaced" in said
    assert "may hold wrong values" not in said
    assert f"w{workers + 1}" not in said


def test_one_of_another_fingerprint_names_what_differs(
    calm: Callable[..., Path], unisono: Unisono, tmp_path: Path
) -> None:
    """The probe gives the same, and the training does not."""
    faults = Faults().corrupt("w1", "gradient", lasting=True)
    said = with_newcomer(unisono, tmp_path, "small_training.py", 1, faults, SMALL, "env", "NVIDIA_TF32_OVERRIDE=0")
    assert compare(calm("small_training.py", *SMALL), tmp_path / "run").startswith("identical: ")
    assert "is sent away if it gets others for its first micro-batches, which do not count" in said
    assert "Their processors or libraries differ" in said
    assert "--set arithmetic=avx2" in said
    assert "NVIDIA_TF32_OVERRIDE is '0' and not 'unknown'" in said.partition("is sent away and not replaced")[2]
