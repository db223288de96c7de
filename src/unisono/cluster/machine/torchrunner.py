"""torchrun on one machine of ``unisono run --plain``.

``python -P -m unisono.cluster.machine.torchrunner [--folder DIR]``.

The first line of standard input is an `Order`. Standard input then stays open: at its end, or when anything follows
(`unisono.cluster.machine.holder.LOST`), torchrun gets SIGTERM, and ends the processes of the script. The kernel ends
them with torchrun, also after ``kill -9``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from io import RawIOBase
from typing import Final

import msgspec

from unisono.system.interfaces import route_to
from unisono.system.lifetime import PARENT, bind_to_parent, name_process, scratch_folder

__all__ = ["Order", "become_script", "main"]

END_S: Final = 35.0
"""From SIGTERM to the end of torchrun: it gives the script's processes 30 s."""
_BECOME: Final = "from unisono.cluster.machine.torchrunner import become_script; become_script()"
_PREFIX: Final = "[rank${rank}] "


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What one machine runs."""

    arguments: tuple[str, ...]
    """``SCRIPT ...`` or ``-m MODULE ...``"""
    options: tuple[str, ...]
    """Of torchrun."""
    folder: str
    environment: dict[str, str] = {}
    """Variables beside those of the machine."""
    endpoint: str = ""
    """HOST:PORT of the store at which the machines meet; "": the script runs on this machine only."""

    def encode(self) -> str:
        """Return the order as one line."""
        return msgspec.json.encode(self).decode()


def main() -> None:
    """Be torchrun. Ends the process with torchrun's exit code."""
    bind_to_parent(signal.SIGTERM)
    name_process("unisono torchrun")
    launcher = os.fdopen(os.dup(0), "rb", buffering=0)
    order = msgspec.json.decode(launcher.readline(), type=Order)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.chdir(sys.argv[2] if sys.argv[1:2] == ["--folder"] else order.folder)
    os.environ.update(order.environment)
    os.environ[PARENT] = str(os.getpid())
    os.environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = _PREFIX
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # torchrun copies lines of the script there
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.run import main as torchrun

    script = ["--no-python", sys.executable, "-P", "-c", _BECOME, *order.arguments]
    with scratch_folder("unisono-torchrun-") as folder:  # torchrun reads the output of the script's processes in files
        try:
            torchrun([*order.options, *_meeting(order.endpoint), "--tee", "3", "--log-dir", str(folder), *script])
        except SignalException as asked:
            sys.exit(128 + asked.sigval)


def become_script() -> None:
    """Become a process of the script, which the kernel ends with torchrun."""
    bind_to_parent(signal.SIGKILL)
    os.execv(sys.executable, [sys.executable, "-u", *sys.argv[1:]])


def _end_with(launcher: RawIOBase) -> None:
    """End torchrun when the launcher does not hold its standard input any more."""
    launcher.read(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    os._exit(128 + signal.SIGTERM)


def _meeting(endpoint: str) -> list[str]:
    """Return the options that say where the torchruns of all machines meet, and how others reach this machine."""
    if not endpoint:
        return ["--standalone", "--local-addr", "127.0.0.1"]
    host, _, port = endpoint.rpartition(":")
    _, address = route_to(host.strip("[]"), int(port))
    return ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-conf", "is_host=0", "--local-addr", address]


if __name__ == "__main__":
    main()
