"""What went wrong, in real runs: the sentence names the culprit, and the file has the evidence and no secret."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.waiting import SILENCE_S, WAIT_S
from tests.workers.conftest import Command, Unisono

pytestmark = pytest.mark.usefixtures("nursery")
Script = Callable[..., str]

TROUBLED = """
    import os
    import sys
    import threading
    import torch
    import unisono
    from torch import nn

    WHAT = sys.argv[1]

    class Data:
        def __len__(self):
            return 48

        def __getitem__(self, index):
            if index == 31 and WHAT == "hang":
                threading.Event().wait()
            value = float("nan") if index == 31 and WHAT == "nan" else index / 48
            return torch.full((3,), value)

    with unisono.Run("run", seed=3) as run:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        run.track(model=model, optimizer=optimizer)
        drift = 0.0
        for step in run.steps(Data(), batch_size=24, microbatches=8, shuffle=False):
            for inputs in step:
                is_here = 31 in step.indices.tolist()
                out = model(inputs)
                loss = out.mean()
                if WHAT == "drift":
                    drift += 0.001
                    loss = loss * (1 + drift)
                if is_here and WHAT == "error":
                    raise ValueError(f"no such class, --api-key {sys.argv[3]}")
                if is_here and WHAT == "memory":
                    torch.empty(1 << 45)
                if is_here and WHAT == "python-memory":
                    raise MemoryError
                if is_here and WHAT == "native":
                    import ctypes
                    ctypes.PyDLL(None).sleep(100_000)  # without letting the interpreter go on
                if is_here and WHAT == "gradient":
                    loss = loss + torch.sqrt((out * 0).sum())
                if is_here and WHAT == "segfault":
                    import ctypes
                    ctypes.string_at(0)
                loss.backward()
            optimizer.step()
        print("loss", step.loss)
    """

HOST = r"on host [\w.-]+"
SECRET = "hunter2-and-more"
LIMITS = (
    "--set",
    "report-late-after=0.4s",
    "--set",
    "go-on-without-after=3s",
    "--set",
    "kill-after=6s",
    "--set",
    "heartbeat=0.1s",
    "--set",
    f"heartbeat-timeout={WAIT_S}s",
)


def start(unisono: Unisono, script: Script, what: str, *options: object, num_workers: int = 2) -> Command:
    return unisono("run", *options, "--workers", num_workers, "--", script(TROUBLED), what, "--api-key", SECRET)


def evidence(folder: Path) -> list[str]:
    """The files, the oldest first."""
    return [file.read_text() for file in sorted((folder / "run" / "problems").glob("*.txt"))]


def said(content: str) -> str:
    return content.splitlines()[3]


def whole(content: str) -> None:
    """What each file has."""
    for part in ("What to do: ", "Stacks of all workers", "Machines, and the memory", "Last events", "Versions"):
        assert part in content, content
    for part in ("torch ", "OMP_NUM_THREADS", '"microbatches": 8', "MemTotal", "limit: "):
        assert part in content, content
    assert SECRET not in content


def test_a_hang_in_the_data_set(unisono: Unisono, script: Script, tmp_path: Path) -> None:
    command = start(unisono, script, "hang", *LIMITS)
    assert command.wait() == 1
    first, *_, last = evidence(tmp_path)
    where = (
        r"hung in step 1, micro-batch 2 \(samples 30, 31, 32\): its main thread has been in train.py:\d+ __getitem__"
    )
    assert re.match(rf"w[01] {HOST} {where} \(in threading.py:\d+ wait\) for \d+ s; the others compute", said(first))
    assert re.match(rf"w\d {HOST} {where} .* for \d+ s; w[01] hung there as well, so the script", said(last))
    for content in (first, last):
        whole(content)
        assert re.search(r"main thread:\n(  .*\n)+?  .*train.py:\d+ __getitem__\n", content)
    assert "[w0]" in first, "the stacks of all"
    assert "[w1]" in first, "the stacks of all"
    assert " unisono: failed: worker w" in command.err[-1]
    assert re.search(
        r" unisono: evidence \(stacks, memory, last events\): problems/\S+-hang-step1\S*.txt in", command.err[-2]
    )


def test_an_error_in_a_micro_batch(unisono: Unisono, script: Script, tmp_path: Path) -> None:
    command = start(unisono, script, "error")
    assert command.wait() == 1
    first, second = evidence(tmp_path)
    where = r"failed in step 1, micro-batch 2 \(samples 30, 31, 32\): ValueError: no such class"
    tried = {re.match(rf"(w\d) {HOST} {where}", said(content))[1] for content in (first, second)}  # type: ignore[index]
    assert tried == {"w0", "w1"}
    assert "another worker tries it" in said(first)
    for content in (first, second):
        whole(content)
        assert "raise ValueError(f" in content, "the traceback"
    assert sum("Traceback (most recent call last)" in line for line in command.err) == 1, "once"


def test_a_sample_that_is_not_a_number(unisono: Unisono, script: Script, tmp_path: Path) -> None:
    assert start(unisono, script, "nan").wait() == 1
    (content,) = evidence(tmp_path)
    assert re.match(
        rf"the loss is nan in step 1, micro-batch 2 \(samples 30, 31, 32\), which w\d {HOST} has computed.$",
        said(content),
    )
    assert "all parameters and buffers are finite: these samples" in content
    whole(content)


def test_a_gradient_that_is_not_finite_ends_no_run_and_changes_no_bit(
    unisono: Unisono, script: Script, tmp_path: Path
) -> None:
    """The loss of the micro-batch is finite, so the step is applied as the script wants it, and said once."""
    command = start(unisono, script, "gradient", num_workers=3)
    assert command.wait() == 0, command.err
    (content,) = evidence(tmp_path)
    assert re.match(
        rf"the gradient is not finite in step 1, micro-batch 2 \(samples 30, 31, 32\), which w\d {HOST} has computed;",
        said(content),
    )
    assert "gradients that are not finite there: those of 'model.0.weight'" in content
    assert len([line for line in command.err if "the gradient is not finite" in line]) == 1
    losses = {line.partition(" ")[2] for line in command.out if line.startswith("[w")}
    assert len(losses) == 1
    whole(content)


@pytest.mark.parametrize("what", ["memory", "python-memory"])
def test_memory_that_is_used_up(unisono: Unisono, script: Script, tmp_path: Path, what: str) -> None:
    assert start(unisono, script, what).wait() == 1
    first, *_ = evidence(tmp_path)
    assert re.match(rf"w\d {HOST} ran out of memory in step 1, micro-batch 2 \(samples 30, 31, 32\): ", said(first))
    for part in ("what held the memory of this process:", "parameters", "gradients", "optimizer state", "activations"):
        assert part in first
    if what == "memory":
        assert "you tried to allocate 140737488355328 bytes" in first
        assert re.search(r"What to do: .* 1 sample would need about [\d,]+ GB of \d+", first)
    whole(first)


def test_native_code_that_fails(unisono: Unisono, script: Script, tmp_path: Path) -> None:
    command = start(unisono, script, "segfault", "--max-restarts", 0)
    assert command.wait() == 1
    first, *_ = evidence(tmp_path)
    assert re.match(rf"w\d {HOST} was killed by signal 11 \(SIGSEGV\).*: it was in train.py:\d+ <module>", said(first))
    assert "Fatal Python error: Segmentation fault" in first
    whole(first)


def test_native_code_that_holds_the_interpreter(unisono: Unisono, script: Script, tmp_path: Path) -> None:
    """The worker cannot say anything, not even that it lives; the kernel can."""
    silence = f"heartbeat-timeout={3 * SILENCE_S}s"  # on a busy machine, another may send nothing for a while
    command = start(unisono, script, "native", "--set", "heartbeat=0.1s", "--set", silence)
    command.line("has sent nothing for")
    os.kill(command.pid, signal.SIGTERM)
    command.wait()
    first = evidence(tmp_path)[0]
    # Where it was, it can have said only before it got there.
    why = r"(, last in step \d.*)?: its process is stopped, native code holds its interpreter"
    assert re.match(rf"w\d {HOST} has sent nothing for [\d.]+ s{why}", said(first)), said(first)
    culprit = said(first).partition(" ")[0]
    assert re.search(rf"\[{culprit}\]\n\(no answer: ", first)
    assert re.search(rf"\n{culprit} \(pid \d+\): state S \(sleeping\).*waits in the kernel's \S+", first)
    whole(first)


def test_a_gradient_that_depends_on_the_worker(unisono: Unisono, script: Script, tmp_path: Path) -> None:
    assert start(unisono, script, "drift").wait() == 1
    content = evidence(tmp_path)[0]
    assert re.match(r"micro-batch \d of step 0 was computed by two workers", said(content))
    assert re.search(r"gradient differs between w\d and w\d", said(content))
    whole(content)


def test_a_process_that_somebody_has_killed(unisono: Unisono, script: Script, tmp_path: Path) -> None:
    """Nothing says that it was for memory. The others go on, and the file has their stacks."""
    command = start(
        unisono,
        script,
        "hang",
        "--set",
        "report-late-after=1.0s",
        "--set",
        f"go-on-without-after={WAIT_S}s",
        "--set",
        f"kill-after={WAIT_S}s",
    )
    late = command.line("s at step 1, micro-batch 2")  # on a busy machine, another may have been late before
    worker, pid = re.search(r"worker (w\d) \(pid (\d+)\)", late).groups()  # type: ignore[union-attr]
    os.kill(int(pid), signal.SIGKILL)
    command.line("is late: no progress", after=r"evidence \(stacks, memory, last events\)")
    os.kill(command.pid, signal.SIGTERM)
    command.wait()
    content = evidence(tmp_path)[0]
    assert said(content).startswith(f"{worker} on host")
    assert "was killed by signal 9 (SIGKILL) in step 1, micro-batch 2 (samples 30, 31, 32)" in said(content)
    assert "Nothing on the machine suggests that memory was the reason" in content
    whole(content)


LIMITED = """
    import resource
    import torch
    import unisono
    from torch import nn

    with unisono.Run("run") as run:
        model = nn.Linear(1000, 1000)
        optimizer = torch.optim.AdamW(model.parameters())
        run.track(model=model, optimizer=optimizer)
        data = torch.zeros(64, 1000)
        for step in run.steps(data, batch_size=64, microbatches=2, epochs=2):
            for inputs in step:
                if step.number == 1:
                    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
                    if soft == hard:
                        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
                        resource.setrlimit(resource.RLIMIT_AS, (used + 300_000_000, hard))
                    kept = [torch.zeros(len(inputs), 1_000_000) for _ in range(4)]  # 16 MB a sample
                model(inputs).mean().backward()
                kept = None
            optimizer.step()
    """


def test_a_script_alone_says_which_number_of_micro_batches_fits(
    unisono: Unisono, script: Script, tmp_path: Path
) -> None:
    """A limit of its address space: 16 MB a sample, 300 MB of room. The advice comes true."""
    import subprocess
    import sys

    name = script(LIMITED)
    failed = subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S)
    assert failed.returncode == 1
    assert "what is known of the script's error: problems/" in failed.stderr
    (content,) = evidence(tmp_path)
    assert said(content).startswith("the script ran out of memory in step 1, micro-batch 0 (samples ")
    found = re.search(r"microbatches=(\d+) instead of 2, so (\d+) samples? each", content)
    assert found is not None, content
    (tmp_path / name).write_text((tmp_path / name).read_text().replace("microbatches=2", f"microbatches={found[1]}"))
    (tmp_path / name).write_text((tmp_path / name).read_text().replace('Run("run")', 'Run("other")'))
    again = subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S)
    assert again.returncode == 0, again.stderr


OTHER_SCRIPT = TROUBLED + "    # edited\n"


def test_a_machine_with_another_script_is_refused_by_name(unisono: Unisono, script: Script, tmp_path: Path) -> None:
    command = start(
        unisono,
        script,
        "hang",
        "--set",
        "report-late-after=0.2s",
        "--set",
        f"go-on-without-after={WAIT_S}s",
        "--set",
        f"kill-after={WAIT_S}s",
    )
    command.line("is late: no progress")
    script(OTHER_SCRIPT)
    joined = unisono("join", "run", "--workers", 1)
    assert joined.wait() != 0
    command.line("is sent away")
    os.kill(command.pid, signal.SIGTERM)
    command.wait()
    content = evidence(tmp_path)[0]
    assert re.match(rf"w2 {HOST} could not join the run: it has a different text of the script", said(content))
    whole(content)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (problem,) = [event["text"] for event in events if event["kind"] == "problem"]
    assert problem.startswith(said(content).removesuffix(".")), "the same words"


def test_nothing_is_written_where_the_run_has_no_directory(unisono: Unisono, script: Script, tmp_path: Path) -> None:
    name = script(TROUBLED.replace('unisono.Run("run", seed=3)', "unisono.Run(seed=3)"))
    command = unisono("run", "--workers", 2, "--", name, "gradient")
    assert command.wait() == 0, command.err
    assert any("the gradient is not finite in step 1, micro-batch 2" in line for line in command.err)
    assert not [line for line in command.err if "evidence" in line.lower()]
    assert not list(tmp_path.rglob("problems"))
