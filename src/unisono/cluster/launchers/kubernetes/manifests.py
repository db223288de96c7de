"""The objects of a run: a pure function of what the user asks for.

The head is a Job of one pod, the workers are a Deployment::

    Secret (token)     ConfigMap (script)     PersistentVolumeClaim (the user's: run directory)
         |                    |                          |
    Job NAME-head: unisono run --launcher none  <--Service NAME-head--  Deployment NAME-workers: unisono join

docs/clusters.md says why these kinds, and what follows from each.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

from unisono.core.errors import UsageError

__all__ = [
    "HEAD",
    "ClusterRequest",
    "Volume",
    "as_json",
    "head_name",
    "labels",
    "parse_volume",
    "render",
    "workers_name",
]

HEAD: Final = "head"
"""The part of the run that is the head, and its container."""
PORT: Final = 7777
GRACE_S: Final = 120
"""Time from SIGTERM to SIGKILL: until the end of the step."""
KEPT_S: Final = 300
"""Time from the end of the head's job to its removal, and with it that of the workers."""
HEAD_RETRIES: Final = 20
LASTING: Final = (1, 2)
"""Exit codes of a head that ends the same way again: of a script that fails, and of a wrong command line."""
HEAD_AWAY_S: Final = 300.0
WAIT_S: Final = 86400.0
TOKEN: Final = "/etc/unisono/secret/token"
SCRIPT: Final = "/etc/unisono/script"
MOST_SCRIPT_BYTES: Final = 900_000  # a ConfigMap holds 1 MiB
_NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Volume:
    """A claim, and where it is mounted."""

    claim: str
    path: str


def parse_volume(text: str) -> Volume:
    """Read the value of ``--set kubernetes.pvc``."""
    claim, colon, path = text.partition(":")
    if not colon or not claim or not path.startswith("/"):
        raise UsageError(f"--set kubernetes.pvc is CLAIM:/PATH, got {text!r}")
    return Volume(claim=claim, path=path.rstrip("/") or "/")


@dataclass(frozen=True, kw_only=True)
class ClusterRequest:
    """What the user asks for."""

    name: str
    """Of the run; the names of its objects begin with it."""
    namespace: str
    image: str
    token: str = field(repr=False)
    command: tuple[str, ...]
    """Script and options of ``unisono run``, as the user has given them."""
    arguments: tuple[str, ...] = ()
    """Of the script."""
    run_dir: str
    """On one of the volumes."""
    script: str = ""
    """Text of the script; "": it is in the image."""
    script_name: str = ""
    num_pods: int
    """Of workers."""
    workers_per_pod: int = 1
    cpu: str = "1"
    memory: str = "2Gi"
    gpus_per_worker: int = 0
    shm: str = "1Gi"
    user: int = 1000
    volumes: tuple[Volume, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                "the name of a run in Kubernetes takes lower-case letters, digits and dashes, at most 50 in all; got "
                f"--set kubernetes.name={self.name}"
            )
        num_bytes = len(self.script.encode())
        if num_bytes > MOST_SCRIPT_BYTES:
            raise UsageError(
                f"the script has {num_bytes:,} bytes, and a ConfigMap holds {MOST_SCRIPT_BYTES:,}; put it into the "
                "image and say --set kubernetes.in-image=yes"
            )
        run_dir = PurePosixPath(self.run_dir)
        if not any(run_dir.is_relative_to(volume.path) for volume in self.volumes):
            raise UsageError(
                f"the run directory {self.run_dir} is on no volume, and would be lost with the pod: --set "
                "kubernetes.pvc=CLAIM:/PATH, and --run-dir below that path"
            )


def head_name(name: str) -> str:
    """Return the name of the head's Job and Service."""
    return f"{name}-head"


def workers_name(name: str) -> str:
    """Return the name of the workers' Deployment: ``kubectl scale deployment`` takes it."""
    return f"{name}-workers"


def labels(name: str, part: str = "") -> dict[str, str]:
    """Return the labels of a run's objects, or of one part of it."""
    common = {"app.kubernetes.io/name": "unisono", "app.kubernetes.io/instance": name}
    return {**common, "app.kubernetes.io/component": part} if part else common


def render(request: ClusterRequest) -> list[dict[str, Any]]:
    """Return the objects of the run, in the order in which they are made."""
    objects: tuple[tuple[str, str, str, Mapping[str, Any] | None], ...] = (
        ("v1", "Secret", "token", {"type": "Opaque", "stringData": {"token": request.token}}),
        ("v1", "ConfigMap", "script", {"data": {request.script_name: request.script}} if request.script else None),
        ("v1", "Service", "head", {"spec": _service(request)}),
        ("networking.k8s.io/v1", "NetworkPolicy", "pods", {"spec": _network_policy(request)}),
        ("policy/v1", "PodDisruptionBudget", "workers", {"spec": _disruption_budget(request)}),
        ("batch/v1", "Job", "head", {"spec": _job(request)}),
        ("apps/v1", "Deployment", "workers", {"spec": _deployment(request)}),
    )
    common = {"namespace": request.namespace, "labels": labels(request.name)}
    return [
        {"apiVersion": api, "kind": kind, "metadata": {"name": f"{request.name}-{end}", **common}, **rest}
        for api, kind, end, rest in objects
        if rest is not None
    ]


def as_json(objects: Sequence[Mapping[str, Any]]) -> str:
    """Return objects as one text for ``kubectl create -f -``, in characters that every locale has."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2) + "\n"


def _service(request: ClusterRequest) -> dict[str, Any]:
    ports = [{"name": "head", "port": PORT, "targetPort": "head", "protocol": "TCP"}]
    return {"selector": labels(request.name, HEAD), "ports": ports}


def _network_policy(request: ClusterRequest) -> dict[str, Any]:
    """Only the pods of the run talk to each other."""
    own = {"podSelector": {"matchLabels": labels(request.name)}}
    return {**own, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}]}


def _disruption_budget(request: ClusterRequest) -> dict[str, Any]:
    """One pod of workers at a time is evicted from nodes that are drained: its workers leave at the end of a step."""
    return {"maxUnavailable": 1, "selector": {"matchLabels": labels(request.name, "workers")}}


def _job(request: ClusterRequest) -> dict[str, Any]:
    words = ["unisono", "run", *request.command, "--run-dir", request.run_dir]
    words += [
        "--resume",
        "auto",
        "--launcher",
        "none",
        "--set",
        f"token-file={TOKEN}",
        "--tls",
        "--bind",
        "0.0.0.0",
        "--set",
        f"port={PORT}",
    ]
    words += ["--set", f"head-away={HEAD_AWAY_S:g}s", *(["--", *request.arguments] if request.arguments else [])]
    health = {"path": "/health", "port": "head", "scheme": "HTTPS"}  # the kubelet takes any certificate
    probe = {"httpGet": health, "periodSeconds": 5, "timeoutSeconds": 5}
    container = {
        **_container(request, HEAD, words),
        "ports": [{"name": "head", "containerPort": PORT, "protocol": "TCP"}],
        "startupProbe": {**probe, "failureThreshold": 60},
        "readinessProbe": {**probe, "failureThreshold": 2},
        "livenessProbe": {**probe, "periodSeconds": 20, "failureThreshold": 6},
        "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "1Gi"}},
    }
    disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    codes = {"containerName": HEAD, "operator": "In", "values": list(LASTING)}
    lasting = {"action": "FailJob", "onExitCodes": codes, "onPodConditions": []}  # older schemas want the empty list
    return {
        "backoffLimit": HEAD_RETRIES,
        # The first rule that fits counts: a head whose node is drained may end with code 1 as well.
        "podFailurePolicy": {"rules": [disrupted, lasting]},
        "ttlSecondsAfterFinished": KEPT_S,
        "template": _pod(request, HEAD, container, restart="Never"),
    }


def _deployment(request: ClusterRequest) -> dict[str, Any]:
    words = ["unisono", "join", f"wss://{head_name(request.name)}:{PORT}", "--token-file", TOKEN]
    # Only the head's Job has the head: a worker's pod is not behind the Service.
    words += ["--no-head", "--workers", str(request.workers_per_pod)]
    words += ["--wait", f"{WAIT_S:g}s"]
    gpus = request.gpus_per_worker * request.workers_per_pod
    of_gpus = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    container = {
        **_container(request, "worker", words),
        "resources": {
            "requests": {"cpu": request.cpu, "memory": request.memory, **of_gpus},
            "limits": {"memory": request.memory, **of_gpus},
        },
    }
    return {
        "replicas": request.num_pods,
        "selector": {"matchLabels": labels(request.name, "workers")},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "template": _pod(request, "workers", container, restart="Always"),
    }


def _pod(request: ClusterRequest, part: str, container: dict[str, Any], *, restart: str) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [
        {"name": "token", "secret": {"secretName": f"{request.name}-token", "defaultMode": 0o440}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": request.shm}},
    ]
    if request.script:
        volumes.append({"name": "script", "configMap": {"name": f"{request.name}-script"}})
    for number, volume in enumerate(request.volumes):
        volumes.append({"name": f"volume{number}", "persistentVolumeClaim": {"claimName": volume.claim}})
    return {
        "metadata": {"labels": labels(request.name, part)},
        "spec": {
            "restartPolicy": restart,
            "terminationGracePeriodSeconds": GRACE_S,
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": request.user,
                "runAsGroup": request.user,
                "fsGroup": request.user,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": volumes,
        },
    }


def _container(request: ClusterRequest, name: str, words: list[str]) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [
        {"name": "token", "mountPath": str(PurePosixPath(TOKEN).parent), "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if request.script:
        mounts.append({"name": "script", "mountPath": SCRIPT, "readOnly": True})
    mounts += [{"name": f"volume{number}", "mountPath": volume.path} for number, volume in enumerate(request.volumes)]
    variables = {"HOME": "/tmp", "PYTHONUNBUFFERED": "1", **request.variables}
    return {
        "name": name,
        "image": request.image,
        "command": words,
        **({"workingDir": SCRIPT} if request.script else {}),
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }


def how_to_follow(request: ClusterRequest) -> str:
    """Return the commands that a user needs next."""
    where = shlex.join(["-n", request.namespace])
    return (
        f"kubectl {where} logs -f job/{head_name(request.name)}\n"
        f"kubectl {where} scale deployment/{workers_name(request.name)} --replicas N"
    )
