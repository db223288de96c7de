"""The settings of a command line, checked, and what the parts of a run need of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from unisono.cli.given import address_of
from unisono.cli.settings_file import in_file
from unisono.cluster.launchers import Request
from unisono.cluster.machine.headprocess import Service
from unisono.cluster.trust.invitation import HeadUrl
from unisono.cluster.trust.secret import is_reader
from unisono.core.errors import UsageError
from unisono.core.policy import Policy
from unisono.core.settings import DEFAULTS, FILE, SETTINGS, RunSettings, gathered, pairs, split_parts
from unisono.core.spec import MOST_AUDITED, RunSpec
from unisono.system.capacity import Workers

__all__ = ["BY_FIELD", "Options", "options_of"]

LOOPBACK: Final = "127.0.0.1"
SHORTEST_TOKEN: Final = 20
COMMAND_LINE: Final = "command line"
"""Source of settings."""
BY_FIELD: Final = {setting.field: setting for setting in SETTINGS.values()}


class Options(RunSettings, frozen=True, kw_only=True, dict=True):
    """A command line: the script and the settings of the run, checked, and what the parts of a run need of them."""

    script: str | None = None
    arguments: tuple[str, ...] = ()
    module: str | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"a worker needs at least 1 thread, got --threads {self.threads}")
        if self.evaluators < 0:
            raise UsageError(f"--evaluators must be 0 or more, got --evaluators {self.evaluators}")
        if self.wait_for < 0:
            raise UsageError(f"a run waits for 0 or more workers, got --wait-for {self.wait_for}")
        if not 0.0 <= self.efficiency < 1.0:
            raise UsageError(f"efficiency must be above 0 and below 1, got {self.efficiency}")
        if self.max_restarts < 0:
            raise UsageError(f"max_restarts must be at least 0, got {self.max_restarts}")
        if not self.heartbeat_s < self.heartbeat_timeout_s:
            raise UsageError(
                f"a heartbeat must come more often than its timeout: --set heartbeat={self.heartbeat_s:g}s is not "
                f"shorter than --set heartbeat-timeout={self.heartbeat_timeout_s:g}s"
            )
        if not 0.0 <= self.audit <= MOST_AUDITED:
            raise UsageError(
                f"--audit must be a share of the micro-batches from 0 to {MOST_AUDITED:g}, e.g. 0.01; got {self.audit}"
            )
        if self.parts > 1:
            self._check_parts()
        if self.bind == "":
            raise UsageError("--bind takes an address of this machine, or 0.0.0.0 for all of them; got ''")
        _ = self.ports, self.profiled
        if self.interface and self.bind:
            raise UsageError(
                f"--set interface={self.interface} and --bind {self.bind} both name an address; give one of them"
            )
        if self.advertise and not HeadUrl.is_host(self.advertise):
            raise UsageError(f"--set advertise takes an address or a host name, without a port; got {self.advertise!r}")
        if bool(self.certificate) != bool(self.private_key):
            raise UsageError("give --set certificate and --set private-key together, or neither")
        if self.certificate and self.tls is False:
            raise UsageError("--set certificate is for TLS, and --set tls=no turns it off; leave one of them out")
        if self.simulate_hosts < 1:
            raise UsageError(f"there is at least 1 host, got --set simulate-hosts={self.simulate_hosts}")
        if self.per_task is not None and self.per_task < 1:
            raise UsageError(f"a task needs at least 1 worker, got --set per-task={self.per_task}")

        if self.ship_limit <= 0:
            raise UsageError(f"--set ship-limit must be a size in MB above 0, got {self.ship_limit:g}")
        if self.names_hosts and self.launcher not in ("auto", "ssh"):
            raise UsageError(f"--hosts and --set hostfile are for the launcher ssh, got --launcher {self.launcher}")
        if not self.names_hosts:
            self._refuse(("ship", "remote-python", "pass-env"), "is for machines that --hosts or --set hostfile name")

    @property
    def names_hosts(self) -> bool:
        return bool(self.hosts or self.hostfile)

    def refuse_hosts(self, why: str) -> None:
        """Raise a `UsageError` if the command line names machines; ``why`` says where they come from instead."""
        if self.names_hosts:
            raise UsageError(f"--hosts and --set hostfile are for `unisono run` on its own; {why}")

    def _refuse(self, names: Sequence[str], why: str) -> None:
        """Raise a `UsageError` if one of these settings is not its default."""
        for setting in map(SETTINGS.__getitem__, names):
            if getattr(self, setting.field) != setting.default:
                raise UsageError(f"{setting.spelled()} {why}")

    @cached_property
    def address(self) -> str:
        """The address of the interface that was named; "" where none was."""
        return address_of(self.interface) if self.interface else ""

    @property
    def bound(self) -> str:
        """The address at which the user wants the head to listen; "" where none was named."""
        return self.address or self.bind or ""

    @cached_property
    def token(self) -> str:
        """The token in the file that was named; "" where none was."""
        from unisono.cli.reach import read_token

        if not self.token_file:
            return ""
        try:
            token = read_token(self.token_file)
        except FileNotFoundError:
            raise UsageError(f"there is no --set token-file={self.token_file}") from None
        if is_reader(token):
            raise UsageError(
                f"the token in --set token-file={self.token_file} looks like one for watchers; use a different one"
            )
        if len(token) < SHORTEST_TOKEN:
            raise UsageError(
                f"the token in --set token-file={self.token_file} has {len(token)} characters; it needs at least "
                f"{SHORTEST_TOKEN}, so that it cannot be guessed: python -c 'import secrets; "
                "print(secrets.token_urlsafe(32))'"
            )
        return token

    def check_head(self) -> None:
        """Raise a `UsageError` if the head's interface or token are not there: before any machine is asked."""
        _ = self.address, self.token

    def _check_parts(self) -> None:
        workers = f"--workers {self.workers}"
        if self.evaluators:
            raise UsageError(
                f"--evaluators {self.evaluators} are single workers with the whole model, and with {workers} each has "
                f"one of {self.parts} parts of it; leave one of them out"
            )
        if self.wait_for % self.parts:
            raise UsageError(
                f"--wait-for counts workers, and {workers} makes groups of {self.parts}: got {self.wait_for}, which is "
                f"not a multiple; give {max(1, round(self.wait_for / self.parts)) * self.parts}"
            )

    def request(self, spec: RunSpec, workers: Workers) -> Request:
        """Return what a launcher is asked for."""
        return Request(
            workers=workers,
            environment=dict(os.environ),
            spec=spec,
            bind=self.bound,
            port=self.ports[0],
        )

    def service(self, workers: Workers, bind: str) -> Service:
        """Return the head of a run that begins with so many workers.

        Args:
            bind: where it listens if the user has not said it; "": on the loopback interface.
        """
        policy = Policy(
            start=workers.start,
            efficiency=self.efficiency,
            most=workers.maximum,
            wait_for=self.wait_for,
            parts=workers.parts,
            minimum=workers.minimum,
            maximum=workers.start if self.efficiency else workers.maximum,
            grows=workers.grows,
        )
        return Service(policy=policy, settings=self, bind=self.bound or bind or LOOPBACK, token=self.token)


def options_of(given: dict[str, Any]) -> Options:
    """Return the settings of a command line: of its own, or else of the file beside the script, or else the defaults.

    Raises:
        UsageError: one of them is not known, or its value is wrong.
    """
    own = {name: given[name] for name in ("script", "arguments", "module")}
    said = [
        (setting, tuple(map(setting.read, given[field])) if setting.is_list else setting.read(given[field]))
        for field, setting in BY_FIELD.items()
        if given.get(field) not in (None, ())
    ]
    values = gathered([*said, *pairs(given["others"])])
    sources = {setting.name: COMMAND_LINE for setting in SETTINGS.values() if setting.field in values}
    folder = values.get("beside") or os.path.dirname(own["script"] or "")
    file = Path(folder, FILE)
    if file.exists():
        for setting, value in in_file(Path(folder)):
            if setting.field not in values:
                values[setting.field], sources[setting.name] = value, str(file)
    _take_parts_of_hosts(values, sources)
    return Options(**own, **values, sources=sources)


def _take_parts_of_hosts(values: dict[str, Any], sources: dict[str, str]) -> None:
    """Make the groups that the machines name (``--hosts a:1x4``) those of ``--workers``.

    Raises:
        UsageError: the two say different groups, or the machines cannot be read.
    """
    names = [name for name in ("hosts", "hostfile") if values.get(name)]
    if len(names) != 1:  # the launcher refuses both
        return
    from unisono.cluster.launchers.hosts import parse_hosts, parts_of, read_hostfile

    parts = parts_of((parse_hosts if names == ["hosts"] else read_hostfile)(values[names[0]]))
    groups, own = split_parts(values.get("workers", DEFAULTS.workers))
    if parts > 1 and own == 1 and groups == "auto":
        values["workers"], sources["workers"] = f"autox{parts}", sources[names[0]]
    elif parts not in (1, own):
        setting = SETTINGS[names[0]]
        raise UsageError(
            f"{setting.spelled()} names groups of {parts} workers, and --workers {values['workers']} groups of {own}; "
            f"leave --workers out, or write --workers NxP with P = {parts}"
        )
