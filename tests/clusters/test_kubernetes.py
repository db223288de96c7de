"""``unisono kubernetes``: what is rendered, what is asked of the API server, and that the pods' commands make a run.

There is no API server here. The manifests are held against Kubernetes' schemas, what kubectl is told against a fake
server, and the commands of the containers are started as processes of this machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click.testing
import pytest

from tests.clusters.slurm import free_ports
from tests.house.rooms import ROOT
from tests.waiting import WAIT_S
from tests.workers.conftest import Command, Unisono, marked
from tests.workers.gates import Gates
from unisono.cli.run import run as command
from unisono.cluster.launchers.kubernetes.kubectl import Cluster, PodOutput
from unisono.cluster.launchers.kubernetes.manifests import (
    PORT,
    SCRIPT,
    TOKEN,
    ClusterRequest,
    Volume,
    as_json,
    head_name,
    labels,
    parse_volume,
    render,
)
from unisono.core.errors import UsageError
from unisono.record.journal import compare

if find_spec("kmock") is None:  # not imported: every process that collects tests would do it
    pytest.skip("could not import 'kmock'", allow_module_level=True)
kubernetes_validate = pytest.importorskip("kubernetes_validate")

NEEDS_KUBECTL = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
OLDEST_KUBECTL = 24


def _minor_of_kubectl() -> int:
    done = subprocess.run(
        ["kubectl", "version", "--client", "--output=json"], capture_output=True, timeout=WAIT_S, check=True
    )
    return int(json.loads(done.stdout)["clientVersion"]["minor"].rstrip("+"))


@pytest.fixture(autouse=True)
def _fits_the_fake_server(request: pytest.FixtureRequest) -> None:
    """Debian 12's kubectl is of 2021: it does not take the fake server's words for an object that is not there."""
    if "server" in request.fixturenames and _minor_of_kubectl() < OLDEST_KUBECTL:
        pytest.skip(f"kubectl is older than 1.{OLDEST_KUBECTL}")


GOLDEN = Path(__file__).parent / "golden"
TOKEN_OF_TESTS = "no-secret-of-anybody-but-the-tests"
OF_A_SCRIPT = ClusterRequest(
    name="unisono-train",
    namespace="lab",
    image="registry.example/train:1",
    token=TOKEN_OF_TESTS,
    command=(f"{SCRIPT}/train.py", "--workers", "2:8", "--threads", "2"),
    arguments=("--lr", "0.1"),
    run_dir="/runs/unisono-train",
    script="import unisono\n\nprint('a script: \"quoted\"')\n",
    script_name="train.py",
    num_pods=4,
    workers_per_pod=2,
    cpu="4",
    memory="8Gi",
    gpus_per_worker=1,
    volumes=(Volume(claim="runs", path="/runs"), Volume(claim="data", path="/data")),
    variables={"HF_HOME": "/data/cache"},
)
OF_AN_IMAGE = ClusterRequest(
    name="plain",
    namespace="lab",
    image="registry.example/train:1",
    token=TOKEN_OF_TESTS,
    command=("/app/train.py", "--workers", "4"),
    run_dir="/runs/plain",
    num_pods=4,
    volumes=(Volume(claim="runs", path="/runs"),),
)
REQUESTS = {"script": OF_A_SCRIPT, "image": OF_AN_IMAGE}


@pytest.mark.parametrize("name", REQUESTS)
def test_what_is_rendered_is_what_was_read_by_a_person(name: str) -> None:
    """After a change that is meant: write `as_json(render(...))` there, and read the difference."""
    assert as_json(render(REQUESTS[name])) == (GOLDEN / f"{name}.json").read_text()


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("version", ["1.27", "1.37"])
def test_what_is_rendered_has_the_form_that_kubernetes_knows(version: str, name: str) -> None:
    for manifest in render(REQUESTS[name]):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_typing_error_would_be_found() -> None:
    manifest = render(OF_A_SCRIPT)[-1]
    manifest["spec"]["replica"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, "1.37", strict=True)


def test_a_script_that_fails_is_not_run_again_and_a_head_whose_node_goes_is() -> None:
    """Exit code 1 is a script that raises, 2 a wrong option: with GPUs that wait, each further start costs."""
    (job,) = (manifest for manifest in render(OF_A_SCRIPT) if manifest["kind"] == "Job")
    first, second = job["spec"]["podFailurePolicy"]["rules"]
    assert first == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert second["action"] == "FailJob"
    assert second["onExitCodes"] == {"containerName": container(job)["name"], "operator": "In", "values": [1, 2]}


def test_the_workers_reach_the_head_by_the_name_of_its_service() -> None:
    objects = {manifest["kind"]: manifest for manifest in render(OF_A_SCRIPT)}
    words = container(objects["Deployment"])["command"]
    assert f"wss://{objects['Service']['metadata']['name']}:{PORT}" in words
    assert (
        objects["Service"]["spec"]["selector"].items()
        <= objects["Job"]["spec"]["template"]["metadata"]["labels"].items()
    )


def test_the_token_is_in_no_command_and_no_environment() -> None:
    secret, *others = render(OF_A_SCRIPT)
    assert secret["kind"] == "Secret"
    assert TOKEN_OF_TESTS not in json.dumps(others)
    assert TOKEN_OF_TESTS not in repr(OF_A_SCRIPT)


# -- the command line --------------------------------------------------------------------------------


def call(*words: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(command, ["--launcher", "kubernetes", *words], standalone_mode=False)


def test_the_command_renders_what_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_train.py").write_text("print()\n")
    options = [
        "--set",
        "kubernetes.image=i",
        "--set",
        "kubernetes.pvc=runs:/runs",
        "--workers",
        "2:5",
        "--set",
        "kubernetes.workers-per-pod=2",
        "--strict",
    ]
    done = call("my_train.py", *options, "--dry-run", "--", "--lr", "0.1")
    assert done.exception is None
    objects = {manifest["kind"]: manifest for manifest in json.loads(done.stdout)["items"]}
    assert objects["Deployment"]["spec"]["replicas"] == 3
    assert objects["ConfigMap"]["data"] == {"my_train.py": "print()\n"}
    words = container(objects["Job"])["command"]
    assert words[:3] == ["unisono", "run", f"{SCRIPT}/my_train.py"]
    assert words[words.index("--run-dir") + 1] == "/runs/unisono-my-train"
    assert {"--strict", "2:5"} <= {*words}
    assert words[-3:] == ["--", "--lr", "0.1"]
    assert len(objects["Secret"]["stringData"]["token"]) > 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "kubernetes.pvc=runs:/runs", "--workers", "2"], "which container image"),
        (["--set", "kubernetes.image=i", "--workers", "2"], "--set kubernetes.pvc=CLAIM:/PATH names a volume"),
        (["--set", "kubernetes.image=i", "--set", "kubernetes.pvc=runs:/runs"], "how many workers"),
        (
            ["--set", "kubernetes.image=i", "--set", "kubernetes.pvc=runs", "--workers", "2"],
            "--set kubernetes.pvc is CLAIM:/PATH, got 'runs'",
        ),
        (
            ["--set", "kubernetes.image=i", "--set", "kubernetes.pvc=a:/a", "--workers", "2", "--run-dir", "/b"],
            "the run directory /b is on no volume",
        ),
        (
            ["--set", "kubernetes.image=i", "--set", "kubernetes.pvc=a:/a", "--workers", "2", "--set", "port=5"],
            "--set port is set by the launcher kubernetes itself",
        ),
        (
            [
                "--set",
                "kubernetes.image=i",
                "--set",
                "kubernetes.pvc=a:/a",
                "--workers",
                "2",
                "--set",
                "kubernetes.env=x",
            ],
            "--set kubernetes.env is NAME=VALUE",
        ),
        (
            [
                "--set",
                "kubernetes.image=i",
                "--set",
                "kubernetes.pvc=a:/a",
                "--workers",
                "2",
                "--set",
                "kubernetes.name=A_b",
            ],
            "got --set kubernetes.name=A_b",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_said(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print()\n")
    done = call("train.py", *words, "--dry-run")
    assert isinstance(done.exception, UsageError)
    assert message in str(done.exception)


def test_a_script_that_is_too_long_for_a_config_map_is_refused() -> None:
    with pytest.raises(UsageError, match=r"put it into the image and say --set kubernetes\.in-image=yes"):
        ClusterRequest(**{**vars(OF_A_SCRIPT), "script": "#" * 1_000_000})
    assert parse_volume("a:/") == Volume(claim="a", path="/")


# -- the client, against a fake server ---------------------------------------------------------------


class Server:
    """A fake API server, and a kubeconfig that names it."""

    def __init__(self, folder: Path) -> None:
        import kmock

        self.handler: Any = kmock.KubernetesEmulator()
        self.handler.resources.load_bundled()
        self.config = folder / "kubeconfig"
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        import kmock

        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        async with self.handler, kmock.Server(self.handler) as server:
            cluster = {"name": "c", "cluster": {"server": str(server.url).rstrip("/")}}
            context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
            user = {"name": "u", "user": {"token": "t"}}
            known = {"clusters": [cluster], "contexts": [context], "users": [user], "current-context": "x"}
            self.config.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **known}))
            self._url = str(server.url).rstrip("/")
            self._is_up.set()
            await self._over.wait()

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._is_up.wait(WAIT_S)
        # Its list of the first kinds has a group with an empty name, and not none: kubectl does not find them there.
        kinds = json.loads(urllib.request.urlopen(f"{self._url}/api/v1").read())
        self.handler["get /api/v1"] << {**kinds, "groupVersion": "v1"}
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(WAIT_S)

    def calls(self, method: str) -> list[str]:
        """The paths of the requests with this method, in their order."""
        return [str(request.url.path) for request in list(self.handler) if request.method.value == method]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server(tmp_path) as found:
        monkeypatch.setenv("KUBECONFIG", str(found.config))
        yield found


@pytest.fixture
def cluster(server: Server) -> Cluster:
    return Cluster("lab")


KINDS = ("jobs", "secrets", "configmaps", "services", "networkpolicies", "poddisruptionbudgets", "deployments")


@NEEDS_KUBECTL
def test_the_objects_are_made(server: Server, cluster: Cluster) -> None:
    cluster.create("unisono-train", render(OF_A_SCRIPT))
    made = [path.rpartition("/")[2] for path in server.calls("POST")]
    assert made == [*KINDS]


@NEEDS_KUBECTL
def test_a_run_of_the_same_name_is_not_touched(server: Server, cluster: Cluster) -> None:
    cluster.create("plain", render(OF_AN_IMAGE))
    with pytest.raises(UsageError, match="a run plain exists in namespace lab"):
        cluster.create("plain", render(OF_AN_IMAGE))
    assert server.calls("DELETE") == []


@NEEDS_KUBECTL
def test_what_was_made_goes_where_the_cluster_refuses_a_part(server: Server, cluster: Cluster) -> None:
    """The head's job owns what is there of the others."""
    refused = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no budget left", "code": 403}
    server.handler["post /apis/policy/v1/namespaces/lab/poddisruptionbudgets"] << 403 << refused
    with pytest.raises(UsageError, match="no budget left"):
        cluster.create("plain", render(OF_AN_IMAGE))
    assert server.calls("DELETE") == [f"/apis/batch/v1/namespaces/lab/jobs/{head_name('plain')}"]


@NEEDS_KUBECTL
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_script_comes_to_the_cluster_as_it_is_in_any_locale(server: Server, tmp_path: Path, locale: str) -> None:
    text = "print('é, \N{PARTY POPPER}, \\u1234, \x07')\n"
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    words = [
        "--set",
        "kubernetes.image=i",
        "--set",
        "kubernetes.pvc=runs:/runs",
        "--workers",
        "2",
        "--set",
        "kubernetes.namespace=lab",
        "--dry-run",
    ]
    environment = {**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    shown = subprocess.run(
        [sys.executable, "-m", "unisono", "run", "--launcher", "kubernetes", "train.py", *words],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    kubectl("create", "--filename=-", "--validate=false", given=shown.stdout)
    made = json.loads(kubectl("get", "configmap/unisono-train-script", "--namespace=lab", "--output=json"))
    assert made["data"] == {"train.py": text}


def kubectl(*words: str, given: bytes = b"") -> bytes:
    return subprocess.run(["kubectl", *words], input=given, stdout=subprocess.PIPE, check=True).stdout


def test_a_script_of_another_encoding_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_bytes(b"# -*- coding: latin-1 -*-\nprint('\xe9')\n")
    done = call(
        "train.py", "--set", "kubernetes.image=i", "--set", "kubernetes.pvc=runs:/runs", "--workers", "2", "--dry-run"
    )
    assert "train.py is not UTF-8 (byte 33)" in str(done.exception)


@NEEDS_KUBECTL
def test_following_shows_the_output_of_the_head_and_sends_the_workers_away_at_the_end(
    server: Server, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the cluster ends an answer, and whatever it does not answer, each line is shown once."""
    monkeypatch.setattr("unisono.cluster.launchers.kubernetes.kubectl.LOOK_S", 0.0)
    job = f"get /apis/batch/v1/namespaces/lab/jobs/{head_name('plain')}"
    known = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": head_name("plain")}}
    over = {**known, "status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    jobs = iter((known, 503, known, known, over))
    server.handler[job] << (lambda: next(jobs))
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pod1", "namespace": "lab", "labels": labels("plain", "head")},
        "spec": {"containers": [{"name": "head"}]},
        "status": {"phase": "Running"},
    }
    pods = {"apiVersion": "v1", "kind": "PodList", "items": [pod]}
    server.handler["get /api/v1/namespaces/lab/pods"] << pods
    server.handler["get /api/v1/namespaces/lab/pods/pod1"] << pod
    at = "2026-01-01T00:00:0{}Z".format
    logs = iter(
        [
            f"{at(1)} a\n{at(2)} ".encode(),
            500,
            f"{at(1)} a\n{at(2)} b\n{at(2)} c".encode(),
            f"{at(2)} b\n{at(2)} c\n{at(3)} d\n".encode(),
        ]
    )
    server.handler["get /api/v1/namespaces/lab/pods/pod1/log"] << (lambda: next(logs))
    server.handler.objects["apps/v1/deployments", "lab", "plain-workers"] = render(OF_AN_IMAGE)[-1]
    shown: list[str] = []
    assert cluster.follow("plain", shown.append) == 0
    assert shown == ["a", "b", "c", "d"]
    assert server.calls("PATCH") == ["/apis/apps/v1/namespaces/lab/deployments/plain-workers"]
    changed = server.handler.objects["apps/v1/deployments", "lab", "plain-workers"].last.raw
    assert changed["spec"]["replicas"] == 0


def test_each_line_of_a_pod_is_shown_once_and_none_is_missing() -> None:
    lines = [f"2026-01-01T00:00:{number // 3:02}.000000000Z line {number} \r x" for number in range(30)]
    text = "\n".join(lines)
    for step in (1, 7, 100, 10_000):
        output = PodOutput()
        shown: list[str] = []
        for end in range(0, len(text), step):
            since = output.since()
            known = text[:end] if not since else text[text.index(since[0].partition("=")[2]) : end]
            shown += output.take(known)
        shown += output.take(text, is_over=True)
        assert shown == [line.partition(" ")[2] for line in lines]


@NEEDS_KUBECTL
def test_without_a_cluster_the_command_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print()\n")
    words = ("train.py", "--set", "kubernetes.image=i", "--set", "kubernetes.pvc=runs:/runs", "--workers", "2")
    done = call(*words)
    assert isinstance(done.exception, UsageError)
    assert "says: " in str(done.exception)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "kubectl cannot be started" in str(call(*words).exception)


# -- the commands of the pods ------------------------------------------------------------------------

TRAINING = f"""
    import sys
    from pathlib import Path
    sys.path.insert(0, {str(ROOT)!r})
    import torch
    import unisono
    from torch.nn import functional as F
    from tests.workers.gates import wait_at

    with unisono.Run(seed=3, checkpoint=unisono.Checkpoints(every_steps=2)) as run:
        draw = torch.Generator().manual_seed(1)
        data = torch.utils.data.TensorDataset(torch.randn(40, 6, generator=draw))
        model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Dropout(0.2), torch.nn.Linear(9, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(data, batch_size=16, microbatches=4, epochs=100, max_steps=8):
            if sys.argv[1:]:
                wait_at(Path(sys.argv[1]) / str(step.number))
            for (inputs,) in step:
                step.backward(model(inputs).square().mean(), weight=len(inputs))
            optimizer.step()
    """


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["spec"]["template"]["spec"]["containers"][0]
    return found


class Pods:
    """Starts the commands of the containers as processes: with the paths, the port and the name of this machine."""

    def __init__(self, unisono: Unisono, folder: Path, arguments: tuple[str, ...]) -> None:
        self._unisono = unisono
        self._port = free_ports(1)[0]
        port = str(self._port)
        request = ClusterRequest(
            **{
                **vars(OF_A_SCRIPT),
                "command": (f"{SCRIPT}/train.py", "--workers", "2:4"),
                "workers_per_pod": 1,
                "arguments": arguments,
            }
        )
        (folder / "token").write_text(TOKEN_OF_TESTS)
        here = {TOKEN: "token", f"{SCRIPT}/train.py": "train.py", "/runs/unisono-train": "run", "0.0.0.0": "127.0.0.1"}
        here |= {f"port={PORT}": f"port={port}", f"token-file={TOKEN}": "token-file=token"}
        here |= {f"wss://{head_name(request.name)}:{PORT}": f"wss://127.0.0.1:{port}"}
        self._words = {
            manifest["kind"]: [here.get(word, word) for word in container(manifest)["command"][1:]]
            for manifest in render(request)
            if manifest["kind"] in ("Job", "Deployment")
        }

    def head(self) -> Command:
        return self._unisono(*self._words["Job"])

    def wait_until_it_listens(self) -> None:
        """From then on, whoever calls the head waits for it."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port)).close()
            except ConnectionRefusedError:
                assert time.monotonic() < deadline, "the head does not listen"
            else:
                return

    def worker(self) -> Command:
        return self._unisono(*self._words["Deployment"])


@pytest.fixture
def alone(unisono: Unisono, script: Callable[[str], str], nursery: None, tmp_path: Path) -> Path:
    run = unisono("run", script(TRAINING), "--workers", 1, "--run-dir", "alone")
    assert run.wait() == 0, run.err
    return tmp_path / "alone"


@pytest.mark.usefixtures("nursery")
def test_pods_make_a_run_in_any_order_and_leave_at_the_end_of_a_step(
    unisono: Unisono, tmp_path: Path, alone: Path
) -> None:
    with Gates(tmp_path / "gates", [3, 5]) as gates:
        pods = Pods(unisono, tmp_path, (str(gates.folder),))
        first = pods.worker()
        first.line("waiting for it")
        head = pods.head()
        second, third = pods.worker(), pods.worker()
        gates.wait(3, workers=2)
        gates.open(3, head.generation("with 3 workers"))
        gates.wait(5, workers=3)
        os.kill(third.pid, signal.SIGTERM)  # `kubectl scale`, or a node that is drained
        gates.open(5, head.generation(" leaves"))
        assert third.wait() == 0
        assert head.wait() == 0, head.err
        assert [first.wait(), second.wait()] == [0, 0]
    assert str(compare(alone, tmp_path / "run")).startswith("identical: 8 steps")


@pytest.mark.usefixtures("nursery")
def test_after_the_loss_of_the_head_its_job_goes_on_from_the_checkpoint(
    unisono: Unisono, tmp_path: Path, alone: Path, mark: str
) -> None:
    """What is left of the run before, with the same token, is refused: its pods start again.

    The new pod is there before they have noticed; else one of them would have the next head.
    """
    with Gates(tmp_path / "gates", [5]) as gates:
        pods = Pods(unisono, tmp_path, (str(gates.folder),))
        head, workers = pods.head(), [pods.worker(), pods.worker()]
        gates.wait(5, workers=2)
        server = next(pid for pid, words in marked(mark).items() if "-m unisono.cluster.head " in words)
        for worker in workers:
            os.kill(worker.pid, signal.SIGSTOP)
        os.kill(head.pid, signal.SIGSTOP)  # a container ends as a whole: nobody of it sees the others end
        os.kill(server, signal.SIGKILL)
        os.kill(head.pid, signal.SIGKILL)
        head.wait()
        again = pods.head()
        pods.wait_until_it_listens()
        for worker in workers:
            os.kill(worker.pid, signal.SIGCONT)
        for worker in workers:
            assert worker.wait() == 1
            worker.line("now belongs to run ")
        gates.open(5)
        workers = [pods.worker(), pods.worker()]
        assert again.wait() == 0, again.err
        assert [worker.wait() for worker in workers] == [0, 0]
    assert str(compare(alone, tmp_path / "run")).startswith("identical: 8 steps")


def test_a_pod_that_waits_for_the_head_ends_at_sigterm(unisono: Unisono, tmp_path: Path) -> None:
    worker = Pods(unisono, tmp_path, ()).worker()
    worker.line("waiting for it")
    os.kill(worker.pid, signal.SIGTERM)
    assert worker.wait() == 128 + signal.SIGTERM


def test_a_token_that_can_be_guessed_is_refused(unisono: Unisono, script: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    run = unisono("run", script("print()"), "--set", "token-file=token")
    assert run.wait() == 2
    run.line("has 6 characters; it needs at least 20")
