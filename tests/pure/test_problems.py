"""What went wrong, in words: the sentence names the culprit, the file has no secrets, the advice fits the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from unisono.core.errors import DivergenceError, LossError
from unisono.record.problems.evidence import MAX_CHARACTERS, Evidence, Witness, redacted, shown, shown_environment
from unisono.record.problems.fit import FitSetting, Held, advice, asked_bytes, table
from unisono.record.problems.kinds import Trouble, file_name, kind_of, sentence, text
from unisono.record.problems.limits import Kills, memory_limit

HANG = Trouble(
    kind="hang",
    worker_id="w2",
    host="b",
    step=41,
    where="step 41, micro-batch 3 (samples 17, 3)",
    seconds=60.2,
    place="dataset.py:33 __getitem__",
    then="the others compute its micro-batches",
)


@pytest.mark.parametrize(
    ("trouble", "expected"),
    [
        (
            HANG,
            "w2 on host b hung in step 41, micro-batch 3 (samples 17, 3): its main thread has been in "
            "dataset.py:33 __getitem__ for 60 s; the others compute its micro-batches",
        ),
        (
            replace(HANG, place="", then=""),
            "w2 on host b hung in step 41, micro-batch 3 (samples 17, 3): it has made no progress for 60 s",
        ),
        (
            Trouble(kind="crash", worker_id="w1", host="a", where="step 3", exit_code=-11),
            "w1 on host a was killed by signal 11 (SIGSEGV) in step 3",
        ),
        (
            Trouble(kind="error", worker_id="w0", where="step 3, micro-batch 1", error="ValueError: no such class"),
            "w0 failed in step 3, micro-batch 1: ValueError: no such class",
        ),
        (
            Trouble(
                kind="nan",
                worker_id="w0",
                host="a",
                where="step 1, micro-batch 2 (samples 30, 31)",
                error="LossError: the loss of step 1, micro-batch 2 is nan (samples [30, 31]); nothing was updated",
            ),
            "the loss is nan in step 1, micro-batch 2 (samples 30, 31), which w0 on host a has computed",
        ),
        (
            Trouble.of_gradient(1, 2, [30, 31], "", "w0", "a"),
            "the gradient is not finite in step 1, micro-batch 2 (samples 30, 31), which w0 on host a has computed; "
            "its loss is, and so is the gradient of each micro-batch before it",
        ),
        (
            Trouble.of_gradient(1, -1, [], ""),
            "the gradient is not finite in step 1; the gradient of each micro-batch is: their sum is too large for its "
            "type",
        ),
        (
            Trouble(
                kind="out-of-memory",
                worker_id="w3",
                host="a",
                where="step 7",
                killed_for="the kernel killed it because its control group ran out of memory",
                peak_bytes=3_200_000_000,
            ),
            "w3 on host a ran out of memory in step 7: the kernel killed it because its control group ran out of "
            "memory when it had 3.2 GB",
        ),
        (
            Trouble(kind="failed-join", worker_id="w5", host="c", error="FileNotFoundError: no file 'data.npy'"),
            "w5 on host c could not join the run: FileNotFoundError: no file 'data.npy'",
        ),
        (
            Trouble(kind="divergence", error="DivergenceError: w1 has drifted apart from w0. Look for a counter."),
            "w1 has drifted apart from w0",
        ),
    ],
)
def test_one_sentence_names_the_culprit(trouble: Trouble, expected: str) -> None:
    assert sentence(trouble) == expected
    assert text(trouble).startswith(f"{expected}. ")


def test_what_an_error_says_besides_its_first_sentence_is_what_to_do() -> None:
    error = "DivergenceError: w1 has drifted apart from w0. Look for a counter. Or a clock."
    assert text(Trouble(kind="divergence", error=error)) == (
        "w1 has drifted apart from w0. Look for a counter. Or a clock"
    )


def test_a_long_error_is_quoted_in_part() -> None:
    said = sentence(Trouble(kind="out-of-memory", worker_id="w0", error="CUDA out of memory. " + "See " * 1000))
    assert said.startswith("w0 ran out of memory: CUDA out of memory. See See ")
    assert len(said) < 400


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "out-of-memory"),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "out-of-memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "out-of-memory"),
        (OSError(12, "Cannot allocate memory"), "out-of-memory"),
        (DivergenceError("drifted apart"), "divergence"),
        (LossError("not finite", microbatch=2), "nan"),
        (LossError("no scalar"), "error"),
        (ValueError("out of memory"), "error"),
    ],
)
def test_an_exception_shows_what_went_wrong(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind


# -- the file ----------------------------------------------------------------------------------------

SECRETS = [
    ("train.py --password hunter2 --epochs 3", "hunter2"),
    ("train.py --api-key=abc123def", "abc123def"),
    ('["train.py", "--token", "s3cr3t", "--epochs", "3"]', "s3cr3t"),
    ('[\n "--hf-token",\n "s3cr3t"\n]', "s3cr3t"),
    ("wss://VeryLongToken_of-a-run@host:5000#0123", "VeryLongToken_of-a-run"),
    ("postgres://me:pa55@db/train", "pa55"),
    ("s3://KEY:SECRETKEY@bucket/copies", "SECRETKEY"),
    ("http://host:5000/#read-only-words", "read-only-words"),
    ("WANDB_API_KEY=0123456789abcdef", "0123456789abcdef"),
    ('{"client_secret": "x y z"}', "x y z"),
    ("Authorization: Bearer eyJhbGciOi", "eyJhbGciOi"),
    ("password='correct horse'", "correct horse"),
    ("key hf_abcdefghijklmnopqrst", "abcdefghijklmnopqrst"),
    ("-----BEGIN PRIVATE KEY-----\nMIIEvQ\n-----END PRIVATE KEY-----", "MIIEvQ"),
]


@pytest.mark.parametrize(("said", "secret"), SECRETS)
def test_what_looks_like_a_secret_is_not_shown(said: str, secret: str) -> None:
    assert secret not in redacted(said)


@pytest.mark.parametrize(
    "said",
    [
        "train.py --epochs 3 --tokenizer gpt2 --max-tokens 2048",
        "num_tokens=2048, batch_size=256",
        "step 41, micro-batch 3 (samples 17, 3): its main thread has been in dataset.py:33 __getitem__",
        "s3://bucket/folder and https://host/page",
    ],
)
def test_what_is_no_secret_is_shown(said: str) -> None:
    assert redacted(said) == said


def test_no_part_of_a_file_has_a_secret() -> None:
    said = "\n".join(text for text, _ in SECRETS) + "\nthe word of this run: open-sesame"
    everywhere = Evidence(
        trouble=replace(HANG, kind="error", error=said, traceback=said, detail=said, then=said, advice=said),
        facts={"directory": said},
        workers=[Witness(name="w2", text=said), Witness(name="w1", missing=said)],
        machines=[Witness(name="b", text=said)],
        events=[said],
        versions={"torch": said},
        environment={"NCCL_DEBUG": said},
        settings=said,
        recipe=said,
    )
    file = shown(everywhere, ["open-sesame"])
    assert "open-sesame" not in file
    assert [secret for _, secret in SECRETS if secret in file] == []


def test_only_named_environment_variables_are_shown() -> None:
    environment = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "0",
        "UNISONO_NURSERY": "/tmp/n",
        "UNISONO_TOKEN_FILE": "/x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "HOME": "/x",
        "PATH": "/bin",
    }
    assert list(shown_environment(environment)) == ["CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "UNISONO_NURSERY"]


def test_a_file_begins_with_the_sentence_and_ends_somewhere() -> None:
    endless = Evidence(
        trouble=HANG,
        workers=[Witness(name=f"w{number}", text=f"{number}\n" + "x" * 100_000) for number in range(200)],
        events=["event " * 1000] * 100,
    )
    file = shown(endless)
    assert file.splitlines()[3] == sentence(HANG) + "."
    assert len(file) < MAX_CHARACTERS + 100


def test_workers_that_say_the_same_stand_together_and_the_culprit_comes_first() -> None:
    said = [Witness(name=f"w{number}", text="at the sum") for number in (0, 1, 3)]
    file = shown(Evidence(trouble=HANG, workers=[*said, Witness(name="w2", text="in the data set")]))
    assert file.index("[w2]\nin the data set") < file.index("[w0, w1, w3]\nat the sum")


def test_names_of_files_are_in_the_order_of_time_and_each_is_new() -> None:
    when = "20261122-130405-125"
    first = file_name("hang", 41, when)
    assert first == "20261122-130405-125-hang-step41.txt"
    assert file_name("hang", 41, when, [first]) == "20261122-130405-125-hang-step41-2.txt"
    assert file_name("failed-join", -1, "20261122-130405-135") == "20261122-130405-135-failed-join.txt" > first


# -- memory ------------------------------------------------------------------------------------------

GB = 10**9
HELD = Held(
    kinds={"the program itself": GB // 4, "parameters": GB // 2, "gradients": GB // 2, "optimizer state": GB},
    used=5 * GB,
    asked=GB,
    limit=6 * GB,
    of="cuda:0",
    biggest=[("model.fc.weight (4096, 4096) float32", 67_108_864)],
)


def test_what_held_the_memory_is_told_by_kind() -> None:
    said = table(HELD)
    for words in ("parameters", "500 MB", "optimizer state", "1.0 GB", "activations", "2.8 GB", "refused: 1.0 GB more"):
        assert words in said
    assert "5.0 GB of 6.0 GB of cuda:0" in said
    assert "67 MB  model.fc.weight (4096, 4096) float32" in said


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("asked", [GB // 100, GB, 10 * GB, 40 * GB])
def test_the_number_of_micro_batches_that_is_advised_fits(microbatches: int, asked: int) -> None:
    """By the same numbers: what does not depend on it, and the rest in the proportion of the samples."""
    held = replace(HELD, asked=asked)
    said = advice(held, FitSetting(batch_size=256, microbatches=microbatches))
    assert said.startswith("microbatches="), said
    advised = int(said.removeprefix("microbatches=").split()[0])
    assert 256 % advised == 0
    assert advised > microbatches
    assert held.fixed + held.rest * microbatches / advised <= held.limit


def test_fewer_workers_are_advised_where_they_share_the_memory() -> None:
    said = advice(replace(HELD, shared=21 * GB), FitSetting(batch_size=256, microbatches=8, num_workers=4))
    assert "1 worker on this machine instead of 4 (the bits stay the same)" in said
    said = advice(replace(HELD, shared=34 * GB), FitSetting(batch_size=256, microbatches=8, num_workers=4))
    assert "3 workers on this machine" in said
    assert "on this machine" not in advice(HELD, FitSetting(batch_size=256, microbatches=8, num_workers=4))


def test_what_no_number_of_micro_batches_can_mend_is_said() -> None:
    too_large = replace(HELD, kinds={"parameters": 6 * GB})
    assert "no number of micro-batches makes it fit" in advice(too_large, FitSetting(batch_size=256, microbatches=8))
    one_sample = replace(HELD, asked=1000 * GB)
    assert advice(one_sample, FitSetting(batch_size=8, microbatches=4)).startswith("Even micro-batches of 1 sample")


def test_nothing_is_advised_without_numbers() -> None:
    assert advice(replace(HELD, limit=0), FitSetting(batch_size=256, microbatches=8)) == ""
    assert advice(HELD, FitSetting()) == ""


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has", 2_684_354_560),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12", 4096),
        ("something else", 0),
    ],
)
def test_what_was_asked_for_is_read_from_the_error(said: str, expected: int) -> None:
    assert asked_bytes(said) == expected


# -- whom the kernel has killed ----------------------------------------------------------------------


def machine(root: Path, *, version: int, kills: int, vmstat: int = 0, used: int = 900) -> Path:
    """A file system as a process sees it in a control group with 1,000 bytes of memory."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text("MemTotal:  4000 kB\nMemAvailable:  3000 kB\n")
    (root / "proc/vmstat").write_text(f"pgfault 3\noom_kill {vmstat}\n")
    if version == 2:
        (root / "proc/self/cgroup").write_text("0::/job\n")
        folder = root / "sys/fs/cgroup/job"
        names = ("memory.max", "memory.current", "memory.events")
    else:
        (root / "proc/self/cgroup").write_text("4:memory:/job\n")
        folder = root / "sys/fs/cgroup/memory/job"
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, ("1000", str(used), f"oom_kill_disable 0\noom_kill {kills}"), strict=True):
        (folder / name).write_text(value + "\n")
    return root


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_for_memory_is_known_by_the_counter_of_the_control_group(tmp_path: Path, version: int) -> None:
    kills = Kills(machine(tmp_path, version=version, kills=2))
    assert kills.new() == ""
    machine(tmp_path, version=version, kills=3)
    said = kills.new()
    assert "its control group ran out of memory" in said
    assert "(1 kB of its control group's memory)" in said
    assert kills.new() == "", "that was the one before"


def test_a_kill_for_memory_is_known_by_the_counter_of_the_machine(tmp_path: Path) -> None:
    kills = Kills(machine(tmp_path, version=2, kills=0))
    machine(tmp_path, version=2, kills=0, vmstat=1)
    assert "a process of this machine for lack of memory" in kills.new()


def test_a_group_at_its_limit_is_said(tmp_path: Path) -> None:
    kills = Kills(machine(tmp_path, version=2, kills=0, used=990))
    assert "at its limit" in kills.new()


@pytest.mark.parametrize(("version", "name"), [(1, "total_inactive_file"), (2, "inactive_file")])
def test_a_group_that_is_full_of_what_files_left_is_not_at_its_limit(tmp_path: Path, version: int, name: str) -> None:
    root = machine(tmp_path, version=version, kills=0, used=990)
    folder = root / ("sys/fs/cgroup/job" if version == 2 else "sys/fs/cgroup/memory/job")
    (folder / "memory.stat").write_text(f"anon 90\n{name} 900\n")
    assert Kills(root).new() == "", "somebody has killed it, but not for memory"
    limit = memory_limit(root)
    assert limit is not None
    assert limit.used == 90


def test_the_nearest_limit_counts(tmp_path: Path) -> None:
    limit = memory_limit(machine(tmp_path, version=2, kills=0, used=100))
    assert limit is not None
    assert (limit.limit, limit.used) == (1000, 100)
