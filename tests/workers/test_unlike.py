"""Workers whose scripts make different calls are told so within seconds, and by the names of the calls."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.workers.conftest import Unisono

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.more]
Script = Callable[..., str]

TRAINING = """
    import sys
    import torch
    import unisono
    from torch import nn
    from torch.utils.data import TensorDataset
    from unisono.cluster.worker import member

    call, copies, alone = sys.argv[1], int(sys.argv[2]), member.current().worker_id == "w1"
    with unisono.Run("run", seed=3) as run:
        data = TensorDataset(torch.arange(48.0))
        model = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))
        optimizer = unisono.shard(torch.optim.AdamW(model.parameters()), copies=copies)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(data, batch_size=24, microbatches=4, epochs=5):
            for inputs, in step:
                step.backward(model(inputs[:, None]).mean())
            if step.number == 3 and alone and call == "run.barrier before optimizer.step()":
                run.barrier()
            if step.number == 3 and alone and call == "run.evaluate before optimizer.step()":
                run.evaluate(data, lambda batch: {"n": len(batch[0])}, batch_size=8)
            if step.number != 3 or alone or call != "optimizer.step() by the others":
                optimizer.step()
            if step.number == 3 and alone:
                if call == "optimizer.step()":
                    optimizer.step()
                elif call == "run.evaluate":
                    run.evaluate(data, lambda batch: {"n": len(batch[0])}, batch_size=8)
    """

AT = {
    "run.evaluate": ("an evaluation of 6 batches", "a step of 4 micro-batches", 1),
    "optimizer.step() by the others": ("optimizer.step()", "a step of 4 micro-batches", 1),
    "run.barrier before optimizer.step()": ("run.barrier", "optimizer.step()", 1),
    "run.evaluate before optimizer.step()": ("an evaluation of 6 batches", "optimizer.step()", 2),
}
"""What the second worker is at, and what the first; with so many copies of the optimizer's states."""


@pytest.mark.parametrize("call", AT)
def test_a_call_that_not_all_workers_make_ends_the_run_within_seconds(
    call: str, unisono: Unisono, script: Script
) -> None:
    """The exchange itself would wait for as long as ``--timeout-s`` says, here longer than the test may take."""
    own, others, copies = AT[call]
    command = unisono("run", script(TRAINING), "--workers", 2, "--set", "exchange-timeout=3000s", "--", call, copies)
    assert command.wait() == 1
    said = "\n".join(command.err)
    assert re.search(rf"the workers do different things at step \d: w0 is at {re.escape(others)}", said), said
    assert re.search(rf"w1 is at {re.escape(own)}", said), said


DELAYED = """
    import torch
    import unisono
    from torch import nn
    from torch.utils.data import TensorDataset
    from unisono.cluster.worker import member

    with unisono.Run("run", seed=3) as run:
        data = TensorDataset(torch.arange(48.0))
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(data, batch_size=24, microbatches=4, epochs=9, delay=2):
            for inputs, in step:
                step.backward(model(inputs[:, None]).mean())
            optimizer.step()
            if step.number == 3 and member.current().worker_id == "w1":
                run.all_gather(1)
    """


def test_with_a_delay_too_although_sums_are_under_way(unisono: Unisono, script: Script) -> None:
    command = unisono("run", script(DELAYED), "--workers", 2, "--set", "exchange-timeout=3000s")
    assert command.wait() == 1
    said = "\n".join(command.err)
    assert re.search(r"do different things at step \d: w0 is at the sum of an earlier step", said), said
    assert re.search(r"w1 is at run\.all_gather", said), said
