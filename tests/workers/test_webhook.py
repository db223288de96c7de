"""``unisono run --sink webhook=URL``: a real server is told how a run goes, also by one without a worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pure.test_webhook import Receiver, receiving  # a fixture among them  # noqa: F401
from tests.waiting import PATIENT, WAIT_S
from tests.workers.trainings import Training
from unisono.testing import Faults, run_workers

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]
SMALL = "small_training.py"

FULL = """
import errno
import torch, unisono
from torch.utils.data import TensorDataset
from unisono.record import checkpoint_files as files

def refuse(path, *rest):
    raise OSError(errno.ENOSPC, "No space left on device", str(path))

files.write_file = refuse
every = unisono.Checkpoints(every_steps=2)
with unisono.Run(seed=1, checkpoint=every) as run:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(TensorDataset(torch.ones(96, 4)), batch_size=8, microbatches=2):
        for (inputs,) in step:
            step.backward(model(inputs).square().mean())
        optimizer.step()
"""


def hook(receiver: Receiver) -> tuple[str, str]:
    return "--sink", f"webhook=http://{receiver.address}/hook"


def events(receiver: Receiver) -> list[tuple[str, str]]:
    return [(each["event"], each["run"]) for each in receiver.taken]


def test_a_run_says_that_it_began_what_was_found_wrong_and_how_it_ended(receiver: Receiver, tmp_path: Path) -> None:
    training = Training(SMALL, "--steps", 12, "--even")
    options = [*PATIENT, "--audit", "0.5", "--set", "audit-then=go-on", *hook(receiver)]
    found = training(tmp_path / "run", 3, Faults().corrupt("w1", "gradient", step=9, lasting=True), options)
    assert found.exit_code == 0, found.output
    assert events(receiver) == [("began", "run"), ("wrong", "run"), ("ended", "run")], found.output
    began, wrong, ended = receiver.taken
    assert began["step"] == 0
    assert began["run_id"] == wrong["run_id"] == ended["run_id"] != ""
    assert "w1 on host" in wrong["text"]
    assert ended["ok"]
    assert ended["digests"] == found.final


def test_a_run_of_which_no_worker_is_left_says_so(receiver: Receiver, tmp_path: Path) -> None:
    training = Training(SMALL, "--steps", 12, "--even")
    options = [*PATIENT, "--max-restarts", "0", *hook(receiver)]
    found = training(tmp_path / "run", 1, Faults().kill("w0", at="after_step", step=3), options)
    assert found.exit_code != 0
    assert events(receiver) == [("began", "run"), ("ended", "run")], found.output
    assert not receiver.taken[1]["ok"]
    assert receiver.taken[1]["reason"] != ""


def test_a_checkpoint_that_could_not_be_written_is_told(
    receiver: Receiver, script: Callable[..., str], tmp_path: Path
) -> None:
    found = run_workers(
        tmp_path / script(FULL), 2, directory=tmp_path / "run", options=[*PATIENT, *hook(receiver)], timeout_s=WAIT_S
    )
    assert found.exit_code == 0, found.output
    told = [each for each in receiver.taken if each["event"] == "checkpoint-lost"]
    assert told, found.output
    assert "was not written" in told[0]["text"]
    assert "No space left on device" in told[0]["text"]
    assert receiver.taken[-1]["event"] == "ended"


def test_a_server_that_fails_costs_the_messages_and_nothing_else(receiver: Receiver, tmp_path: Path) -> None:
    receiver.codes = [404] * 9
    training = Training(SMALL, "--steps", 12, "--even")
    found = training(tmp_path / "run", 2, None, [*PATIENT, *hook(receiver)])
    assert found.exit_code == 0, found.output
    assert "was not told 'began', tried once: it answered 404; the run continues" in found.output
    assert receiver.taken == []
    assert "/hook" not in found.output
