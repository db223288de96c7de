"""Machines that ssh reaches: each is an sshd of its own on a free port of this machine, known by an alias.

A plain one shares everything with this machine. One with ``apart=True`` has namespaces of its own (processes, name,
mounts), so it can be killed as a whole, and places can be hidden from it; that takes root.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.waiting import WAIT_S
from unisono.system.seats import LEDGER

__all__ = ["APART", "SshMachine", "Sshd", "children", "run_sshd"]

MACHINE = "UNISONO_TEST_MACHINE"
PASSED = ("PYTHONPATH", "UNISONO_TEST", "UNISONO_NURSERY", "UNISONO_STACK_SIGNAL", "OMP_NUM_THREADS", "TMPDIR")
"""Variables that come along, so that a test finds what it has started, and its runs begin quickly."""

APART = ("unshare", "--pid", "--uts", "--ipc", "--mount", "--fork", "--kill-child=KILL", "--mount-proc")
"""Begins a command that runs in namespaces of its own; all of them end with it."""

SERVER = """
{more}
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
MaxSessions 100
ClientAliveInterval 1
ClientAliveCountMax 3
AcceptEnv {passed}
"""

CLIENT = """
Host *
    User {user}
    HostName 127.0.0.1
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking accept-new
    LogLevel ERROR
    SendEnv {passed}
"""


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


class SshMachine:
    """One machine. ``log`` is what its sshd says."""

    def __init__(self, name: str, port: int, process: subprocess.Popen[str], is_apart: bool) -> None:
        self.name = name
        self.port = port
        self.process = process
        self.is_apart = is_apart
        self.sign = f"{MACHINE}={name}-{port}"
        """A variable of all processes that are started there."""
        self.log: list[str] = []
        self._is_known = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self.log.append(line.rstrip())
                if "Server listening" in line:
                    self._is_known.set()
        self._is_known.set()

    def listens(self) -> bool:
        """Wait until it listens, or has ended; return which."""
        assert self._is_known.wait(WAIT_S), "\n".join(self.log)
        return any("Server listening" in line for line in self.log)

    def kill(self) -> None:
        """End the sshd; with a machine apart, everything on it."""
        self.process.kill()
        self.process.wait()

    def processes(self) -> dict[int, str]:
        """Return all that was started there, children of children included: process id and command."""
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdecimal() and self.sign.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(folder.name)] = command
        return found

    def sessions(self) -> list[int]:
        """Return the processes of the sshd that serve a connection each."""
        return children(self.process.pid)


class Sshd:
    """Starts machines; ``config`` is for ``ssh -F``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config"
        self.machines: dict[str, SshMachine] = {}
        for key in ("host_key", "user_key"):
            subprocess.run(
                ["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", folder / key], check=True, stdin=subprocess.DEVNULL
            )
        user = os.environ.get("USER") or subprocess.check_output(["id", "-un"], text=True).strip()
        self.config.write_text(CLIENT.format(user=user, folder=folder, passed=" ".join(PASSED)))
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)

    @property
    def command(self) -> str:
        """The value of ``--ssh``."""
        return shlex.join(["ssh", "-F", str(self.config)])

    def start(
        self, name: str, *, apart: bool = False, prepare: str = "true", environment: str = "", more: Sequence[str] = ()
    ) -> SshMachine:
        """Start a machine.

        Args:
            prepare: commands of a shell that are run first, in the machine's namespaces.
            environment: variables of every session: ``NAME=value``.
            more: lines of its configuration that count before the usual ones.
        """
        for _ in range(10):
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            machine = self._start(name, port, apart, prepare, environment, more)
            if machine.listens():
                break
        else:
            pytest.fail(f"no sshd could be started: {machine.log}")
        self.machines[name] = machine
        with self.config.open("a") as file:
            file.write(f"\nHost {name}\n    Port {port}\n")
        return machine

    def _start(
        self, name: str, port: int, apart: bool, prepare: str, environment: str, more: Sequence[str]
    ) -> SshMachine:
        # Seats of its own: else two machines that are asked at once would find each other's cores taken.
        lines = [*more, f"SetEnv {MACHINE}={name}-{port} {LEDGER}={name}-{port} {environment}"]
        config = self.folder / f"sshd-{name}"
        config.write_text(SERVER.format(port=port, folder=self.folder, passed=" ".join(PASSED), more="\n".join(lines)))
        sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
        assert sshd is not None, "there is no sshd: tests/needs.sh installs it"
        words = [sshd, "-D", "-e", "-f", str(config)]
        if apart:
            inside = f"hostname {shlex.quote(name)} && {prepare} && exec {shlex.join(words)}"
            words = [*APART, "sh", "-c", inside]
        clean = {key: value for key, value in os.environ.items() if not key.startswith("UNISONO_")}
        process = subprocess.Popen(
            words, env=clean, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return SshMachine(name, port, process, apart)

    def close(self) -> None:
        for machine in self.machines.values():
            for session in machine.sessions() if not machine.is_apart else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(session, signal.SIGKILL)
            machine.kill()


@contextlib.contextmanager
def run_sshd(folder: Path, *names: str) -> Iterator[Sshd]:
    """Plain machines with these names."""
    sshd = Sshd(folder)
    try:
        for name in names:
            sshd.start(name)
        yield sshd
    finally:
        sshd.close()
