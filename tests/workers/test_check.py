"""``unisono check``: each error is found with its line, and no clean script is accused.

The scripts in ``check_cases`` have one error each, on the line that ends in ``# error`` (or on one of two).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parts import ALL
from tests.waiting import WAIT_S
from tests.workers.conftest import Unisono, run_nursery
from unisono.tools.check.trials import Runner
from unisono.tools.check.verdict import CheckVerdict, check_script
from unisono.tools.trialrun import Script

pytestmark = pytest.mark.more

CASES = Path(__file__).parent / "check_cases"
EXAMPLES = Path(__file__).parents[2] / "examples"
CASES_WITH_ERRORS = sorted(path.stem for path in CASES.glob("*.py") if not path.stem.startswith("clean"))
QUICK = {"changing_dataset", "clamped_parameter", "plain_momentum"}


@pytest.fixture(scope="module")
def other_nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A nursery whose workers order sets otherwise."""
    path = str(tmp_path_factory.mktemp("nursery") / "socket")
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "1"
    try:
        with run_nursery(path):
            yield path
    finally:
        os.environ.pop("PYTHONHASHSEED")
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before


def checked(script: Path, folder: Path, nurseries: dict[int, str], *arguments: str) -> CheckVerdict:
    tried = Script(command=[str(script), *arguments], directory=folder)
    with Runner(tried, 4, 120.0, nurseries) as runner:
        return check_script(runner, lambda _: None)


def lines_with_errors(script: Path) -> set[int]:
    return {number for number, line in enumerate(script.read_text().splitlines(), 1) if line.endswith("# error")}


@pytest.mark.parametrize("case", [case for case in CASES_WITH_ERRORS if ALL or case in QUICK])
def test_a_script_that_breaks_the_promise_is_found_with_its_line(
    case: str, tmp_path: Path, standing_nursery: str, other_nursery: str
) -> None:
    script = CASES / f"{case}.py"
    verdict = checked(script, tmp_path / "check", {0: standing_nursery, 1: other_nursery})
    lines = {each.culprit.line for each in verdict.found if each.culprit is not None}
    assert not verdict.keeps
    assert lines
    assert lines <= lines_with_errors(script)


@pytest.mark.parametrize("case", sorted(path.stem for path in CASES.glob("clean*.py")))
def test_a_script_that_keeps_the_promise_is_not_accused(
    case: str, tmp_path: Path, standing_nursery: str, other_nursery: str
) -> None:
    verdict = checked(CASES / f"{case}.py", tmp_path / "check", {0: standing_nursery, 1: other_nursery})
    assert verdict.keeps
    assert verdict.unchecked == []
    assert [each.trial.name for each in verdict.found][-1] == "two hosts, a worker lost, one joins"


def test_the_command_names_the_line_also_for_programs(unisono: Unisono, nursery: None) -> None:
    script = CASES / "hidden_state.py"
    command = unisono("check", str(script), "--json")
    assert command.wait() == 1
    verdict = json.loads("\n".join(command.out))
    assert verdict["keeps"] is False
    culprits = [each["culprit"] for each in verdict["trials"] if each["culprit"]]
    assert {(each["line"], each["path"]) for each in culprits} == {
        (line, "hidden") for line in lines_with_errors(script)
    }


def test_a_script_that_fails_by_itself_cannot_be_checked(unisono: Unisono, nursery: None, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('no data')\n")
    command = unisono("check", str(script))
    assert command.wait() == 2
    assert any("no data" in line for line in command.err)
    assert any("computes the first" in line and line.endswith("steps: alone") for line in command.err), command.err


@pytest.mark.parametrize(
    ("words", "said", "error"),
    [
        (["train.py", "--size", "2"], "", "come after `--`: python -m unisono check SCRIPT -- --size"),
        ([], "", "which script? unisono check SCRIPT"),
        (["--json", "gone.py"], "there is no script gone.py", ""),
        (["--json", "--steps", "1", "gone.py"], "a check needs 2 steps or more", ""),
    ],
)
def test_a_check_that_cannot_begin_says_how_to_call_it(words: list[str], said: str, error: str) -> None:
    command = [sys.executable, "-m", "unisono", "check", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 2
    assert error in ended.stderr
    assert (json.loads(ended.stdout)["error"] if said else ended.stdout).startswith(said)
