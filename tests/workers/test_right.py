"""The result is what plain PyTorch computes over the whole global batch, in float64, to 1e-10."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from tests.workers.models import Cnn, Images, Mlp, Rare, vectors
from tests.workers.processes import Seat
from tests.workers.static_team import AloneRun, Place, train_on
from unisono.core.cursor import Cursor
from unisono.core.errors import StepError
from unisono.core.orders import Shuffled
from unisono.engine.exchange.alone import Alone
from unisono.engine.exchange.slots import Slots
from unisono.engine.microbatch.folding import GradientFolder
from unisono.engine.rounds.life import Rounds
from unisono.engine.state.buffers import Buffers
from unisono.record.journal import read

SEED = 11
EXACT = 1e-10
"""Sums of a thousand numbers of about 1 in another order differ by some 1e-14; AdamW enlarges that."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def global_batches(num_samples: int, batch_size: int, microbatches: int, epochs: int) -> Iterator[list[list[int]]]:
    """The samples of each step, by micro-batch: the order of the run, not its arithmetic."""
    cursor = Cursor(order=Shuffled.of(num_samples), batch_size=batch_size, microbatches=microbatches, seed=SEED)
    for step in range(cursor.steps_per_epoch * epochs):
        yield [cursor.indices(step, leaf) for leaf in range(cursor.position(step).num_leaves)]


def copy_of(make: Callable[[], nn.Module]) -> nn.Module:
    """As the run makes it, because of the seed."""
    with AloneRun(seed=SEED):
        return make()


def assert_equal_parameters(model: nn.Module, reference: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=EXACT, msg=lambda text, name=name: f"{name}: {text}")


# -- against a plain loop ----------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 4, 6, 24])
def test_training_is_that_of_a_plain_loop(microbatches: int) -> None:
    """AdamW over two epochs, each of which ends with a partial batch (56 = 24 + 24 + 8)."""
    data, losses = vectors(dtype=torch.float64), []
    with AloneRun(seed=SEED) as run:
        model = Mlp().double()
        optimizer = AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(data, batch_size=24, microbatches=microbatches, epochs=2):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(step.loss)

    reference, x, y = copy_of(lambda: Mlp().double()), *data.tensors
    optimizer = AdamW(reference.parameters(), lr=0.01)
    expected = []
    for leaves in global_batches(56, 24, microbatches, epochs=2):
        samples = [index for leaf in leaves for index in leaf]
        optimizer.zero_grad()
        loss = F.cross_entropy(reference(x[samples]), y[samples])
        loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        expected.append(loss.item())

    assert losses == pytest.approx(expected, rel=0, abs=EXACT)
    assert_equal_parameters(model, reference)


def tokens() -> TensorDataset:
    """From 0 to 9 of 10 tokens of a sequence count."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 17, (40, 10), generator=generator)
    wanted = torch.randint(0, 17, (40, 10), generator=generator)
    counted = torch.randint(0, 10, (40, 1), generator=generator)
    return TensorDataset(tokens, wanted.masked_fill(torch.arange(10) >= counted, -100))


def language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(17, 8), nn.Tanh(), nn.Linear(8, 17)).double()


def token_loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    inputs, wanted = batch
    loss = F.cross_entropy(model(inputs).transpose(1, 2), wanted, ignore_index=-100)
    return loss, int((wanted != -100).sum())


def test_uneven_tokens_are_averaged_once_over_the_global_batch() -> None:
    """The mean over all tokens, not the mean of the micro-batches' means (transformers issue 34191)."""
    data, losses = tokens(), []
    with AloneRun(seed=SEED) as run:
        model = language_model()
        optimizer = AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(data, batch_size=16, microbatches=8, epochs=2):
            for batch in step:
                loss, weight = token_loss(model, batch)
                step.backward(loss, weight=weight)
            optimizer.step()
            losses.append(step.loss)

    right, wrong = copy_of(language_model), copy_of(language_model)
    updates = {right: AdamW(right.parameters(), lr=0.01), wrong: AdamW(wrong.parameters(), lr=0.01)}
    expected, mistaken = [], []
    for leaves in global_batches(40, 16, 8, epochs=2):
        loss, _ = token_loss(right, data[[index for leaf in leaves for index in leaf]])
        expected.append(loss.item())
        means = [(mean, weight) for mean, weight in (token_loss(wrong, data[leaf]) for leaf in leaves) if weight]
        mean_of_means = torch.stack([mean for mean, _ in means]).mean()
        mistaken.append(mean_of_means.item())
        for model_loss, update in ((loss, updates[right]), (mean_of_means, updates[wrong])):
            update.zero_grad()
            model_loss.backward()
            update.step()

    assert losses == pytest.approx(expected, rel=0, abs=EXACT)
    assert_equal_parameters(model, right)
    assert max(abs(a - b) for a, b in zip(losses, mistaken, strict=True)) > 1e-3  # the test could tell


def test_several_losses_of_a_micro_batch_are_added() -> None:
    data = vectors(dtype=torch.float64)
    with AloneRun(seed=SEED) as run:
        model = Mlp().double()
        run.track(model=model)
        for step in run.steps(data, batch_size=24, microbatches=6, max_steps=1):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y), weight=0.1 * len(y))
                step.backward(0.3 * model.first(x).square().mean(), weight=0.1 * len(y))
    reference = copy_of(lambda: Mlp().double())
    x, y = data[[index for leaf in next(global_batches(56, 24, 6, 1)) for index in leaf]]
    loss = F.cross_entropy(reference(x), y) + 0.3 * reference.first(x).square().mean()
    loss.backward()
    assert step.loss == pytest.approx(loss.item(), rel=0, abs=EXACT)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=EXACT)


def test_losses_of_a_micro_batch_may_share_a_graph() -> None:
    with AloneRun(seed=SEED) as run:
        model = Mlp().double()
        run.track(model=model)
        for step in run.steps(vectors(dtype=torch.float64), batch_size=24, microbatches=4, max_steps=2):
            both = []
            for x, y in step:
                output = model(x)
                step.backward(F.cross_entropy(output, y), retain_graph=True)
                step.backward(0.3 * output.square().mean())
                both.append((x, y))
            ours = [parameter.grad.clone() for parameter in model.parameters()]
            output, y = model(torch.cat([x for x, _ in both])), torch.cat([y for _, y in both])
            loss = F.cross_entropy(output, y) + 0.3 * output.square().mean()
            for found, right in zip(ours, torch.autograd.grad(loss, list(model.parameters())), strict=True):
                torch.testing.assert_close(found, right, rtol=0, atol=EXACT)


NANS = (torch.full((4,), math.nan), torch.tensor([-1 << 22] * 4, dtype=torch.int32).view(torch.float32))


class Positions(nn.Module):
    """A learned position is added with ``unsqueeze(0)``: its gradient is a view of that of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.position = nn.Parameter(torch.randn(5, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, words: Tensor) -> Tensor:
        hidden = torch.tanh(self.embed(words)) + self.position.unsqueeze(0)
        loss: Tensor = self.head(hidden.sin()).mean()
        return loss


def _of_positions(seat: Seat | None, place: Place | None) -> list[list[float]]:
    """Gradients of a step of eight samples, each a micro-batch."""
    with place.run(seed=1) if place is not None else AloneRun(seed=1) as run:
        model = copy_of(Positions)
        run.track(model=model)
        data = list(torch.randn(8, 5, 3, generator=torch.Generator().manual_seed(1)))
        for step in run.steps(data, batch_size=8, microbatches=8, shuffle=False):
            for words in step:
                step.backward(model(words))
            found = [
                parameter.grad.flatten().tolist() for parameter in model.parameters() if parameter.grad is not None
            ]
    reference = copy_of(Positions)
    (sum(reference(words.unsqueeze(0)) for words in data) / 8).backward()
    for mean, parameter in zip(found, reference.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(torch.tensor(mean).view_as(parameter), parameter.grad)
    return found


def test_gradients_that_share_memory_do_not_spoil_each_other() -> None:
    alone = _of_positions(None, None)
    for size in (2, 4):
        assert train_on("shared", size, _of_positions) == [alone] * size


def test_gradients_that_share_memory_are_added_for_several_losses() -> None:
    with AloneRun(seed=1) as run:
        model = nn.Module()
        model.a, model.b = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3, 2))
        run.track(model=model)
        for step in run.steps([torch.ones(6)], batch_size=1, microbatches=1):
            for ones in step:
                for _ in range(2):
                    step.backward(((model.a.view(6) + model.b.view(6)) * ones.view(6)).sum())
            assert model.a.grad.flatten().tolist() == model.b.grad.flatten().tolist() == [2.0] * 6


def _sum_of_nans(order: tuple[int, int]) -> list[int]:
    parameter = nn.Parameter(torch.ones(4))
    slots = Slots()
    folder = GradientFolder([("p", parameter)], Buffers([], {}), slots=slots)
    exchange = Alone(torch.device("cpu"))
    exchange.prepare(folder.layout)
    folder.start_step(2)
    for leaf in order:
        folder.start_leaf(leaf, exchange.slot)
        folder.backward((parameter * NANS[leaf]).sum(), torch.tensor(1.0))
        folder.finish_leaf(1.0, 1.0)
    (slot,) = slots.nodes.values()
    return slot.gradients[0].view(torch.int32).tolist()


def test_the_bits_of_a_nan_do_not_depend_on_the_order() -> None:
    """A scaler lets them pass. The sum of two has the bits of one of them: always of the same."""
    assert NANS[0].view(torch.int32).tolist() != NANS[1].view(torch.int32).tolist()
    assert _sum_of_nans((0, 1)) == _sum_of_nans((1, 0))


class Switch(Mlp):
    """A flag that every micro-batch turns over."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("alive", torch.ones(3, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        self.alive[0] = False
        output: Tensor = super().forward(x)
        return output


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_a_flag_that_several_micro_batches_turn_over_is_turned_over(microbatches: int) -> None:
    with AloneRun(seed=SEED) as run:
        model = Switch()
        run.track(model=model)
        for step in run.steps(vectors(), batch_size=24, microbatches=microbatches, max_steps=1):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
        assert model.alive.tolist() == [False, True, True]


class Repeated(Mlp):
    """Applies one layer three times, and computes it again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.middle, self.reentrant = nn.Linear(33, 33), reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(3):
            hidden = checkpoint(lambda z: torch.tanh(self.middle(z)), hidden, use_reentrant=self.reentrant)
        result: Tensor = self.last(hidden)
        return result


def _of_repeated(seat: Seat | None, place: Place | None, reentrant: bool) -> list[list[float]]:
    with AloneRun(seed=SEED) if place is None else place.run(seed=SEED) as run:
        model = Repeated(reentrant).double()
        run.track(model=model)
        found = []
        for step in run.steps(vectors(dtype=torch.float64), batch_size=24, microbatches=4, max_steps=2):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).tolist())
    return found


def test_a_gradient_that_one_backward_gives_in_parts_counts_whole() -> None:
    """Reentrant checkpoints of one layer add to its gradient one by one, each in a backward of its own."""
    alone = _of_repeated(None, None, True)
    for ours, right in zip(alone, _of_repeated(None, None, False), strict=True):
        assert ours == pytest.approx(right, rel=0, abs=EXACT)
    assert train_on("shared", 3, _of_repeated, True) == [alone] * 3


def _penalised(known: int | None) -> list[list[float]]:
    """A second loss in every second step, the first of which is not the run's first if ``known`` is given."""
    with AloneRun(seed=SEED) as run:
        model = Mlp()
        run.track(model=model)
        if known is not None:
            run._tracked.calls.known[0] = known
        found = []
        for step in run.steps(vectors(), batch_size=24, microbatches=4, max_steps=3):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
                if step.number % 2 == (known is not None):
                    step.backward(model(x).square().mean())
            found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).tolist())
    return found


def test_a_loss_that_comes_only_in_some_steps() -> None:
    """The first micro-batch of a worker that has joined may have fewer losses than those before it."""
    assert all(_penalised(None))
    assert all(_penalised(2))
    with pytest.raises(StepError, match="2 times for this micro-batch and 1 times"):
        _penalised(0)


def _more_parts_than_before() -> None:
    with AloneRun(seed=SEED) as run:
        model = Repeated(False)
        run.track(model=model)
        for step in run.steps(vectors(), batch_size=24, microbatches=4, max_steps=1):
            for x, y in step:
                model.reentrant = step.microbatch != 0
                step.backward(F.cross_entropy(model(x), y))


def test_more_parts_than_in_the_first_micro_batch_are_refused() -> None:
    """What is folded cannot be folded again: it would count the micro-batches before it twice."""
    with pytest.raises(StepError, match=r"'model\.middle\.\w+' got its gradient in more parts .* use_reentrant=False"):
        _more_parts_than_before()


def test_weights_change_the_mean_and_not_its_size() -> None:
    """A common factor of all weights changes nothing but the total."""
    gradients = []
    for factor in (1.0, 0.37, 1e6):
        with AloneRun(seed=SEED) as run:
            model = Mlp().double()
            run.track(model=model)
            for step in run.steps(vectors(dtype=torch.float64), batch_size=24, microbatches=6, max_steps=1):
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y), weight=factor * (y.sum() + 1).double())
            gradients.append(model.first.weight.grad)
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=0, atol=EXACT)


# -- which parameters have a gradient ----------------------------------------------------------------


def test_a_parameter_that_nothing_used_keeps_no_gradient() -> None:
    """And one that only some micro-batches used has the mean over all of them."""
    data = vectors(dtype=torch.float64)
    with AloneRun(seed=SEED) as run:
        model = Rare().double()
        optimizer = AdamW(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(data, batch_size=24, microbatches=6, max_steps=2):
            calls = 0
            for x, y in step:
                calls += bool(x[0, 0] > 0.5)
                step.backward(F.cross_entropy(model(x), y))
            assert model.unused.grad is None
            assert 0 < calls < 6
            reference = copy_of(lambda: Rare().double())
            reference.load_state_dict(model.state_dict())
            leaves = list(global_batches(56, 24, 6, 1))[step.number]
            sum(F.cross_entropy(reference(data[leaf][0]), data[leaf][1]) / 6 for leaf in leaves).backward()
            torch.testing.assert_close(model.rare.weight.grad, reference.rare.weight.grad, rtol=0, atol=EXACT)
            optimizer.step()
    assert torch.equal(model.unused, torch.ones(5, dtype=torch.float64))  # no weight decay either
    assert model.unused not in optimizer.state


def test_frozen_parameters_have_no_gradient_and_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = []
    use = Rounds.use_layout
    monkeypatch.setattr(Rounds, "use_layout", lambda rounds, layout: (layouts.append(layout), use(rounds, layout))[1])
    with AloneRun(seed=SEED) as run:
        model = nn.Sequential(nn.Linear(12, 1000), nn.Linear(1000, 4))
        model[0].requires_grad_(False)
        optimizer = AdamW(model.parameters())
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(vectors(), batch_size=24, microbatches=4, max_steps=2):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            assert model[0].weight.grad is None
            optimizer.step()
    (layout,) = layouts
    assert [entry.name for entry in layout.gradients] == ["model.1.weight", "model.1.bias"]
    assert layout.num_rows < 4 * 4004 / 512 + 10


def test_what_was_frozen_in_mid_run_is_not_updated_any_more() -> None:
    """Its last gradient is gone, so that no optimizer applies it again."""
    with AloneRun(seed=SEED) as run:
        model = Mlp()
        optimizer = AdamW(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(vectors(), batch_size=24, microbatches=4, max_steps=3):
            if step.number == 1:
                model.first.requires_grad_(False)
                kept = model.first.weight.detach().clone()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
    assert model.first.weight.grad is None
    assert torch.equal(model.first.weight, kept)


# -- what a loop may do ------------------------------------------------------------------------------


def _gradient(disturb: Callable[[str, AdamW], None]) -> list[Tensor | None]:
    with AloneRun(seed=SEED) as run:
        model = Rare()
        optimizer = AdamW(model.parameters())
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(vectors(), batch_size=24, microbatches=4, max_steps=2):
            disturb("head", optimizer)
            for x, y in step:
                disturb("before", optimizer)
                loss = F.cross_entropy(model(x), y)
                disturb("between", optimizer)
                step.backward(loss)
                disturb("twice", optimizer)
                step.backward(model.first(x).square().mean())
                disturb("after", optimizer)
            gradients = [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            disturb("end", optimizer)
    return gradients


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("place", ["head", "before", "between", "twice", "after", "end"])
def test_zero_grad_does_no_harm_anywhere(place: str, to_none: bool) -> None:
    expected = _gradient(lambda _, optimizer: None)
    found = _gradient(lambda now, optimizer: optimizer.zero_grad(set_to_none=to_none) if now == place else None)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def _clip_for_oneself(seat: Seat, place: Place) -> list[list[float]]:
    """Rank 1 makes its gradients nonsense in place; another step follows."""
    found = []
    with place.run(seed=SEED) as run:
        model = Mlp()
        run.track(model=model)
        for step in run.steps(vectors(), batch_size=24, microbatches=4, max_steps=3):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            run._rounds.team.exchange.all_gather(b"")
            if seat.rank == 1:
                for parameter in model.parameters():
                    parameter.grad.fill_(torch.nan)
            run._rounds.team.exchange.all_gather(b"")
            found.append([float(parameter.grad.sum()) for parameter in model.parameters()])
    return found


@pytest.mark.parametrize(("kind", "size"), [("shared", 2), ("shared", 4), ("gloo", 2), ("two-level", 3)])
def test_a_gradient_is_private(kind: str, size: int) -> None:
    """What a worker does to its gradients in place (clipping, unscaling) reaches nobody else, and no later step."""
    by_rank = train_on(kind, size, _clip_for_oneself)
    assert all(value != value for step in by_rank[1] for value in step)
    for rank in set(range(size)) - {1}:
        assert by_rank[rank] == by_rank[0]
        assert all(value == value for step in by_rank[rank] for value in step)


def test_an_early_end_of_the_outer_loop_keeps_the_last_step(tmp_path: Path) -> None:
    """`break` after the update (early stopping): its line is in the journal, and another loop may follow."""
    with AloneRun(tmp_path, seed=SEED) as run:
        model = Mlp()
        optimizer = AdamW(model.parameters())
        run.track(model=model, optimizer=optimizer)
        for epochs in (1, 2):
            for step in run.steps(vectors(), batch_size=24, microbatches=4, epochs=epochs):
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                if step.number_in_loop == 1:
                    break
    lines = list(read(tmp_path))
    assert [(line["kind"], line.get("step")) for line in lines[:-1]] == [("step", number) for number in range(4)]
    assert lines[-1]["ok"]


# -- buffers -----------------------------------------------------------------------------------------


def test_running_statistics_are_the_mean_of_what_the_micro_batches_would_have_made() -> None:
    data = TensorDataset(Images().images[:, :, :6, :6].double(), Images().labels)
    with AloneRun(seed=SEED) as run:
        model = Cnn().double()
        run.track(model=model)
        for step in run.steps(data, batch_size=24, microbatches=6, epochs=1):
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            for x, y in step:
                for name, buffer in model.named_buffers():
                    assert torch.equal(buffer, before[name]), "every micro-batch starts from the step's buffers"
                step.backward(F.cross_entropy(model(x), y))
            made, leaves = [], list(global_batches(56, 24, 6, 1))[step.number]
            for leaf in leaves:
                norm = nn.BatchNorm2d(5).double()
                norm.load_state_dict(
                    {**model.norm.state_dict(), **{n.removeprefix("norm."): b for n, b in before.items()}}
                )
                norm(model.conv(data[leaf][0]))
                made.append(norm)
            sizes = [len(leaf) for leaf in leaves]
            for name in ("running_mean", "running_var"):
                mean = sum(size * getattr(norm, name) for size, norm in zip(sizes, made, strict=True)) / sum(sizes)
                torch.testing.assert_close(getattr(model.norm, name), mean, rtol=0, atol=EXACT)
            assert model.norm.num_batches_tracked == before["norm.num_batches_tracked"] + len(leaves)


class Codebook(nn.Module):
    """Moves a large buffer in forward through `.data`, which no version counter notices, as codebooks do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()
        self.register_buffer("codes", torch.ones(70_000))

    def forward(self, x: Tensor) -> Tensor:
        self.codes.data.mul_(0.5).add_(x.mean())
        result: Tensor = self.inner(x) * self.codes[0]
        return result


def _codes(seat: Seat | None, place: Place | None) -> tuple[float, float]:
    with AloneRun(seed=SEED) if place is None else place.run(seed=SEED) as run:
        model = Codebook().double()
        run.track(model=model)
        for step in run.steps(vectors(dtype=torch.float64), batch_size=24, microbatches=4, max_steps=2):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
    return float(model.codes[0]), float(model.codes[-1])


def test_a_large_buffer_that_changes_unseen_moves_by_the_mean() -> None:
    data, right = vectors(dtype=torch.float64), 1.0
    for leaves in list(global_batches(56, 24, 4, 1))[:2]:
        right = 0.5 * right + float(data[[index for leaf in leaves for index in leaf]][0].mean())
    alone = _codes(None, None)
    assert alone == pytest.approx((right, right), rel=0, abs=EXACT)
    assert train_on("shared", 3, _codes) == [alone] * 3


class Cache(Mlp):
    """Keeps a table that grows with its input: a cache, not a state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < len(x):
            self.__dict__.pop("table", None)
            self.register_buffer("table", torch.ones(len(x)), persistent=False)
        return super().forward(x * self.table[: len(x), None])


def _cached(seat: Seat | None, place: Place | None, made: bool) -> tuple[int, list[float]]:
    with AloneRun(seed=SEED) if place is None else place.run(seed=SEED) as run:
        model = Cache()
        if not made:
            del model.table
            model.table = torch.zeros(0)  # a buffer from the first micro-batch on
        model.last.requires_grad_(False)
        run.track(model=model)
        for step in run.steps(vectors(), batch_size=24, microbatches=4, max_steps=3):
            if step.number == 2:
                model.last.requires_grad_(True)  # what is summed is laid out anew
            for x, y in step:
                x, y = (each[: 1 + step.microbatch] for each in (x, y))
                step.backward(F.cross_entropy(model(x), y), weight=1)
        return len(model.table), torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).tolist()


@pytest.mark.parametrize("made", [True, False])
def test_a_cache_may_have_another_size_on_every_worker(made: bool) -> None:
    size, right = _cached(None, None, made)
    by_rank = train_on("shared", 3, _cached, made)
    assert size == max(size for size, _ in by_rank) == 4
    assert len({size for size, _ in by_rank}) > 1  # the test could tell
    assert [gradient for _, gradient in by_rank] == [right] * 3


# -- scaled losses -----------------------------------------------------------------------------------


def test_a_scaler_finds_what_overflows_and_the_loss_is_recorded_without_it() -> None:
    with AloneRun(seed=SEED) as run:
        model = Mlp()
        optimizer = AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        run.track(model=model, optimizer=optimizer, scaler=scaler)
        for step in run.steps(vectors(), batch_size=24, microbatches=4, max_steps=2):
            before = model.first.weight.detach().clone()
            for x, y in step:
                step.backward(100 * F.cross_entropy(model(x), y), scaler=scaler)
            assert 10 < step.loss < 1000
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(model.first.weight, before), "an overflow skips the update"
    assert scaler.get_scale() == 2.0**125
