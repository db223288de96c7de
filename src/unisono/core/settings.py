"""The settings of a run, each declared once: its name, type, default, help, group and who may give it.

Made from this declaration: the options of ``unisono run`` and its ``--set NAME=VALUE``, the arguments of
`unisono.launch`, the entries of ``unisono.toml``, what ``--dry-run`` prints, and the table of docs/settings.md. The
value itself goes to all processes of the run (`unisono.core.spec.RunSpec.settings`).

The name of a setting is that of its field, with dashes; a field whose name ends with ``_s`` is a time in seconds, which
is written with its unit: ``--set heartbeat=500ms``.
"""

from __future__ import annotations

import difflib
import math
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from unisono.core.errors import UsageError
from unisono.core.words import without_password

__all__ = [
    "DEFAULTS",
    "FILE",
    "GROUPS",
    "SETTINGS",
    "AuditThen",
    "Coding",
    "Instructions",
    "Partition",
    "RunSettings",
    "Setting",
    "StartMethod",
    "gathered",
    "pairs",
    "parse_time",
    "port_range",
    "setting_named",
    "split_parts",
    "table",
]

Partition = Literal["wait", "majority", "go-on"]
"""What machines do that hold the run's state and have lost the head: wait for it; go on under a head of their own where
they are more than half of the machines; go on in any case."""

AuditThen = Literal["go-back", "go-on"]
"""What a run does when an audit has found a worker that computes wrong values: go back to the newest checkpoint from
before the steps that are to be doubted; or go on, with what that worker has done so far."""

Instructions = Literal["avx2", "avx512", "compatible"]
"""What libraries compute with on x86 processors: at most these instructions; compatible: at most AVX2, and the kernels
of MKL that are equal on processors of all makers."""

StartMethod = Literal["fork", "spawn"]
"""fork: from a process that has imported torch; spawn: each worker imports torch by itself."""

Coding = Literal["auto", "always", "never"]
"""Whether messages between machines are coded to fewer bytes: where that saves time, or in any case."""

Group = Literal["workers", "machines", "network", "keeping", "Ray", "Kubernetes", "internal"]
GROUPS: Final[dict[Group, str]] = {
    "workers": "Workers",
    "machines": "Machines",
    "network": "Network",
    "keeping": "Keeping",
    "Ray": "With --launcher ray",
    "Kubernetes": "With --launcher kubernetes",
}
"""The groups of the help and of the documentation, with their titles. Settings of the group "internal" are for own
processes and for tests."""

FILE: Final = "unisono.toml"
"""The file beside a script (`unisono.cli.settings_file`)."""
MOST_PARTS: Final = 4096
"""More parts than this are taken for a typing error."""
UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
WORDS: Final = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}


class Setting(msgspec.Struct, frozen=True):
    """One setting of a run, as the field of `RunSettings` declares it."""

    help: str
    group: Group
    name: str = ""
    """After ``--set``, in the file and in the documentation."""
    option: str = ""
    """The options of the command line, such as ``-n --workers``; "": it is given by ``--set`` only."""
    metavar: str = ""
    """The form of its value."""
    shown: str = ""
    """The default in words, where the value itself does not say it."""
    in_file: bool = True
    """It may stand in ``unisono.toml``: it is no token, and no command that is executed."""
    field: str = ""
    kind: Any = str
    """Type of the value, without None."""
    default: Any = None

    @property
    def is_time(self) -> bool:
        return self.field.endswith("_s")

    @property
    def is_flag(self) -> bool:
        return self.kind is bool

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it may have; empty: any of its type."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def form(self) -> str:
        """How a value is written."""
        if self.metavar:
            return self.metavar
        if self.choices:
            return "|".join(self.choices)
        return "TIME" if self.is_time else {bool: "yes|no", int: "N", float: "X"}.get(self.kind, "TEXT")

    @property
    def words_of_default(self) -> str:
        """The default, as the help and the documentation show it."""
        return self.shown or self.text(self.default) or "none"

    def spelled(self) -> str:
        """Return how a user writes it on the command line."""
        return self.option.split(" ")[-1] if self.option else f"--set {self.name}"

    def read(self, text: str) -> Any:
        """Return the value that a text says.

        Raises:
            UsageError: it says none.
        """
        try:
            if self.is_time:
                return parse_time(text)
            if self.is_flag:
                return WORDS[text.lower()]
            if self.kind in (int, float):
                number = self.kind(text)
                if not math.isfinite(number):
                    raise ValueError
                return number
        except (KeyError, ValueError):
            what = {"TIME": "a time above 0 with its unit, such as 500ms, 60s, 2m or 1h", "N": "a whole number"}
            wanted = "yes or no" if self.is_flag else what.get("TIME" if self.is_time else self.form, "a number")
            raise UsageError(f"{self.spelled()} is {wanted}, got {text!r}") from None
        if self.choices and text not in self.choices:
            raise UsageError(f"{self.spelled()} is one of {', '.join(self.choices)}; got {text!r}")
        return text

    def checked(self, value: Any) -> Any:
        """Return the value that a caller in Python or a file has given.

        Raises:
            UsageError: it has another type.
        """
        if self.is_list:
            return (value,) if isinstance(value, str) else tuple(str(each) for each in value)
        if isinstance(value, bool):
            return self.read("yes" if value else "no")
        if isinstance(value, (int, float)):
            return self.read(f"{value}s" if self.is_time else str(value))
        return self.read(str(value))

    def text(self, value: Any) -> str:
        """Return a value as it is given on the command line, so that `read` returns it again."""
        if value is None:
            return "auto"
        if self.is_flag:
            return "yes" if value else "no"
        if self.is_time:
            return f"{value:g}s"
        if self.is_list:
            return ", ".join(value)
        return f"{value:g}" if self.kind is float else str(value)

    def words(self, value: Any) -> list[str]:
        """Return a value as words of the command line of ``unisono run``."""
        if value is None:
            return []
        values = value if self.is_list else (value,)
        return [word for each in values for word in self._word(each if self.is_list else self.text(each))]

    def _word(self, text: str) -> list[str]:
        name = self.option.split(" ")[-1]
        if not name or (self.is_flag and text == "no"):
            return ["--set", f"{self.name}={text}"]
        return [name] if self.is_flag else [name, text]


def parse_time(text: str) -> float:
    """Return the seconds of ``500ms``, ``60s``, ``2m`` or ``1h``.

    Raises:
        ValueError: it is no such time, or not above 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h)", text.strip())
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"{text!r} is no time")
    return float(found[1]) * UNITS[found[2]]


# fmt: off
class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The settings of a run, as its user gives them."""

    sources: dict[str, str] = {}
    """Where the settings that were given come from, by name; the others have their default."""

    workers: Annotated[str, Setting(
        "How many workers: N; auto, one for each GPU, or else each core; or at least A and at most B. With xP, that "
        "many groups of P workers, each with one part of the model: 2x4.", "workers", option="-n --workers",
        metavar="N|auto|A:B[xP]")] = "auto"
    evaluators: Annotated[int, Setting(
        "How many extra processes of this machine compute run.evaluate(..., wait=False) while the workers continue "
        "training.", "workers", option="--evaluators")] = 0
    wait_for: Annotated[int, Setting(
        "Start when N workers are ready, counting those of machines that join.", "workers",
        option="--wait-for", shown="the workers of this machine")] = 0
    threads: Annotated[int | None, Setting(
        "CPU threads of a worker. Affects the result's bits.", "workers", option="--threads", shown="1")] = None
    exchange: Annotated[str, Setting(
        "How gradients are exchanged: auto (the fastest), shared (one machine), gloo, or two-level.", "workers",
        option="--exchange", metavar="auto|shared|gloo|two-level")] = "auto"
    max_restarts: Annotated[int, Setting(
        "How many lost workers of a machine are replaced.", "workers", option="--max-restarts")] = 10
    strict: Annotated[bool, Setting(
        "Reject workers whose arithmetic may differ, even if they get the same results in the probe.", "workers",
        option="--strict")] = False
    arithmetic: Annotated[Instructions | None, Setting(
        "The instruction set that all workers use, for a mix of processors. Affects the result's bits.",
        "workers", shown="what libraries choose for the processor")] = None
    audit: Annotated[float, Setting(
        "Have a second worker compute this share of the micro-batches as well, e.g. 0.01, to find a machine that "
        "computes wrong values (with three workers or more). At most 0.5. Changes no bits.", "workers",
        option="--audit", metavar="SHARE")] = 0.0
    audit_then: Annotated[AuditThen | None, Setting(
        "What happens when an audit finds that a worker is wrong: the run goes back to a checkpoint from before the "
        "doubtful steps, or continues.", "workers", shown="as the script says, or go-back")] = None
    efficiency: Annotated[float, Setting(
        "With --workers A:B: start with A, add workers as long as each new one brings at least this share of a "
        "worker's speed, e.g. 0.7, and release those that do not.", "workers", metavar="PART")] = 0.0
    allow_different_script: Annotated[bool, Setting(
        "Admit workers whose script differs from the run's, with a warning. May change the result.",
        "workers")] = False
    start: Annotated[StartMethod | None, Setting(
        "Whether workers are forked from a process that has imported torch, or spawned.", "workers",
        shown="fork on Linux, else spawn")] = None
    heartbeat_s: Annotated[float, Setting("Time between a worker's heartbeats.", "workers")] = 0.5
    heartbeat_timeout_s: Annotated[float, Setting(
        "A worker that is silent for this long counts as lost.", "workers")] = 5.0
    timeout_s: Annotated[float, Setting("Time limit of one exchange.", "workers", name="exchange-timeout")] = 300.0
    late_s: Annotated[float, Setting(
        "Report a worker when others have waited for it this long.", "workers", name="report-late-after")] = 3.0
    aside_s: Annotated[float, Setting(
        "Continue without a worker when others have waited for it this long.", "workers",
        name="go-on-without-after")] = 10.0
    hang_s: Annotated[float, Setting(
        "Kill a worker when others have waited for it this long.", "workers", name="kill-after")] = 60.0

    hosts: Annotated[str, Setting(
        "Machines to train on, over ssh: B with 2 workers, the others with as many as fit. This machine takes part "
        "only if it is named (localhost).", "machines", option="--hosts", metavar="A,B:2,C")] = ""
    launcher: Annotated[str, Setting(
        "What starts the workers: auto, local (this machine), none (they join by themselves), ray, kubernetes, or the "
        "batch system that the command runs in.", "machines", option="--launcher", metavar="NAME")] = "auto"
    ship: Annotated[bool, Setting(
        "Send the current folder, without what .gitignore names, to machines of --hosts that lack it.", "machines",
        option="--ship")] = False
    pass_env: Annotated[tuple[str, ...], Setting(
        "An environment variable to pass on to the workers of --hosts.", "machines", option="--pass-env",
        metavar="NAME")] = ()
    hostfile: Annotated[str, Setting(
        "Like --hosts, one host per line: HOST, HOST:N or HOST slots=N.", "machines", metavar="FILE")] = ""
    ssh: Annotated[str, Setting(
        "The command that reaches machines, with its options: 'ssh -F config'.", "machines", metavar="COMMAND",
        in_file=False)
        ] = "ssh"
    remote_python: Annotated[str, Setting(
        "Python on the other machines.", "machines", metavar="PATH", shown="the path of this one", in_file=False)] = ""
    ship_limit: Annotated[float, Setting("The most that --ship sends, in MB.", "machines", metavar="MB")] = 100.0
    per_task: Annotated[int | None, Setting(
        "Under srun or mpiexec: workers per task; --workers is the number in all tasks together.", "machines",
        shown="one, or one for each of its GPUs")] = None
    rendezvous: Annotated[str, Setting(
        "Under srun or mpiexec: where task 0 writes the address of the run for the other tasks, a directory that all "
        "of them see.", "machines", metavar="DIR")] = "."

    bind: Annotated[str | None, Setting(
        "The address on which the head listens; other machines must be able to reach it.", "network", option="--bind",
        metavar="ADDRESS", shown="127.0.0.1; with --hosts, one that they reach")] = None
    tls: Annotated[bool | None, Setting(
        "Whether connections to the head are encrypted.", "network", option="--tls",
        shown="if other machines can reach it")] = None
    interface: Annotated[str, Setting(
        "The network interface that the head listens on, and that workers of this machine exchange gradients over, "
        "e.g. ib0. Replaces --bind.", "network", metavar="NAME")] = ""
    coding: Annotated[Coding, Setting(
        "Whether sums are compressed between machines: auto (where a link is slower than the compression), always or "
        "never. Changes no bits. The workers need the package zstandard.", "network")] = "auto"
    port: Annotated[str, Setting(
        "The head's port; or A:B, the first free one in this range. `unisono doctor --ports A:B` says which ports "
        "workers need.",
        "network", metavar="N|A:B", shown="any")] = "0"
    advertise: Annotated[str, Setting(
        "The address or name at which other machines reach the head, if not the one of --bind.", "network",
        metavar="HOST")] = ""
    certificate: Annotated[str, Setting(
        "The head's certificate (PEM). By default, one is made for the run.", "network", metavar="FILE")] = ""
    private_key: Annotated[str, Setting(
        "The private key of the certificate (PEM, no password).", "network", metavar="FILE", in_file=False)] = ""
    token_file: Annotated[str, Setting(
        "The run's token, for machines that must know it in advance. By default, one is made for the run.", "network",
        metavar="FILE", in_file=False)] = ""
    head_away_s: Annotated[float, Setting(
        "How long machines wait for a head that they cannot reach.", "network")] = 20.0
    when_cut: Annotated[Partition, Setting(
        "What machines with the run's state do when head-away has passed: end; continue if they are more than half "
        "of all machines; or continue in any case (both sides compute the same bits).", "network")] = "go-on"

    run_dir: Annotated[str, Setting(
        "Directory for the journal and checkpoints. Overrides the script's.", "keeping", option="--run-dir",
        metavar="DIR")] = ""
    overwrite: Annotated[bool, Setting(
        "Replace the run in the directory: its files go into the folder replaced there.", "keeping",
        option="--overwrite", in_file=False)] = False
    resume: Annotated[str, Setting(
        "Resume the run in DIR, or from one of its checkpoints, or from the URL of its copies, on any number of "
        "workers; without SCRIPT, with the run's own. auto: resume what is in the run directory, if anything.",
        "keeping",
        option="--resume", metavar="DIR")] = ""
    copies_to: Annotated[tuple[str, ...], Setting(
        "Copy each checkpoint to this place as well: a path, or a URL that fsspec knows (s3://bucket/run, "
        "sftp://host/path). Overrides the script's.", "keeping", option="--copies-to", metavar="URL")] = ()
    sinks: Annotated[tuple[str, ...], Setting(
        "Send the run's events to a tool: tensorboard, mlflow, wandb, opentelemetry, logging, webhook, or "
        "MODULE:FUNCTION of your own.", "keeping", option="--sink", name="sink", metavar="NAME[=ARGUMENT]",
        in_file=False)] = ()
    profile: Annotated[str, Setting(
        "Record the steps from A up to, but not including, B with torch.profiler on all workers: one trace for "
        "Perfetto, in the folder profile of the run's directory.", "keeping", option="--profile", metavar="A:B")] = ""
    dry_run: Annotated[bool, Setting(
        "Print the settings and where each comes from (with --launcher kubernetes, the manifests) without starting "
        "anything.",
        "keeping", option="--dry-run", in_file=False)] = False
    resume_anyway: Annotated[tuple[str, ...], Setting(
        "A part of the recipe that may differ from the checkpoint's, e.g. microbatches. Changes the bits.",
        "keeping", metavar="NAME", in_file=False)] = ()

    without: Annotated[str, Setting(
        "Leave out the samples that FILE names: one index a line, a range such as 100-199, or shard NAME. Affects "
        "the result's bits.", "keeping", metavar="FILE", in_file=False)] = ""

    ray_address: Annotated[str, Setting(
        "The Ray cluster.", "Ray", name="ray.address", metavar="auto|HOST:PORT")] = "auto"
    ray_gpus_per_worker: Annotated[float | None, Setting(
        "GPUs that Ray reserves for a worker.", "Ray", name="ray.gpus-per-worker",
        shown="1 where the cluster has GPUs")] = None
    ray_send_folder: Annotated[bool, Setting(
        "Let Ray send the current folder to its nodes. Otherwise it must be there at the same path.", "Ray",
        name="ray.send-folder")] = False

    kubernetes_image: Annotated[str, Setting(
        "Container image, with Python, Unisono and what the script needs.", "Kubernetes", name="kubernetes.image",
        metavar="IMAGE")] = ""
    kubernetes_name: Annotated[str, Setting(
        "Name of the run in Kubernetes.", "Kubernetes", name="kubernetes.name", metavar="NAME",
        shown="from the script's name")] = ""
    kubernetes_namespace: Annotated[str, Setting(
        "Namespace of the objects.", "Kubernetes", name="kubernetes.namespace", metavar="NAME")] = "default"
    kubernetes_context: Annotated[str, Setting(
        "Context of the kubeconfig.", "Kubernetes", name="kubernetes.context", metavar="NAME",
        shown="the current one")] = ""
    kubernetes_volumes: Annotated[tuple[str, ...], Setting(
        "A volume for all pods. The first one holds the run directory.", "Kubernetes", name="kubernetes.pvc",
        metavar="CLAIM:/PATH")] = ()
    kubernetes_workers_per_pod: Annotated[int, Setting(
        "Workers per pod.", "Kubernetes", name="kubernetes.workers-per-pod")] = 1
    kubernetes_cpu: Annotated[str, Setting(
        "CPUs of a worker pod.", "Kubernetes", name="kubernetes.cpu", metavar="N",
        shown="the threads of its workers")] = ""
    kubernetes_memory: Annotated[str, Setting(
        "Memory of a worker pod.", "Kubernetes", name="kubernetes.memory", metavar="SIZE")] = "2Gi"
    kubernetes_gpus_per_worker: Annotated[int, Setting(
        "GPUs per worker.", "Kubernetes", name="kubernetes.gpus-per-worker")] = 0
    kubernetes_shm: Annotated[str, Setting(
        "Size of /dev/shm, which counts towards the memory.", "Kubernetes", name="kubernetes.shm",
        metavar="SIZE")] = "1Gi"
    kubernetes_user: Annotated[int, Setting(
        "User id in the containers.", "Kubernetes", name="kubernetes.user")] = 1000
    kubernetes_variables: Annotated[tuple[str, ...], Setting(
        "An environment variable of all pods.", "Kubernetes", name="kubernetes.env", metavar="NAME=VALUE",
        in_file=False)] = ()
    kubernetes_in_image: Annotated[bool, Setting(
        "The script is in the image, not on this machine.", "Kubernetes", name="kubernetes.in-image")] = False
    kubernetes_detach: Annotated[bool, Setting(
        "Do not follow the run.", "Kubernetes", name="kubernetes.detach")] = False

    simulate_hosts: Annotated[int, Setting("Workers get so many different labels of hosts.", "internal")] = 1
    inspect: Annotated[str, Setting("The inspector of a trial run, and its settings.", "internal", in_file=False)] = ""
    function: Annotated[str, Setting("The function that `launch` calls.", "internal", in_file=False)] = ""
    result: Annotated[str, Setting("The file for what the function returns.", "internal", in_file=False)] = ""
    outcome: Annotated[str, Setting(
        "The file for how the run ended (JSON); the command prints no traceback then.", "internal", in_file=False)] = ""
    left: Annotated[str, Setting(
        "The run that this one leaves, and where (JSON).", "internal", in_file=False)] = ""
    beside: Annotated[str, Setting("The folder of `unisono.toml`, for a function.", "internal", in_file=False)] = ""
# fmt: on

    @property
    def parts(self) -> int:
        """The number of parts of the model, each on one worker of a group; 1: every worker has the whole model.

        Raises:
            UsageError: `workers` says no number.
        """
        return split_parts(self.workers)[1]

    @property
    def takes_all(self) -> bool:
        """``--workers auto``: as many workers as the machines have room for."""
        return split_parts(self.workers)[0] == "auto"

    @property
    def ports(self) -> tuple[int, int]:
        """The first and the last port that the head may take; 0: any.

        Raises:
            UsageError: `port` says none.
        """
        if ":" in self.port:
            return port_range(self.port)
        if not (self.port.isdecimal() and int(self.port) <= 65535):
            raise UsageError(f"a port is a number from 0 (any) to 65535, got --set port={self.port}")
        return int(self.port), int(self.port)

    @property
    def profiled(self) -> range | None:
        """The steps that torch.profiler records on all workers; None: the command line names none.

        Raises:
            UsageError: `profile` says none.
        """
        if not self.profile:
            return None
        first, _, stop = self.profile.partition(":")
        if not (first.isdecimal() and stop.isdecimal() and int(first) < int(stop)):
            raise UsageError(
                f"--profile takes A:B, e.g. 100:105 for the steps 100 to 104; got --profile {self.profile}"
            )
        return range(int(first), int(stop))


def split_parts(text: str) -> tuple[str, int]:
    """Return the ``N``, ``auto`` or ``A:B`` of a value of ``--workers``, and the parts of a group; 1 without ``xP``.

    Raises:
        UsageError: there is nothing before the ``x``, or no number from 1 behind it.
    """
    groups, x, parts = text.partition("x")
    if not x:
        return text, 1
    if not groups or not (parts.isascii() and parts.isdecimal() and 1 <= int(parts) <= MOST_PARTS):
        raise UsageError(
            f"--workers {text}: groups of several workers are NxP, such as 2x4 for 2 groups of 4, with P from 1 to "
            f"{MOST_PARTS}; also autox4, or 1:3x4"
        )
    return groups, int(parts)


def port_range(text: str) -> tuple[int, int]:
    """Return the first and the last port of ``A:B``.

    Raises:
        UsageError: it is not a range of ports.
    """
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) <= 65535):
        raise UsageError(f"a range of ports is A:B with 1 <= A <= B <= 65535, got {text!r}")
    return int(first), int(last)


def _declared() -> Iterable[Setting]:
    defaults = RunSettings()
    for field, hint in get_type_hints(RunSettings, include_extras=True).items():
        if get_origin(hint) is not Annotated:
            continue
        kind, setting = get_args(hint)
        if get_origin(kind) in (Union, types.UnionType):
            kind = next(each for each in get_args(kind) if each is not type(None))
        name = setting.name or field.removesuffix("_s").replace("_", "-")
        yield msgspec.structs.replace(setting, field=field, name=name, kind=kind, default=getattr(defaults, field))


SETTINGS: Final[dict[str, Setting]] = {setting.name: setting for setting in _declared()}
"""All settings by name."""
DEFAULTS: Final = RunSettings()


def setting_named(name: str) -> Setting:
    """Return the setting with a name.

    Raises:
        UsageError: there is none; names the nearest.
    """
    if name in SETTINGS:
        return SETTINGS[name]
    known = [setting.name for setting in SETTINGS.values() if setting.group != "internal"]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else "`unisono run --dry-run SCRIPT` prints all of them"
    raise UsageError(f"there is no setting {name}; {hint}")


def pairs(texts: Iterable[str]) -> list[tuple[Setting, Any]]:
    """Return the settings and values of the ``NAME=VALUE`` of ``--set``.

    Raises:
        UsageError: one of them has another form, is not known, or has a wrong value.
    """
    found = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set takes NAME=VALUE, such as --set heartbeat=500ms; got {text!r}")
        setting = setting_named(name)
        found.append((setting, setting.read(value)))
    return found


def gathered(given: Sequence[tuple[Setting, Any]]) -> dict[str, Any]:
    """Return the values that were given, by the names of their fields: of each the last one, of a list all."""
    found: dict[str, Any] = {}
    for setting, value in given:
        if setting.is_list:
            more = (value,) if isinstance(value, str) else value
            found[setting.field] = (*found.get(setting.field, ()), *more)
        else:
            found[setting.field] = value
    return found


def table(settings: RunSettings) -> Mapping[str, tuple[str, str]]:
    """Return each setting's value as text, and where it comes from, by name. No URL in it has a password."""
    found = {}
    for setting in SETTINGS.values():
        source = settings.sources.get(setting.name, "default")
        value = getattr(settings, setting.field)
        if setting.group != "internal":
            words = setting.words_of_default if source == "default" else without_password(setting.text(value))
            found[setting.name] = (words, source)
    return found
