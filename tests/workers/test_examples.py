"""The examples do what their first lines say: alone, on workers, and where their data are missing."""

from __future__ import annotations

import gzip
import json
import random
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import WAIT_S
from tests.workers.conftest import IMPORTS
from tests.workers.scripts import run_script

pytestmark = pytest.mark.more

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ACCURACY = r"test accuracy ([\d.]+)%"
UNISONO = [sys.executable, "-m", "unisono"]
TINY = {
    "fashion_mnist": ["--samples", "64", "--batch-size", "32", "--epochs", "1"],
    "language_model": ["--length", "32", "--width", "32", "--depth", "1", "--batch-size", "16", "--epochs", "1"],
    "recurrent_language_model": ["--length", "8", "--width", "16", "--batch-size", "16", "--epochs", "1"],
}
REAL = {
    "fashion_mnist": ROOT / "data" / "fashion-mnist",
    "language_model": ROOT / "data" / "english",
    "recurrent_language_model": ROOT / "data" / "english",
}
FEW_STEPS = {
    "language_model": ["--documents", "3"],
    "recurrent_language_model": ["--length", "64", "--batch-size", "2048"],
}
"""Of the real data."""


@pytest.fixture(autouse=True)
def quick_starts(nursery_with_data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker of these tests imports torch and scikit-learn by itself."""
    monkeypatch.setenv("UNISONO_NURSERY", nursery_with_data)


def run(*command: str | Path, status: int = 0) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def alone(name: str, *arguments: str | Path, status: int = 0) -> str:
    code, output = run_script(EXAMPLES / f"{name}.py", *arguments, imports=IMPORTS)
    assert code == status, output
    return output


def on_workers(num_workers: int, name: str, directory: Path, *arguments: str | Path) -> str:
    options = ["--workers", str(num_workers), "--run-dir", directory]
    return run(*UNISONO, "run", EXAMPLES / f"{name}.py", *options, "--", *arguments)


def write_idx(path: Path, *sizes: int) -> None:
    count = 1
    for size in sizes:
        count *= size
    values = bytes(random.Random(path.name).choices(range(10), k=count))
    header = bytes([0, 0, 8, len(sizes)]) + b"".join(size.to_bytes(4, "big") for size in sizes)
    path.write_bytes(gzip.compress(header + values))


@pytest.fixture
def small_data(tmp_path: Path) -> dict[str, Path]:
    """Data of the right form and without meaning, so that the examples are run where the real ones are missing."""
    clothes, text = tmp_path / "clothes", tmp_path / "text"
    clothes.mkdir()
    for part, count in (("train", 96), ("t10k", 40)):
        write_idx(clothes / f"{part}-images-idx3-ubyte.gz", count, 28, 28)
        write_idx(clothes / f"{part}-labels-idx1-ubyte.gz", count)
    (text / "tutorial").mkdir(parents=True)
    for number in range(12):
        (text / "tutorial" / f"{number:02}.rst.txt").write_text("All the same, a rose is a rose.\n" * (5 + number))
    return {"fashion_mnist": clothes, "language_model": text, "recurrent_language_model": text}


def test_digits_learns_to_read(tmp_path: Path) -> None:
    output = alone("digits", "--run-dir", tmp_path / "run")
    assert number(ACCURACY, output) >= 97


def test_digits_gives_the_same_bits_on_workers(tmp_path: Path) -> None:
    short = ["--epochs", "2", "--microbatches", "4"]
    run(sys.executable, EXAMPLES / "digits.py", "--run-dir", tmp_path / "alone", *short)
    on_workers(3, "digits", tmp_path / "three", *short)
    assert "identical: 24 steps" in run(*UNISONO, "compare", tmp_path / "alone", tmp_path / "three")


def number(pattern: str, output: str) -> float:
    """The number at the group of this regular expression, where it is found last."""
    found = re.findall(pattern, output)
    assert found, output
    return float(found[-1])


def test_the_gan_learns_to_write(tmp_path: Path) -> None:
    output = alone("gan", "--run-dir", tmp_path / "run", "--epochs", "3")
    assert number(r"read by written digits: ([\d.]+)%", output) >= 60
    header, _, pixels = (tmp_path / "run" / "written.pgm").read_bytes().partition(b"\n")
    assert header == b"P5 400 400 255"
    assert len(pixels) == 400 * 400
    assert len(set(pixels)) > 100


def test_the_recurrent_model_learns_more_with_a_state_that_is_carried(
    small_data: dict[str, Path], tmp_path: Path
) -> None:
    """The text repeats itself every 32 bytes, and a piece has 2: where it is in the text only the state can tell."""
    options = ["--batch-size", "12", "--length", "2", "--width", "32", "--lr", "0.01", "--epochs", "2"]
    options += ["--data", str(small_data["recurrent_language_model"])]
    carried = alone("recurrent_language_model", "--run-dir", tmp_path / "carried", *options)
    forgotten = alone("recurrent_language_model", "--run-dir", tmp_path / "forgotten", *options, "--forget")
    bits = r"epoch 1: ([\d.]+) bits per byte"
    assert number(bits, carried) < 0.7 * number(bits, forgotten)


def test_the_graph_network_learns_from_its_edges(tmp_path: Path) -> None:
    with_edges = number(ACCURACY, alone("graph_network", "--run-dir", tmp_path / "with"))
    without = number(ACCURACY, alone("graph_network", "--run-dir", tmp_path / "without", "--no-edges"))
    assert with_edges >= 88
    assert without <= with_edges - 5


def test_the_rare_digits_are_learned_by_drawing_them_more_often(tmp_path: Path) -> None:
    """Each digit is seen about as often as any other, and the accuracy is higher than by drawing all pictures once."""
    weighted = alone("imbalanced_digits", "--run-dir", tmp_path / "weighted")
    uniform = alone("imbalanced_digits", "--run-dir", tmp_path / "uniform", "--uniform")
    assert number(r"(\d+) to \d+ drawn of each digit", weighted) >= 20
    assert number(r"(\d+) to \d+ drawn of each digit", uniform) == 3
    assert number(ACCURACY, weighted) >= number(ACCURACY, uniform) + 3


def test_the_policy_learns_to_balance(tmp_path: Path) -> None:
    output = alone("reinforcement", "--run-dir", tmp_path / "run", "--epochs", "5")
    returns = [float(each) for each in re.findall(r"mean return ([\d.]+)", output)]
    assert len(returns) == 5
    assert returns[-1] >= 3 * returns[0]


@pytest.mark.parametrize("name", TINY)
def test_the_larger_examples_give_the_same_bits_on_workers(
    name: str, small_data: dict[str, Path], tmp_path: Path
) -> None:
    arguments = ["--data", small_data[name], *TINY[name]]
    assert "test " in alone(name, "--run-dir", tmp_path / "alone", *arguments)
    on_workers(2, name, tmp_path / "two", *arguments)
    assert "identical: " in run(*UNISONO, "compare", tmp_path / "alone", tmp_path / "two")


@pytest.mark.parametrize("name", TINY)
def test_the_larger_examples_read_the_real_data(name: str, tmp_path: Path) -> None:
    if not REAL[name].is_dir():
        pytest.skip(f"{REAL[name]} is missing; `make data` fetches it")
    few = [*TINY[name], *FEW_STEPS.get(name, [])]
    output = alone(name, "--run-dir", tmp_path / "run", "--data", REAL[name], *few)
    assert "(10000 pictures)" in output or re.search(r"[\d.]+ bits per byte", output)


@pytest.mark.parametrize("name", TINY)
def test_missing_data_are_named_with_the_command_that_fetches_them(name: str, tmp_path: Path) -> None:
    output = alone(name, "--run-dir", tmp_path / "run", "--data", tmp_path / "nothing", status=1)
    assert str(tmp_path / "nothing") in output
    assert "python examples/fetch_data.py" in output
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()


def test_fetching_an_unknown_data_set_names_the_known_ones() -> None:
    assert "there are fashion-mnist and english" in alone("fetch_data", "imagenet", status=2)


def test_data_that_are_there_are_not_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "fashion-mnist").mkdir()
    (tmp_path / "fashion-mnist" / "train-images-idx3-ubyte.gz").touch()
    assert "is there already" in alone("fetch_data", "fashion-mnist", "--data", tmp_path)


def test_the_demo_compares_and_measures(tmp_path: Path) -> None:
    output = alone("demo", "--directory", tmp_path, "--workers", "1", "2", "--", "--epochs", "2")
    assert "1 and 2 workers: identical: 6 steps" in output
    assert re.search(r"2 workers +[\d,]+ samples/s", output)


# Stands for `unisono`: its runs write a journal with their arguments, and its comparison finds every pair different.
FALSE_UNISONO = """
import json, pathlib, sys
if sys.argv[1] == "compare":
    print("different: step 0 is the first to differ")
    sys.exit(1)
folder = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
folder.mkdir(parents=True)
line = {"kind": "step", "samples": 8, "seconds": {"compute": 0.5}, "arguments": sys.argv[1:]}
(folder / "journal.jsonl").write_text(json.dumps(line))
"""


def test_the_demo_fails_where_runs_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "unisono.py").write_text(FALSE_UNISONO)
    demo = runpy.run_path(str(EXAMPLES / "demo.py"))
    monkeypatch.setitem(demo["main"].__globals__, "UNISONO", [sys.executable, str(tmp_path / "unisono.py")])
    monkeypatch.setattr(sys, "argv", ["demo.py", "--directory", str(tmp_path / "runs"), "--", "--epochs", "3"])
    with pytest.raises(SystemExit) as leaving:
        demo["main"]()
    assert leaving.value.code == "2 of 2 runs differ from the first: this is a bug"
    assert "4 workers       16 samples/s, 1.00 times the first" in capsys.readouterr().out
    ran = json.loads((tmp_path / "runs" / "workers-4" / "journal.jsonl").read_text())["arguments"]
    assert ran[ran.index("--") + 1 :][:2] == ["--epochs", "12"]
    assert ran[-2:] == ["--epochs", "3"]  # the last one counts
