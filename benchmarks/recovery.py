"""What the loss of a worker costs: with Unisono, with torchrun and its checkpoints, with torchft where it is installed.

python -m benchmarks.recovery                               # 20 losses
python -m benchmarks.recovery --quick --json recovery.json  # fewer, in a few minutes

One of 4 workers is killed (SIGKILL) at a random moment of a step.

`recover_ms`: how much later the step in which it died and the one after it are committed, compared with calm steps,
beyond the worker's own micro-batches of that step, which the others compute in its place (their share of a calm step).
`lost_time_vs_torchrun`, `lost_time_vs_torchft`: the time that they lose, divided by the time that Unisono loses, these
micro-batches included. torchrun has lost what passes until the step at which the worker was killed is reached again; a
checkpoint is written every 50 steps, and the kills are spread evenly between two of them. torchft has lost what the
same two steps took longer, the attempt that its survivors discard included; that they then go on with fewer samples is
not counted. `lost_time_vs_torchft_tuned`: the same with deadlines shorter than torchft's documentation has them.
`admit_ms`: how much longer than usual the members stand between two steps when a worker is admitted, and in
`admit_steps` the same in steps.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.recovery_sides import CHECKPOINT_EVERY, MICROBATCHES, WANTED, Told
from benchmarks.report import print_table, write_json
from unisono.cli.reach import find, tell
from unisono.core.messages import Scale
from unisono.system.lifetime import PARENT

ROOT = Path(__file__).resolve().parents[1]
WORKERS = 4
CALM_STEPS = 15
TIMEOUT_S = 90.0
TORCHFT = "torchft==0.2.0"
KILLS = {"unisono": 20, "torchrun": 10, "torchft": 12, "torchft_tuned": 12}
QUICK_KILLS = {"unisono": 8, "torchrun": 4, "torchft": 5, "torchft_tuned": 5}

Loss = dict[str, float]
"""What one kill cost, by figure."""


class Watch:
    """What the processes of one side have told."""

    def __init__(self, pipe: Path) -> None:
        os.mkfifo(pipe)
        self._descriptor = os.open(pipe, os.O_RDWR)  # also for writing: it never ends
        self._changed = threading.Condition()
        self._ended = False
        self.told: list[Told] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with os.fdopen(self._descriptor, buffering=1) as file:
            for line in file:
                if line == "end\n":
                    return
                with self._changed:
                    self.told.append(Told.read(line))
                    self._changed.notify_all()

    def close(self) -> None:
        os.write(self._descriptor, b"end\n")
        self._thread.join()

    def wait(self, found: Callable[[], Any]) -> Any:
        """Until ``found`` is true of what was told; its value."""
        with self._changed:
            if not self._changed.wait_for(found, TIMEOUT_S):
                raise TimeoutError(f"nothing after {TIMEOUT_S:.0f} s; the last line was {self.told[-1:]}")
            return found()

    def of_step(self, step: int, pids: set[int]) -> list[Told]:
        """The first thing that each of these processes told of this step or a later one, if all of them have."""
        found = {t.pid: t for t in reversed(self.told) if t.step >= step and t.pid in pids}
        return list(found.values()) if found.keys() == pids else []

    def reaches(self, step: int) -> bool:
        return any(t.step >= step for t in self.told)

    def of_step_since(self, step: int, moment: float) -> list[Told]:
        """What processes told of a step that they began after that moment."""
        return [t for t in self.told if t.step == step and t.head > moment]


@contextmanager
def side(name: str, folder: Path, command: list[str]) -> Iterator[Watch]:
    """A training that runs until the end of the ``with``."""
    watch = Watch(folder / "pipe")
    log = folder / "log"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "REPLICAS": str(WORKERS),
        "RUST_LOG": "warn",  # torchft's lighthouse and managers write several lines a step without it
        PARENT: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # torchrun's second start fails without it
    }
    script = [str(ROOT / "benchmarks" / "recovery_sides.py"), *(["--"] if name == "unisono" else [])]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *script, name, str(folder / "pipe"), str(folder)],
            stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        yield watch
    except TimeoutError as error:
        raise TimeoutError(f"{name}: {error}\n{log.read_text()[-3000:]}") from None
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        watch.close()


def hurt_unisono(num_kills: int, folder: Path) -> list[Loss]:
    run_dir = folder / "run"
    command = [
        *(sys.executable, "-m", "unisono", "run", "-n", str(WORKERS), "--run-dir", str(run_dir), "--max-restarts", "0"),
    ]

    def replace() -> None:
        tell(find(str(run_dir)), Scale(num_workers=WORKERS))

    return hurt_team("unisono", command, num_kills, folder, replace)


def hurt_torchft(num_kills: int, folder: Path, *, name: str) -> list[Loss]:
    """As with Unisono, a replacement starts when the others have gone on, and takes no time of theirs until then."""
    found = hurt_team(name, [sys.executable], num_kills, folder, (folder / WANTED).touch)
    return [{figure: one[figure] for figure in ("lost_ms", "step_ms")} for one in found]


def hurt_team(name: str, command: list[str], num_kills: int, folder: Path, replace: Callable[[], None]) -> list[Loss]:
    """Kill, look how the others go on, let another one come in its place; again."""
    draw, found, since = random.Random(1), list[Loss](), 0.0
    with side(name, folder, command) as watch:
        for _ in range(num_kills):
            calm = calm_steps(watch, since)
            step_s = statistics.median(t.committed - t.head for t in calm)
            between_s = statistics.median(gaps(calm))
            pids = {t.pid for t in calm}
            time.sleep(draw.random() * (step_s + between_s))
            victim = draw.choice(sorted(pids))
            killed_at = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            others = pids - {victim}
            step = watch.wait(after(watch, killed_at))
            two = [watch.wait(partial(watch.of_step, step + i, others)) for i in range(2)]
            lost_s = max(t.committed for t in two[1]) - statistics.median(t.head for t in two[0])
            lost_s -= 2 * step_s + between_s
            its_share = statistics.mean(t.count for t in calm if t.pid == victim) / MICROBATCHES
            replace()
            first = watch.wait(after(watch, killed_at, newcomers_to=pids))
            met = watch.wait(partial(watch.of_step, first, others))
            before = watch.of_step(first - 1, others)
            stood = max(a.head - b.committed for a in met for b in before if a.pid == b.pid) - between_s
            since = max(t.head for t in met)
            found.append(
                {
                    "lost_ms": 1000 * lost_s, "recover_ms": 1000 * (lost_s - its_share * step_s),
                    "its_share": its_share, "step_ms": 1000 * step_s, "admit_ms": 1000 * stood,
                }
            )  # fmt: skip
    return found


def after(watch: Watch, moment: float, *, newcomers_to: set[int] | None = None) -> Callable[[], int | None]:
    """The first step that was committed after that moment (if asked: by a process that is not one of these)."""

    def first() -> int | None:
        told = [t for t in watch.told if t.committed > moment and (not newcomers_to or t.pid not in newcomers_to)]
        return min((t.step for t in told), default=None)

    return first


def calm_steps(watch: Watch, since: float) -> list[Told]:
    """The steps of all workers since then, as soon as there are enough of them; the first few do not count."""

    def enough() -> list[Told]:
        told = [t for t in watch.told if t.num_workers == WORKERS and t.head > since]
        first = min((t.step for t in told), default=0) + 3
        told = [t for t in told if t.step >= first]
        return told if len(told) >= WORKERS * CALM_STEPS and len({t.pid for t in told}) == WORKERS else []

    found: list[Told] = watch.wait(enough)
    return found


def gaps(told: list[Told]) -> list[float]:
    """From a commit to the head of the next step, by process."""
    by_place = {(t.pid, t.step): t for t in told}
    return [
        t.head - by_place[pid, step - 1].committed for (pid, step), t in by_place.items() if (pid, step - 1) in by_place
    ]


def hurt_torchrun(num_kills: int, folder: Path) -> list[Loss]:
    """Kill, and wait until the step is reached again."""
    draw, found = random.Random(1), list[Loss]()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes", "1"),
        *("--nproc-per-node", str(WORKERS), "--max-restarts", "1000"),
    ]
    with side("torchrun", folder, command) as watch:
        reached = 0
        for number in range(num_kills):
            # So many steps after a checkpoint: in the middle of each of as many equal parts.
            offset = int((number + 0.5) / num_kills * CHECKPOINT_EVERY)
            base = (reached // CHECKPOINT_EVERY + 1) * CHECKPOINT_EVERY
            watch.wait(partial(watch.reaches, base + offset))
            calm = watch.told[-WORKERS * CALM_STEPS :]
            step_s = statistics.median(t.committed - t.head for t in calm) + statistics.median(gaps(calm))
            victim = draw.choice(sorted({t.pid for t in calm}))
            killed_at = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            reached = max(t.step for t in watch.told) + 1
            # No process survives, so whoever tells about that step has come after the kill.
            again = watch.wait(partial(watch.of_step_since, reached, killed_at + step_s))
            lost_s = min(t.committed for t in again) - killed_at - step_s
            found.append({"lost_ms": 1000 * lost_s, "step_ms": 1000 * step_s, "steps_since_checkpoint": offset})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer losses")
    parser.add_argument("--kills", type=int, help="losses of each side")
    parser.add_argument("--json", default="", metavar="FILE", help="write figures and single losses there")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    num_kills = QUICK_KILLS if arguments.quick else KILLS
    if arguments.kills:
        num_kills = dict.fromkeys(KILLS, arguments.kills)
    left_out = dict[str, str]()
    sides: dict[str, Callable[[int, Path], list[Loss]]] = {"unisono": hurt_unisono, "torchrun": hurt_torchrun}
    if importlib.util.find_spec("torchft") is not None:
        sides |= {name: partial(hurt_torchft, name=name) for name in ("torchft", "torchft_tuned")}
    else:
        left_out["torchft"] = "torchft is not installed"
        print(f"lost_time_vs_torchft: skipped, torchft is not installed (pip install {TORCHFT})", flush=True)
    losses = {}
    with tempfile.TemporaryDirectory(prefix="unisono-benchmark-") as place:
        for name, hurt in sides.items():
            (folder := Path(place) / name).mkdir()
            try:
                losses[name] = hurt(num_kills[name], folder)
            except TimeoutError as error:
                if "torchft" not in name:
                    raise
                left_out[name] = str(error).splitlines()[0]
                print(f"lost_time_vs_{name}: not measured, it did not go on: {error}", flush=True)
    ours = losses["unisono"]
    recover = [one["recover_ms"] for one in ours]
    lost = {name: statistics.mean(one["lost_ms"] for one in found) for name, found in losses.items()}
    figures = {
        "recover_ms.median": statistics.median(recover),
        "recover_ms.worst": max(recover),
        **{f"lost_ms.{name}": value for name, value in lost.items()},
        **{f"lost_time_vs_{name}": value / lost["unisono"] for name, value in lost.items() if name != "unisono"},
        "admit_ms.median": statistics.median(one["admit_ms"] for one in ours),
        "admit_steps.worst": max(one["admit_ms"] / one["step_ms"] for one in ours),
        **{f"step_ms.{name}": statistics.median(one["step_ms"] for one in found) for name, found in losses.items()},
    }
    print_table(["figure", "value"], [[name, f"{value:.1f}"] for name, value in figures.items()])
    if arguments.json:
        runs = [{"side": name, **one} for name, found in losses.items() for one in found]
        write_json(arguments.json, figures, runs, left_out)


if __name__ == "__main__":
    main()
