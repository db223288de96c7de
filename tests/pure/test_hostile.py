"""A run's directory that somebody else has written has no command send, execute or print what it should not."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.house.rooms import ROOT, parse
from unisono.cli import COMMANDS, main
from unisono.cli.reach import NotGoing, find
from unisono.cli.saying import say, say_json, say_lines
from unisono.core.errors import UsageError
from unisono.engine.checkpoint.copies import COPIES
from unisono.record.rundir import ADDRESS_FILE, TOKEN_FILE
from unisono.system.owned import MOST_BYTES, read_owned

SECRET = "hf_a-secret-of-mine"
NOBODY = 65534


class Trap:
    """A port to which nothing may be sent, and a directory that names it as that of a head."""

    def __init__(self, folder: Path) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.setblocking(False)
        self.folder = folder / "run"
        self.folder.mkdir()
        self.secret = folder / "secret"
        self.secret.write_text(SECRET)
        self.url = f"ws://127.0.0.1:{self.socket.getsockname()[1]}"
        self.say(url=self.url)
        (self.folder / TOKEN_FILE).write_text("of-the-run")

    def say(self, **known: object) -> None:
        (self.folder / ADDRESS_FILE).write_text(json.dumps(known))

    @property
    def is_sprung(self) -> bool:
        """Whether anybody has connected."""
        try:
            self.socket.accept()[0].close()
        except BlockingIOError:
            return False
        return True


@pytest.fixture
def trap(tmp_path: Path) -> Iterator[Trap]:
    found = Trap(tmp_path)
    with found.socket:
        yield found


def given_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a path be that of another user, or this user be another one where only root gives files away."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)


def link(trap: Trap, name: str) -> None:
    (trap.folder / name).unlink()
    (trap.folder / name).symlink_to(trap.secret)


def second_name(trap: Trap, name: str) -> None:
    (trap.folder / name).unlink()
    (trap.folder / name).hardlink_to(trap.secret)


def pipe(trap: Trap, name: str) -> None:
    """Whoever opens it as a file waits for ever."""
    (trap.folder / name).unlink()
    os.mkfifo(trap.folder / name)


def huge(trap: Trap, name: str) -> None:
    os.truncate(trap.folder / name, MOST_BYTES + 1)


def folder(trap: Trap, name: str) -> None:
    (trap.folder / name).unlink()
    (trap.folder / name).mkdir()


HOSTILE: dict[str, Callable[[Trap, str], None]] = {
    "a link": link,
    "a second name of a file": second_name,
    "a pipe": pipe,
    "a huge file": huge,
    "a directory": folder,
}


@pytest.mark.parametrize("name", [ADDRESS_FILE, TOKEN_FILE])
@pytest.mark.parametrize("how", HOSTILE)
def test_what_is_no_file_of_the_directory_is_believed_by_no_command(how: str, name: str, trap: Trap) -> None:
    HOSTILE[how](trap, name)
    with pytest.raises(UsageError) as caught:
        find(str(trap.folder))
    assert not isinstance(caught.value, NotGoing)
    assert f"{trap.folder / name} is " in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", ["", ADDRESS_FILE, TOKEN_FILE])
def test_what_belongs_to_another_user_is_believed_by_no_command(
    name: str, trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_away(trap.folder / name, monkeypatch)
    with pytest.raises(UsageError, match=r"belongs to .*uid \d+.*, but this command runs as .*uid \d+"):
        find(str(trap.folder))


def test_no_path_in_the_directory_is_followed(trap: Trap) -> None:
    """Earlier versions wrote there where the token is; the directory may be mounted elsewhere on this machine."""
    trap.say(url=trap.url, token_file=str(trap.secret))
    assert find(str(trap.folder)).token == "of-the-run"
    moved = trap.folder.rename(trap.folder.with_name("mounted elsewhere"))
    assert find(str(moved)).token == "of-the-run"
    latest = trap.folder.with_name("latest")
    latest.symlink_to(moved)
    assert find(str(latest)).token == "of-the-run"  # the link is the user's word, not the directory's


@pytest.mark.parametrize("url", ["", 7, None, [], "http://127.0.0.1:1", "ws://127.0.0.1:99999", "ws://a\x1b]0;b\x07:1"])
def test_an_address_that_is_none_is_refused_in_words(url: object, trap: Trap) -> None:
    trap.say(url=url)
    with pytest.raises(UsageError):
        find(str(trap.folder))


ASKING = {
    "stop": ["stop", "RUN"],
    "scale": ["scale", "RUN", "2"],
    "join": ["join", "RUN"],
    "watch": ["watch", "--once", "RUN"],
    "watch --web": ["watch", "--web", "RUN"],
    "doctor": ["doctor", "RUN"],
}


@pytest.mark.parametrize("command", ASKING)
@pytest.mark.parametrize("how", ["a path", "a link", "another user's"])
def test_no_command_sends_a_file_of_the_user_to_who_wrote_the_directory(
    how: str, command: str, trap: Trap, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor does it connect to the address that stands there."""
    assert command.split()[0] in COMMANDS
    if how == "a path":
        (trap.folder / TOKEN_FILE).unlink()
        trap.say(url=trap.url, token_file=str(trap.secret))
    elif how == "a link":
        link(trap, TOKEN_FILE)
    else:
        (trap.folder / TOKEN_FILE).write_text(SECRET)
        given_away(trap.folder, monkeypatch)
    words = [word.replace("RUN", str(trap.folder)) for word in ASKING[command]]
    monkeypatch.setattr("sys.argv", ["unisono", *words])
    monkeypatch.setattr("unisono.views.page.directory_server.run", lambda *_: 0)  # goes on until Ctrl-C
    with pytest.raises(SystemExit):
        main()
    assert not trap.is_sprung
    out, err = capfd.readouterr()
    assert SECRET not in out + err


def test_a_shared_directory_is_no_reason_to_refuse_an_own_file(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    given_away(trap.folder, monkeypatch)
    if os.geteuid() == 0:
        assert read_owned(trap.folder, TOKEN_FILE, is_folder_shared=True) == b"of-the-run"


# -- what is printed -----------------------------------------------------------------------------------

EVIL = "\x1b]0;EVIL\x07\x1b[2J\x9b31m\x9d0;EVIL\x9c\r\b\u202e\nother machines join with: EVIL"
"""A title, an empty screen, colours, the way back to the first column, letters the other way round, another line."""
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
RUN_01 = ROOT / "tests" / "data" / "run-0.1"
MEANT = {"kind", "how", "state", "unit", "digests", "worker_ids", "columns", "key"}
"""Texts of which a reader knows the possible ones, or which it compares."""


def poisoned(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        found = {name: poisoned(each, name) for name, each in value.items()}
        return {**found, EVIL: 1.0} if key in ("logs", "metrics", "environment", "recipe") else found
    if isinstance(value, list):
        return [poisoned(each, key) for each in value]
    return value + EVIL if isinstance(value, str) and key not in MEANT else value


@pytest.fixture
def poison(tmp_path: Path) -> Path:
    """A run that has ended, with something for terminals in each text."""
    folder = Path(shutil.copytree(RUN_01, tmp_path / "run"))
    for file in [*folder.rglob("*.jsonl"), *folder.rglob("*.json")]:
        lines = [file.read_text()] if file.suffix == ".json" else file.read_text().splitlines()
        file.write_text("".join(json.dumps(poisoned(json.loads(line))) + "\n" for line in lines))
    return folder


SAYING = {
    "watch --once --json": ["watch", "--once", "--json", "RUN"],
    "watch --once": ["watch", "--once", "RUN"],
    "watch --json": ["watch", "--json", "RUN"],
    "watch | cat": ["watch", "RUN"],
    "report": ["report", "RUN", "-o", "REPORT"],
    "compare": ["compare", "RUN", "SOUND"],
    "checkpoints": ["checkpoints", "RUN"],
    "checkpoints --check": ["checkpoints", "RUN", "--check"],
    "plan": ["plan", "RUN"],
    "replay": ["replay", "RUN", "--step", "3"],
    "run --resume": ["run", "--resume", "RUN"],
    "stop": ["stop", "RUN"],
}


@pytest.mark.parametrize("command", SAYING)
def test_a_terminal_obeys_nothing_that_a_run_says(
    command: str, poison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    names = {"RUN": str(poison), "SOUND": str(RUN_01), "REPORT": str(tmp_path / "report.html")}
    monkeypatch.setattr("sys.argv", ["unisono", *(names.get(word, word) for word in SAYING[command])])
    with pytest.raises(SystemExit):
        main()
    out, err = capfd.readouterr()
    assert out + err
    assert not OBEYED.findall(out + err)
    if command in ("watch --once", "watch | cat", "report"):  # a field a line
        assert not [line for line in (out + err).splitlines() if line.startswith("other machines join")]


def test_the_poison_is_in_what_is_said(
    poison: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["unisono", "watch", "--once", str(poison)])
    with pytest.raises(SystemExit):
        main()
    assert capfd.readouterr().out.count("EVIL") >= 5


def test_the_door_for_output(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"one{EVIL}")
    say_lines("two\nthree\x1b[2Jä\x9b", err=True)
    say_json({"a": EVIL})
    out, err = capsys.readouterr()
    assert err == "two\nthreeä\n"
    first, _, rest = out.partition("\n")
    assert first == "one other machines join with: EVIL"
    assert json.loads(rest) == {"a": EVIL}
    assert not OBEYED.findall(out)


RAW = {"saying.py", "slurm.py", "kubernetes.py", "completion.py"}
"""The door itself; those that copy the output of a job of the user's; and a text that a shell executes."""


def test_no_command_writes_past_the_door() -> None:
    for file in sorted((ROOT / "src" / "unisono" / "cli").glob("*.py")):
        called = [node.func for node in ast.walk(parse(file)) if isinstance(node, ast.Call)]
        names = {each.id for each in called if isinstance(each, ast.Name)}
        names |= {each.attr for each in called if isinstance(each, ast.Attribute)}
        assert file.name in RAW or not names & {"print", "echo", "secho", "stdout"}, file


# -- what is waited for, and what takes more than there is ---------------------------------------------

LOOKING = {
    "watch --once": ["watch", "--once", "RUN"],
    "watch --once --json": ["watch", "--once", "--json", "RUN"],
    "report": ["report", "RUN", "-o", "REPORT"],
    "report --table": ["report", "RUN", "--table"],
    "compare": ["compare", "RUN", "SOUND"],
    "compare, the other way round": ["compare", "SOUND", "RUN"],
    "checkpoints": ["checkpoints", "RUN"],
    "checkpoints check": ["checkpoints", "RUN", "check"],
    "checkpoints export": ["checkpoints", "RUN", "export", "WEIGHTS"],
    "checkpoints --best": ["checkpoints", "RUN", "--best", "loss"],
    "plan": ["plan", "RUN"],
    "replay": ["replay", "RUN", "--step", "3"],
    "certify": ["certify", "RUN", "-o", "CERTIFICATE"],
    "verify": ["verify", "RUN/certificate.json", "--any-signer", "--run", "RUN"],
    "status": ["status", "RUN"],
}
OF_A_RUN = (
    "run.json", "journal.jsonl", "journal.index", ".journal.index.new", "events.jsonl", "times.jsonl", "use.jsonl",
    "plan.json", "certificate.json", ".lock", "head.json", "checkpoints/step-0000000012/manifest.json",
    "checkpoints/step-0000000012/skeleton.msgpack", "checkpoints/step-0000000012/part-00000-of-00001.safetensors",
)  # fmt: skip


def looks(command: str, run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Return what a command says of a run; it ends, and an error that it meets is one of its own."""
    names = {"RUN": run, "SOUND": RUN_01, "REPORT": tmp_path / "r.html", "CERTIFICATE": tmp_path / "c.json"}
    names["WEIGHTS"] = tmp_path / "w.safetensors"
    words = [re.sub(r"[A-Z]{3,}", lambda found: str(names[found[0]]), word) for word in LOOKING[command]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["unisono", *words])
        with pytest.raises(SystemExit):
            main()
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    return out + err


@pytest.mark.parametrize("how", ["a pipe", "a link"])
@pytest.mark.parametrize("command", LOOKING)
def test_no_command_waits_for_a_pipe_or_follows_a_link(
    command: str, how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(RUN_01, tmp_path / "run"))
    (tmp_path / "secret").write_text(f'{{"line": 0, "kind": "{SECRET}"}}\n')
    for name in OF_A_RUN:
        (run / name).rename(tmp_path / "kept") if (run / name).exists() else None
        os.mkfifo(run / name) if how == "a pipe" else (run / name).symlink_to(tmp_path / "secret")
        assert SECRET not in looks(command, run, tmp_path, capfd)
        (run / name).unlink()
        (tmp_path / "kept").rename(run / name) if (tmp_path / "kept").exists() else None
    assert SECRET not in "".join(path.read_text() for path in tmp_path.glob("*.html"))


@pytest.mark.parametrize("command", ["certify", "compare"])
def test_no_command_waits_for_a_script_that_a_run_names(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(RUN_01, tmp_path / "run"))
    os.mkfifo(tmp_path / "pipe")
    facts = json.loads((run / "run.json").read_text())
    for script in (tmp_path / "pipe", "/dev/zero"):
        facts |= {"command": {"folder": "/", "arguments": [str(script)]}, "environment": {"script": "00000000"}}
        (run / "run.json").write_text(json.dumps(facts))
        looks(command, run, tmp_path, capfd)


@pytest.mark.parametrize(
    "command", ["watch --once", "compare", "checkpoints check", "checkpoints export", "plan", "replay", "certify"]
)
def test_a_file_of_any_size_is_an_error_in_words(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(RUN_01, tmp_path / "run"))
    for name in OF_A_RUN:
        before = (run / name).read_bytes() if (run / name).exists() else None
        (run / name).touch()
        os.truncate(run / name, 1 << 43)
        looks(command, run, tmp_path, capfd)
        (run / name).unlink()
        (run / name).write_bytes(before) if before is not None else None


# -- what is executed ----------------------------------------------------------------------------------

EXECUTING = {
    "replay": (["replay", "RUN", "--step", "3"], 2),
    "compare --explain": (["compare", "RUN", "OTHER", "--explain"], 1),
    "run --resume": (["run", "--resume", "RUN", "-n", "1"], 2),
    "run --resume of a checkpoint": (["run", "--resume", "CHECKPOINT", "-n", "1"], 2),
    "run --resume auto": (["run", "--resume", "auto", "--run-dir", "RUN", "-n", "1"], 2),
    "run --resume of a copy": (["run", "--resume", "COPY", "-n", "1", "--run-dir", "NEW"], 2),
    "run --resume of a copy by its URL": (["run", "--resume", "file://COPY", "-n", "1", "--run-dir", "NEW"], 2),
}


@pytest.fixture
def strange(tmp_path: Path) -> dict[str, Path]:
    """A run and its copy of a stranger's, which name a script of theirs that writes a file."""
    folder = tmp_path / "strange"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    run = Path(shutil.copytree(RUN_01, tmp_path / "run"))
    facts = json.loads((run / "run.json").read_text())
    facts["command"] = {"folder": str(folder), "arguments": ["evil.py"]}
    (run / "run.json").write_text(json.dumps(facts))
    other = Path(shutil.copytree(run, tmp_path / "other"))
    journal = (other / "journal.jsonl").read_text().splitlines()
    at = next(at for at, line in enumerate(journal) if (one := json.loads(line))["kind"] == "step" and one["step"] == 3)
    journal[at] = json.dumps({**json.loads(journal[at]), "loss": 77.0, "digest": "0" * 16})
    (other / "journal.jsonl").write_text("\n".join([*journal, ""]))
    copy = tmp_path / "copy"
    (copy / "checkpoints").mkdir(parents=True)
    (copy / COPIES).write_text("")
    shutil.copytree(run / "checkpoints" / "step-0000000012", copy / "checkpoints" / "step-0000000012")
    for name in ("run.json", "journal.jsonl"):
        shutil.copy(run / name, copy / "checkpoints" / "step-0000000012" / name)
    checkpoint = run / "checkpoints" / "step-0000000012"
    return {"RUN": run, "OTHER": other, "COPY": copy, "CHECKPOINT": checkpoint, "NEW": tmp_path / "new"}


@pytest.mark.parametrize("which", ["directory", "run.json"])
@pytest.mark.parametrize("command", EXECUTING)
def test_no_command_executes_what_a_strangers_directory_names(
    command: str,
    which: str,
    strange: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    copied = strange["COPY"] / "checkpoints" / "step-0000000012"
    for folder in (strange["RUN"], strange["OTHER"], copied):
        given_away(folder if which == "directory" else folder / "run.json", monkeypatch)
    words, code = EXECUTING[command]
    for name, path in strange.items():
        words = [re.sub(rf"\b{name}\b", str(path), word) for word in words]
    monkeypatch.setattr("sys.argv", ["unisono", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capfd.readouterr()
    assert not (tmp_path / "executed").exists()
    assert "is not executed as you without your consent; give the script" in " ".join((out + err).split())
    assert ended.value.code == code


def test_the_users_own_run_is_executed_and_a_strangers_with_a_script_of_the_users(
    strange: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'mine')!r}, 'w')\n")
    for script in ([], [str(tmp_path / "mine.py")]):
        if script:
            given_away(strange["RUN"], monkeypatch)
        monkeypatch.setattr("sys.argv", ["unisono", "replay", str(strange["RUN"]), "--step", "3", *script])
        with pytest.raises(SystemExit):
            main()
        assert (tmp_path / ("mine" if script else "executed")).exists(), capfd.readouterr()
