"""Workers talk to each other: all get the same results, also those that come later, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import unisono as library
from tests.waiting import PATIENT, WAIT_S, wait_until
from tests.workers.conftest import Unisono, served_by, wait_until_gone
from tests.workers.gates import Gates
from tests.workers.models import Mlp, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from tests.workers.test_head_death import held_run
from tests.workers.test_rounds import Threads
from unisono.cli.reach import ask_status, find
from unisono.core.errors import PeerLost, StepError, UsageError
from unisono.engine.exchange import Exchange
from unisono.engine.exchange.script_group import ScriptGroup
from unisono.engine.exchange.wire import Wire
from unisono.engine.rounds import Report
from unisono.engine.rounds.gathering import BlockRound, GroupRound, TalkRound, together
from unisono.engine.rounds.life import Rounds
from unisono.engine.rounds.team import Team
from unisono.engine.state.tracked import Tracked
from unisono.record.journal import read
from unisono.testing import Outcome, run_workers

pytestmark = pytest.mark.more

HERE = str(Path(__file__).parents[2])
CPU = torch.device("cpu")


# -- alone -------------------------------------------------------------------------------------------


def test_alone_a_value_comes_back_as_it_would_from_another_worker() -> None:
    value: dict[str, Any] = {
        "a": (1, 2.5, None, "x", b"y"),
        "t": torch.arange(4, dtype=torch.bfloat16).view(2, 2),
        "s": {1, 2},
    }
    with AloneRun() as run:
        run.barrier()
        back = run.broadcast(value)
        (gathered,) = run.all_gather(value)
    for one in (back, gathered):
        assert one["a"] == value["a"]
        assert one["s"] == {1, 2}
        assert one["t"].dtype == torch.bfloat16
        assert torch.equal(one["t"], value["t"])
    assert back["t"].data_ptr() != value["t"].data_ptr(), "a copy, as on every other worker"


def steps_of(run: library.Run, num_steps: int = 1) -> Any:
    run.track(model=Mlp())
    return run.steps(vectors(), batch_size=8, microbatches=4, max_steps=num_steps)


TALK: dict[str, Callable[[library.Run], Any]] = {
    "run.barrier": lambda run: run.barrier(),
    "run.broadcast": lambda run: run.broadcast(1),
    "run.all_gather": lambda run: run.all_gather(1),
    "run.once": lambda run: run.once(int),
    "run.main_first": lambda run: run.main_first().__enter__(),
    "run.process_group": lambda run: run.process_group(),
}


@pytest.mark.parametrize("what", TALK)
def test_nobody_talks_within_the_inner_loop(what: str) -> None:
    with AloneRun() as run:
        for step in steps_of(run):
            for x, _ in step:
                with pytest.raises(UsageError, match=f"{what} was called inside `for batch in step`"):
                    TALK[what](run)
                step.backward(run._tracked.modules["model"](x).sum())


@pytest.mark.parametrize("what", TALK)
def test_nobody_talks_while_others_wait_for_a_block(what: str) -> None:
    with AloneRun() as run:
        with pytest.raises(UsageError, match=f"{what} was called inside `with run.main_first"), run.main_first():
            TALK[what](run)
        run.barrier()


@pytest.mark.parametrize("what", ["run.broadcast", "run.all_gather"])
def test_what_cannot_be_sent_is_refused_with_its_path(what: str) -> None:
    method = what.removeprefix("run.")
    with AloneRun() as run, pytest.raises(UsageError, match=rf"the value of {what}\['x'\]\[0\] is a builtins.object"):
        getattr(run, method)({"x": [object()]})


def test_large_values_do_not_go_through_the_head() -> None:
    with AloneRun() as run:
        with pytest.raises(UsageError, match="1,048,576"):
            run.all_gather(bytes(2 << 20))
        for _ in steps_of(run):
            break


def test_a_group_is_for_workers_that_take_part() -> None:
    with AloneRun() as run:
        with pytest.raises(UsageError, match="call it inside run"):
            run.process_group()


def draws(directory: Path) -> list[float]:
    """What a script draws after a block that makes a file, if there is none."""
    path = directory / "data"
    with AloneRun(seed=7) as run:
        found = []
        for _ in range(2):
            with run.main_first():
                if not path.exists():
                    path.write_text(str(torch.rand(100).tolist()))
            found.append(float(torch.rand(())))
    return found


def test_who_finds_the_file_draws_the_same_numbers_as_who_makes_it(tmp_path: Path) -> None:
    first, second = draws(tmp_path), draws(tmp_path)
    assert first == second
    assert len(set(first)) == 2


# -- members that stay -------------------------------------------------------------------------------


def talk_in_a_loop(seat: Seat, place: Place) -> list[Any]:
    found: list[Any] = []
    order = place._store
    with place.run(seed=1) as run:
        model = Mlp()
        run.track(model=model)
        for _ in range(2):
            for step in run.steps(vectors(), batch_size=8, microbatches=4, max_steps=2):
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y))
                found.append(run.broadcast({"from": seat.rank, "t": torch.full((3,), seat.rank)})["t"].tolist())
                found.append(run.all_gather(seat.rank))
                with run.main_first():
                    number = order.add(f"block-{len(found)}", 1)
                    assert (number == 1) == run.is_main
                run.barrier()
                found.append(float(torch.rand(())))
            found.append(run.all_gather((seat.rank, step.number)))
            run.barrier()
    return found


@pytest.mark.parametrize(("kind", "size"), [("shared", 3), ("gloo", 2)])
def test_all_members_get_the_same(kind: str, size: int) -> None:
    by_rank = train_on(kind, size, talk_in_a_loop)
    assert by_rank == [by_rank[0]] * size
    assert by_rank[0][:2] == [[0, 0, 0], list(range(size))]
    assert by_rank[0][6] == [(rank, 1) for rank in range(size)]


@contextlib.contextmanager
def two_wires() -> Iterator[list[Wire]]:
    """Two members in this process."""
    store = dist.HashStore()
    limits: Any = {"device": CPU, "address": "127.0.0.1", "timeout_s": WAIT_S}
    wires = [Wire(store, rank, 2, **limits) for rank in range(2)]
    try:
        yield wires
    finally:
        for wire in wires:
            wire.close()


def talk_differently(seat: Seat, place: Place) -> str:
    with contextlib.suppress(library.UnisonoError), place.run() as run:
        for _ in steps_of(run):
            try:
                run.barrier()
                if seat.rank == 0:
                    run.all_gather(1)
                else:
                    run.barrier()
            except StepError as error:
                return str(error)
    return ""


def test_members_at_different_calls_are_told_so() -> None:
    """Each would otherwise take the other's value for that of its own call."""
    for error in train_on("shared", 2, talk_differently):
        assert "w0 is at run.all_gather (call 2 of the step), w1 is at run.barrier (call 2 of the step)" in error
        assert "run.all_gather and run.main_first alike" in error


MESSAGE_OR_COLLECTIVE: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "all_reduce": lambda group, x: dist.all_reduce(x, group=group),
    "irecv": lambda group, x: dist.irecv(x, group=group, group_src=1).wait(),  # has no future
    "reduce_scatter": lambda group, x: dist.reduce_scatter(x, [x, x], group=group),
}


@pytest.mark.parametrize("what", MESSAGE_OR_COLLECTIVE)
def test_who_waits_for_another_member_in_torch_is_woken(what: str) -> None:
    """While the other member has done nothing, and its connections are open."""
    with two_wires() as (own, other), ThreadPoolExecutor(1) as pool:
        group = own.process_group()
        waiting = pool.submit(MESSAGE_OR_COLLECTIVE[what], group, torch.ones(4))
        wait_until(lambda: bool(cast(ScriptGroup, group).pending()), "the script waits")
        own.interrupt(PeerLost("c is gone"))
        with pytest.raises(RuntimeError, match=r"call run\.process_group\(\) again"):
            waiting.result(WAIT_S)
        other.close()


def test_a_group_of_a_script_does_what_a_group_of_torch_does() -> None:
    def talk(wire: Wire) -> list[Any]:
        group, rank = wire.process_group(), wire.rank
        own, halves, all_ = torch.full((2,), float(rank + 1)), torch.empty(1), [torch.empty(2), torch.empty(2)]
        dist.reduce_scatter(halves, list(own.split(1)), group=group)
        dist.all_gather(all_, own, group=group)
        dist.barrier(group=group)
        if rank == 0:
            dist.send(own, group=group, group_dst=1)
        else:
            dist.irecv(own, group=group, group_src=0).wait()  # type: ignore[union-attr]
        sent = dist.all_reduce(own, group=group, async_op=True)
        sent.wait()
        return [halves.tolist(), torch.stack(all_).tolist(), own.tolist(), sent.is_completed()]

    with two_wires() as wires, ThreadPoolExecutor(2) as pool:
        assert list(pool.map(talk, wires)) == [[[3.0], [[1.0, 1.0], [2.0, 2.0]], [2.0, 2.0], True]] * 2


# -- a loss between two commits ----------------------------------------------------------------------


class Hurt:
    """The exchange of a generation in which the third member is lost in the first call."""

    size = 3

    def __init__(self, name: str, exchange: Threads) -> None:
        self._name, self._exchange = name, exchange
        self._is_over = False
        self.rank = exchange.rank

    def all_gather(self, data: bytes) -> list[bytes]:
        if self._is_over:
            raise PeerLost("c is gone")
        found = self._exchange.all_gather(data)
        self._is_over = True
        if self._name == "b":
            raise PeerLost("c is gone, and b has not seen the result")
        return found

    def prepare(self, layout: Any, slots: Any = ()) -> list[Any]:
        return []

    def interrupt(self, error: Exception) -> None:
        pass

    def close(self) -> None:
        pass


class HurtTeam(Team):
    """The members a, b and c; then a and b."""

    def __init__(self, name: str, first: Threads, second: Threads) -> None:
        super().__init__(CPU)
        self.rank, self.size, self.worker_ids = "abc".index(name), 3, ("a", "b", "c")
        self.exchange = cast(Exchange, Hurt(name, first))
        self._second = second

    def meet(self, report: Report) -> list[Report]:
        letters = self.exchange.all_gather(msgspec.msgpack.encode(report))
        return [msgspec.msgpack.decode(letter, type=Report) for letter in letters]

    def regroup(self, report: Report, lost: Exception) -> list[Report]:
        self.size, self.worker_ids, self.generation = 2, ("a", "b"), 2
        self.exchange = cast(Exchange, self._second)
        return self.meet(report)

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()


def in_threads(work: Callable[[str, Rounds], None]) -> None:
    """Do this as each of the members a, b and c."""
    first, second = threading.Barrier(3, timeout=WAIT_S), threading.Barrier(2, timeout=WAIT_S)
    boxes: list[list[Any]] = [[None] * 3, [None] * 2]
    errors: list[BaseException] = []

    def take_part(name: str) -> None:
        rank = "abc".index(name)
        team = HurtTeam(name, Threads(rank, first, boxes[0]), Threads(rank, second, boxes[1]))
        try:
            work(name, Rounds(team, Tracked()))
        except BaseException as error:
            errors.append(error)
            first.abort()
            second.abort()

    threads = [threading.Thread(target=take_part, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_member_that_has_not_seen_the_result_gets_it_from_one_that_has() -> None:
    """And not another one, of those that are left."""
    found: dict[str, list[list[bytes]]] = {}

    def work(name: str, rounds: Rounds) -> None:
        values = found.setdefault(name, [])
        for title in ("first", "second")[: 1 if name == "c" else 2]:
            round_ = TalkRound(rounds, title, name.encode)
            for _ in rounds.play(round_):
                pass
            values.append(round_.values)

    in_threads(work)
    assert found["a"] == found["b"] == [[b"a", b"b", b"c"], [b"a", b"b"]]


def test_what_a_lost_member_has_said_at_a_checkpoint_counts_on_all_members_or_on_none() -> None:
    """So all write, or wait for copies, alike."""
    found: dict[str, list[dict[str, bytes]]] = {}

    def work(name: str, rounds: Rounds) -> None:
        said = found.setdefault(name, [])
        for _ in range(1 if name == "c" else 2):
            said.append(together(rounds, lambda: None, name.encode()))

    in_threads(work)
    assert found["a"] == found["b"] == [{"a": b"a", "b": b"b", "c": b"c"}, {"a": b"a", "b": b"b"}]


def test_who_has_not_seen_that_a_block_is_over_runs_it_and_nobody_is_first_twice() -> None:
    turns: list[str] = []

    def work(name: str, rounds: Rounds) -> None:
        for title in ("first", "second")[: 1 if name == "c" else 2]:
            for _ in rounds.play(BlockRound(rounds, title)):
                turns.append(f"{name} {title}")

    in_threads(work)
    assert turns[0] == "a first"
    assert sorted(turns) == ["a first", "a second", "b first"], "what a has run of the second one counts"


def test_who_has_not_seen_that_others_have_a_group_gets_one_that_is_over_like_theirs() -> None:
    """So the collectives raise on all members alike, and all make as many calls."""
    found: dict[str, list[str]] = {}

    def work(name: str, rounds: Rounds) -> None:
        words = found.setdefault(name, [])
        for title in ("first", "second")[: 1 if name == "c" else 2]:
            round_ = GroupRound(rounds, title)
            for _ in rounds.play(round_):
                pass
            assert round_.group is not None
            try:
                dist.all_reduce(torch.ones(()), group=round_.group)
                words.append(f"in generation {rounds.team.generation}")
            except RuntimeError as error:
                words.append(str(error))
        rounds.team.close()

    in_threads(work)
    assert found["a"] == ["in generation 1", "in generation 2"]
    assert "call run.process_group() again" in found["b"][0]
    assert found["b"][1:] == ["in generation 2"]


# -- whole runs --------------------------------------------------------------------------------------

HEAD = f"""
import json, os, pathlib, signal, sys, torch, unisono
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import TensorDataset
sys.path.insert(0, {HERE!r})
from tests.workers.gates import wait_at
from unisono.cluster.worker import member

def name():
    return member.current().worker_id if member.current() is not None else "alone"

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def make():
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator))
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))
    return data, model, torch.optim.AdamW(model.parameters(), lr=0.01)
"""

BEFORE = (
    HEAD
    + """
folder = pathlib.Path(sys.argv[1])
with unisono.Run(seed=3) as run:
    with run.main_first():
        path = folder / "data"
        if not path.exists():
            with path.with_suffix(".part").open("w") as file:
                file.write("half")
                file.flush()
                if name() == "w0":
                    die()
                file.seek(0)
                file.write("whole, of " + name())
            path.with_suffix(".part").rename(path)
    found = [path.read_text(), run.broadcast(name()), run.all_gather(name())]
    if name() == "w2":
        die()
    run.barrier()
    data, model, optimizer = make()
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data, batch_size=24, microbatches=4, max_steps=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    print("found", json.dumps(found))
"""
)


def found_in(output: str) -> list[Any]:
    """What the workers of a run have printed after "found", each."""
    return [json.loads(line.partition("found ")[2]) for line in output.splitlines() if "found " in line]


@pytest.mark.usefixtures("nursery")
def test_losses_before_the_training_leave_nobody_waiting_and_nothing_half_done(tmp_path: Path) -> None:
    """One is killed in the block, and one between two calls; the replacements get what the others have got."""
    script = tmp_path / "train.py"
    script.write_text(BEFORE)
    options = ["--max-restarts", "9"]
    outcome = run_workers(
        script, 3, directory=tmp_path / "run", arguments=[str(tmp_path)], options=options, timeout_s=WAIT_S
    )
    assert outcome.exit_code == 0, outcome.output
    assert len(outcome.digests) == 2
    found = found_in(outcome.output)
    assert len(found) == 3, outcome.output
    assert found == [["whole, of w1", "w1", ["w1", "w2", "w3"]]] * 3, outcome.output
    assert "begins again" not in outcome.output


@pytest.mark.usefixtures("nursery")
def test_workers_that_make_different_calls_before_the_training_fail_at_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        HEAD
        + """
with unisono.Run(seed=3) as run:
    if name() == "w0":
        run.barrier()
    data, model, optimizer = make()
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data, batch_size=24, microbatches=4):
        pass
"""
    )
    outcome = run_workers(script, 2, directory=tmp_path / "run", timeout_s=WAIT_S)
    assert outcome.exit_code == 1
    assert "reached the training loop, or its end, without the first call before run.steps" in outcome.output


@pytest.mark.usefixtures("nursery")
def test_workers_that_wait_before_the_training_do_not_notice_another_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.cli.reach.TIMEOUT_S", WAIT_S)
    text = (
        HEAD
        + """
gate = pathlib.Path(sys.argv[1])
with unisono.Run(seed=3) as run:
    found = [run.broadcast(name())]
    run.barrier()
    if name() == "w1":
        (gate / "reached").open("w").write("x")
        (gate / "go").open().read()
    with run.main_first():
        found.append(run.seed)
    found.append(run.all_gather(name()))
    data, model, optimizer = make()
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data, batch_size=24, microbatches=4, max_steps=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    print("found", json.dumps(found))
"""
    )
    with held_run(tmp_path, text, 3) as run:
        address, old = find(str(run.directory)), run.head()
        os.kill(old, signal.SIGKILL)
        wait_until_gone({old}, time.monotonic() + WAIT_S)
        assert len(ask_status(address)["workers"]) == 3
        run.go_on()
        output = run.output()
    assert run.process.returncode == 0, output
    assert "another one takes over" in output
    assert found_in(output) == [["w0", 3, ["w0", "w1", "w2"]]] * 3, output


PHASES = (
    HEAD
    + """
from tests.workers.disk import wait_for_disk

folder, where, saves = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:] == ["saves"]

def comes_to(what):
    if what != where or name() not in ("w0", "alone"):
        return
    if saves:
        (folder / "found").write_text(json.dumps(found))
        os.kill(member.current().spec.agent, signal.SIGKILL)
    die()

with unisono.Run(seed=3, checkpoint=unisono.Checkpoints(every_steps=5) if saves else None) as run:
    found = [run.broadcast(os.getpid()), run.all_gather(name())]
    data, model, optimizer = make()
    inputs, labels = data.tensors
    run.track(model=model, optimizer=optimizer)

    def count(batch):
        print(name(), "evaluates after epoch", epoch, flush=True)
        return {"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), "n": len(batch[1])}

    for epoch in range(4):
        for step in run.steps(data, batch_size=24, microbatches=4, epochs=2, max_steps=4):
            wait_at(folder / str(step.number))
            wait_for_disk(run)
            ones = torch.ones(())
            group = run.process_group()
            dist.all_reduce(ones, group=group)
            assert ones.item() == group.size() == run.num_workers
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            said = run.all_gather((epoch, step.number_in_loop, name()))
            assert len({one[:2] for one in said}) == 1
            comes_to(f"step {epoch} {step.number_in_loop}")
            with run.main_first():
                with (folder / f"order-{epoch}-{step.number_in_loop}").open("a") as file:
                    file.write(name() + " ")
                comes_to(f"block {epoch} {step.number_in_loop}")
            if (epoch, step.number_in_loop) == (0, 3):
                break  # a worker that comes later skips this loop as well
        totals = run.evaluate(data, count, batch_size=7)
        noise = torch.rand(())
        with run.main_first():
            pass
        if saves and epoch == 2:
            run.save()
            comes_to("gap")
        pid = run.broadcast(os.getpid())
        found += [totals["loss"], run.all_gather((name(), pid))]
        run.barrier()
        # The data of the next epoch come from what the evaluation of this one has given, and from what is drawn then.
        data = TensorDataset(inputs * (1 + totals["loss"] / 1000) + noise + torch.rand(()), labels)
    print("found", json.dumps(found))
"""
)


def phases(folder: Path, *arguments: str, workers: int = 1, options: Sequence[str] = ()) -> Outcome:
    return run_workers(
        folder / "train.py",
        workers,
        directory=folder / arguments[0],
        arguments=[str(folder), *arguments[1:]],
        options=options,
        timeout_s=WAIT_S,
    )


@pytest.fixture(scope="module")
def calm(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One worker to which nothing happens."""
    folder = tmp_path_factory.mktemp("calm")
    (folder / "train.py").write_text(PHASES)
    with served_by(standing_nursery):
        outcome = phases(folder, "run", "")
    assert outcome.exit_code == 0, outcome.output
    return outcome


def check_bits(directory: Path, calm: Outcome) -> None:
    lines = list(read(directory))
    assert [line["digest"] for line in lines if line["kind"] == "step"] == calm.digests
    assert [line["totals"] for line in lines if line["kind"] == "evaluation"] == calm.evaluations
    assert [line["line"] for line in lines] == list(range(len(calm.lines)))
    assert lines[-1]["digests"] == calm.final


@pytest.mark.usefixtures("nursery")
def test_who_comes_later_gets_the_results_of_all_calls_that_it_skips(
    tmp_path: Path, unisono: Unisono, calm: Outcome
) -> None:
    """The first worker is killed in a block of the second loop: the next one runs the block first. The replacement
    makes its data from the evaluation of a model that is no more.
    """
    (tmp_path / "train.py").write_text(PHASES)
    with Gates(tmp_path / "gates", (10,)) as gates:
        command = unisono("run", "train.py", "-n", 3, "--run-dir", "run", "--", gates.folder, "block 1 2")
        gates.wait(10)
        gates.open(10, command.generation("w3 joins"))
        assert command.wait() == 0, command.err
        orders = {path.name: path.read_text().split() for path in gates.folder.glob("order-*")}
    found = found_in("\n".join(command.out))
    assert len(found) == 3
    assert found == [found[0]] * 3
    assert found[0][1] == ["w0", "w1", "w2"]
    assert [worker for worker, _ in found[0][3]] == ["w0", "w1", "w2"], "the workers after the first loop"
    assert orders["order-1-2"][0] == "w0"
    assert sorted(orders["order-1-2"]) == ["w0", "w1", "w2"], "each runs the block once"
    assert not [line for line in command.out if "w3 evaluates after epoch 0" in line]
    check_bits(tmp_path / "run", calm)


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("where", ["step 2 3", "gap"])
def test_a_run_that_is_resumed_has_the_results_of_the_calls_before(where: str, tmp_path: Path, calm: Outcome) -> None:
    """Within a later loop, and from a checkpoint between two loops: as if it had never been stopped."""
    (tmp_path / "train.py").write_text(PHASES)
    assert phases(tmp_path, "run", where, "saves", workers=2).exit_code != 0
    before = json.loads((tmp_path / "found").read_text())
    again = phases(tmp_path, "run", "", "saves", workers=3, options=["--resume", str(tmp_path / "run")])
    assert again.exit_code == 0, again.output
    assert f"resuming at step {10 if where == 'step 2 3' else 12}" in again.output
    for found in found_in(again.output):
        assert found[2:6] == before[2:6], "with the pids of processes that are gone"
    assert len(found_in(again.output)) == 3
    evaluated = {line.rpartition(" ")[2] for line in again.output.splitlines() if "evaluates after epoch" in line}
    assert evaluated == ({"2", "3"} if where == "step 2 3" else {"3"})
    check_bits(tmp_path / "run", calm)


GROUP = (
    HEAD
    + """
with unisono.Run(seed=3) as run:
    data, model, optimizer = make()
    run.track(model=model, optimizer=optimizer)
    kept = []
    for step in run.steps(data, batch_size=24, microbatches=4, epochs=2):
        sizes = []
        while not sizes or sizes[-1] < 0:
            group, ones = run.process_group(), torch.ones(())
            if (step.number, name()) == (1, "w2"):
                die()
            try:
                # w0 waits for w1, whose connections stay open: it has not only the group, but also its collectives.
                kept.append(dist.all_reduce(ones, group=group, async_op=True))
                kept[-1].wait()
                sizes.append(int(ones))
            except RuntimeError:
                sizes.append(-1)
        print("found", json.dumps([step.number, sizes]))
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
"""
)


@pytest.mark.usefixtures("nursery")
def test_a_group_that_has_lost_a_member_raises_and_the_next_one_is_of_those_that_are_left(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(GROUP)
    options = [*PATIENT, "--max-restarts", "0"]
    outcome = run_workers(script, 3, directory=tmp_path / "run", options=options, timeout_s=WAIT_S)
    assert outcome.exit_code == 0, outcome.output
    found = found_in(outcome.output)
    assert found.count([0, [3]]) == 3
    assert found.count([1, [-1, 2]]) == 2, outcome.output
    assert found.count([2, [2]]) == found.count([3, [2]]) == 2
