"""Question and answer of a launcher before a run: what is on another machine, and does it reach this one?

The first part of this file is sent to the other machine's Python as a program (`program`): it may be any Python 3, and
need not have Unisono. So it is written for old versions, and uses the standard library only.
"""

import json
import os
import socket
import sys

__all__ = ["MARK", "answer", "find_answer", "program"]

MARK = "unisono-answer "
"""Begins the line with the answer: the start-up files of a shell may print, too."""

CONNECT_S = 3.0


def answer(question):  # type: ignore[no-untyped-def]
    """Return what is on this machine; entries that could not be found out are missing.

    Args:
        question: ``folder``, ``arguments`` and ``threads`` of the run; ``addresses``, ``port`` and ``secret`` of a
            beacon (`unisono.cluster.launchers.ssh`), where the address "" stands for the one that this connection
            comes from; ``shipped``, ``names`` and ``checksum`` of a folder that could be sent; ``variables`` that an
            agent would have beside those here.
    """
    found: dict[str, object] = {
        "python": list(sys.version_info[:3]),
        "executable": sys.executable,
        "host": socket.gethostname(),
    }
    sys.path[:] = [entry for entry in sys.path if entry]  # not the folder that the shell begins in
    if sys.version_info < (3, 11):  # noqa: UP036 - this program is for any Python
        return found
    try:
        import importlib
        from importlib.metadata import version

        found["unisono"] = importlib.import_module("unisono").__version__
        found["torch"] = version("torch")
    except Exception as error:  # whatever it is, the user is to read it
        found["error"] = type(error).__name__ + ": " + str(error)
    if found.get("unisono") != question["unisono"]:
        return found
    from unisono.system import fingerprint

    # An older checkout of this version may lack what follows.
    if not hasattr(fingerprint, "package_checksum") or fingerprint.package_checksum() != question["source"]:
        return found
    found["has_source"] = True
    found["arithmetic"] = fingerprint.foretold({**os.environ, **question["variables"]})
    from unisono.system.capacity import free_workers

    found["room"] = free_workers(question["threads"])
    shipped = question["shipped"]
    if shipped:
        from unisono.cluster.machine import shipped as folders

        found["has_tree"] = folders.checksum(question["folder"], shipped["names"]) == shipped["checksum"]
        found["copy"] = folders.find_copy(shipped["checksum"])
    found["has_folder"] = os.path.isdir(question["folder"])
    if found["has_folder"]:
        os.chdir(question["folder"])
        found["script"] = fingerprint.script_checksum(question["arguments"])
    reached = []
    for address in question["addresses"]:
        address = address or os.environ.get("SSH_CONNECTION", "").split(" ")[0]
        if address and "%" not in address and address not in reached:  # "%": of one interface of this machine only
            try:
                with socket.create_connection((address, question["port"]), CONNECT_S) as connection:
                    connection.settimeout(CONNECT_S)
                    if connection.recv(256).decode() == question["secret"]:
                        reached.append(address)
            except (OSError, UnicodeError):
                pass
    found["reached"] = reached
    return found


def program(question: dict[str, object]) -> str:
    """Return the text of a program that prints the answer to this question."""
    with open(__file__, encoding="utf-8") as file:
        text = file.read().partition("\n\ndef program(")[0]
    return f"{text}\n\nprint(MARK + json.dumps(answer(json.loads({json.dumps(question)!r}))), flush=True)\n"


def find_answer(output: str) -> "dict[str, object] | None":
    """Return the answer in what the program has printed; None if there is none."""
    for line in output.splitlines():
        if line.startswith(MARK):
            found: dict[str, object] = json.loads(line[len(MARK) :])
            return found
    return None
