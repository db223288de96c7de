"""A Slurm of two nodes on this machine: each node is a ``slurmd`` in namespaces of its own, which can be killed.

Several of them can be up beside each other: cluster, nodes, ports and directories are each one's own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.waiting import WAIT_S
from tests.workers.conftest import MARK

CORES = 8
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "unshare", "hostname")
LOST_S = 4
FREEZER = Path("/sys/fs/cgroup/freezer")
LOOK_S = 0.1
AGAIN = threading.Event()
"""Never set: Slurm and the kernel can only be asked again."""

CONFIGURATION = """\
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
ProctrackType={tracking}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={lost_s}
KillWait=60
MessageTimeout=5
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores}
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores}
PartitionName=main Nodes={nodes[0]},{nodes[1]} Default=YES MaxTime=INFINITE
"""
CGROUPS = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\n"


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as sockets:
        opened = [sockets.enter_context(socket.socket()) for _ in range(number)]
        for one in opened:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in opened]


class Cluster:
    """The controller and two nodes."""

    def __init__(self, folder: Path) -> None:
        self.name = f"u{uuid.uuid4().hex[:6]}"
        self.nodes = [f"{self.name}n{number}" for number in (1, 2)]
        self.configuration = folder / "slurm.conf"
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.configuration.write_text(
            CONFIGURATION.format(
                name=self.name,
                host=socket.gethostname(),
                ports=free_ports(3),
                folder=folder,
                tracking="proctrack/cgroup" if FREEZER.is_dir() else "proctrack/linuxproc",
                nodes=self.nodes,
                cores=CORES,
                lost_s=LOST_S,
            )
        )
        (folder / "cgroup.conf").write_text(CGROUPS)
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (folder / name).mkdir()

    def up(self) -> None:
        """Start what is not running, and wait until Slurm would start a job on both nodes."""
        if "controller" not in self._processes:
            self._start("controller", ["slurmctld", "-D", "-c"])
        for node in self.nodes:
            if node not in self._processes:
                separate = ["--pid", "--uts", "--ipc", "--mount", "--fork", "--kill-child=KILL", "--mount-proc"]
                inside = ["sh", "-c", f"hostname {node}; exec slurmd -D -N {node}"]
                self._start(node, ["unshare", *separate, *inside])
        self.wait_for("sinfo", "--noheader", "--format=%D %t", until="2 idle")

    def kill(self, node: str) -> None:
        """Node ``node`` loses its power."""
        process = self._processes.pop(node)
        process.kill()
        process.wait()
        self._remove_cgroups([node])

    def run(self, *words: str | Path, timeout_s: float = WAIT_S) -> str:
        """Run one of Slurm's commands; returns what it prints."""
        done = subprocess.run(
            [*map(str, words)], env=self._environment(), capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def wait_for(self, *words: str, until: str) -> None:
        """Repeat one of Slurm's commands until it prints this."""
        deadline = time.monotonic() + WAIT_S
        while (said := self._try(words)) != until:
            assert time.monotonic() < deadline, f"{words} says {said!r}, not {until!r}\n{self._logs()}"
            AGAIN.wait(LOOK_S)

    def jobs(self) -> list[str]:
        return self.run("squeue", "--noheader", "--format=%i").split()

    def clear(self) -> None:
        """End all jobs, and bring lost nodes back."""
        if jobs := self.jobs():
            self.run("scancel", *jobs)
        self.wait_for("squeue", "--noheader", until="")
        self.up()

    def down(self) -> None:
        for node in [node for node in self.nodes if node in self._processes]:
            self.kill(node)
        if (controller := self._processes.pop("controller", None)) is not None:
            controller.kill()
            controller.wait()
        self._remove_cgroups(self.nodes)

    def cgroups(self) -> list[Path]:
        """Those of steps of jobs that Slurm has left."""
        return [path for node in self.nodes for path in FREEZER.glob(f"slurm_{node}/**/step_*")]

    def _environment(self) -> dict[str, str]:
        """Return one without the mark of a test: the nodes outlive it."""
        return {**os.environ, "SLURM_CONF": str(self.configuration), MARK: ""}

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _try(self, words: Sequence[str]) -> str:
        done = subprocess.run(
            words, env=self._environment(), capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        return (done.stdout or done.stderr).strip()

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self._folder.glob("*.log"))

    def _remove_cgroups(self, nodes: Sequence[str]) -> None:
        """Folders of the dead nodes: the kernel lets them go when their last process is gone."""
        deadline = time.monotonic() + 10.0
        left = [FREEZER / f"slurm_{node}" for node in nodes]
        while (left := [path for path in left if path.is_dir()]) and time.monotonic() < deadline:
            for top in left:
                for path in sorted((p for p in top.rglob("*") if p.is_dir()), reverse=True):
                    with contextlib.suppress(OSError):
                        path.rmdir()
                with contextlib.suppress(OSError):
                    top.rmdir()
            AGAIN.wait(LOOK_S)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: tests/needs.sh")
    if os.geteuid():
        pytest.skip("nodes of Slurm need root")
    cluster = Cluster(folder)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


if __name__ == "__main__":  # for a look by hand
    place = Path(sys.argv[1])
    place.mkdir()
    with running(place) as cluster:
        print(f"export SLURM_CONF={cluster.configuration}", flush=True)
        sys.stdin.read()
