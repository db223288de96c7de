"""``step.again``: further passes over the same global batch, each a sum of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import StackDataset, TensorDataset

from tests.workers.models import Images, Mlp, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from unisono.core.errors import StepError, UsageError
from unisono.engine.state.packing import digest_of_state
from unisono.script.run import Run

pytestmark = pytest.mark.more

M = 6


def bits(*objects: Any) -> list[int]:
    return [digest_of_state(one.state_dict()) for one in objects]


def gan(run: Run) -> Any:
    """Two models, two optimizers; each is frozen while the other one learns, so the sums have two layouts."""
    generator = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 12))
    critic = nn.Sequential(nn.Linear(12, 16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1))
    first, second = (torch.optim.Adam(model.parameters(), 1e-2) for model in (critic, generator))
    run.track(generator=generator, critic=critic, first=first, second=second)
    found: list[Any] = []
    for step in run.steps(vectors(), batch_size=24, microbatches=M, max_steps=4, epochs=2):
        generator.requires_grad_(False)
        critic.requires_grad_(True)
        for x, _ in step:
            fake = generator(torch.randn(len(x), 3))
            step.backward(F.softplus(-critic(x)).mean())
            step.backward(F.softplus(critic(fake)).mean())
            step.add(real=(critic(x) > 0).sum())
        first.step()
        found.append(step.loss)
        generator.requires_grad_(True)
        critic.requires_grad_(False)
        for x, _ in step.again():
            step.backward(F.softplus(-critic(generator(torch.randn(len(x), 3)))).mean())
            step.add(fake=1.0 * len(x))
        second.step()
        found.append((step.loss, step.totals, run.totals))
    return found, bits(generator, critic, first, second)


def lbfgs(run: Run) -> Any:
    """Evaluates the loss as often as the line search asks."""
    model = Mlp().double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    run.track(model=model, optimizer=optimizer)
    found = []
    for step in run.steps(vectors(dtype=torch.float64), batch_size=24, microbatches=M, max_steps=3):
        losses: list[float] = []

        def closure(step: Any = step, losses: list[float] = losses) -> float:
            for x, y in step.again():
                step.backward(F.cross_entropy(model(x), y))
            losses.append(step.loss)
            return step.loss  # type: ignore[no-any-return]

        optimizer.step(closure)
        found.append(losses)
    return found, bits(model, optimizer)


def sam(run: Run) -> Any:
    """Climbs to where the loss is sharpest, takes the gradient there, and goes back."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(Noisy(), batch_size=24, microbatches=M, max_steps=3):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        climb = [parameter.grad for parameter in model.parameters()]  # kept, and not copied
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), climb, alpha=0.05)
        for x, y in step.again():
            step.backward(F.cross_entropy(model(x), y))
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), climb, alpha=0.05)
        optimizer.step()
    return bits(model)


class Noisy(TensorDataset):
    def __init__(self) -> None:
        super().__init__(*vectors().tensors)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(x.shape), y


TRAININGS: dict[str, Callable[[Run], Any]] = {"gan": gan, "lbfgs": lbfgs, "sam": sam}


def train_in_place(seat: Seat, place: Place, name: str) -> Any:
    with place.run(seed=1) as run:
        return TRAININGS[name](run)


@pytest.mark.parametrize("name", TRAININGS)
def test_several_passes_give_the_same_bits_at_any_number_of_workers(name: str) -> None:
    with AloneRun(seed=1) as run:
        alone = TRAININGS[name](run)
    for kind, size in (("shared", 3), ("gloo", 2), ("two-level", 5), ("shared", 7)):
        assert train_on(kind, size, train_in_place, name) == [alone] * size


def test_lbfgs_evaluates_as_it_does_on_the_whole_batch() -> None:
    """Against torch on the whole batch: the same losses, to rounding, in each of its evaluations."""
    with AloneRun(seed=1) as run:
        found, _ = lbfgs(run)
    with AloneRun(seed=1) as run:
        model = Mlp().double()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
        run.track(model=model)
        for number, step in enumerate(
            run.steps(vectors(dtype=torch.float64), batch_size=24, microbatches=1, max_steps=3)
        ):
            for x, y in step:
                losses = []

                def closure(x: Tensor = x, y: Tensor = y, losses: list[float] = losses) -> Tensor:
                    loss = F.cross_entropy(model(x), y)
                    gradients = torch.autograd.grad(loss, list(model.parameters()))
                    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                        parameter.grad = gradient
                    losses.append(float(loss.detach()))
                    return loss

                step.backward(F.cross_entropy(model(x), y))
            optimizer.step(closure)
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(found[number]), rtol=0, atol=1e-9)
            assert len(losses) == len(found[number]) > 2


def _seen(run: Run, **options: Any) -> list[list[Any]]:
    model = Mlp()
    run.track(model=model)
    seen: list[list[Any]] = [[], []]
    for step in run.steps(Images(), batch_size=24, microbatches=4, max_steps=1):
        for x, _ in step:
            seen[0].append((x.tolist(), torch.rand(1).item(), step.indices.tolist()))
            step.backward(model(torch.ones(1, 12)).mean())
        for x, _ in step.again(**options):
            seen[1].append((x.tolist(), torch.rand(1).item(), step.indices.tolist()))
            step.backward(model(torch.ones(1, 12)).mean())
    return seen


def test_another_pass_has_the_same_samples_augmentation_and_random_numbers() -> None:
    with AloneRun(seed=1) as run:
        first, second = _seen(run)
    assert first == second
    with AloneRun(seed=1) as run:
        first, second = _seen(run, reseed=True)
    assert [(x, indices) for x, _, indices in first] == [(x, indices) for x, _, indices in second]
    assert all(one[1] != other[1] for one, other in zip(first, second, strict=True))


def test_memory_does_not_grow_with_the_passes() -> None:
    with AloneRun(seed=1) as run:
        model = Mlp()
        run.track(model=model)
        for step in run.steps(vectors(), batch_size=24, microbatches=M, max_steps=1):
            for _ in range(9):
                for x, y in step.again():
                    step.backward(F.cross_entropy(model(x), y))
                assert run._rounds is not None
                assert len(run._rounds.slots.results) == 1


@pytest.mark.parametrize(
    "hold",
    [lambda g: g, lambda g: g.view(-1), lambda g: g.detach(), lambda g: g.data, lambda g: g[:1], lambda g: g.numpy()],
    ids=["itself", "view", "detach", "data", "slice", "numpy"],
)
def test_a_gradient_that_the_script_holds_is_not_written_over(hold: Callable[[Tensor], Any]) -> None:
    """Neither by the next pass nor by the next step; without Unisono, backward makes new gradients each time."""
    with AloneRun(seed=1) as run:
        model = Mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        held: list[Any] = []
        copies: list[Tensor] = []
        for step in run.steps(vectors(), batch_size=24, microbatches=M, max_steps=3):
            for number in range(2):
                for x, y in step.again():
                    step.backward(F.cross_entropy(model(x), y) * (1 + number))
                held += [hold(parameter.grad) for parameter in model.parameters()]
                copies += [torch.as_tensor(one).clone() for one in held[len(copies) :]]
            optimizer.step()
        assert all(torch.equal(torch.as_tensor(one), copy) for one, copy in zip(held, copies, strict=True))


def test_what_the_script_holds_is_not_known_by_counting_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.14 does not count those of local variables, so a gradient that is held would look free."""
    monkeypatch.setattr(sys, "getrefcount", lambda _: 1)
    test_a_gradient_that_the_script_holds_is_not_written_over(lambda gradient: gradient)


def test_a_torch_that_counts_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch._C._storage_Use_Count
    monkeypatch.setattr(torch._C, "_storage_Use_Count", lambda data: original(data) - 1)
    with pytest.raises(UsageError, match="gradients that a script keeps would be overwritten"):
        AloneRun(seed=1)


def test_the_journal_has_the_loss_of_every_pass(tmp_path: Any) -> None:
    from unisono.record.journal import JOURNAL, read

    with AloneRun(tmp_path / "run", seed=1) as run:
        found, _ = gan(run)
    lines = [line for line in read(tmp_path / "run" / JOURNAL) if line["kind"] == "step"]
    assert [line["losses"] for line in lines] == [[found[i], found[i + 1][0]] for i in range(0, 8, 2)]
    assert [line["loss"] for line in lines] == found[0::2]
    assert [line["totals"] for line in lines] == [totals for _, totals, _ in found[1::2]]


def test_another_pass_begins_when_the_last_one_is_complete() -> None:
    with AloneRun(seed=1) as run:
        model = Mlp()
        run.track(model=model)
        for step in run.steps(vectors(), batch_size=24, microbatches=M, max_steps=1):
            for x, y in step:
                with pytest.raises(StepError, match="can start another pass only when the one before is complete"):
                    step.again()
                step.backward(F.cross_entropy(model(x), y))
            with pytest.raises(StepError, match=r"For another pass over the same global batch: .*step.again"):
                iter(step)
        with pytest.raises(StepError, match="the outer loop has moved on"):
            step.again()


def _side_by_side() -> None:
    with AloneRun(seed=1) as run:
        run.track(model=Mlp())
        next(zip(*(run.steps(vectors(), batch_size=24, microbatches=M) for _ in range(2)), strict=True))


def test_passes_are_not_interleaved_and_end_with_their_step() -> None:
    with AloneRun(seed=1) as run:
        model = Mlp()
        run.track(model=model)
        stale = None
        for step in run.steps(vectors(), batch_size=24, microbatches=M, max_steps=2):
            if stale is not None:
                with pytest.raises(StepError, match="a pass over step 0 cannot begin: the outer loop has moved on"):
                    next(stale)
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            first, second, stale = step.again(), step.again(), step.again()
            for x, y in first:
                step.backward(F.cross_entropy(model(x), y))
                if step.microbatch == 1:
                    with pytest.raises(StepError, match="cannot begin: its inner loop is under way"):
                        next(second)
        assert step.loss > 0


def test_a_step_without_its_loop_says_so() -> None:
    with AloneRun(seed=1) as run:
        run.track(model=Mlp())
        step = next(run.steps(vectors(), batch_size=24, microbatches=M))  # nobody holds the iterator
        with pytest.raises(StepError, match="the loop of step 0 is over"):
            next(iter(step))


def test_two_loops_side_by_side_are_refused_with_the_ways_that_work() -> None:
    with pytest.raises(UsageError, match=r"step.again\(\).*torch.utils.data.StackDataset"):
        _side_by_side()


def test_two_data_sets_in_one_loop() -> None:
    """As the refusal says."""
    with AloneRun(seed=1) as run:
        model = Mlp()
        run.track(model=model)
        for step in run.steps(StackDataset(vectors(), Images()), batch_size=24, microbatches=M, max_steps=2):
            for (x, y), (images, _) in step:
                assert len(x) == len(images)
                step.backward(F.cross_entropy(model(x), y) + F.cross_entropy(model(images.flatten(1)[:, :12]), y))


def test_totals_over_an_epoch_are_those_of_its_steps_however_many_passes_they_have() -> None:
    with AloneRun(seed=1) as run:
        model = Mlp()
        run.track(model=model)
        for step in run.steps(vectors(), batch_size=24, microbatches=M):
            for number in range(1 + step.number):
                for x, y in step.again():
                    step.backward(F.cross_entropy(model(x), y))
                    step.add(seen=len(y), **{f"pass {number}": len(y)})
            assert step.totals["seen"] == step.num_samples
    assert run.totals == {"seen": 56, "pass 0": 56, "pass 1": 32, "pass 2": 8}
