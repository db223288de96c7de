"""The command line: what it refuses before anything is started, what it shows, and `launch`."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import torch
from click.testing import CliRunner

import unisono as unisono_package
from tests.waiting import WAIT_S
from tests.watch.long_run import make_long_run
from tests.workers.conftest import Command, Unisono
from unisono import LaunchError, cli, launch
from unisono.cli import given
from unisono.cli.checkpoints import _export as export
from unisono.cli.given import check_text
from unisono.cluster.machine.headprocess import Service, listen, reserve
from unisono.core.errors import CheckpointError, RunDirectoryError, UsageError
from unisono.core.events import Announcement, Problem, RunEnded, Seconds, StepFinished, WorkerOutput, WorkerTimes
from unisono.core.policy import Policy
from unisono.core.settings import RunSettings, port_range
from unisono.record import rundir
from unisono.record.asides import Asides
from unisono.record.journal import JOURNAL
from unisono.system.capacity import free_workers, parse_workers
from unisono.system.interfaces import Interface
from unisono.system.tasks import TAKEN
from unisono.views.watch.terminal import PlainTerminal
from unisono.views.watch.terminal.plain_lines import Cadence

Script = Callable[..., str]

BEGIN = """
    import sys
    from unisono.cluster.worker import member
    from unisono.core.events import Seconds, StepFinished, WorkerTimes

    me = member.current()
    me.ready(0)
    notice = me.wait_notice(0)
    me.holding(notice.generation)
    rank = [info.worker_id for info in notice.members].index(me.worker_id)
    """


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "missing.py"], "there is no script missing.py"),
        (["run", "."], ". is a directory; give the script in it"),
        (["run"], "which script?"),
        (["run", "-m", "no.such.module"], "there is no module 'no.such.module'"),
        (
            ["run", "here.py", "--workers", "0"],
            "--workers must be a number from 1, 'auto', or A:B with 1 <= A <= B; got '0'",
        ),
        (["run", "here.py", "--workers", "many"], "got 'many'"),
        (["run", "here.py", "--workers", "4:2"], "got '4:2'"),
        (["run", "here.py", "-n", "100000"], "100000 workers are more than 64 for every core ("),
        (["run", "here.py", "--threads", "0"], "at least 1 thread, got --threads 0"),
        (["run", "here.py", "--set", "port=70000"], "got --set port=70000"),
        (["run", "here.py", "--bind", "192.0.2.7"], "cannot listen on 192.0.2.7 port 0"),
        (["run", "here.py", "--bind", ""], "--bind takes an address of this machine"),
        (["run", "here.py", "--bind", "ä..b"], "cannot listen on ä..b port 0: encoding of hostname failed"),
        (
            ["run", "here.py", "--set", "heartbeat=9s"],
            "--set heartbeat=9s is not shorter than --set heartbeat-timeout=5s",
        ),
        (
            ["run", "here.py", "--set", "exchange-timeout=0s"],
            "--set exchange-timeout is a time above 0 with its unit, such as 500ms, 60s, 2m or 1h, got '0s'",
        ),
        (["run", "here.py", "--set", "exchange-timeout=nans"], "--set exchange-timeout is a time above 0"),
        (["run", "here.py", "--set", "kill-after=infs"], "--set kill-after is a time above 0"),
        (["run", "here.py", "--set", "report-late-after=-1s"], "--set report-late-after is a time above 0"),
        (["run", "here.py", "--set", "heartbeat=nans"], "--set heartbeat is a time above 0"),
        (["run", "odd-\udcff.py"], r"the script or one of its arguments is not UTF-8: b'odd-\xff.py'"),
        (["run", "here.py", "--", "\udcff"], r"the script or one of its arguments is not UTF-8: b'\xff'"),
        (["run", "here.py", "--run-dir", "\udcff"], r"the run directory is not UTF-8: b'\xff'"),
        (["run", "here.py", "--run-dir", "here.py"], "here.py is not a directory"),
        (["run", "here.py", "--run-dir", "here.py/run"], "here.py is not a directory"),
        (["run", "here.py", "--max-restarts", "-1"], "max_restarts must be at least 0, got -1"),
        (["run", "--resume", "odd-word"], "odd-word does not say which script it was made with; give the script"),
        (["run", "--resume", "odd-module"], "odd-module does not say which script it was made with; give the script"),
        (["watch", "--once", "missing"], "there is no run directory missing"),
        (["watch", "--once", "empty"], "there is no run in empty: it has no journal, and no head answers"),
        (
            ["watch", "--once", "foreign"],
            "foreign/journal.jsonl is not a journal: it begins with 'dear diary'",
        ),
        (["compare", "broken", "broken"], "line 2 of broken/journal.jsonl is not a line of a journal: '{nonsense'"),
        (["compare", "nothing", "nothing"], "nothing is not a journal"),
        (["scale", ".", "0"], "a run needs at least 1 worker, got 0"),
        (["scale", ".", "-1"], "a run needs at least 1 worker, got -1"),
        (["scale", ".", "2"], "no run is active in ."),
        (["stop", "."], "no run is active in .; a run that has just started can be reached after a few seconds"),
        (["join", "over"], "the run in over is over; `unisono watch --once over` shows how it ended"),
        (
            ["run", "--resume", "odd-word", "--", "--lr", "1"],
            "--lr is not a script, but is given where the script should",
        ),
        (["join", "http://x", "--token-file", "here.py"], "the address of a run is ws://HOST:PORT"),
        (
            ["join", "ws://x:99999", "--token-file", "here.py"],
            "the address of a run is ws://HOST:PORT or wss://HOST:PORT#FINGERPRINT, got 'ws://x:99999'",
        ),
        (["join", "ws://127.0.0.1:1", "--token-file", "here.py", "--wait", "nans"], "--wait is a time"),
        (["join", "ws://127.0.0.1:1", "--token-file", "nothing"], "nothing has no token"),
        (["join", "ws://127.0.0.1:1", "--token-file", "missing"], "there is no --token-file missing"),
        (["join", "ws://127.0.0.1:1", "--token-file", "here.py"], "no head answers at ws://127.0.0.1:1"),
        (["join", "-"], "there is no invitation on standard input"),
        (["stop", "ws://127.0.0.1:1"], "the invitation has no token: ws://127.0.0.1:1 is where the head listens"),
        (["watch", "--once", "wss://x@127.0.0.1:1"], "no head answers at wss://127.0.0.1:1"),
        (
            ["run", "here.py", "--set", "certificate=x.pem"],
            "give --set certificate and --set private-key together",
        ),
        (
            ["run", "here.py", "--set", "certificate=x.pem", "--set", "private-key=x.key"],
            "the certificate x.pem cannot be read",
        ),
        (["run", "here.py", "--set", "advertise=lab:4000"], "--set advertise takes an address or a host name"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "-",
)
def test_bad_input_is_one_line_and_starts_nothing(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    for name in ("here.py", "odd-\udcff.py"):
        (tmp_path / name).write_text("print('ran')")
    for name, arguments_there in (("odd-word", ["here.py", 5]), ("odd-module", ["-m"])):
        (tmp_path / name).mkdir()
        rundir.describe(tmp_path / name, {"command": {"folder": ".", "arguments": arguments_there}})
    (tmp_path / "nothing").touch()
    for name in ("over", "broken", "foreign"):
        (tmp_path / name).mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "over" / JOURNAL).touch()
    (tmp_path / "foreign" / JOURNAL).write_text("dear diary\ntoday it rained\n")
    (tmp_path / "broken" / JOURNAL).write_text('{"line": 0, "kind": "step", "step": 0}\n{nonsense\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["unisono", *arguments])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    shown = capsys.readouterr()
    assert leaving.value.code == 2
    assert words in shown.err
    assert len(shown.err.splitlines()) == 1
    assert shown.out == ""


def test_a_task_of_mpiexec_does_not_ignore_the_machines_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.delenv(TAKEN, raising=False)
    monkeypatch.setattr(sys, "argv", ["unisono", "run", "here.py", "--hosts", "a,b"])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    words = "unisono: --hosts and --set hostfile are for `unisono run` on its own; "
    assert (leaving.value.code, capsys.readouterr().err[: len(words)]) == (2, words)


def test_a_working_directory_that_has_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here.py").touch()
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "argv", ["unisono", "run", str(tmp_path / "here.py"), "--run-dir", "run"])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    words = "unisono: the working directory has been removed; change to another one (cd)\n"
    assert (leaving.value.code, capsys.readouterr().err) == (2, words)


def test_a_name_that_only_the_locale_cannot_read_is_not_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    with pytest.raises(UsageError, match=r"the script cannot be read in this locale.* ascii: .*; set PYTHONUTF8=1"):
        check_text("the script", "l\udcc3\udca4ufe.py")


def test_every_command_is_listed_and_explains_itself() -> None:
    shown = CliRunner().invoke(cli._group, ["--help"]).output
    for name in cli.COMMANDS:
        assert (f"\n  {name} " in shown) is (name not in cli.HIDDEN)
        if name != "compare":
            assert "Usage:" in CliRunner().invoke(cli._group, [name, "--help"]).output


def test_help_loads_nothing_heavy() -> None:
    code = "import sys\nfrom unisono import cli\nsys.argv = ['unisono', '--help']\ntry:\n    cli.main()\nfinally:\n"
    code += "    heavy = {'torch', 'numpy', 'websockets', 'rich', 'asyncio'}\n"
    code += "    print(*heavy & set(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stderr.strip() == ""


def test_the_version_is_shown_without_torch() -> None:
    code = "import sys\nfrom unisono import cli\nsys.argv = ['unisono', '--version']\ntry:\n    cli.main()\nfinally:\n"
    code += "    print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    torch_version = importlib.metadata.version("torch")
    said = f"unisono {unisono_package.__version__} (torch {torch_version}, Python {platform.python_version()})"
    assert done.stdout.splitlines() == [said, "False"]


@pytest.mark.parametrize("unreadable", ["head.json", "token"])
def test_a_run_that_this_user_cannot_reach_is_not_shown_as_stopped(unreadable: str, tmp_path: Path) -> None:
    """A directory in the file's place stands for whatever keeps it from being read."""
    (tmp_path / JOURNAL).write_text('{"kind": "step", "step": 3, "num_steps": 9, "loss": 1.0}\n')
    (tmp_path / "head.json").write_text(json.dumps({"url": "ws://127.0.0.1:1"}))
    (tmp_path / unreadable).unlink(missing_ok=True)
    (tmp_path / unreadable).mkdir()
    with pytest.raises(
        UsageError, match=f"{unreadable} is not a plain file of that directory: it is a pipe, a directory"
    ):
        CliRunner().invoke(
            cli._group, ["watch", "--once", str(tmp_path)], standalone_mode=False, catch_exceptions=False
        )


def test_the_status_of_a_run_whose_journal_has_a_broken_line_is_shown(tmp_path: Path) -> None:
    """With what can be read; and it says what cannot."""
    lines = [json.dumps({"line": n, "kind": "step", "step": n, "num_steps": 9, "loss": 0.5}) for n in range(2)]
    (tmp_path / JOURNAL).write_text("\n".join([*lines, "{nonsense", ""]))
    shown = CliRunner().invoke(cli._group, ["watch", "--once", str(tmp_path)], standalone_mode=False)
    first, second, *rest = shown.output.splitlines()
    assert (first, second) == ("stopped", "2 of 9 steps, loss 0.5000")
    (tmp_path / JOURNAL).write_text(lines[0].replace("0.5", "2.5e-06") + "\n")
    shown = CliRunner().invoke(cli._group, ["watch", "--once", str(tmp_path)], standalone_mode=False)
    assert "1 of 9 steps, loss 2.500e-06" in shown.output
    assert any(line.startswith(f"1 line of {tmp_path / JOURNAL} cannot be read and is left out") for line in rest)


def test_the_status_of_a_run_whose_journal_is_something_else_has_the_rest(tmp_path: Path) -> None:
    """And where only the end of the journal is lost, the run has finished all the same."""
    run = make_long_run(tmp_path / "run", steps=70, workers=2)
    journal = run / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-20])
    shown = CliRunner().invoke(cli._group, ["watch", "--once", str(run)], standalone_mode=False)
    assert shown.output.startswith("finished\n70 of 70 steps"), shown.output
    journal.write_bytes(b"\x7fELF\x00\n" * 99)
    shown = CliRunner().invoke(cli._group, ["watch", "--once", str(run)], standalone_mode=False)
    assert shown.output.startswith("finished\nno step yet"), shown.output
    assert "w1 on node0 came" in shown.output
    assert "is not a journal: it begins with" in shown.output


def test_the_status_of_a_run_that_diverged(tmp_path: Path) -> None:
    """A loss that is no number is a string in the journal."""
    (tmp_path / JOURNAL).write_text('{"kind": "step", "step": 3, "num_steps": 9, "loss": "nan"}\n')
    shown = CliRunner().invoke(cli._group, ["watch", "--once", str(tmp_path)], standalone_mode=False)
    said = f"there is no {tmp_path / 'run.json'}"
    assert shown.output == f"stopped\n4 of 9 steps, loss nan\n{said}\n"


@pytest.mark.parametrize(("other", "code"), [("a", 0), ("b", 1)])
def test_a_comparison_that_nobody_reads_has_its_exit_code(other: str, code: int, tmp_path: Path) -> None:
    for name, loss in (("a", 0.5), ("b", 0.25)):
        (tmp_path / name).write_text(json.dumps({"kind": "step", "step": 0, "loss": loss}) + "\n")
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-P", "-m", "unisono", "compare", "a", other]
    done = subprocess.run(
        command, cwd=tmp_path, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=WAIT_S, check=False
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize(
    ("facts", "loss", "is_offered"),
    [
        ({"command": {}}, 0.25, False),
        ({"command": {"folder": "/", "arguments": ["x.py"]}}, 0.25, True),
        ({"command": {"folder": "/", "arguments": ["x.py"]}}, 0.5, False),
    ],
)
def test_an_explanation_is_offered_where_steps_can_be_computed_again(
    facts: dict[str, Any], loss: float, is_offered: bool, tmp_path: Path
) -> None:
    for name, other in (("a", 0.5), ("the b", loss)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps(facts))
        (tmp_path / name / JOURNAL).write_text(json.dumps({"kind": "step", "step": 0, "loss": other}) + "\n")
    a, b = tmp_path / "a", tmp_path / "the b"
    shown = CliRunner().invoke(cli._group, ["compare", str(a), str(b)], standalone_mode=False)
    assert (f"\nunisono compare {a} '{b}' --explain looks for the cause\n" in shown.output) == is_offered


def test_an_action_that_there_is_not_is_named_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^unknown action 'best'; use list, check or export$"):
        CliRunner().invoke(
            cli._group, ["checkpoints", str(tmp_path), "best"], standalone_mode=False, catch_exceptions=False
        )


def test_an_answer_that_finds_no_room_is_one_line(tmp_path: Path) -> None:
    """And its exit code is not that of an answer: 1 is "different" for compare."""
    (tmp_path / JOURNAL).write_text('{"line": 0, "kind": "end", "ok": true}\n')
    command = [sys.executable, "-P", "-m", "unisono", "compare", str(tmp_path), str(tmp_path)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=WAIT_S, check=False)
    words = "unisono: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, words)


@pytest.mark.parametrize("place", ["nowhere/x.pt", "nowhere/x.safetensors", "here/x.pt", "/proc/x.pt"])
def test_a_file_that_cannot_be_exported_to_is_named(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").touch()
    weights = {"weight": torch.zeros(2)}
    monkeypatch.setattr("unisono.engine.checkpoint.loading.load_weights", lambda place, name: weights)
    with pytest.raises(CheckpointError, match=r"x.* cannot be written: (No such file|Not a)") as caught:
        export(tmp_path, tmp_path / place, None)
    assert len(str(caught.value).splitlines()) == 1


def test_how_many_workers() -> None:
    assert parse_workers("4", 1) == (4, 1, 4, True, 1)
    assert parse_workers("2:8", 1) == (2, 2, 8, False, 1)
    assert parse_workers("auto", 1)[0] == free_workers(1)
    with pytest.raises(UsageError):
        parse_workers("2:", 1)


def test_too_few_open_files_for_the_workers_are_told_before_anything_is_started(
    unisono: Unisono, script: Script
) -> None:
    command = unisono("run", script("print('ran')"), "-n", 24, before=["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"])
    assert command.wait() == 2
    assert command.err == [
        "unisono: 24 workers need about 88 open files in one process, the limit is 64; raise it (ulimit -n 88), or use "
        "fewer"
    ]


def test_an_interface_is_named_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [Interface("eth0", "10.0.0.1"), Interface("ib0", "10.1.0.1"), Interface("eth0", "fd00::1")]
    monkeypatch.setattr(given, "interfaces", lambda: known)
    assert given.address_of("ib0") == "10.1.0.1"
    assert given.address_of("eth0") == "10.0.0.1"
    with pytest.raises(UsageError, match=r"has no address on this machine; there are eth0 \(10.0.0.1\), ib0"):
        given.address_of("eth1")


def test_a_range_of_ports_is_read() -> None:
    assert port_range("47000:47100") == (47000, 47100)
    for wrong in ("47000", "5:4", "0:9", "1:65536", "a:b", ":"):
        with pytest.raises(UsageError, match="a range of ports is A:B"):
            port_range(wrong)


def test_the_head_takes_the_first_free_port_of_a_range() -> None:
    policy = Policy(start=1, maximum=1)
    with listen(Service(policy=policy)) as taken:
        first = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1 port {first}"):
            listen(Service(policy=policy, settings=RunSettings(port=f"{first}:{first}")))
        with listen(Service(policy=policy, settings=RunSettings(port=f"{first}:{first + 50}"))) as listener:
            assert first < listener.getsockname()[1] <= first + 50


def test_a_head_that_may_follow_on_another_machine_has_a_port_of_the_range() -> None:
    with listen(Service(policy=Policy(start=1, maximum=1))) as taken:
        first = taken.getsockname()[1]
        listener, url = reserve(f"ws://127.0.0.1:{first}", (first, first + 50))
        with listener:
            assert first < listener.getsockname()[1] <= first + 50
            assert url == f"ws://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(OSError, match="in use"):
            reserve(f"ws://127.0.0.1:{first}", (first, first))


@pytest.mark.usefixtures("nursery")
def test_an_address_is_named_once(unisono: Unisono, script: Script) -> None:
    name = script("print('ran')")
    for options, words in (
        (["--set", "interface=eth0", "--bind", "10.0.0.1"], "both name an address"),
        (["--set", "interface=nowhere7"], "the network interface nowhere7 has no address on this machine"),
    ):
        command = unisono("run", name, "-n", 1, *options)
        assert command.wait() == 2
        assert words in command.err[-1]


def test_every_gpu_else_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,5")
    assert free_workers(4) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cores = len(os.sched_getaffinity(0))
    assert free_workers(1) == cores
    assert free_workers(1000) == 1


def test_the_script_runs_as_python_would_run_it(unisono: Unisono, script: Script, tmp_path: Path) -> None:
    """Arguments, `__main__`, imports from its folder, environment; output is told apart, streams stay apart."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "beside.py").write_text("WORD = 'found'")
    name = script(
        """
        import json, os, pickle, sys
        import beside
        from unisono.cluster.worker import member

        class Local:
            pass

        assert __name__ == "__main__" and type(pickle.loads(pickle.dumps(Local()))) is Local
        assert os.environ["OMP_NUM_THREADS"] == "2"
        import torch
        assert torch.get_num_threads() == 2
        print(json.dumps([beside.WORD, sys.argv, __file__, member.current().info.host[-2:]]))
        print("to error", file=sys.stderr)
        print("without end", end="")
        """,
        "deep/train.py",
    )
    command = unisono(
        "run", name, "--workers", 2, "--threads", 2, "--set", "simulate-hosts=2", "--", "--lr", "0.1", "-x"
    )
    assert command.wait() == 0, command.err
    for worker, host in (("w0", "-0"), ("w1", "-1")):
        said = json.dumps(["found", [name, "--lr", "0.1", "-x"], str(tmp_path / name), host])
        assert f"[{worker}] {said}" in command.out
        assert f"[{worker}] without end" in command.out
        assert f"[{worker}] to error" in command.err


@pytest.mark.parametrize(("start", "chosen"), [("fork", None), ("spawn", "7")])
def test_sets_of_strings_have_one_order_in_all_runs(
    start: str, chosen: str | None, unisono: Unisono, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user has chosen another one: Python has a new order for each process else."""
    monkeypatch.delenv("UNISONO_NURSERY", raising=False)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if chosen is not None:
        monkeypatch.setenv("PYTHONHASHSEED", chosen)
    code = "print(hash('unisono'))"
    environment = {**os.environ, "PYTHONHASHSEED": chosen or "0"}
    expected = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip()
    command = unisono("run", script(code), "-n", 1, "--set", f"start={start}")
    assert command.wait() == 0, command.err
    assert f"[w0] {expected}" in command.out


def test_sets_of_strings_have_that_order_as_well_where_a_standing_nursery_forks_the_workers(
    unisono: Unisono, script: Script, nursery: None
) -> None:
    """It counts from the start of a process, which is that of the nursery here."""
    code = "print(hash('unisono'))"
    environment = {**os.environ, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED") or "0"}
    expected = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip()
    command = unisono("run", script(code), "-n", 1)
    assert command.wait() == 0, command.err
    assert f"[w0] {expected}" in command.out


@pytest.mark.usefixtures("nursery")
def test_a_module_runs_as_python_would_run_it(unisono: Unisono, script: Script) -> None:
    script("import sys\nprint(__name__, sys.argv[1:])", "tool.py")
    command = unisono("run", "-m", "tool", "--workers", 1, "--", "a", "--b")
    assert command.wait() == 0, command.err
    assert "[w0] __main__ ['a', '--b']" in command.out


@pytest.mark.usefixtures("nursery")
def test_the_traceback_of_the_worker_that_failed_is_the_last_thing(
    unisono: Unisono, script: Script, tmp_path: Path
) -> None:
    name = script(
        BEGIN
        + """
    print("before", file=sys.stderr)
    if rank == 1:
        raise ValueError("the number is 7")
    me.wait_notice(notice.generation)
    """
    )
    command = unisono("run", name, "--workers", 2)
    assert command.wait() == 1
    assert command.err[-1] == "ValueError: the number is 7"
    start = command.err.index("Traceback (most recent call last):")
    assert command.err[start + 1].startswith(f'  File "{tmp_path / name}", line ')
    assert "unisono: failed: worker w1" in command.err[start - 1]
    assert sum("ValueError: the number is 7" in line for line in command.err[start:]) == 1
    assert sum("Traceback" in line for line in [*command.out, *command.err]) == 1


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize(("leave", "code"), [("sys.exit(7)", 7), ("sys.exit('too bad')", 1), ("sys.exit()", 0)])
def test_the_exit_code_is_the_scripts(unisono: Unisono, script: Script, leave: str, code: int) -> None:
    command = unisono("run", script(f"import sys\n{leave}"), "--workers", 1)
    assert command.wait() == code
    assert not any("Traceback" in line for line in command.err)
    assert ("[w0] too bad" in command.err) == ("too bad" in leave)


@pytest.mark.usefixtures("nursery")
def test_steps_are_shown_and_summed_up(unisono: Unisono, script: Script) -> None:
    name = script(
        BEGIN
        + """
    for step in range(3):
        if rank == 0:
            me.happened(StepFinished(
                number=step, step=step, epoch=0, num_steps=3, loss=1 / (step + 1), weight=8.0, samples=8, digest="",
                generation=1, seconds=Seconds(compute=0.5),
                workers={"w0": WorkerTimes(), "w1": WorkerTimes()}, logs={}))
    """
    )
    command = unisono("run", name, "--workers", 2)
    assert command.wait() == 0
    shown = "unisono: 3 of 3 steps  loss 0.3333  16 samples/s  2 workers"
    assert any(line.endswith(shown) for line in command.out)
    assert " unisono: finished: 3 steps in " in command.out[-1]
    assert command.out[-1].endswith(" s on 2 workers")


@pytest.mark.usefixtures("nursery")
def test_what_a_terminal_cannot_show_is_spelled(
    unisono: Unisono, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = script("import os\nos.write(1, b'caf\\xc3\\xa9\\n')\nos.write(2, b'caf\\xc3\\xa9\\n')\n")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    command = unisono("run", name, "-n", 1)
    assert command.wait() == 0
    assert [[line for line in lines if "[w0]" in line] for lines in (command.out, command.err)] == 2 * [
        [r"[w0] caf\xe9"]
    ]


@pytest.mark.usefixtures("nursery")
def test_a_terminal_gets_a_progress_line(script: Script, tmp_path: Path) -> None:
    name = script(
        BEGIN
        + """
    print("a line of its own")
    me.happened(StepFinished(
        number=0, step=0, epoch=0, num_steps=1, loss=0.5, weight=8.0, samples=8, digest="", generation=1,
        seconds=Seconds(compute=0.5), workers={"w0": WorkerTimes()}, logs={}))
    """
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "unisono", "run", name, "--workers", "1"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    shown = bytearray()
    try:
        while data := os.read(ours, 4096):
            shown += data
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(WAIT_S) == 0
    text = shown.decode()
    assert "a line of its own" in text
    assert "1 of 1 step " in text
    assert "loss 0.5000" in text
    assert "finished: 1 step in" in text


def finished(step: int, balance: str = "") -> StepFinished:
    return StepFinished(
        step=step,
        epoch=0,
        loss=2.0,
        weight=10.0,
        samples=10,
        digest="",
        num_steps=100,
        generation=1,
        seconds=Seconds(compute=0.75, other=0.25),
        workers={f"w{number}": WorkerTimes() for number in range(4)},
        logs={},
        balance=balance,
    )


MORNING: Final = 1.7e9
"""A time of day."""


def at(seconds: float = 0.0) -> str:
    """How a line of that time begins."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(MORNING + seconds))


def test_plain_lines_have_the_time_of_day_come_rarer_and_rarer_and_the_last_always() -> None:
    now = [0.0]
    out, err = io.StringIO(), io.StringIO()
    screen = PlainTerminal(out, err, clock=lambda: now[0], wall=lambda: MORNING + now[0])
    for step in range(10):
        screen.emit(finished(step))
        now[0] += 0.5
    screen.emit(RunEnded(ok=True, reason="finished", digests={}))
    screen.close()
    lines = out.getvalue().splitlines()
    assert [line.split()[3] for line in lines[:-1]] == ["1", "3", "7", "10"]
    assert lines[0] == f"{at()} unisono: 1 of 100 steps  loss 2.0000  10 samples/s  1:39 left  4 workers"
    assert lines[-1] == f"{at(5)} unisono: finished: 10 steps in 5.0 s on 4 workers"


def test_the_evidence_of_a_problem_is_named_after_the_sentence_that_says_what_happened() -> None:
    out, err = io.StringIO(), io.StringIO()
    screen = PlainTerminal(out, err, clock=lambda: 0.0, wall=lambda: MORNING)
    screen.emit(Problem(problem="crash", text="worker w1 was killed", evidence="problems/a.txt"))
    screen.emit(Announcement(text="worker w1 was killed; generation 2 with 1 worker"))
    screen.emit(Problem(problem="crash", text="worker w2 was killed", evidence="problems/b.txt"))
    screen.emit(RunEnded(ok=False, reason="worker w2 was killed", digests={}))
    screen.close()
    said = [line.partition("unisono: ")[2] for line in [*out.getvalue().splitlines(), *err.getvalue().splitlines()]]
    assert said == [
        "worker w1 was killed; generation 2 with 1 worker",
        "evidence (stacks, memory, last events): problems/a.txt in the run's directory",
        "evidence (stacks, memory, last events): problems/b.txt in the run's directory",
        "failed: worker w2 was killed",
    ]


def test_rounds_of_local_steps_are_called_so() -> None:
    out = io.StringIO()
    screen = PlainTerminal(out, io.StringIO(), clock=lambda: 0.0, wall=lambda: MORNING)
    screen.emit(msgspec.structs.replace(finished(0), unit="round"))
    screen.emit(RunEnded(ok=True, reason="finished", digests={}))
    screen.close()
    first, last = out.getvalue().splitlines()
    assert " unisono: 1 of 100 rounds  loss" in first
    assert last.endswith(" unisono: finished: 1 round in 0.00 s on 4 workers")


def test_a_step_that_was_computed_before_the_run_was_resumed_says_nothing_of_workers() -> None:
    """With a delay, the first gradients come from the checkpoint."""
    out = io.StringIO()
    screen = PlainTerminal(out, io.StringIO(), clock=lambda: 0.0, wall=lambda: MORNING)
    screen.emit(msgspec.structs.replace(finished(0), workers={}))
    screen.emit(RunEnded(ok=True, reason="finished", digests={}))
    screen.close()
    assert "worker" not in out.getvalue()


def test_a_small_loss_keeps_its_digits() -> None:
    out = io.StringIO()
    screen = PlainTerminal(out, io.StringIO())
    screen.emit(msgspec.structs.replace(finished(0), loss=1.589e-5))
    screen.close()
    assert "loss 1.589e-05  " in out.getvalue()


def test_what_workers_print_is_passed_on_as_it_is() -> None:
    out = io.StringIO()
    screen = PlainTerminal(out, io.StringIO())
    screen.emit(WorkerOutput(source="w1", text="epoch 3: 0.25", is_error=False))
    assert out.getvalue() == "[w1] epoch 3: 0.25\n"


def test_a_day_has_a_few_hundred_lines() -> None:
    cadence, lines = Cadence(), []
    for half in range(2 * 86_400):
        if cadence.is_due(half / 2):
            cadence.said(half / 2)
            lines.append(half / 2)
    assert len(lines) < 200
    assert lines[:5] == [0.0, 1.0, 3.0, 5.0, 10.0]
    assert lines[-1] - lines[-2] == 600.0


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("finished", "finished after 0.00 s, without a step"),
        (
            "all 2 processes have ended with exit code 0",
            "all 2 processes have ended with exit code 0 after 0.00 s",
        ),
    ],
)
def test_the_last_line_of_a_run_without_steps(reason: str, line: str) -> None:
    out = io.StringIO()
    screen = PlainTerminal(out, io.StringIO(), clock=lambda: 0.0, wall=lambda: MORNING)
    screen.emit(RunEnded(ok=True, reason=reason, digests={}))
    screen.close()
    assert out.getvalue().splitlines() == [f"{at()} unisono: {line}"]


def test_news_of_the_balance_come_once_in_a_minute() -> None:
    """The journal has all of them; in a log, steps of milliseconds would show nothing else."""
    err, asides = io.StringIO(), Asides()
    screen = PlainTerminal(io.StringIO(), err, clock=lambda: 0.0, wall=lambda: MORNING)
    for number in range(130):
        step = msgspec.structs.replace(finished(number, balance=f"w0 gets {number} of 8 now"), time=100 + 0.6 * number)
        for event in (step, *asides.of(step)):
            screen.emit(event)
    assert err.getvalue().splitlines() == [f"{at()} unisono: w0 gets {step} of 8 now" for step in (0, 101)]


@pytest.mark.parametrize(
    ("told", "last", "steps"),
    [([0, 1, 1, 2], 2, 3), ([0, 1, 3], 3, 4), ([0, 1], 3, 4), ([100, 101], 101, 2)],
    ids=["one told twice", "one not told", "the last not told", "resumed"],
)
def test_the_steps_of_the_last_line_are_counted_by_their_numbers(told: list[int], last: int, steps: int) -> None:
    """Where a worker is killed, a step may be told twice, or not at all."""
    out = io.StringIO()
    screen = PlainTerminal(out, io.StringIO(), clock=lambda: 0.0, wall=lambda: MORNING)
    for step in told:
        screen.emit(finished(step))
    screen.emit(RunEnded(ok=True, reason="finished", digests={}, step=last))
    screen.close()
    assert out.getvalue().splitlines()[-1].endswith(f" unisono: finished: {steps} steps in 0.00 s on 4 workers")


@pytest.mark.usefixtures("nursery")
def test_launch_returns_what_rank_0_returns(capsys: pytest.CaptureFixture[str]) -> None:
    def main(number: int) -> tuple[int, str]:
        from unisono.cluster.worker import member

        me = member.current()
        assert me is not None
        print("hello")
        return number * 6, me.worker_id

    assert launch(main, 7, workers=2) == (42, "w0")
    shown = capsys.readouterr().out
    assert "[w0] hello" in shown
    assert "[w1] hello" in shown


@pytest.mark.usefixtures("nursery")
def test_launch_raises_with_the_workers_traceback() -> None:
    def main() -> None:
        raise KeyError("gone")

    with pytest.raises(LaunchError, match="KeyError: 'gone'") as caught:
        launch(main, workers=1)
    assert "in main" in caught.value.traceback
    assert "raise KeyError" in caught.value.traceback


@pytest.mark.usefixtures("nursery")
def test_a_worker_that_launch_has_to_start_again_finds_the_function() -> None:
    def main() -> list[str]:
        import os
        import signal

        from unisono.cluster.worker import member

        me = member.current()
        assert me is not None
        if me.worker_id == "w1":
            os.kill(os.getpid(), signal.SIGKILL)
        me.ready(0)
        return [info.worker_id for info in me.wait_notice(0).members]

    assert launch(main, workers=2) == ["w0", "w2"]


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_launch_that_is_killed(number: int, script: Script, tmp_path: Path, mark: str) -> None:
    """Not even its function on the disk (the fixture `mark` looks for it, and for the processes)."""
    name = script(
        """
        import signal, unisono

        def main():
            print("here", flush=True)
            signal.pause()

        unisono.launch(main, workers=1)
        """
    )
    command = Command([sys.executable, name], tmp_path, mark)
    try:
        command.line("[w0] here")
        command.process.send_signal(number)
        assert command.wait() == -number
    finally:
        command.end()


@pytest.mark.usefixtures("nursery")
def test_a_run_keeps_its_settings_and_where_each_comes_from(unisono: Unisono, tmp_path: Path) -> None:
    """Those of the file beside the script too; --dry-run prints the same, and starts nothing."""
    (tmp_path / "train.py").write_text(
        "import torch, unisono\n"
        "with unisono.Run('run') as run:\n"
        "    model = torch.nn.Linear(1, 1)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "    run.track(model=model, optimizer=optimizer)\n"
        "    for step in run.steps([0.0, 1.0], batch_size=2, microbatches=2):\n"
        "        for batch in step:\n"
        "            step.backward(model(batch.float().reshape(-1, 1)).sum(), weight=len(batch))\n"
        "        optimizer.step()\n"
    )
    (tmp_path / "unisono.toml").write_text('workers = 1\nheartbeat = "400ms"\n')
    words = ("run", "train.py", "--set", "kill-after=2m")
    shown = unisono(*words, "--dry-run")
    assert shown.wait() == 0, shown.err
    assert "heartbeat = 0.4s  (unisono.toml)" in shown.out
    assert "kill-after = 120s  (command line)" in shown.out
    assert not (tmp_path / "run").exists()
    assert unisono(*words).wait() == 0
    known = json.loads((tmp_path / "run" / "run.json").read_text())["command"]["settings"]
    assert known["workers"] == ["1", "unisono.toml"]
    assert known["kill-after"] == ["120s", "command line"]
    assert known["exchange"] == ["auto", "default"]


def test_launch_reads_the_file_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "unisono.toml").write_text("wokers = 2\n")
    (tmp_path / "train.py").write_text("import unisono\nunisono.launch(print)\n")
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert "unisono.toml: there is no setting wokers; did you mean workers?" in done.stderr + done.stdout


def test_launch_names_what_it_was_given_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any process is started."""

    def main(number: int) -> None: ...

    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(
        LaunchError, match=r"^launch has no option foo=; there are advertise, allow_.*, bind, .*exchange_timeout\b"
    ):
        launch(main, 1, foo=3)
    with pytest.raises(LaunchError, match=r"^launch has no option heart_beat=; did you mean heartbeat=.$"):
        launch(main, 1, heart_beat=3)
    with pytest.raises(LaunchError, match=r"^--set kill-after is a time above 0 with its unit"):
        launch(main, 1, kill_after="3")
    with pytest.raises(LaunchError, match="no option callable="):
        launch(main, 1, callable="x")
    with pytest.raises(LaunchError, match=r"main with the 2 arguments given: too many positional arguments$"):
        launch(main, 1, 2)
    with pytest.raises(LaunchError, match="launch takes a function, got 3"):
        launch(3)  # type: ignore[arg-type]


def test_launch_refuses_what_the_command_refuses() -> None:
    with pytest.raises(LaunchError, match="--workers must be a number from 1"):
        launch(print, workers=0)


@pytest.mark.usefixtures("nursery")
def test_the_traceback_of_a_wrong_use_ends_at_the_line_to_change(unisono: Unisono, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import unisono\nwith unisono.Run() as run:\n    run.track(model=3)\n")
    command = unisono("run", script, "-n", 1)
    assert command.wait() == 1
    shown = "\n".join(command.err)
    assert "UsageError: run.track(model=...) got a int without state_dict()" in shown
    assert "run.track(model=3)" in shown
    assert "tracked.py" not in shown


@pytest.mark.parametrize(
    ("makes", "options", "is_certain"),
    [
        ("unisono.Run('used', seed=3)", (), True),
        ("Run(directory='used')", (), True),
        ("Run('used', overwrite=False, resume=None)", (), True),
        ("Run('used', overwrite=len(sys.argv) > 1)", (), False),
        ("Run(sys.argv[1])", ("--run-dir", "used"), True),
        ("Run('used')", ("--overwrite",), False),
        ("Run('used')", ("--run-dir", "new"), False),
        ("Run('used', resume='auto')", (), False),
        ("Run('used', **more)", ("--run-dir", "used"), False),
        ("Run(sys.argv[1])", (), False),
        ("0", ("--run-dir", "used"), False),
    ],
)
def test_a_used_directory_is_refused_before_anything_is_started(
    makes: str, options: tuple[str, ...], is_certain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Started(Exception):
        pass

    def start(*_: object, **__: object) -> None:
        raise Started

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("unisono.cluster.launchers.choose", start)
    Path("used").mkdir()
    rundir.claim(Path("used"), "r0", overwrite=False)
    Path("train.py").write_text(f"import sys, unisono\nrun = {makes}\n")
    command = ["run", "train.py", *options]

    def run() -> None:
        CliRunner().invoke(cli._group, command, standalone_mode=False, catch_exceptions=False)

    with pytest.raises(Started):
        run()  # the run that the directory holds has done nothing that could be lost
    Path("used", JOURNAL).write_text('{"line": 0, "kind": "step", "step": 0}\n')
    with pytest.raises(RunDirectoryError if is_certain else Started, match="--overwrite" if is_certain else None):
        run()


@pytest.mark.usefixtures("nursery")
def test_a_used_directory_is_refused_where_the_run_is_made(unisono: Unisono, tmp_path: Path) -> None:
    """And not by the first step, after all data were made: where the text of the script does not say what it does."""
    script = tmp_path / "train.py"
    script.write_text("import sys, unisono\nunisono.Run('used', overwrite=len(sys.argv) > 1)\nprint('makes data')\n")
    rundir.make(tmp_path / "used")
    rundir.claim(tmp_path / "used", "r0", overwrite=False)
    (tmp_path / "used" / JOURNAL).write_text('{"line": 0, "kind": "step", "step": 0}\n')
    command = unisono("run", script, "--workers", 2)
    assert command.wait() == 1
    command.line("holds another run (r0); choose another directory, or add --overwrite")
    assert "[w0] makes data" not in command.out


@pytest.mark.parametrize("options", [[], ["--once"]], ids=str)
def test_a_folder_of_runs_is_listed(options: list[str], tmp_path: Path) -> None:
    for name, line in {
        "a": {"line": 0, "kind": "step", "step": 2, "num_steps": 9, "loss": 0.5},
        "second": {"line": 0, "kind": "step", "step": 4, "num_steps": 0, "loss": "nan"},
        "third": None,
    }.items():
        (tmp_path / name).mkdir()
        rundir.claim(tmp_path / name, name, overwrite=False)
        if line is not None:
            (tmp_path / name / JOURNAL).write_text(json.dumps(line) + "\n")
    (tmp_path / "data").mkdir()
    shown = CliRunner().invoke(
        cli._group, ["watch", str(tmp_path), *options], standalone_mode=False, catch_exceptions=False
    )
    columns = len(str(tmp_path / "second"))
    assert shown.output.splitlines() == [
        f"{tmp_path / 'a'!s:<{columns}}  stopped   3 of 9 steps, loss 0.5000",
        f"{tmp_path / 'second'}  stopped   5 steps, loss nan",
        f"{tmp_path / 'third'!s:<{columns}}  unknown   no step yet",
    ]
