"""What the variables of srun and mpiexec say to a process, and where its tasks meet."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import msgspec
import pytest

from unisono.cluster.launchers import Request, slurm
from unisono.cluster.launchers.hosts import Host, spread
from unisono.cluster.launchers.protocol import in_allocation
from unisono.cluster.launchers.slurm import capacities, expand, own_address, parse_gpus, step_environment
from unisono.cluster.machine.workers import machine_label
from unisono.cluster.trust.rendezvous import MeetingPoint, Rendezvous
from unisono.core.errors import UsageError
from unisono.system.capacity import parse_workers
from unisono.system.tasks import TAKEN, Task, counts, here, refuse_others, refuse_unknown

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_precondition_transports": "54c99bd3b6951d4a-618c94b71a7b86ca",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BATCH = {
    "SLURM_CLUSTER_NAME": "lab",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2,1",
}
SRUN = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
}


def task(environment: dict[str, str]) -> Task:
    found = here(environment)
    assert found is not None
    return found


def place(found: Task) -> tuple[str, int, int, int, int]:
    return found.engine, found.rank, found.size, found.local_rank, found.local_size


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (OPEN_MPI, ("Open MPI", 2, 4, 0, 2)),
        (MPICH, ("MPICH", 1, 2, 1, 2)),
        (SRUN, ("Slurm", 1, 3, 1, 2)),
        ({**SRUN, "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}, ("Slurm", 2, 3, 0, 1)),
        ({**SRUN, **OPEN_MPI}, ("Open MPI", 2, 4, 0, 2)),  # mpiexec uses srun
        ({**SRUN, **MPICH}, ("MPICH", 1, 2, 1, 2)),
        ({**SRUN, "PMI_RANK": "1", "PMI_SIZE": "3"}, ("Slurm", 1, 3, 1, 2)),  # srun --mpi=pmi2
    ],
)
def test_a_task_knows_its_place(environment: dict[str, str], expected: tuple[str, int, int, int, int]) -> None:
    assert place(task(environment)) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {},
        BATCH,
        {**BATCH, "SLURM_STEP_ID": "4294967290"},  # the shell of salloc, where it runs on a node
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "many"},
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        {**SRUN, TAKEN: "Slurm"},  # a script's own run, in a worker
    ],
)
def test_what_was_started_by_itself_is_no_task(environment: dict[str, str]) -> None:
    assert here(environment) is None


@pytest.mark.parametrize("environment", [OPEN_MPI, SRUN])
def test_the_job_is_the_same_for_all_tasks_and_another_for_another_start(environment: dict[str, str]) -> None:
    job = task(environment).job
    ranks = {"OMPI_COMM_WORLD_RANK": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    changed = {name: value for name, value in ranks.items() if name in environment}
    assert job
    assert task({**environment, **changed}).job == job
    starts = [{"SLURM_RESTART_COUNT": "1"}, {"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "8"}]
    others = starts if environment is SRUN else [{"OMPI_MCA_orte_precondition_transports": "0-0"}]
    assert job not in {task({**environment, **other}).job for other in others}


def test_mpich_is_asked_for_the_name_of_its_job() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for answer in ("cmd=response_to_init rc=0", "cmd=my_kvsname kvsname=kvs_18251_0_vm", "cmd=finalize_ack"):
            theirs.sendall(f"{answer}\n".encode())
        found = task({**MPICH, "PMI_FD": str(ours.fileno())})
        asked = theirs.recv(4096).decode().splitlines()
    assert found.job
    assert asked == ["cmd=init pmi_version=1 pmi_subversion=1", "cmd=get_my_kvsname", "cmd=finalize"]
    assert task(MPICH).job == "", "an mpiexec that cannot be asked"


@pytest.mark.parametrize(
    ("text", "numbers"), [("1", [1]), ("8(x2)", [8, 8]), ("2(x3),1", [2, 2, 2, 1]), ("4,2(x2)", [4, 2, 2])]
)
def test_numbers_for_each_node(text: str, numbers: list[int]) -> None:
    assert counts(text) == numbers


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12],login", ["n08", "n09", "n10", "n12", "login"]),
        ("a[1-2]-ib,b[3]", ["a1-ib", "a2-ib", "b3"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_a_list_of_nodes_without_scontrol(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    ("more", "threads", "expected"),
    [
        ({"SLURM_JOB_CPUS_PER_NODE": "8(x2)"}, 1, [8, 8]),
        ({"SLURM_JOB_CPUS_PER_NODE": "8,4"}, 2, [4, 2]),
        ({"SLURM_JOB_CPUS_PER_NODE": "1(x2)"}, 4, [1, 1]),
        ({"SLURM_JOB_CPUS_PER_NODE": "16(x2)", "SLURM_TASKS_PER_NODE": "2(x2)"}, 1, [2, 2]),
        ({"SLURM_JOB_CPUS_PER_NODE": "16(x2)", "SLURM_TASKS_PER_NODE": "1(x2)"}, 1, [16, 16]),
        ({"SLURM_JOB_CPUS_PER_NODE": "16(x2)", "SLURM_GPUS_ON_NODE": "4"}, 1, [4, 4]),
    ],
)
def test_the_room_of_nodes(more: dict[str, str], threads: int, expected: list[int]) -> None:
    """GPUs; else tasks, where more than one a node was asked for; else cores."""
    room, gpus = capacities(more, ["a", "b"], threads)
    assert room == expected
    assert gpus == ([4, 4] if "SLURM_GPUS_ON_NODE" in more else [0, 0])


DETAILS = """JobId=7 JobName=train
   NodeList=a[1-2],b1 BatchHost=a1
   JOB_GRES=gpu:a100:9,shard:4
     Nodes=a[1-2] CPU_IDs=0-7 Mem=1024 GRES=gpu:a100:4(IDX:0-3)
     Nodes=b1 CPU_IDs=0-1 Mem=1024 GRES=gpu:1(IDX:0),shard:4(0/4)
     Nodes=c1 CPU_IDs=0-1 Mem=1024 GRES=
   MinCPUsNode=1
"""


@pytest.mark.parametrize(("job", "gpus"), [("7", [4, 4, 1, 0]), ("8", [4, 4, 4, 4])], ids=["said", "not said"])
def test_each_node_has_its_own_number_of_gpus(job: str, gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's variables say only how many the node has on which the batch script runs."""
    assert parse_gpus(DETAILS) == {"a1": 4, "a2": 4, "b1": 1, "c1": 0}
    monkeypatch.setattr(slurm, "_scontrol", lambda *words: DETAILS if words[-1] == "7" else "")
    environment = {"SLURM_JOB_ID": job, "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_CPUS_PER_NODE": "8(x4)"}
    assert capacities(environment, ["a1", "a2", "b1", "c1"], 1) == (gpus, gpus)


def test_variables_of_slurm_that_cannot_be_read_are_an_error() -> None:
    with pytest.raises(UsageError, match="Slurm's variables cannot be read"):
        capacities({"SLURM_JOB_CPUS_PER_NODE": "many"}, ["a"], 1)


@pytest.mark.parametrize(
    ("number", "room", "expected"),
    [
        (2, [8, 8], [1, 1]),
        (3, [8, 8], [2, 1]),
        (6, [4, 2], [4, 2]),
        (9, [4, 2], [6, 3]),
        (1, [1, 1], [1, 0]),
        (3, [2, 0, 1], [2, 0, 1]),
    ],
)
def test_workers_are_shared_out_by_room(number: int, room: list[int], expected: list[int]) -> None:
    hosts = [Host(f"n{index}") for index in range(len(room))]
    assert spread(parse_workers(str(number), 1), hosts, room, is_auto=False) == expected


def test_only_a_process_in_an_allocation_that_is_no_task_starts_agents() -> None:
    asked = [Request(workers=parse_workers("1", 1), environment=found) for found in ({}, BATCH, SRUN)]
    assert [in_allocation(request) for request in asked] == [False, True, False]


def test_the_wishes_of_a_batch_script_are_not_those_of_an_agent() -> None:
    wishes = {"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_GPUS": "8", "SLURM_MEM_PER_CPU": "1000"}
    assert step_environment({**BATCH, **wishes, "PATH": "/bin"}) == {**BATCH, "PATH": "/bin"}


def test_the_head_listens_on_the_address_of_the_route_to_the_other_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of a node need not be its name: Slurm knows it."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$2 $3" = "node n2" ] && echo "NodeName=n2 NodeAddr=127.0.0.1 NodeHostName=n2"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert own_address({**BATCH, "SLURMD_NODENAME": "n1"}) == "127.0.0.1"


# -- the rendezvous ------------------------------------------------------------------------------------


def listening() -> tuple[socket.socket, str]:
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, f"ws://127.0.0.1:{listener.getsockname()[1]}"


def test_tasks_learn_the_address_from_a_file_that_only_their_user_can_read(tmp_path: Path) -> None:
    meeting = Rendezvous(tmp_path, "job")
    meeting.publish("ws://10.0.0.1:4711", "secret")
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = Rendezvous(tmp_path, "job").wait(0.0, pytest.fail)
    assert (found.url, found.token) == ("ws://10.0.0.1:4711", "secret")
    assert "secret" not in repr(found)
    meeting.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_another_job_is_not_taken(tmp_path: Path) -> None:
    Rendezvous(tmp_path, "other").publish("ws://10.0.0.1:4711", "secret")
    with pytest.raises(UsageError, match=r"task 0 has not written the address .*--set rendezvous=DIR"):
        Rendezvous(tmp_path, "job").wait(0.0, lambda text: None)


def test_a_file_that_a_dead_job_has_left_is_removed_and_one_of_a_living_job_stays(tmp_path: Path) -> None:
    def leave(job: str, url: str, host: str) -> Path:
        file = tmp_path / f".unisono-tasks-{job}"
        file.write_bytes(msgspec.json.encode(MeetingPoint(url=url, token="t", host=host, pid=os.getpid(), began="1")))
        return file

    own = os.uname().nodename
    alive, url = listening()
    with alive:
        gone, closed = listening()
        gone.close()
        dead = leave("dead", closed, own)
        elsewhere = leave("elsewhere", closed, "another-host")
        going = leave("going", url, own)
        Rendezvous(tmp_path, "job").publish("ws://10.0.0.1:4711", "secret")
    assert [file.exists() for file in (dead, elsewhere, going)] == [False, True, True]


def test_the_file_of_another_user_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several users share the folder, another one could name a head of theirs, and a token that they know."""
    meeting = Rendezvous(tmp_path, "77")
    meeting.publish("ws://127.0.0.1:1", "theirs")
    (file,) = tmp_path.iterdir()
    if os.geteuid() == 0:
        os.chown(file, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with pytest.raises(UsageError, match="task 0 has not written the address"):
        meeting.wait(0, lambda text: None)
    Rendezvous(tmp_path, "78").remove()
    assert file.exists(), "no address of a stranger's is asked whether its job is over"


def test_a_link_is_not_believed(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "shared", tmp_path / "mine"
    folder.mkdir()
    elsewhere.mkdir()
    Rendezvous(elsewhere, "77").publish("ws://127.0.0.1:1", "old")
    (file,) = elsewhere.iterdir()
    (folder / file.name).symlink_to(file)
    with pytest.raises(UsageError, match="task 0 has not written the address"):
        Rendezvous(folder, "77").wait(0, lambda text: None)


def test_a_directory_that_cannot_be_written_to_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be written to .*missing .*No such file.*--set rendezvous=DIR"):
        Rendezvous(tmp_path / "missing", "job").publish("ws://10.0.0.1:4711", "secret")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (
            {"PMI_RANK": "0", "PMI_SIZE": "4"},
            "of MPI has started this process as task 0 of 4 (PMI_RANK)",
        ),
        (
            {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4"},
            "Flux has started this process as task 3 of 4",
        ),
        ({"PALS_RANKID": "1", "PMI_RANK": "1", "PMI_SIZE": "2"}, "Cray PALS has started this process as task 1 of 2"),
        ({"PALS_RANKID": "1"}, "as task 1 of several"),
    ],
)
def test_a_task_of_an_unknown_starter_does_not_train_alone(environment: dict[str, str], words: str) -> None:
    for refuse in (refuse_unknown, refuse_others):
        with pytest.raises(UsageError) as refused:
            refuse(environment)
        assert words in str(refused.value)
        assert "`unisono join` in the other tasks" in str(refused.value)
        refuse({**environment, TAKEN: "1"})  # within a worker of a run


@pytest.mark.parametrize(
    "environment",
    [
        *({}, {"PMI_RANK": "0", "PMI_SIZE": "1"}, {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"}, MPICH, SRUN),
        {**SRUN, "PMI_RANK": "1", "PMI_SIZE": "3"},
    ],
)
def test_whoever_is_alone_or_known_is_not_refused(environment: dict[str, str]) -> None:
    refuse_unknown(environment)


def test_processes_of_clones_share_memory_by_more_than_a_few_bits() -> None:
    """They may have one host name: the rest of the label tells their kernels apart."""
    assert len(machine_label().rpartition("-")[2]) == 16
