"""Workers of different processors: held to the same instructions, told apart by what they get."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.operations import SETTINGS, in_process
from tests.workers.conftest import Unisono
from unisono.record.journal import compare
from unisono.record.rundir import read_facts
from unisono.system.arithmetic import _of_processor, name_of, variables

pytestmark = pytest.mark.skipif("avx2" not in _of_processor("flags"), reason="no AVX2 here")

TRAINING = """
    import sys
    import torch, unisono
    from torch import nn
    from torch.utils.data import TensorDataset

    run = unisono.Run(seed=3, arithmetic=(*sys.argv[1:], None)[0])
    data = TensorDataset(torch.randn(48, 33))
    model = nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.LayerNorm(65), nn.Linear(65, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data, batch_size=24, microbatches=4, epochs=5):
        for inputs, in step:
            model(inputs).mean().backward()
        optimizer.step()
    """
OTHER = ("env", "ATEN_CPU_CAPABILITY=default", "MKL_CBWR=COMPATIBLE", "ONEDNN_MAX_CPU_ISA=SSE41")
Script = Callable[..., str]


def test_a_worker_that_gets_other_bits_is_refused_by_the_probe(unisono: Unisono, script: Script) -> None:
    """Without an option each computes as its libraries choose."""
    run = unisono("run", script(TRAINING), "--run-dir", "run", "--workers", 1, "--wait-for", 2)
    run.line("1 of 2 workers are there")
    guest = unisono("join", "run", "--workers", 1, before=OTHER)
    assert guest.wait() != 0
    said = " ".join(guest.out + guest.err)
    assert "gets different bits in product, " in said
    assert "(ATEN_CPU_CAPABILITY is 'default' and not 'unknown'; " in said
    assert "start the run with --set arithmetic=avx2" in said
    assert unisono("stop", "run").wait() == 0
    run.wait()


@pytest.mark.skipif("avx512f" not in _of_processor("flags"), reason="no AVX-512 here")
def test_the_probe_of_this_machine_tells_the_instructions_apart() -> None:
    """Whatever differs in any of a thousand operations differs in the probe."""
    names = SETTINGS if os.environ.get("UNISONO_TEST_ALL") else ("none", "aten avx2")
    found = [in_process(SETTINGS[name]) for name in names]
    for (one, ops), (other, other_ops) in itertools.combinations(found, 2):
        assert one != other or ops == other_ops


def test_workers_that_are_held_to_the_same_instructions_get_the_same_bits(
    unisono: Unisono, script: Script, tmp_path: Path
) -> None:
    name = script(TRAINING)
    run = unisono("run", name, "--run-dir", "run", "--workers", 1, "--wait-for", 2, "--set", "arithmetic=avx2")
    run.line("1 of 2 workers are there")
    guest = unisono("join", "run", "--workers", 1, before=OTHER)
    assert (run.wait(), guest.wait()) == (0, 0), (run.err, guest.err)
    wanted = variables("avx2")
    for number, before in enumerate((("env", *(f"{one}={value}" for one, value in wanted.items())), OTHER)):
        options = ("--workers", 1, "--run-dir", f"alone{number}", *(("--set", "arithmetic=avx2") if number else ()))
        alone = unisono("run", name, *options, before=before)
        assert alone.wait() == 0, alone.err
        assert compare(tmp_path / "run", tmp_path / f"alone{number}").startswith("identical: ")
    names = [read_facts(tmp_path / one)["recipe"]["arithmetic"] for one in ("run", "alone0", "alone1")]
    assert names == [name_of(wanted)] * 3  # "compatible", where the processor is not one of Intel's


def test_alone_a_script_that_wants_them_names_the_command(script: Script, tmp_path: Path) -> None:
    command = [sys.executable, script(TRAINING), "avx2"]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    words = " ".join(f"{name}={value}" for name, value in variables("avx2").items())
    assert f"Start it with: {words} python train.py" in refused.stderr
    assert subprocess.run(command, cwd=tmp_path, env={**os.environ, **variables("avx2")}, check=False).returncode == 0


def test_under_unisono_run_it_names_the_option(unisono: Unisono, script: Script) -> None:
    run = unisono("run", script(TRAINING), "--workers", 1, "--", "avx2")
    assert run.wait() == 1
    assert "Start it with: unisono run train.py --set arithmetic=avx2" in "\n".join(run.err)
    assert unisono("run", "train.py", "--workers", 1, "--set", "arithmetic=compatible", "--", "avx2").wait() == 0
