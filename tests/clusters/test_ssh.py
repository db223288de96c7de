"""`unisono run --hosts`: real machines as far as ssh can tell, each with an sshd of its own."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clusters.sshd import APART, Sshd, SshMachine, children, run_sshd
from tests.waiting import WAIT_S
from tests.workers import small_training
from tests.workers.conftest import Command, Unisono, marked, served_by, wait_until_gone
from tests.workers.gates import Gates
from unisono.cluster.launchers.way import VERSION
from unisono.record.journal import compare
from unisono.record.journal.times import by_step
from unisono.system import fingerprint
from unisono.testing import run_workers

SCRIPT = Path(small_training.__file__)
STEPS = 6
STRAY = 'trap "" TERM HUP; exec sleep 1000000'
WITH_STRAYS = f"""
    import runpy, subprocess
    subprocess.Popen(["sh", "-c", {STRAY!r}], start_new_session=True)
    runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
    """


CHATTY = 'ForceCommand echo "Welcome to m2!"; eval "$SSH_ORIGINAL_COMMAND"'
"""A machine whose shell has something to say first."""


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with run_sshd(tmp_path_factory.mktemp("sshd"), "m1") as found:
        found.start("m2", more=[CHATTY])
        yield found


@pytest.fixture
def island(sshd: Sshd, tmp_path: Path) -> Iterator[SshMachine]:
    """A machine that can die, and that does not see the folder `hidden` of the test."""
    if os.getuid() != 0:
        pytest.skip("mount is not permitted: it takes root")
    if subprocess.run([*APART, "true"], capture_output=True, timeout=WAIT_S, check=False).returncode:
        pytest.skip("mount is not permitted: machines with namespaces of their own cannot be made")
    hidden, name = tmp_path / "hidden", f"island{len(sshd.machines)}"
    hidden.mkdir()
    prepare = f"mount -t tmpfs none {hidden}"
    machine = sshd.start(name, apart=True, prepare=prepare, environment=f"XDG_CACHE_HOME={tmp_path / 'cache'}")
    yield machine
    machine.kill()


class Wire:
    """A network of its own for the command, with a cable to this machine."""

    def __init__(self) -> None:
        self.name, self.link = f"unisono-ssh-{os.getpid()}", f"us{os.getpid()}"
        net = f"10.214.{os.getpid() % 250}"
        self.own, self.far = f"{net}.1", f"{net}.2"

    def lay(self) -> None:
        do("ip", "netns", "add", self.name)
        do("ip", "link", "add", self.link, "type", "veth", "peer", "name", "far", "netns", self.name)
        do("ip", "address", "add", f"{self.own}/24", "dev", self.link)
        do("ip", "link", "set", self.link, "up")
        for words in (f"address add {self.far}/24 dev far", "link set far up", "link set lo up"):
            do("ip", "-n", self.name, *words.split())

    def cut(self) -> None:
        do("ip", "-n", self.name, "link", "set", "far", "down")  # as if the machine had no power any more

    def mend(self) -> None:
        do("ip", "-n", self.name, "link", "set", "far", "up")

    def remove(self) -> None:
        subprocess.run(["ip", "link", "delete", self.link], capture_output=True, timeout=WAIT_S, check=False)
        subprocess.run(["ip", "netns", "delete", self.name], capture_output=True, timeout=WAIT_S, check=False)


def do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=WAIT_S)


@pytest.fixture
def wire() -> Iterator[Wire]:
    found = Wire()
    try:
        found.lay()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("network namespaces are not permitted here")
    try:
        yield found
    finally:
        found.remove()


@pytest.fixture(scope="module")
def calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training by one process."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    with served_by(standing_nursery):
        done = run_workers(SCRIPT, 1, directory=folder, arguments=["--steps", str(STEPS)], timeout_s=WAIT_S)
    assert done.exit_code == 0, done.output
    return folder


def is_the_same(calm: Path, run: Path) -> bool:
    words = compare(calm, run)
    assert words.startswith(f"identical: {STEPS} steps"), words
    return True


def num_workers(run: Path) -> list[int]:
    return [len(workers) for workers in by_step(run).values()]


def root(machine: SshMachine) -> Path:
    """The files that a machine apart sees."""
    return Path(f"/proc/{children(machine.process.pid)[0]}/root")


def process_of(machine: SshMachine, words: str) -> int:
    """The one process there whose command has these words."""
    found = [pid for pid, command in machine.processes().items() if words in command]
    assert len(found) == 1, (machine.name, machine.processes())
    return found[0]


def client_of(command: Command, host: str) -> int:
    """The ssh of the command to this host."""
    for pid in map(int, Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        if words[0] == b"ssh" and host.encode() in words:
            return pid
    raise AssertionError("the command has no such child")


def wait_until_empty(machine: SshMachine) -> None:
    """Wait until nothing of a run is left on a machine."""
    deadline = time.monotonic() + WAIT_S
    while (left := machine.processes()) and time.monotonic() < deadline:
        for pid in left:
            wait_until_gone({pid}, deadline)
    assert not left


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize(("hosts", "total"), [("m1,m2", 2), ("localhost:1,m1:1,m2:1", 3)])
def test_a_run_by_ssh_gives_the_bits_of_one_process(
    hosts: str, total: int, sshd: Sshd, unisono: Unisono, calm: Path, tmp_path: Path
) -> None:
    options = ("--hosts", hosts, "--set", f"ssh={sshd.command}", "--workers", total)
    command = unisono("run", SCRIPT, "--run-dir", tmp_path / "run", *options, "--", "--steps", STEPS)
    assert command.wait() == 0, command.err
    assert is_the_same(calm, tmp_path / "run")
    assert num_workers(tmp_path / "run")[-1] == total
    assert "[m2] Welcome to m2!" in command.out
    assert not any("is not on this machine" in line for line in command.err), "both machines share this one's disk"


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def status(unisono: Unisono, run: Path) -> list[str]:
    asked = unisono("watch", "--once", run)
    assert asked.wait() == 0, asked.err
    return asked.out


ENDS = {
    "agent-killed": lambda command, machine: end(process_of(machine, "unisono join")),
    "holder-killed": lambda command, machine: end(process_of(machine, "unisono.cluster.machine.holder")),
}
LOSSES = {
    "client-killed": lambda command, machine: end(client_of(command, machine.name)),
    "link-cut": lambda command, machine: freeze(client_of(command, machine.name)),
    "session-killed": lambda command, machine: end(machine.sessions()[0]),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_lost_machine_comes_back_and_nothing_stays_of_what_ran_there(
    how: str, sshd: Sshd, unisono: Unisono, script: Callable[[str], str], calm: Path, tmp_path: Path
) -> None:
    """Not even a process stays that the script has put into a session of its own, and that ignores SIGTERM. The run
    goes on with the rest meanwhile, and has all its workers in the end.
    """
    machine = sshd.start(how)
    with Gates(tmp_path / "gates", (2, 4)) as gates:
        hosts = ("--hosts", f"m1:1,{how}:1", "--set", f"ssh={sshd.command}")
        arguments = ("--", "--steps", STEPS, "--gates", gates.folder)
        command = unisono("run", script(WITH_STRAYS), "--run-dir", tmp_path / "run", *hosts, *arguments)
        gates.wait(2, workers=2)
        before = machine.processes()
        assert any("sleep 1000000" in words for words in before.values())
        ENDS[how](command, machine)
        alone = command.generation(" with 1 worker")
        wait_until_gone(set(before), time.monotonic() + WAIT_S)
        gates.open(2, alone)
        gates.wait(4)
        command.line(f"the agent of {how} ")
        assert f"machine {how}: its agent has ended" in "\n".join(status(unisono, tmp_path / "run"))
        command.line(f"{how} is lost: restarting its agent after 5 s")
        gates.open(4, command.generation("w2 joins"))
    assert command.wait() == 0, command.err
    assert is_the_same(calm, tmp_path / "run")
    assert num_workers(tmp_path / "run")[-1] == 2
    for name in ("m1", how):
        wait_until_empty(sshd.machines[name])


def test_machines_go_on_without_ssh_and_nothing_stays_on_them(
    sshd: Sshd, unisono: Unisono, script: Callable[[str], str], calm: Path, tmp_path: Path
) -> None:
    """A machine for each way in which the connection to it may end, all in one run: the head can still be reached.
    At the end of the run not even a process stays that the script has put into a session of its own, and that ignores
    SIGTERM.
    """
    machines = [sshd.start(name) for name in LOSSES]
    with Gates(tmp_path / "gates", (2, 4)) as gates:
        hosts = ("--hosts", ",".join(f"{name}:1" for name in ("m1", *LOSSES)), "--set", f"ssh={sshd.command}")
        arguments = ("--", "--steps", STEPS, "--gates", gates.folder)
        command = unisono("run", script(WITH_STRAYS), "--run-dir", tmp_path / "run", *hosts, *arguments)
        gates.wait(2, workers=len(LOSSES) + 1)
        frozen = client_of(command, "link-cut")
        for machine in machines:
            assert any("sleep 1000000" in words for words in machine.processes().values())
            LOSSES[machine.name](command, machine)
        for machine in machines:
            wait_until_alone(machine)
        end(frozen)
        gates.open(2)
        gates.wait(4, workers=len(LOSSES) + 1)
        gates.open(4)
    assert command.wait() == 0, command.err
    assert not [line for line in command.err if "started again" in line], "their agents have reached the head"
    for machine in (*machines, sshd.machines["m1"]):
        wait_until_empty(machine)
    assert is_the_same(calm, tmp_path / "run")


def wait_until_alone(machine: SshMachine) -> None:
    """Wait until the agent of a machine goes on without the connection that has started it."""
    agent = process_of(machine, "unisono join")
    deadline = time.monotonic() + WAIT_S
    while os.readlink(f"/proc/{agent}/fd/0") != os.devnull:
        assert time.monotonic() < deadline
        select.select([], [], [], 0.05)


@pytest.mark.parametrize("is_reached", [True, False], ids=["ssh", "ssh lost"])
def test_nothing_stays_where_the_command_is_killed(
    is_reached: bool, sshd: Sshd, unisono: Unisono, script: Callable[[str], str], tmp_path: Path, mark: str
) -> None:
    """No process, no shared memory, no file (the fixture `mark` looks for these)."""
    shared = set(os.listdir("/dev/shm"))
    with Gates(tmp_path / "gates", (2,)) as gates:
        options = ("--hosts", "m1:1,m2:1", "--set", f"ssh={sshd.command}")
        arguments = ("--", "--steps", STEPS, "--gates", gates.folder)
        command = unisono("run", script(WITH_STRAYS), "--run-dir", tmp_path / "run", *options, *arguments)
        gates.wait(2, workers=2)
        if not is_reached:
            end(sshd.machines["m1"].sessions()[0])
            wait_until_alone(sshd.machines["m1"])
        command.process.kill()
        for machine in sshd.machines.values():
            wait_until_empty(machine)
    wait_until_gone(set(marked(mark)), time.monotonic() + WAIT_S)
    assert marked(mark) == {}
    assert {name for name in set(os.listdir("/dev/shm")) - shared if "unisono" in name} == set()


def test_a_machine_that_dies_in_the_middle_costs_no_bit(
    sshd: Sshd, island: SshMachine, unisono: Unisono, calm: Path, tmp_path: Path
) -> None:
    with Gates(tmp_path / "gates", (2,)) as gates:
        options = ("--hosts", f"m1:1,{island.name}:2", "--set", f"ssh={sshd.command}")
        arguments = ("--", "--steps", STEPS, "--gates", gates.folder)
        command = unisono("run", SCRIPT, "--run-dir", tmp_path / "run", *options, *arguments)
        gates.wait(2, workers=3)
        island.kill()
        generation = command.generation("with 1 worker")
        command.line(f"the agent of {island.name} is out of reach over ssh")
        gates.open(2, generation)
    assert command.wait() == 0, command.err
    assert is_the_same(calm, tmp_path / "run")


def test_machines_whose_command_is_out_of_reach_are_left_alone_until_they_have_ended(
    sshd: Sshd, wire: Wire, unisono: Unisono, calm: Path, tmp_path: Path
) -> None:
    """The machine of the command is lost with its connections. What the others do then is the same as after
    `unisono join`: the run goes on to its end under a head of their own. Nothing is left then.
    """
    machine = sshd.start("reached", more=[f"ListenAddress {wire.own}"])
    reach = f"{sshd.command} -o HostName={wire.own}"
    with Gates(tmp_path / "gates", (2,)) as gates:
        options = ("--hosts", "reached:2", "--set", f"ssh={reach}", "--set", "head-away=8s")
        arguments = ("--", "--steps", STEPS, "--gates", gates.folder)
        inside = ("ip", "netns", "exec", wire.name)
        command = unisono("run", SCRIPT, "--run-dir", tmp_path / "run", *options, *arguments, before=inside)
        gates.wait(2, workers=2)
        session = os.pidfd_open(machine.sessions()[0])
        wire.cut()
        assert select.select([session], [], [], WAIT_S)[0], "sshd has noticed"
        os.close(session)
        process_of(machine, "unisono join")
    command.process.kill()
    wait_until_empty(machine)
    assert is_the_same(calm, tmp_path / "run")


def test_a_cut_off_command_and_its_machine_find_each_other_again(
    sshd: Sshd, wire: Wire, unisono: Unisono, calm: Path, tmp_path: Path
) -> None:
    """The machine's ssh is gone for good; its agent, which reaches the head again, goes on."""
    machine = sshd.start("met", more=[f"ListenAddress {wire.own}"])
    reach = f"{sshd.command} -o HostName={wire.own}"
    with Gates(tmp_path / "gates", (2, 4)) as gates:
        options = ("--hosts", "localhost:1,met:1", "--set", f"ssh={reach}", "--set", "head-away=2s")
        arguments = ("--", "--steps", STEPS, "--gates", gates.folder)
        inside = ("ip", "netns", "exec", wire.name)
        command = unisono("run", SCRIPT, "--run-dir", tmp_path / "run", *options, *arguments, before=inside)
        gates.wait(2, workers=2)
        agent, session = process_of(machine, "unisono join"), os.pidfd_open(machine.sessions()[0])
        wire.cut()
        alone = command.generation("with 1 worker")
        assert select.select([session], [], [], WAIT_S)[0], "sshd has noticed"
        os.close(session)
        wait_until_alone(machine)
        wire.mend()
        command.line("is back")
        gates.open(2, alone)
        gates.wait(4)
        gates.open(4, command.generation(" joins; "))
        assert process_of(machine, "unisono join") == agent
    assert command.wait() == 0, command.err
    wait_until_empty(machine)
    assert is_the_same(calm, tmp_path / "run")
    assert num_workers(tmp_path / "run")[-1] == 2


def test_a_folder_is_sent_to_the_machines_that_lack_it(
    sshd: Sshd, island: SshMachine, unisono: Unisono, calm: Path, tmp_path: Path
) -> None:
    """The second time it is there already."""
    project = tmp_path / "hidden"
    (project / "train.py").write_text(f"import helper\nhelper.train({str(SCRIPT)!r})\n")
    (project / "helper.py").write_text("import runpy\ndef train(path): runpy.run_path(path, run_name='__main__')\n")
    (project / ".gitignore").write_text("*.secret\n")
    (project / "own.secret").write_text("stays here")
    options = ("--hosts", f"m1:1,{island.name}:1", "--set", f"ssh={sshd.command}")

    def train(name: str, *more: str) -> Command:
        words = ("run", "train.py", "--run-dir", tmp_path / name, *options, *more, "--", "--steps", STEPS)
        return unisono(*words, before=("env", "-C", str(project)))

    refused = train("no")
    assert refused.wait() == 2
    assert refused.err[0] == "unisono: 1 of 2 hosts is not ready, so nothing was started:"
    assert refused.err[1].startswith(f"  {island.name}: train.py is not in {project} there; copy the project to it, or")
    other = root(island) / project.relative_to("/") / "train.py"
    other.write_text("# edited\n")
    refused = train("no")
    assert refused.wait() == 2
    assert f"  {island.name}: train.py differs there (checksum " in refused.err[1]
    for name in ("first", "second"):
        command = train(name, "--ship")
        assert command.wait() == 0, command.err
        assert is_the_same(calm, tmp_path / name)
        assert num_workers(tmp_path / name)[-1] == 2
        copies = list((tmp_path / "cache" / "unisono" / "shipped").iterdir())
        assert len(copies) == 1
        sent = {path.name for path in (copies[0] / "folder").iterdir()} - {"__pycache__"}
        assert sent == {".gitignore", "helper.py", "train.py"}


def test_the_user_is_told_where_the_runs_directory_is_if_it_is_not_here(
    sshd: Sshd, island: SshMachine, unisono: Unisono, calm: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "hidden" / "run"
    options = ("--hosts", f"{island.name}:1", "--set", f"ssh={sshd.command}", "--run-dir", directory)
    command = unisono("run", SCRIPT, *options, "--", "--steps", STEPS)
    assert command.wait() == 0, command.err
    where = command.line(f"the run's directory {directory} is not on this machine")
    assert f"journal and checkpoints are on {island.name}-" in where
    assert is_the_same(calm, root(island) / directory.relative_to("/"))


def test_every_machine_that_is_not_ready_is_named_before_anything_is_started(
    sshd: Sshd, unisono: Unisono, script: Callable[[str], str]
) -> None:
    stranger = sshd.start("stranger", more=["AuthorizedKeysFile /dev/null"])
    with sshd.config.open("a") as file:
        file.write("\nHost closed\n    Port 9\n")
    name = script("raise SystemExit(3)")
    command = unisono("run", name, "--hosts", "m1,closed,stranger", "--set", f"ssh={sshd.command}")
    assert command.wait() == 2
    assert command.err[0] == "unisono: 2 of 3 hosts are not ready, so nothing was started:"
    assert command.err[1].startswith("  closed: it cannot be reached (ssh: connect to host 127.0.0.1 port 9: ")
    assert "  stranger: it refuses the key of this user (" in command.err[2]
    assert "`ssh-copy-id stranger`" in command.err[2]
    assert not command.out
    stranger.kill()
    nowhere = unisono(
        "run", name, "--hosts", "m1", "--set", f"ssh={sshd.command}", "--set", "remote-python=/nowhere/python"
    )
    assert nowhere.wait() == 2
    assert "  m1: there is no /nowhere/python there" in nowhere.err[1]
    python = unisono("run", name, "--hosts", "m1", "--set", f"ssh={sshd.command}", "--set", "remote-python=/bin/sh")
    assert python.wait() == 2
    assert python.err[1].startswith("  m1: /bin/sh there ended with exit code 2: ")
    assert not sshd.machines["m1"].processes()


def test_with_strict_a_machine_that_may_compute_other_bits_is_refused_before_the_start(
    sshd: Sshd, unisono: Unisono, script: Callable[[str], str], tmp_path: Path
) -> None:
    """Compared with this machine, where it takes part, else with the first one: not with whoever arrives first."""
    sshd.start("odd", more=["SetEnv ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE"])
    name = script("raise SystemExit(3)")
    for hosts, where in (("localhost:1,odd:1,m1:1", "on this machine"), ("m1:1,odd:1", "on m1")):
        command = unisono("run", name, "--hosts", hosts, "--set", f"ssh={sshd.command}", "--strict")
        assert command.wait() == 2
        assert command.err[0].endswith(" hosts is not ready, so nothing was started:")
        assert command.err[1:] == [
            "  odd: it may compute different bits (--strict): ATEN_CPU_CAPABILITY is default there, and not set "
            f"{where}; MKL_CBWR is COMPATIBLE there, and not set {where}"
        ]
    assert not sshd.machines["odd"].processes()


def test_a_machine_with_another_unisono_is_refused(
    sshd: Sshd, unisono: Unisono, script: Callable[[str], str], tmp_path: Path
) -> None:
    """Also if only the source differs: it may compute something else."""
    package, python = tmp_path / "other" / "unisono", tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={package.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    options = ("--hosts", "m1", "--set", f"ssh={sshd.command}", "--set", f"remote-python={python}")
    shutil.copytree(Path(fingerprint.__file__).parents[1], package)
    words = (package / "core" / "words.py").read_text()
    for change, why in (
        (
            lambda: (package / "core" / "words.py").write_text(f"{words}#"),
            f"{python} has another unisono {VERSION} there",
        ),
        (
            lambda: (package / "__init__.py").write_text("__version__ = '9'"),
            f"has unisono 9 there, and this is {VERSION}",
        ),
        (lambda: (package / "__init__.py").write_text("import nothing"), "has no unisono there (ModuleNotFoundError: "),
    ):
        change()
        command = unisono("run", script("raise SystemExit(3)"), *options)
        assert command.wait() == 2
        assert why in command.err[1]


def test_a_machine_that_does_not_reach_this_one_is_refused(
    sshd: Sshd, island: SshMachine, unisono: Unisono, script: Callable[[str], str], tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec unshare --net {sys.executable} "$@"\n')
    python.chmod(0o755)
    options = (
        "--hosts",
        island.name,
        "--set",
        f"ssh={sshd.command}",
        "--set",
        f"remote-python={python}",
        "--bind",
        "127.0.0.1",
    )
    command = unisono("run", script("raise SystemExit(3)"), *options)
    assert command.wait() == 2
    assert f"  {island.name}: it does not reach this machine at 127.0.0.1, port " in command.err[1]
    assert "--set port=N" in command.err[1]
