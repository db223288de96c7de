"""``unisono kubernetes``: train on a Kubernetes cluster."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click import option
from click.core import ParameterSource

from unisono.capacity import parse_workers
from unisono.cli.run import Options, run_options
from unisono.errors import UsageError
from unisono.words import listed

if TYPE_CHECKING:
    from unisono.kubernetes.manifests import Request

__all__ = ["kubernetes"]

OF_THE_HEAD = {"bind", "port", "token_file", "launcher", "run_dir", "resume", "head_away_s"}
"""Options of a run that this command sets itself."""


# fmt: off
_OPTIONS: Final = (
    option("--image", default="", metavar="IMAGE", help="Container image: Python, Unisono, what the script needs."),
    option("--name", default="", metavar="NAME", show_default="from the script's name", help="Of the run there."),
    option("--namespace", default="default", show_default=True, help="Where the objects are made."),
    option("--context", default="", metavar="NAME", help="Of the kubeconfig. Default: the current one."),
    option("--pvc", "volumes", multiple=True, metavar="CLAIM:/PATH", help="A volume for all pods; the first one holds "
           "the run directory."),
    option("--workers-per-pod", type=click.IntRange(1), default=1, show_default=True),
    option("--cpu", default="", metavar="N", show_default="the threads of its workers", help="CPUs of a worker pod."),
    option("--memory", default="2Gi", show_default=True, metavar="SIZE", help="Memory of a worker pod."),
    option("--gpus-per-worker", type=click.IntRange(0), default=0, show_default=True),
    option("--shm", default="1Gi", show_default=True, metavar="SIZE", help="Of /dev/shm; a part of the memory."),
    option("--user", type=click.IntRange(1), default=1000, show_default=True, help="User id in the containers."),
    option("--env", "variables", multiple=True, metavar="NAME=VALUE", help="An environment variable of all pods."),
    option("--in-image", is_flag=True, help="The script is in the image, and not here."),
    option("--dry-run", is_flag=True, help="Print the objects, for `kubectl create -f -`. The token is among them."),
    option("--detach", is_flag=True, help="Do not follow the run."),
    option("--delete", default="", metavar="NAME", help="Remove a run's objects. Its run directory stays."),
)
# fmt: on


def _options(command: Callable[..., int]) -> Callable[..., int]:
    for add in reversed(_OPTIONS):
        command = add(command)
    return command


@click.command()
@run_options
@_options
@click.pass_context
def kubernetes(context_: click.Context, /, **given: Any) -> int:
    """Train SCRIPT on a Kubernetes cluster, with the same bits at any number of workers.

    The head is a job, the workers are a deployment, whose number `kubectl scale` changes:

        unisono kubernetes train.py --image registry/train:1 --pvc runs:/runs --workers 2:8 -- --lr 0.01
    """
    from unisono.kubernetes.kubectl import Cluster

    own = {name: given.pop(name) for name in _OWN}
    if own["delete"]:
        gone = Cluster(own["namespace"], own["context"]).delete(own["delete"])
        if not gone:
            raise UsageError(f"there is no run {own['delete']} in namespace {own['namespace']}")
        click.echo(f"unisono: removed {listed(gone)}")
        return 0
    request = _request(context_, Options(**given), own)
    from unisono.kubernetes.manifests import as_json, how_to_follow, render

    if own["dry_run"]:
        click.echo(as_json(render(request)), nl=False)
        return 0
    cluster = Cluster(request.namespace, own["context"])
    cluster.create(request.name, render(request))
    where = f"the run {request.name} is in namespace {request.namespace}"
    click.echo(f"unisono: {where}:\n{how_to_follow(request)}", err=True)
    if own["detach"]:
        return 0
    try:
        return cluster.follow(request.name, click.echo)
    except KeyboardInterrupt:
        click.echo(
            f"unisono: the run goes on; `unisono kubernetes --delete {request.name} --namespace {request.namespace}` "
            "ends it",
            err=True,
        )
        return 130


_OWN = (
    *("image", "name", "namespace", "context", "volumes", "workers_per_pod", "cpu", "memory", "gpus_per_worker", "shm"),
    *("user", "variables", "in_image", "dry_run", "detach", "delete"),
)


def _request(context: click.Context, options: Options, own: dict[str, Any]) -> Request:
    """Return what the command line asks for.

    Raises:
        UsageError: something is missing or wrong.
    """
    from unisono.kubernetes.manifests import SCRIPT, Request, parse_volume

    if not own["image"]:
        raise UsageError("which container image? --image IMAGE, with Python, Unisono and the packages of the script")
    if options.workers == "auto":
        raise UsageError("how many workers? --workers N, or A:B; each pod has as many as --workers-per-pod says")
    threads = options.threads or 1
    workers = parse_workers(options.workers, threads)
    volumes = tuple(map(parse_volume, own["volumes"]))
    text, script = "", options.script or ""
    if not own["in_image"] and not options.module:
        path = Path(script)
        if not script or not path.is_file():
            raise UsageError(f"there is no script {script or '(none given)'} here; --in-image: it is in the image")
        text, script = _text(path), path.name
    name = own["name"] or f"unisono-{Path(options.module or script).stem.lower().replace('_', '-').replace('.', '-')}"
    run_dir = options.run_dir or (f"{volumes[0].path.rstrip('/')}/{name}" if volumes else "")
    if not run_dir:
        raise UsageError("where is the run directory? --pvc CLAIM:/PATH names a volume for it")
    where = f"{SCRIPT}/{script}" if text else script
    variables = dict(_pair(text_) for text_ in own["variables"])
    per_pod = own["workers_per_pod"]
    return Request(
        name=name,
        namespace=own["namespace"],
        image=own["image"],
        token=secrets.token_urlsafe(32),
        command=(*([where] if not options.module else []), *_given(context)),
        arguments=(*([script] if options.module and script else []), *options.arguments),
        run_dir=run_dir,
        script=text,
        script_name=script if text else "",
        num_pods=-(-workers.maximum // per_pod),
        workers_per_pod=per_pod,
        cpu=own["cpu"] or str(threads * per_pod),
        memory=own["memory"],
        gpus_per_worker=own["gpus_per_worker"],
        shm=own["shm"],
        user=own["user"],
        volumes=volumes,
        variables=variables,
    )


def _text(script: Path) -> str:
    try:
        return script.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{script} is not UTF-8 (byte {error.start}), which the script in a ConfigMap has to be; put it into the "
            "image and say --in-image"
        ) from error


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--env is NAME=VALUE, got {text!r}")
    return name, value


def _given(context: click.Context) -> list[str]:
    """Return the options of a run that the user has given, as words of a command line."""
    words: list[str] = []
    for param in context.command.params:
        name = param.name or ""
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if not isinstance(param, click.Option) or name in _OWN or not is_given:
            continue
        if name in OF_THE_HEAD - {"run_dir"}:
            raise UsageError(f"{param.opts[0]} is set by unisono kubernetes itself")
        value, word = context.params[name], max(param.opts, key=len)
        if name == "run_dir":
            continue
        if param.is_flag:
            words.append(word)
        elif param.multiple:
            words += [part for each in value for part in (word, str(each))]
        else:
            words += [word, str(value)]
    return words
