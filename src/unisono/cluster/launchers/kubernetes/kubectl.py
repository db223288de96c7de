"""A run's objects in a cluster, by the program ``kubectl``: make them, and follow the head.

Every call ends within `CALL_S`. The head's output is asked for again and again, and not held as a stream: such a stream
ends whenever the cluster likes, and then nobody knows what is missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from unisono.cluster.launchers.kubernetes.manifests import HEAD, as_json, head_name, labels, workers_name
from unisono.core.errors import UsageError
from unisono.system.lifetime import run_bound

__all__ = ["Cluster", "PodOutput"]

CALL_S: Final = 60.0
LOOK_S: Final = 2.0
MAX_SILENCE_S: Final = 300.0
"""For an API server that is away while a run is followed."""


class _Failed(Exception):
    """``kubectl`` has failed; says why, in its words."""


class Cluster:
    """A namespace of a cluster.

    Args:
        context: of the kubeconfig; "": the current one.
    """

    def __init__(self, namespace: str, context: str = "") -> None:
        self._namespace = namespace
        self._where = [f"--namespace={namespace}", *([f"--context={context}"] if context else [])]

    # -- objects -------------------------------------------------------------------------------------

    def create(self, name: str, objects: Sequence[Mapping[str, Any]]) -> None:
        """Make the objects of a run. The head's job owns the others: they are removed with it.

        Raises:
            UsageError: there is a run of this name, or the cluster refuses an object. What was made is removed again.
        """
        (job,) = (each for each in objects if each["kind"] == "Job")
        job_name = f"job/{head_name(name)}"
        try:
            if self._call("get", job_name, "--ignore-not-found", "--output=name"):
                raise UsageError(
                    f"a run {name} exists in namespace {self._namespace}; choose a different name with --set "
                    f"kubernetes.name=NAME, or remove that run with `kubectl -n {self._namespace} delete {job_name}`"
                )
            uid = self._make([job], "--output=jsonpath={.metadata.uid}")
        except _Failed as error:
            raise UsageError(f"the cluster did not answer whether the run exists: {error}") from error
        owner = {"apiVersion": job["apiVersion"], "kind": "Job", "name": head_name(name), "uid": uid}
        others = [
            {**each, "metadata": {**each["metadata"], "ownerReferences": [owner]}}
            for each in objects
            if each is not job
        ]
        try:
            self._make(others, "--output=name")
        except _Failed as error:
            self._remove(job_name)
            raise UsageError(f"the cluster rejects a part of the run: {error}") from error

    def _make(self, objects: Sequence[Mapping[str, Any]], *words: str) -> str:
        # Not validated: a server that does not know a field yet leaves it out.
        return self._call("create", "--filename=-", "--validate=false", *words, text=as_json(objects))

    def _remove(self, *names: str) -> list[str]:
        words = ("--ignore-not-found", "--wait=false", "--output=name")
        try:
            return self._call("delete", *names, *words).split()
        except _Failed as error:
            raise UsageError(f"{' '.join(names)} cannot be removed: {error}") from error

    # -- the head ------------------------------------------------------------------------------------

    def follow(self, name: str, show: Callable[[str], None]) -> int:
        """Show what the head prints until the run is over, and send the workers away then. Returns the exit code.

        Raises:
            UsageError: there is no such run, or the cluster does not answer for `MAX_SILENCE_S`.
        """
        outputs: dict[str, PodOutput] = {}
        answered_at = time.monotonic()
        while True:
            try:
                ends = self._look(name, outputs, show)
                answered_at = time.monotonic()
                if ends & {"Complete", "Failed"}:
                    no_pods = json.dumps({"spec": {"replicas": 0}})
                    self._call("patch", f"deployment/{workers_name(name)}", "--type=merge", f"--patch={no_pods}")
                    return 0 if "Complete" in ends else 1
            except _Failed as error:
                if time.monotonic() - answered_at > MAX_SILENCE_S:
                    raise UsageError(f"the run {name} cannot be followed: {error}") from error
            time.sleep(LOOK_S)

    def _look(self, name: str, outputs: dict[str, PodOutput], show: Callable[[str], None]) -> set[str]:
        """Show what the head's pods have printed since the last look; return how its job has ended, or nothing."""
        found = self._call("get", f"job/{head_name(name)}", "--ignore-not-found", "--output=json")
        if not found:
            raise UsageError(f"there is no run {name} in namespace {self._namespace}, or no longer")
        conditions = json.loads(found).get("status", {}).get("conditions") or ()
        chosen = ",".join(f"{key}={value}" for key, value in labels(name, HEAD).items())
        for pod in json.loads(self._call("get", "pods", f"--selector={chosen}", "--output=json"))["items"]:
            pod_name, phase = str(pod["metadata"]["name"]), pod.get("status", {}).get("phase")
            if phase in ("Running", "Succeeded", "Failed"):
                self._show(pod_name, outputs.setdefault(pod_name, PodOutput()), show, is_over=phase != "Running")
        return {str(end["type"]) for end in conditions if end.get("status") == "True"}

    def _show(self, pod: str, output: PodOutput, show: Callable[[str], None], *, is_over: bool) -> None:
        try:
            text = self._call("logs", pod, f"--container={HEAD}", "--timestamps", *output.since())
        except _Failed as error:
            if is_over and not output.is_lost:  # its machine may be gone; a pod that goes on is asked again
                output.is_lost = True
                show(f"unisono: what pod {pod} has printed last cannot be read: {error}")
            return
        for line in output.take(text, is_over=is_over):
            show(line)

    def _call(self, *words: str, text: str = "") -> str:
        """Return what ``kubectl`` prints.

        Raises:
            _Failed: it has failed, or does not end.
            UsageError: there is none.
        """
        try:
            done = run_bound(["kubectl", *self._where, *words], CALL_S, given=text.encode())
        except OSError as error:
            raise UsageError(
                f"kubectl cannot be started ({error.strerror}): install it (https://kubernetes.io/docs/tasks/tools), "
                "or take what --dry-run prints to a machine that has it, for `kubectl create -f -`"
            ) from error
        if done.code is None:
            raise _Failed(f"kubectl {words[0]} has not ended within {CALL_S:.0f} s")
        if done.code:
            raise _Failed(f"kubectl {words[0]} says: {done.errors.strip() or f'nothing, and exits with {done.code}'}")
        return done.output


class PodOutput:
    """What a pod has printed, as far as it is known."""

    def __init__(self) -> None:
        self.is_lost = False
        """It has been said that the end cannot be read."""
        self._newest = ""
        self._num_newest = 0
        """Known lines that have the newest timestamp."""

    def since(self) -> list[str]:
        """Return the option of ``kubectl logs`` by which known lines are left out, but those of the newest second."""
        return [f"--since-time={self._newest}"] if self._newest else []

    def take(self, text: str, *, is_over: bool = False) -> list[str]:
        """Return the lines that were not known. Each begins with its timestamp, of a fixed length.

        Args:
            is_over: the pod prints nothing more; else the rest of a line that has no end is still to come.
        """
        *lines, rest = text.split("\n")
        found = []
        num_same = 0
        for line in [*lines, rest] if is_over and rest else lines:
            when, _, words = line.partition(" ")
            if when == self._newest:
                num_same += 1
            elif when > self._newest:
                self._newest, self._num_newest, num_same = when, 0, 1
            else:
                continue
            if num_same > self._num_newest:
                self._num_newest = num_same
                found.append(words)
        return found
