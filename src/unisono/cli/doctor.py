"""``unisono doctor``: what of these machines will hurt a run, and what to do."""

from __future__ import annotations

import time
from pathlib import Path

import click

from unisono.cli.reach import ask_status, find
from unisono.cli.saying import say, say_json
from unisono.cluster.launchers.hosts import is_this_machine, parse_hosts
from unisono.cluster.launchers.way import Way
from unisono.core.errors import UsageError
from unisono.core.settings import port_range
from unisono.core.words import count
from unisono.tools.doctor.checks import Finding, check
from unisono.tools.doctor.facts import Scope
from unisono.tools.doctor.remote import examine
from unisono.tools.doctor.together import check_together

__all__ = ["doctor"]

FAR_HEAD_S = 0.2


@click.command()
@click.argument("run", default="", type=click.Path())
@click.option(
    "--hosts",
    "names",
    default="",
    metavar="A,B,...",
    help="Machines, by their ssh names, each with Unisono at the same path. Default: this one.",
)
@click.option("--ssh", default="ssh", metavar="COMMAND", help="How to reach them.")
@click.option("--run-dir", default=".", metavar="DIR", help="Where the run's journal and checkpoints would go.")
@click.option("--ports", default="", metavar="A:B", help="The ports that a firewall allows.")
@click.option("--ipv6", is_flag=True, help="Measure over IPv6 between machines.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def doctor(run: str, names: str, ssh: str, run_dir: str, ports: str, ipv6: bool, as_json: bool) -> int:
    """Check these machines for problems that would slow or break a run; say why, and what to do. Exit code 1 if there
    are any.

    With RUN (its directory, or an invitation), also check that this machine can reach that run.
    """
    chosen = {host.name: is_this_machine(host.name) for host in parse_hosts(names)} if names else {}
    asked = Scope(run_dir=str(Path(run_dir).absolute()), ports=port_range(ports) if ports else None, ipv6=ipv6)
    findings = [_head(run)] if run else []
    known, errors = examine(chosen, Way.parse(ssh, option="--ssh"), asked)
    for name, error in errors.items():
        if error:
            findings.append(_silent(name, error))
        elif name in known.facts:
            findings += check(name, known.facts[name], asked)
    findings += check_together(known)
    if as_json:
        say_json({"findings": findings, "machines": known})
    else:
        _show(findings)
    return 0 if all(finding.is_ok for finding in findings) else 1


def _head(run: str) -> Finding:
    """Return whether this machine reaches the head of a run."""
    begun = time.monotonic()
    try:
        status = ask_status(find(run))
    except UsageError as error:
        return Finding(
            check="run",
            seen=str(error),
            because="this machine cannot join it, nor ask for its state",
            do="check the address, that the run is going, and that the firewall of its head passes TCP from here",
        )
    seconds = time.monotonic() - begun
    seen = f"the head at {status['url']} answers within {seconds * 1e3:.0f} ms: {status['state']}"
    if seconds > FAR_HEAD_S:
        return Finding(check="run", seen=seen, because="heartbeats and decisions take as long", do="see the network")
    return Finding(check="run", seen=seen)


def _silent(name: str, error: str) -> Finding:
    return Finding(
        check="ssh",
        host=name,
        seen=error,
        because="nothing can be started there",
        do="see docs/ssh.md: `unisono run --hosts` asks in the same way",
    )


def _show(findings: list[Finding]) -> None:
    heading = None
    for finding in findings:
        if finding.host != heading:
            heading = finding.host
            say(f"{heading or 'together'}:")
        say(f"  {'ok' if finding.is_ok else 'will hurt':<11}{finding.check}: {finding.seen}")
        if not finding.is_ok:
            say(f"{'':13}because {finding.because}")
            say(f"{'':13}do: {finding.do}")
    bad = sum(not finding.is_ok for finding in findings)
    say(f"{count(bad, 'warning')}" if bad else "nothing will hurt")
