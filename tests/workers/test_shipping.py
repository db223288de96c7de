"""A folder that is sent to other machines: what is sent, and what is taken."""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from unisono.cluster.launchers import shipping
from unisono.cluster.launchers.shipping import MEGABYTE, inspect, pack
from unisono.cluster.machine import shipped
from unisono.cluster.machine.shipped import find_copy, receive
from unisono.core.errors import UsageError

LARGE = 10 * MEGABYTE


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "unisono" / "shipped"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name, text in {
        "train.py": "import lib",
        "lib/__init__.py": "",
        "lib/tool.sh": "#!/bin/sh",
        "lib/__pycache__/x.pyc": "x",
        ".gitignore": "*.log\n/data/\n",
        "lib/.gitignore": "!kept.log\n",
        "lib/kept.log": "kept",
        "out.log": "x",
        "data/numbers": "1 2 3",
        "env/pyvenv.cfg": "",
        "env/lib/torch.py": "x",
        "runs/one/journal.jsonl": "x",
        "older/run.json": "{}",
        "older/journal.jsonl": "x",
        "older/checkpoints/1/model.pt": "x",
        "ä b\n.txt": "a strange name",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "lib/tool.sh").chmod(0o755)
    os.symlink("lib/tool.sh", folder / "link")
    os.mkfifo(folder / "pipe")
    return folder


SENT = {
    "train.py",
    "lib/__init__.py",
    "lib/tool.sh",
    ".gitignore",
    "lib/.gitignore",
    "lib/kept.log",
    "ä b\n.txt",
    "link",
}


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)


@pytest.mark.parametrize("kind", ["a checkout", "a folder of a checkout", "no checkout"])
def test_what_git_ignores_stays_at_home(kind: str, project: Path) -> None:
    """And so do virtual environments, caches, the run's directory, and what is no file."""
    if kind != "no checkout":
        top = project if kind == "a checkout" else project.parent
        git(top, "init", "-q")
        git(top, "add", "project/train.py" if top != project else "train.py")
        (project / "gone.py").write_text("")
        git(project, "add", "gone.py")
        (project / "gone.py").unlink()
    parcel = inspect(str(project), without=str(project / "runs"), max_bytes=LARGE)
    assert set(parcel.names) == SENT


def test_a_checkout_in_the_folder_is_sent_as_well(project: Path) -> None:
    git(project, "init", "-q", "part")
    (project / "part" / "module.py").write_text("")
    git(project, "init", "-q")
    parcel = inspect(str(project), without=str(project / "runs"), max_bytes=LARGE)
    assert set(parcel.names) == SENT | {"part/module.py"}


def test_without_git_a_gitignore_is_not_overlooked(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping.shutil, "which", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"--ship needs git to read .*\.gitignore; install git"):
        inspect(str(project), without="", max_bytes=LARGE)
    for path in (project / ".gitignore", project / "lib" / ".gitignore"):
        path.unlink()
    parcel = inspect(str(project), without=str(project / "runs"), max_bytes=LARGE)
    assert set(parcel.names) == SENT - {".gitignore", "lib/.gitignore"} | {"data/numbers", "out.log"}


def test_a_folder_that_is_too_large_is_refused_with_the_numbers(project: Path) -> None:
    (project / "model.pt").write_bytes(bytes(2 * MEGABYTE))
    with pytest.raises(UsageError) as error:
        inspect(str(project), without="", max_bytes=MEGABYTE)
    words = str(error.value)
    assert f"--ship would send 2.0 MB in {len(SENT) + 2} files from {project}; the limits are 1 MB and 20000" in words
    assert "The largest are model.pt (2.0 MB), " in words
    assert "raise --set ship-limit=MB" in words


def test_a_link_that_leaves_the_folder_is_refused(project: Path) -> None:
    os.symlink("/etc/passwd", project / "users")
    with pytest.raises(UsageError, match="cannot send the link users -> /etc/passwd: it points outside the folder"):
        inspect(str(project), without="", max_bytes=LARGE)


def send(folder: Path) -> tuple[str, str]:
    """Returns the checksum, and where the folder lies now."""
    parcel = inspect(str(folder), without=str(folder / "runs"), max_bytes=LARGE)
    data = io.BytesIO()
    pack(parcel, data)
    data.seek(0)
    return parcel.checksum, receive(data, parcel.checksum, parcel.num_bytes)


def test_a_folder_arrives_as_it_was(project: Path, cache: Path) -> None:
    os.link(project / "train.py", project / "again.py")
    digest, place = send(project)
    assert place == str(cache / digest / "folder") == find_copy(digest)
    assert (Path(place) / "ä b\n.txt").read_text() == "a strange name"
    assert (Path(place) / "again.py").read_text() == "import lib"
    assert os.readlink(Path(place) / "link") == "lib/tool.sh"
    assert os.access(Path(place) / "lib/tool.sh", os.X_OK)
    assert not os.access(Path(place) / "train.py", os.X_OK)
    assert [path.stat().st_mode & 0o777 for path in (cache, cache / digest)] == [0o700, 0o700]
    assert send(project) == (digest, place)
    assert len(list(cache.iterdir())) == 1, "it is kept once"


def test_a_copy_that_a_script_has_changed_is_not_used_again(project: Path, cache: Path) -> None:
    digest, place = send(project)
    (Path(place) / "output.txt").write_text("a script may write there")
    assert find_copy(digest) == place
    (Path(place) / "train.py").write_text("other")
    assert find_copy(digest) == ""
    assert send(project)[1] == find_copy(digest) == str(cache / f"{digest}-1" / "folder")


def test_copies_that_nobody_needs_are_removed(project: Path, cache: Path) -> None:
    digests = []
    for text in ("old", "in use", "new"):
        (project / "train.py").write_text(text)
        digests.append(send(project)[0])
    long_ago = time.time() - 8 * 24 * 3600
    for digest in digests[:2]:
        os.utime(cache / digest / shipped.LOCK, (long_ago, long_ago))
    with (cache / digests[1] / shipped.LOCK).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        (project / "train.py").write_text("newest")
        send(project)
    assert [(cache / digest).exists() for digest in digests] == [False, True, True]


Filler = Callable[[tarfile.TarFile], None]


def archive(fillers: list[Filler]) -> io.BytesIO:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for fill in fillers:
            fill(tar)
    data.seek(0)
    return data


def member(
    name: str, kind: bytes = tarfile.REGTYPE, to: str = "", data: bytes = b""
) -> Callable[[tarfile.TarFile], None]:
    def fill(tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.size = kind, to, len(data)
        tar.addfile(info, io.BytesIO(data))

    return fill


EVIL = {
    "a path outside": ([member("../evil", data=b"x")], "a path outside the folder: '../evil'"),
    "a path that comes back": ([member("a/../../evil", data=b"x")], "a path outside"),
    "an absolute path": ([member("/tmp/evil", data=b"x")], "a path outside the folder: '/tmp/evil'"),
    "a link outside": (
        [member("a", tarfile.SYMTYPE, "../../..")],
        "a link that points outside the folder: 'a' -> '../../..'",
    ),
    "an absolute link": ([member("a", tarfile.SYMTYPE, "/etc")], "a link that points outside the folder"),
    "links that leave together": (
        [member("a/b/c", tarfile.SYMTYPE, "../.."), member("x", tarfile.SYMTYPE, "a/b/c/../secret")],
        "a link that points outside the folder: 'x'",
    ),
    "a file through a link": (
        [member("a", tarfile.SYMTYPE, "/tmp"), member("a/evil", data=b"x")],
        "cannot be unpacked",
    ),
    "a hard link": ([member("a", tarfile.LNKTYPE, "/etc/passwd")], "neither a file nor a folder nor a link: 'a'"),
    "a device": ([member("a", tarfile.CHRTYPE)], "neither a file nor a folder nor a link: 'a'"),
    "a file twice": ([member("a", data=b"x"), member("a", data=b"y")], "cannot be unpacked"),
    "too much": ([member("a", data=bytes(2000))], "more than 1000 bytes"),
    "other files": ([member("a", data=b"x")], "and 0123 was sent"),
}


@pytest.mark.parametrize("kind", EVIL)
def test_what_leaves_the_folder_is_refused_and_leaves_nothing(kind: str, cache: Path, tmp_path: Path) -> None:
    members, words = EVIL[kind]
    with pytest.raises(UsageError) as error:
        receive(archive(members), "0123", 1000)
    assert words in str(error.value)
    assert list(cache.iterdir()) == []
    assert not [path for path in (tmp_path / "evil", cache / "evil", Path("/tmp/evil")) if path.exists()]


def test_half_an_archive_is_refused_and_leaves_nothing(project: Path, cache: Path) -> None:
    (project / "noise").write_bytes(os.urandom(200_000))
    parcel = inspect(str(project), without="", max_bytes=LARGE)
    data = io.BytesIO()
    pack(parcel, data)
    whole = data.getvalue()
    for damaged in (b"", whole[:10], whole[:100_000], whole[:100_000] + b"xyz" + whole[100_003:]):
        with pytest.raises(UsageError, match=r"the folder cannot be unpacked|has arrived with the checksum"):
            receive(io.BytesIO(damaged), parcel.checksum, parcel.num_bytes)
    assert list(cache.iterdir()) == []
