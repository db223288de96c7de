"""``unisono ray`` on a real Ray cluster of several nodes: the same bits, whoever is killed, and nothing is left.

The cluster stands in a network namespace that has only the loopback interface. Each node is in namespaces of its own,
so that it dies as a machine does: with everything that runs there.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.waiting import WAIT_S
from tests.workers import small_training
from tests.workers.conftest import MARK, Command, Unisono, marked, served_by, wait_until_gone
from tests.workers.gates import Gates
from unisono.cluster.launchers import LAUNCHERS, Request
from unisono.cluster.launchers.protocol import RAY_JOB, Machine, in_ray_job
from unisono.cluster.launchers.ray import Ray, _Place
from unisono.core.settings import RunSettings
from unisono.core.spec import RunSpec
from unisono.record.journal import compare
from unisono.system.capacity import parse_workers

if find_spec("ray") is None:  # not imported: every process that collects tests would do it
    pytest.skip("could not import 'ray'", allow_module_level=True)

SCRIPT = Path(small_training.__file__)
PORT = 6399
ADDRESS = f"127.0.0.1:{PORT}"
RAY = ("run", "--launcher", "ray", "--set", f"ray.address={ADDRESS}")
QUICK = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 4,
}
"""A lost node is seen after 2 s, instead of 15."""
NODES = (sys.executable, "-m", "ray.scripts.scripts", "start")
MEMORY = ("--object-store-memory", "80000000")
NODE = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
WORLD = "ip link set lo up && echo up && exec sleep infinity"
SPACES = ("--pid", "--mount", "--mount-proc", "--fork", "--kill-child=KILL")
UNTIL_KILLED = ("setpriv", "--pdeathsig", "KILL")
NUM_CPUS = 2
"""Of a node."""
ROOMS = """
    import sys, time
    import ray
    from unisono.cluster.launchers.ray import _rooms

    said, sys.stdout = sys.stdout, sys.stderr  # Ray prints what it hears of lost nodes
    ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
    for line in sys.stdin:
        while sorted(room for _, room in _rooms(ray, {"CPU": 1.0})) != [int(sys.argv[2])] * int(line):
            time.sleep(0.05)
        print("free", file=said, flush=True)
    """


class Cluster:
    """A Ray cluster, whose head has no CPUs."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.mark = uuid.uuid4().hex
        self._folder = folder
        self._environment = {
            **os.environ,
            MARK: self.mark,
            "RAY_USAGE_STATS_ENABLED": "0",
            "TMPDIR": str(folder),
            **variables,
        }
        self._nodes: dict[str, subprocess.Popen[str]] = {}
        self._inside: list[str] = []

    def start(self) -> None:
        # The namespaces end with this process, and everything in them with the namespaces.
        world = subprocess.Popen(
            [
                *UNTIL_KILLED,
                "unshare",
                "--net",
                *SPACES,
                "sh",
                "-c",
                "ip link set lo up && echo up && exec sleep infinity",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert world.stdout is not None
        self._nodes["world"] = world
        if world.stdout.readline() != "up\n":
            pytest.skip("network namespaces are not permitted here")
        child = Path(f"/proc/{world.pid}/task/{world.pid}/children").read_text().strip()
        self._inside = ["nsenter", "--target", child, "--net", "--pid", "--mount"]
        self.before = ["nsenter", "--target", child, "--net"]
        options = ("--num-cpus", 0, "--port", PORT, "--temp-dir", self._folder, "--system-config", json.dumps(QUICK))
        self._start("head", "--head", "--include-dashboard", "false", "--disable-usage-stats", *options)
        self._rooms = subprocess.Popen(
            [*self._inside, *UNTIL_KILLED, sys.executable, "-c", textwrap.dedent(ROOMS), ADDRESS, str(NUM_CPUS)],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._nodes["rooms"] = self._rooms

    def add(self, name: str) -> None:
        """Add a node. One after the other: two that start at a time on one address take each other's ports."""
        self._start(name, "--address", ADDRESS, "--num-cpus", NUM_CPUS)

    def wait_until_free(self) -> None:
        """Wait until Ray has room on all nodes, as a launcher would see it, and on no other.

        A process that has ended holds its CPUs until Ray has heard of its end.
        """
        assert self._rooms.stdin is not None
        assert self._rooms.stdout is not None
        self._rooms.stdin.write(f"{len(self._nodes.keys() - {'world', 'head', 'rooms'})}\n")
        self._rooms.stdin.flush()
        ready, _, _ = select.select([self._rooms.stdout], [], [], WAIT_S)
        assert ready, f"Ray has not all of its nodes free within {WAIT_S:.0f} s"
        assert self._rooms.stdout.readline() == "free\n"

    def _start(self, name: str, *options: object) -> None:
        machine = [*self._inside, *UNTIL_KILLED, "unshare", "--uts", "--ipc", *SPACES, "sh", "-c", NODE, name]
        process = subprocess.Popen(
            [*machine, *NODES, "--block", "--node-ip-address", "127.0.0.1", *MEMORY, *map(str, options)],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._nodes[name] = process
        assert process.stdout is not None
        said, deadline = "", time.monotonic() + WAIT_S
        os.set_blocking(process.stdout.fileno(), False)
        while "Ray runtime started" not in said:
            ready, _, _ = select.select([process.stdout], [], [], deadline - time.monotonic())
            assert ready, f"Ray does not start on {name} within {WAIT_S:.0f} s: {said}"
            new = process.stdout.read()
            assert new, f"Ray has not started on {name}: {said}"
            said += new

    def kill(self, name: str) -> None:
        """The machine has no power any more."""
        process = self._nodes.pop(name)
        process.kill()
        process.wait()

    def agents(self) -> dict[int, str]:
        """The agents of all nodes, and what they have started: pid and host name."""
        found = {}
        for pid, command in marked(self.mark).items():
            if "-m unisono" in command:
                with contextlib.suppress(OSError, subprocess.CalledProcessError):
                    ask = ["nsenter", "--target", str(pid), "--uts", "hostname"]
                    name = subprocess.run(ask, capture_output=True, text=True, check=True)
                    found[pid] = f"{name.stdout.strip()} {command}"
        return found

    def close(self) -> None:
        for name in reversed(list(self._nodes)):
            self.kill(name)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running("n1", "n2") as found:
        yield found


@contextlib.contextmanager
def running(*nodes: str, **variables: str) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # short: sockets are there
    found = Cluster(folder, **variables)
    try:
        found.start()
        for node in nodes:
            found.add(node)
        found.wait_until_free()
        yield found
    finally:
        found.close()
        wait_until_gone(set(marked(found.mark)), time.monotonic() + 60.0)
        left = marked(found.mark)
        shutil.rmtree(folder, ignore_errors=True)
    assert left == {}


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: Cluster, mark: str) -> Iterator[None]:
    """No agent, worker or nursery is left on a node after a test, and the next one finds all nodes free."""
    yield
    left = cluster.agents()
    wait_until_gone(set(left), time.monotonic() + 60.0)
    assert cluster.agents() == {}, "processes were left behind on the nodes"
    cluster.wait_until_free()


@pytest.fixture(scope="module")
def alone(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The journal of the same training in one process."""
    folder = tmp_path_factory.mktemp("alone")
    command = [sys.executable, "-P", "-m", "unisono", "run", SCRIPT, "--workers", "1", "--run-dir", folder / "run"]
    with served_by(standing_nursery):
        subprocess.run(command, check=True, capture_output=True, timeout=WAIT_S)
    return folder / "run"


def assert_same(run: Command, folder: Path, alone: Path) -> None:
    assert run.wait() == 0, run.err
    assert str(compare(alone, folder)).startswith("identical: 8 steps")


@pytest.mark.parametrize("workers", ["2", "3"])
def test_the_bits_of_a_run_on_ray_are_those_of_one_process(
    workers: str, cluster: Cluster, unisono: Unisono, tmp_path: Path, alone: Path
) -> None:
    run = unisono(*RAY, SCRIPT, "--workers", workers, "--run-dir", "run", before=cluster.before)
    assert_same(run, tmp_path / "run", alone)
    run.line("ray0 is on n")


def test_a_command_inside_of_a_ray_job_trains_on_the_cluster(
    cluster: Cluster, unisono: Unisono, tmp_path: Path, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RAY_JOB, json.dumps({"runtime_env": {}, "metadata": {}}))
    monkeypatch.setenv("RAY_ADDRESS", ADDRESS)
    run = unisono("run", SCRIPT, "--run-dir", "run", before=cluster.before)
    assert_same(run, tmp_path / "run", alone)
    run.line("generation 1 with 4 workers")


def agent_on(cluster: Cluster, node: str) -> int:
    return next(pid for pid, words in cluster.agents().items() if words.startswith(node) and "unisono join" in words)


@pytest.mark.parametrize("what", ["agent", "actor"])
def test_a_killed_agent_costs_no_bit(
    what: str, cluster: Cluster, unisono: Unisono, tmp_path: Path, alone: Path
) -> None:
    with Gates(tmp_path / "gates", [3]) as gates:
        run = unisono(
            *(*RAY, SCRIPT, "--workers", 3, "--run-dir", "run", "--", "--gates", gates.folder),
            before=cluster.before,
        )
        gates.wait(3, workers=3)
        pid = agent_on(cluster, "n2")
        if what == "actor":
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(pid, signal.SIGKILL)
        gates.open(3, run.generation("generation 2 with "))  # Ray chooses which of the nodes has two of them
    assert_same(run, tmp_path / "run", alone)


def test_a_lost_node_costs_no_bit_and_its_workers_are_asked_for_again(
    cluster: Cluster, unisono: Unisono, tmp_path: Path, alone: Path
) -> None:
    """Ray has no room for them, until a node comes: so a run grows with the cluster."""
    with Gates(tmp_path / "gates", [3, 5]) as gates:
        run = unisono(
            *(*RAY, SCRIPT, "--workers", 4, "--run-dir", "run", "--", "--gates", gates.folder),
            before=cluster.before,
        )
        try:
            gates.wait(3, workers=4)
            cluster.kill("n2")
            gates.open(3, run.generation("with 2 workers"))
            gates.wait(5, workers=2)
        finally:
            cluster.add("n2")
        run.line("is on n2, with ", after=r"generation \d+ with 2 workers")
        gates.open(5, run.generation(" join", after="with 2 workers"))
    assert_same(run, tmp_path / "run", alone)


def test_nothing_is_left_when_the_command_is_killed(cluster: Cluster, unisono: Unisono, tmp_path: Path) -> None:
    """The fixture looks for it."""
    with Gates(tmp_path / "gates", [3]) as gates:
        run = unisono(*(*RAY, SCRIPT, "--workers", 3, "--", "--gates", gates.folder), before=cluster.before)
        gates.wait(3, workers=3)
        assert len(cluster.agents()) >= 2
        run.process.kill()


GROWS = """
    import json, os, sys
    from unisono.system.capacity import parse_workers
    from unisono.cluster.launchers import Request
    from unisono.cluster.launchers.ray import Ray
    from unisono.core.settings import RunSettings
    from unisono.core.spec import RunSpec

    settings = RunSettings(workers="2:6", ray_address=sys.argv[1])
    launcher = Ray(Request(workers=parse_workers("2:6", 1), environment={}, spec=RunSpec(settings=settings)))
    def say(machines):
        print(json.dumps([machine.num_workers for machine in machines]), flush=True)
    say(launcher.machines())
    class Command:
        words = (sys.executable, "-c", "import sys; print(sys.stdin.read())")
        secret = "secret"
    for line in sys.stdin:
        found = list(launcher.ensure(int(line), []))
        say(found)
    launcher.close()
    """


def test_machines_come_when_the_cluster_grows(cluster: Cluster, tmp_path: Path) -> None:
    """Actors that Ray has no room for are its demand; when a node comes, `ensure` returns their machines, once."""
    (tmp_path / "grows.py").write_text(textwrap.dedent(GROWS))
    with subprocess.Popen(
        [*cluster.before, sys.executable, tmp_path / "grows.py", ADDRESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def resize(number: int) -> list[int]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
            found: list[int] = json.loads(process.stdout.readline())
            return found

        def until(came: list[int], num_workers: int) -> list[int]:
            deadline = time.monotonic() + WAIT_S
            while sum(came) < num_workers:
                assert time.monotonic() < deadline
                came = [*came, *resize(6)]
            return came

        try:
            came = json.loads(process.stdout.readline())
            assert came, "2 of 6 workers begin the run"
            assert until(came, 4) == [2, 2], "there is room for 4 of 6, on nodes that may be slow"
            assert resize(6) == []
            cluster.add("n3")
            try:
                assert until([], 2) == [1, 1]
                assert resize(6) == []
            finally:
                cluster.kill("n3")
        finally:
            process.stdin.close()
            process.wait(WAIT_S)


def test_a_cluster_with_a_token_takes_a_run_that_has_it_and_the_others_are_told(
    unisono: Unisono, tmp_path: Path, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray asks for a token from 2.61 on, if nothing else is said."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2}
    command = (*RAY, SCRIPT, "--workers", 2, "--run-dir", "run")
    with running("n1", **token) as guarded:
        for mode in ("token", "disabled"):
            monkeypatch.setenv("RAY_AUTH_MODE", mode)
            monkeypatch.setenv("RAY_AUTH_TOKEN", "of-another-cluster")
            refused = unisono(*command, before=guarded.before)
            assert refused.wait() == 2, refused.err
            refused.line("or give its token: RAY_AUTH_TOKEN")
        for name, value in token.items():
            monkeypatch.setenv(name, value)
        assert_same(unisono(*command, before=guarded.before), tmp_path / "run", alone)


def test_places_may_come_and_go_while_a_launcher_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ensure` runs in a thread, and whoever closes the launcher waits for it for a short time only."""
    ray = SimpleNamespace(remote=lambda kind: kind, shutdown=lambda: None, exceptions=SimpleNamespace(RayError=OSError))
    monkeypatch.setitem(sys.modules, "ray", ray)
    spec = RunSpec(settings=RunSettings(workers="1:4"))
    launcher = Ray(Request(workers=parse_workers("1:4", 1), environment={}, spec=spec))
    killed = []

    def kill(actor: str) -> None:
        killed.append(actor)
        launcher._places[f"late{len(killed)}"] = _Place(
            Machine(name="late", num_workers=1), "late", None, is_sure=False
        )

    ray.kill = kill
    for name in ("ray0", "ray1"):
        launcher._places[name] = _Place(Machine(name=name, num_workers=1), name, None, is_sure=True)
    launcher.close()
    assert killed == ["ray0", "ray1"]
    assert launcher.ensure(4, []) == [], "a launcher that is closed asks for nothing more"


def test_without_a_cluster_the_command_says_what_to_do(unisono: Unisono) -> None:
    run = unisono(*RAY[:-1], "ray.address=127.0.0.1:1", SCRIPT, "--workers", 2)
    assert run.wait() == 2
    run.line("no Ray cluster answers at ray.address=127.0.0.1:1")


def test_ray_is_asked_for_inside_of_its_jobs_only() -> None:
    workers = parse_workers("2", 1)
    assert in_ray_job(Request(workers=workers, environment={RAY_JOB: "{}"}))
    assert not in_ray_job(Request(workers=workers, environment={"RAY_ADDRESS": ADDRESS}))
    assert "ray" in LAUNCHERS
