"""``unisono run --launcher kubernetes``: train on a Kubernetes cluster.

The head is a job, the workers are a deployment, whose number ``kubectl scale`` changes.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

import click

from unisono.cli.options import Options
from unisono.cluster.launchers.kubernetes.manifests import (
    SCRIPT,
    ClusterRequest,
    as_json,
    head_name,
    how_to_follow,
    parse_volume,
    render,
)
from unisono.core.errors import UsageError
from unisono.core.settings import SETTINGS
from unisono.system.capacity import parse_workers

__all__ = ["train"]

OF_THE_HEAD: Final = ("bind", "port", "token-file", "resume", "head-away", "tls")
"""Settings of the run in the cluster that this launcher gives itself."""
OF_THE_COMMAND: Final = ("launcher", "run-dir", "dry-run")


def train(options: Options) -> int:
    """Make the objects of the run in the cluster, and follow its head. Returns the exit code.

    Raises:
        UsageError: something is missing or wrong, or the cluster refuses an object.
    """
    request = _request(options)
    from unisono.cluster.launchers.kubernetes.kubectl import Cluster

    if options.dry_run:
        click.echo(as_json(render(request)), nl=False)
        return 0
    cluster = Cluster(request.namespace, options.kubernetes_context)
    cluster.create(request.name, render(request))
    where = f"the run {request.name} is in namespace {request.namespace}"
    click.echo(f"unisono: {where}:\n{how_to_follow(request)}", err=True)
    if options.kubernetes_detach:
        return 0
    try:
        return cluster.follow(request.name, click.echo)
    except KeyboardInterrupt:
        click.echo(
            f"unisono: the run continues; `kubectl -n {request.namespace} delete job/{head_name(request.name)}` ends "
            "it",
            err=True,
        )
        return 130


def _request(options: Options) -> ClusterRequest:
    """Return what the command line asks for.

    Raises:
        UsageError: something is missing or wrong.
    """
    if not options.kubernetes_image:
        raise UsageError(
            "which container image? --set kubernetes.image=IMAGE, with Python, Unisono and the packages of the script"
        )
    if options.takes_all:
        raise UsageError("how many workers? --workers N, or A:B; each pod has --set kubernetes.workers-per-pod of them")
    for name in ("workers-per-pod", "user"):
        setting = SETTINGS[f"kubernetes.{name}"]
        if getattr(options, setting.field) < 1:
            raise UsageError(f"{setting.spelled()} is a number of at least 1, got {getattr(options, setting.field)}")
    threads = options.threads or 1
    workers = parse_workers(options.workers, threads)
    volumes = tuple(map(parse_volume, options.kubernetes_volumes))
    text, script = "", options.script or ""
    if not options.kubernetes_in_image and not options.module:
        path = Path(script)
        if not script or not path.is_file():
            raise UsageError(
                f"there is no script {script or '(none given)'} here; --set kubernetes.in-image=yes: it is in the image"
            )
        text, script = _text(path), path.name
    stem = Path(options.module or script).stem.lower().replace("_", "-").replace(".", "-")
    name = options.kubernetes_name or f"unisono-{stem}"
    run_dir = options.run_dir or (f"{volumes[0].path.rstrip('/')}/{name}" if volumes else "")
    if not run_dir:
        raise UsageError("where is the run directory? --set kubernetes.pvc=CLAIM:/PATH names a volume for it")
    where = f"{SCRIPT}/{script}" if text else script
    per_pod = options.kubernetes_workers_per_pod
    return ClusterRequest(
        name=name,
        namespace=options.kubernetes_namespace,
        image=options.kubernetes_image,
        token=secrets.token_urlsafe(32),
        command=(*(["-m", options.module] if options.module else [where]), *_given(options)),
        arguments=(*([script] if options.module and script else []), *options.arguments),
        run_dir=run_dir,
        script=text,
        script_name=script if text else "",
        num_pods=-(-workers.maximum // per_pod),
        workers_per_pod=per_pod,
        cpu=options.kubernetes_cpu or str(threads * per_pod),
        memory=options.kubernetes_memory,
        gpus_per_worker=options.kubernetes_gpus_per_worker,
        shm=options.kubernetes_shm,
        user=options.kubernetes_user,
        volumes=volumes,
        variables=dict(map(_pair, options.kubernetes_variables)),
    )


def _text(script: Path) -> str:
    try:
        return script.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{script} is not UTF-8 (byte {error.start}), which the script in a ConfigMap has to be; put it into the "
            "image and say --set kubernetes.in-image=yes"
        ) from error


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--set kubernetes.env is NAME=VALUE, got {text!r}")
    return name, value


def _given(options: Options) -> list[str]:
    """Return the settings that the user has given, as words of the command line of the head."""
    words: list[str] = []
    for name in options.sources:
        setting = SETTINGS[name]
        if name in OF_THE_HEAD:
            raise UsageError(f"{setting.spelled()} is set by the launcher kubernetes itself")
        if setting.group != "Kubernetes" and name not in OF_THE_COMMAND:
            words += setting.words(getattr(options, setting.field))
    return words
