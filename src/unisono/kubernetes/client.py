"""What a user does with the objects of a run in a cluster: make them, follow the head, remove them.

Needs the package ``kubernetes``, which is imported here only.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from unisono.errors import UsageError
from unisono.extras import install_words
from unisono.kubernetes.manifests import PARTS, head_name, labels, workers_name

__all__ = ["Cluster"]

LOOK_S: Final = 2.0
MERGE: Final = "application/merge-patch+json"


class Cluster:
    """A namespace of a cluster, reached as ``kubectl`` reaches it.

    Args:
        context: of the kubeconfig; "": the current one.

    Raises:
        UsageError: the package is not installed, or no cluster is configured or answers.
    """

    def __init__(self, namespace: str, context: str = "") -> None:
        try:
            self._package = importlib.import_module("kubernetes")
            dynamic = importlib.import_module("kubernetes.dynamic")
        except ImportError as error:
            raise UsageError(
                f"the package kubernetes is not installed ({error}); {install_words('kubernetes')}, or use "
                "--dry-run with `kubectl apply -f -`"
            ) from error
        self._namespace = namespace
        self._failed = importlib.import_module("kubernetes.client.exceptions").ApiException
        try:
            known = {"config_file": os.environ.get("KUBECONFIG"), "context": context}
            self._package.config.load_config(**{name: value for name, value in known.items() if value})
            client = self._package.client.ApiClient()
            self._core = self._package.client.CoreV1Api(client)
            with tempfile.TemporaryDirectory() as folder:  # else a list of all kinds stays in the system's folder
                self._objects = dynamic.DynamicClient(client, cache_file=f"{folder}/kinds")
                for api, kind, _ in PARTS:
                    self._kind({"apiVersion": api, "kind": kind})
        except Exception as error:  # of the configuration, of its plugins, of the network
            first = str(error).strip().partition("\n")[0]
            raise UsageError(
                f"no cluster can be reached: {first}; `kubectl config view` shows what is known"
            ) from error

    # -- objects -------------------------------------------------------------------------------------

    def create(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """Make the objects of a run. The others are removed with the head's job, some time after its end.

        Raises:
            UsageError: there is a run of this name, or the cluster refuses an object. What was made is removed again.
        """
        name = str(objects[0]["metadata"]["labels"]["app.kubernetes.io/instance"])
        made: list[Mapping[str, Any]] = []
        owner: list[dict[str, Any]] = []
        try:
            for manifest in objects:
                given = {
                    **manifest,
                    "metadata": {**manifest["metadata"], **({"ownerReferences": owner} if owner else {})},
                }
                found = self._kind(manifest).create(body=given, namespace=self._namespace)
                made.append(manifest)
                if manifest["kind"] == "Job":
                    owner = [
                        {
                            "apiVersion": manifest["apiVersion"],
                            "kind": "Job",
                            "name": manifest["metadata"]["name"],
                            "uid": found.metadata.uid,
                        }
                    ]
                    for before in made[:-1]:
                        self._patch(before, {"metadata": {"ownerReferences": owner}})
        except self._failed as error:
            for before in reversed(made):
                self._remove(before["apiVersion"], before["kind"], before["metadata"]["name"])
            if error.status == 409:
                raise UsageError(
                    f"there is a run {name} in namespace {self._namespace}; --name names another one, and "
                    f"`unisono kubernetes --delete {name}` removes that one"
                ) from error
            raise UsageError(f"the cluster refuses the {manifest['kind']}: {_message(error)}") from error

    def delete(self, name: str) -> list[str]:
        """Remove the objects of a run; return which there were. Its run directory stays."""
        return [
            f"{kind.lower()}/{name}-{end}"
            for api, kind, end in reversed(PARTS)
            if self._remove(api, kind, f"{name}-{end}")
        ]

    def _kind(self, manifest: Mapping[str, Any]) -> Any:
        return self._objects.resources.get(api_version=manifest["apiVersion"], kind=manifest["kind"])

    def _patch(self, manifest: Mapping[str, Any], change: Mapping[str, Any]) -> None:
        name = manifest["metadata"]["name"]
        self._kind(manifest).patch(body=change, name=name, namespace=self._namespace, content_type=MERGE)

    def _remove(self, api: str, kind: str, name: str) -> bool:
        options = {"propagationPolicy": "Background"}
        try:
            found = self._kind({"apiVersion": api, "kind": kind})
            found.delete(name=name, namespace=self._namespace, body=options)
        except self._failed as error:
            if error.status == 404:
                return False
            raise UsageError(f"{kind.lower()}/{name} cannot be removed: {_message(error)}") from error
        return True

    # -- the head ------------------------------------------------------------------------------------

    def follow(self, name: str, show: Callable[[str], None]) -> int:
        """Show what the head prints until the run is over, and send the workers away then. Returns the exit code."""
        jobs = self._kind({"apiVersion": "batch/v1", "kind": "Job"})
        seen: set[str] = set()
        while True:
            try:
                status = jobs.get(name=head_name(name), namespace=self._namespace).to_dict().get("status") or {}
            except self._failed as error:
                raise UsageError(f"the run {name} cannot be followed: {_message(error)}") from error
            for pod in self._new_pods(name, seen):
                for line in self._lines(pod):
                    show(line)
            ends = {str(end["type"]) for end in status.get("conditions") or () if end.get("status") == "True"}
            if ends & {"Complete", "Failed"}:
                self._patch(
                    {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": workers_name(name)}},
                    {"spec": {"replicas": 0}},
                )
                return 0 if "Complete" in ends else 1
            time.sleep(LOOK_S)

    def _new_pods(self, name: str, seen: set[str]) -> Iterator[str]:
        """Yield the head's pods that have begun and were not seen before."""
        chosen = ",".join(f"{key}={value}" for key, value in labels(name, "head").items())
        pods = self._kind({"apiVersion": "v1", "kind": "Pod"}).get(namespace=self._namespace, label_selector=chosen)
        for pod in pods.to_dict()["items"]:
            pod_name, phase = str(pod["metadata"]["name"]), (pod.get("status") or {}).get("phase")
            if pod_name not in seen and phase in ("Running", "Succeeded", "Failed"):
                seen.add(pod_name)
                yield pod_name

    def _lines(self, pod: str) -> Iterator[str]:
        watch = self._package.watch.Watch()
        try:
            yield from watch.stream(self._core.read_namespaced_pod_log, name=pod, namespace=self._namespace)
        except self._failed as error:
            yield f"the output of pod {pod} cannot be read: {_message(error)}"


def _message(error: Any) -> str:
    """Return what an API server says of an error."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"HTTP {error.status} {error.reason}"
