"""How many tokens a second a GPT trains: with the library alone, and in the plain loop that it replaces.

Sides take turns, each in a process of its own, and are compared within a round: the clocks of a GPU change with its
temperature. Both sides compile the model, cast to bfloat16 and use a fused optimizer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch.utils.data import TensorDataset

import unisono
from benchmarks.gpu.checks import ROOT, Place
from benchmarks.gpu.gpt import GPT, SMALL, TINY
from benchmarks.gpu.report import Result, shortened

__all__ = ["SIDES", "speed"]

MICROBATCHES: Final = 8
ROUNDS: Final = 5
GOAL: Final = 0.98
BYTES_PER_SAMPLE: Final = 1.6e9
"""Of the activations of one sequence of the larger GPT, generously."""

SIDES: Final = {
    "plain": "a plain loop",
    "plain deterministic": "a plain loop with deterministic kernels",
    "unisono": "the library alone, as it is by default (deterministic)",
    "unisono free": "the library alone, with deterministic=False",
}


def speed(place: Place) -> Iterator[Result]:
    """Measure all sides; yields their tokens a second, and the ratios."""
    began = time.monotonic()
    with ExitStack() as stack:
        sides = {name: stack.enter_context(_Side(place, name)) for name in SIDES}
        try:
            for side in sides.values():
                side.turn(2)  # compiles
            rounds = [{name: side.turn() for name, side in sides.items()} for _ in range(ROUNDS)]
        except _Failed as failed:
            yield Result("speed", "failed", time.monotonic() - began, str(failed))
            return
    medians = {name: statistics.median(one[name] for one in rounds) for name in SIDES}
    for name, says in SIDES.items():
        yield Result(f"speed: {name}", "measured", words=f"{medians[name]:,.0f} tokens/s: {says}",
                     figures={"tokens_per_s": medians[name]})  # fmt: skip
    for name, above, below, words in (
        ("the library's part", "unisono free", "plain", f"goal {GOAL}"),
        ("the library's part, deterministic", "unisono", "plain deterministic", f"goal {GOAL}"),
        ("what deterministic kernels leave", "plain deterministic", "plain", ""),
    ):
        ratios = sorted(one[above] / one[below] for one in rounds)
        middle = statistics.median(ratios)
        said = f"{middle:.3f} of {SIDES[below]} ({ratios[0]:.3f} to {ratios[-1]:.3f}){f'; {words}' if words else ''}"
        yield Result(f"speed: {name}", "measured", time.monotonic() - began, said, {"ratio": middle})


class _Failed(Exception):
    """A side has ended."""


class _Side:
    """A process that trains a number of steps when it is told to."""

    def __init__(self, place: Place, name: str) -> None:
        self._place, self._name = place, name
        self._steps = 4 if place.device == "cuda" else 2

    def __enter__(self) -> _Side:
        command = [sys.executable, "-m", "benchmarks.gpu.speed", self._name, "--device", self._place.device]
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def turn(self, steps: int = 0) -> float:
        """Return the tokens a second of some steps.

        Raises:
            _Failed: with the side's output.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{steps or self._steps}\n")
            self._process.stdin.flush()
        except OSError:
            pass
        watch = threading.Timer(self._place.limit_s, self._process.kill)
        watch.start()
        line = self._process.stdout.readline()
        watch.cancel()
        if not line:
            self._errors.seek(0)
            raise _Failed(f"{self._name} has ended, or took longer than {self._place.limit_s:g} s: "
                          f"{shortened(self._errors.read())}")  # fmt: skip
        return float(json.loads(line))


# -- a side ----------------------------------------------------------------------------------------------


def _control(device: str, tokens_per_step: int) -> Callable[[], bool]:
    """Return what is called at the head of each step; it waits for this side's turn, and returns whether to go on."""
    left, steps, began = 0, 0, 0.0

    def go_on() -> bool:
        nonlocal left, steps, began
        if left == 0:
            if device == "cuda":
                torch.cuda.synchronize()
            if steps:
                print(json.dumps(steps * tokens_per_step / (time.perf_counter() - began)), flush=True)
            line = sys.stdin.readline()
            if not line:
                return False
            left = steps = int(line)
            began = time.perf_counter()
        left -= 1
        return True

    return go_on


def _microbatch_size(device: str) -> int:
    """Return how many sequences fit beside the states of all sides."""
    if device == "cpu":
        return 2
    room = torch.cuda.get_device_properties(0).total_memory / len(SIDES) - 3e9  # parameters, gradients and states
    return max(1, min(16, int(room / BYTES_PER_SAMPLE)))


def _prepare(device: str) -> tuple[GPT, TensorDataset, int]:
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    shape = SMALL if device == "cuda" else TINY
    size = _microbatch_size(device)
    tokens = torch.randint(shape.tokens, (size * MICROBATCHES * 4, shape.context + 1))
    return GPT(shape).to(device), TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), size


def _optimizer(model: GPT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)


def with_unisono(device: str, *, deterministic: bool) -> None:
    run = unisono.Run(seed=1, device=None if device == "cuda" else "cpu", deterministic=deterministic)
    model, data, size = _prepare(device)
    optimizer = _optimizer(model)
    run.track(model=model, optimizer=optimizer)
    compiled: Any = torch.compile(model)
    go_on = _control(device, size * MICROBATCHES * data.tensors[0].shape[1])
    for step in run.steps(data, batch_size=size * MICROBATCHES, microbatches=MICROBATCHES, epochs=1 << 20):
        if not go_on():
            break
        for tokens, targets in step:
            with torch.autocast(device, torch.bfloat16):
                loss = compiled(tokens, targets)
            loss.backward()
        optimizer.step()


def plain(device: str, *, deterministic: bool) -> None:
    torch.set_num_threads(1)
    if deterministic:  # what the library sets
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    model, data, size = _prepare(device)
    optimizer = _optimizer(model)
    compiled: Any = torch.compile(model)
    go_on = _control(device, size * MICROBATCHES * data.tensors[0].shape[1])
    while True:
        order = torch.randperm(len(data)).split(size * MICROBATCHES)
        for batch in order:
            if not go_on():
                return
            optimizer.zero_grad()
            for index in batch.split(size):
                tokens, targets = (each[index].to(device, non_blocking=True) for each in data.tensors)
                with torch.autocast(device, torch.bfloat16):
                    loss = compiled(tokens, targets)
                (loss / MICROBATCHES).backward()
            optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description="one side of a measurement; started by benchmarks.gpu")
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    arguments = parser.parse_args()
    side = with_unisono if arguments.side.startswith("unisono") else plain
    side(arguments.device, deterministic=arguments.side in ("unisono", "plain deterministic"))


if __name__ == "__main__":
    main()
