"""What a script probably means otherwise than a step takes it is told once, at its line; a right program is not told.

`BATCHES` gives (x, y) of 48 samples with three classes, some of whose targets are ignored where a case says so.
"""

# ruff: noqa: PT012 (a whole loop is what raises)

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from tests.workers.conftest import Unisono
from tests.workers.static_team import AloneRun

Inside = Callable[[Any, nn.Module, Tensor, Tensor], object]
M = 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())  # type: ignore[no-any-return]


def data(*, ignores: int | None = None) -> TensorDataset:
    draw = torch.Generator().manual_seed(2)
    x, y = torch.randn(48, 6, generator=draw), torch.randint(0, 3, (48,), generator=draw)
    if ignores is not None:
        y[torch.rand(48, generator=draw) < 0.3] = ignores
    return TensorDataset(x, y)


def told(
    inside: Inside,
    *,
    ignores: int | None = None,
    collate: Callable[[Any], Any] | None = None,
    microbatches: int = M,
    **options: Any,
) -> list[str]:
    """What a run of four steps warns of, at a line of this file."""
    with warnings.catch_warnings(record=True) as caught, AloneRun(seed=1) as run:
        warnings.simplefilter("always")
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.track(model=model, optimizer=optimizer)
        options = {"batch_size": 16, "max_steps": 4, "epochs": 2, "collate": collate, **options}
        chosen = data(ignores=ignores)
        for step in run.steps(chosen, microbatches=microbatches, shuffle=False, **options):
            for x, y in step:
                inside(step, model, x, y)
            optimizer.step()
    assert {each.filename for each in caught} <= {__file__}
    return [str(each.message) for each in caught]


WEIGHTS = torch.tensor([1.0, 5.0, 0.5])


def by_class(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y, weight=WEIGHTS).backward()


def ignoring(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    nn.CrossEntropyLoss(ignore_index=255)(model(x), y).backward()


def smoothed(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    (
        0.5 * F.cross_entropy(model(x), y, weight=WEIGHTS, label_smoothing=0.1) + 0.1 * model(x).square().mean()
    ).backward()


def nll(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.nll_loss(model(x).log_softmax(1), y, WEIGHTS).backward()


def images(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    scores = model(x)[:, :, None, None].expand(-1, -1, 2, 2)
    F.cross_entropy(scores, y[:, None, None].expand(-1, 2, 2), ignore_index=255).backward()


@pytest.mark.parametrize(
    ("inside", "ignores", "line"),
    [
        (by_class, None, "step.backward(loss, weight=w[y].sum()), with w the weights of the classes"),
        (smoothed, None, "weight=w[y].sum())"),
        (nll, None, "weight=w[y].sum())"),
        (ignoring, 255, "step.backward(loss, weight=(y != 255).sum()), with y the targets"),
        (images, 255, "weight=(y != 255).sum())"),
        (
            lambda step, model, x, y: F.cross_entropy(model(x), y, weight=WEIGHTS, ignore_index=-1).backward(),
            -1,
            "weight=w[y[y != -1]].sum())",
        ),
    ],
    ids=["by class", "smoothed", "nll", "ignoring", "images", "both"],
)
def test_a_mean_that_is_not_one_over_samples_is_told_once(inside: Inside, ignores: int | None, line: str) -> None:
    (found,) = told(inside, ignores=ignores)
    assert line in found
    assert "are not those of one process with the whole batch" in found
    assert told(inside, ignores=ignores, microbatches=1) == [], "one micro-batch is the whole batch"
    assert told(inside, ignores=ignores, reduction="sum") == []


@pytest.mark.filterwarnings("ignore:the loss of step 0")
def test_its_advice_gives_the_gradient_of_one_process() -> None:
    def gradients(inside: Inside, microbatches: int, ignores: int | None) -> list[Tensor]:
        found: list[Tensor] = []
        with AloneRun(seed=1) as run:
            model = Model()
            run.track(model=model)
            loader = data(ignores=ignores)
            for step in run.steps(loader, batch_size=16, microbatches=microbatches, max_steps=1, shuffle=False):
                for x, y in step:
                    inside(step, model, x, y)
                found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        return found

    def weighted(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
        step.backward(F.cross_entropy(model(x), y, weight=WEIGHTS), weight=WEIGHTS[y].sum())

    def counted(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
        step.backward(F.cross_entropy(model(x), y, ignore_index=255), weight=(y != 255).sum())

    def each(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
        step.backward(F.cross_entropy(model(x), y, weight=WEIGHTS))

    for inside, ignores in ((weighted, None), (counted, 255)):
        whole, cut = gradients(inside, 1, ignores), gradients(inside, M, ignores)
        torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-7)
    whole, cut = gradients(each, 1, None), gradients(each, M, None)
    assert not all(torch.allclose(a, b, rtol=1e-3) for a, b in zip(whole, cut, strict=True))


def one_by_one(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    for index in range(len(x)):
        F.cross_entropy(model(x[index : index + 1]), y[index : index + 1]).backward()


def test_a_backward_for_each_sample_is_told_once() -> None:
    (found,) = told(one_by_one)
    assert found.startswith("backward was called 4 times in step 0, micro-batch 0, once for each of its 4 samples")
    assert "the mean over the sums of 4 micro-batches. Add reduction='sum' to run.steps" in found
    assert told(one_by_one, reduction="sum") == []
    assert told(one_by_one, microbatches=1) == []


def drops(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate([one for one in samples if one[0][0] < 1.2])


def crops(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate([one for one in samples for _ in range(1 + int(one[0][0] > 1.2))])


def plain(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize("collate", [drops, crops])
def test_a_batch_that_has_not_a_row_for_each_sample_is_told_once(collate: Callable[[Any], Any]) -> None:
    (found,) = told(plain, collate=collate)
    assert ("has 3 rows for 4 samples" if collate is drops else "has 5 rows for 4 samples") in found
    assert "step.backward(loss, weight=len(y))" in found
    counted = lambda step, model, x, y: step.backward(F.cross_entropy(model(x), y), weight=len(y))  # noqa: E731
    assert told(counted, collate=collate) == []


def attacked(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """FGSM, whose first gradient is meant for the input only."""
    delta = torch.zeros_like(x).requires_grad_()
    F.cross_entropy(model((x + delta).clamp(-3, 3)), y).backward()
    assert delta.grad is not None
    F.cross_entropy(model((x + 0.1 * delta.grad.sign()).clamp(-3, 3)), y).backward()


def attacked_further(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """PGD: the example of each iteration is a tensor of its own."""
    near = x
    for _ in range(2):
        near = near.detach().requires_grad_()
        F.cross_entropy(model(near), y).backward()
        assert near.grad is not None
        near = near + 0.1 * near.grad.sign()
    F.cross_entropy(model(near.detach()), y).backward()


@pytest.mark.parametrize("inside", [attacked, attacked_further])
def test_a_gradient_for_an_input_that_is_summed_is_told_once(inside: Inside) -> None:
    (found,) = told(inside)
    assert "write torch.autograd.grad(loss, x) instead; if both are meant, write step.backward(loss)" in found


# -- programs that are right -------------------------------------------------------------------------


def weighted(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    step.backward(F.cross_entropy(model(x), y, weight=WEIGHTS), weight=WEIGHTS[y].sum())


def mixed_up(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    scores = model(0.7 * x + 0.3 * x.flip(0))
    (0.7 * F.cross_entropy(scores, y) + 0.3 * F.cross_entropy(scores, y.flip(0))).backward()


def two_losses(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """A padded sequence, say, with the loss that balances experts."""
    loss = F.cross_entropy(model(x), y, ignore_index=255) + 0.01 * model(x).softmax(1).mean(0).square().sum()
    step.backward(loss, weight=(y != 255).sum())


def shifted(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Of each sequence the last target is ignored: all have as many."""
    targets = torch.stack([y, y, torch.full_like(y, -100)], 1)
    F.cross_entropy(model(x).repeat_interleave(3, 0), targets.flatten()).backward()


def real_and_fake(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """As many calls as samples, where micro-batches have two."""
    F.binary_cross_entropy_with_logits(model(x)[:, 0], torch.ones(len(x))).backward()
    F.binary_cross_entropy_with_logits(model(x + 1)[:, 0], torch.zeros(len(x))).backward()


def chunks(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Truncated backpropagation, with as many parts as samples."""
    state = torch.zeros_like(x).requires_grad_()
    for _ in range(4):
        F.cross_entropy(model(x + state), y).backward()
        state = (state + 1).detach().requires_grad_()


def slopes(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Physics: the derivative by the input is in the first loss, and the second one is at a border."""
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().mean().backward()
    model(torch.zeros(4, 6)).square().mean().backward()


def frozen_input(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """What reentrant checkpoints and adapters do: an input needs a gradient, and two losses share the forward."""
    scores = model(x.requires_grad_())
    F.cross_entropy(scores, y).backward(retain_graph=True)
    scores.square().mean().backward()


def pairs(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Two passes, each with an input of its own that needs a gradient."""
    F.cross_entropy(model(x.clone().requires_grad_()), y).backward()
    F.cross_entropy(model((x + 1).requires_grad_()), y).backward()


def clean_and_attacked(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    x.requires_grad_()
    step.backward(F.cross_entropy(model(x), y))
    assert x.grad is not None
    step.backward(F.cross_entropy(model((x + 0.1 * x.grad.sign()).detach()), y))


def own_factor(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """The script makes sums of the means by itself, and divides by the same number everywhere."""
    (F.cross_entropy(model(x), y, weight=WEIGHTS) * float(WEIGHTS[y].sum()) / 7.5).backward()


def positives(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    hot = F.one_hot(y, 3).float()
    F.binary_cross_entropy_with_logits(model(x), hot, pos_weight=WEIGHTS, weight=WEIGHTS).backward()


def soft(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), F.one_hot(y, 3).float(), weight=WEIGHTS).backward()


def equal_weights(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y, weight=torch.full((3,), 0.3)).backward()


def own_mean(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y, weight=WEIGHTS, reduction="none").mean().backward()


def recomputed(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    checkpoint(lambda inputs: F.cross_entropy(model(inputs), y), x, use_reentrant=False).backward()


def boxes(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Detection: as many rows as were found, whose number differs, and several losses of these."""
    rows = 2 + int(y.sum()) % 3
    (F.cross_entropy(model(x[:rows]), y[:rows]) + model(x).square().mean()).backward()


RIGHT: Sequence[Inside] = (
    weighted, mixed_up, shifted, real_and_fake, chunks, slopes, frozen_input, pairs, clean_and_attacked, own_factor,
    positives, soft, equal_weights, own_mean, recomputed, boxes, ignoring, images,
)  # fmt: skip


@pytest.mark.parametrize("inside", RIGHT, ids=lambda inside: inside.__name__)
def test_a_right_program_is_not_told(inside: Inside) -> None:
    assert told(inside, microbatches=8 if inside is real_and_fake else M) == []


def test_a_right_program_with_padding_is_not_told() -> None:
    assert told(two_losses, ignores=255) == []


def crossed(samples: list[Any]) -> Any:
    """Sequences first: three long, or five."""
    x, y = torch.utils.data.default_collate(samples)
    length = 3 if y.sum() % 2 else len(y)
    return x.expand(length, *x.shape), y.expand(length, len(y))


def test_other_batches_are_not_told() -> None:
    first = lambda step, model, x, y: plain(step, model, x[0], y[0])  # noqa: E731
    assert told(first, collate=crossed) == []
    ten_crops = lambda samples: torch.utils.data.default_collate([one for one in samples for _ in range(3)])  # noqa: E731
    assert told(plain, collate=ten_crops) == []


# -- a last micro-batch of one sample ----------------------------------------------------------------


def normalized(norm: nn.Module, **options: Any) -> list[str]:
    """What a run of one epoch warns of, until it ends or torch raises."""
    with warnings.catch_warnings(record=True) as caught, contextlib.suppress(ValueError), AloneRun(seed=1) as run:
        warnings.simplefilter("always")
        model = nn.Sequential(nn.Linear(6, 4), nn.Unflatten(1, (2, 2)), norm, nn.Flatten(), nn.Linear(4, 3))
        run.track(model=model)
        for step in run.steps(data(), **{"batch_size": 20, "microbatches": 5, "shuffle": False, **options}):
            for x, y in step:
                F.cross_entropy(model(x[: len(y)]), y).backward()
    return [str(each.message) for each in caught]


def test_a_last_micro_batch_that_is_too_small_for_batch_norm_is_foretold() -> None:
    """48 samples: the last of the micro-batches of 47 // 47 has one."""
    flat = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4))
    (found,) = normalized(flat, batch_size=47, microbatches=1)
    assert found.startswith("the last batch of an epoch (step 1) has 1 sample, and its micro-batch 0 has one")
    assert "drop_last=True, or give another number of microbatches" in found
    for options in ({}, {"batch_size": 47, "microbatches": 1, "drop_last": True}, {"max_steps": 1, "batch_size": 47}):
        assert normalized(flat, **{"microbatches": 1, **options}) == []
    assert normalized(nn.BatchNorm1d(2), batch_size=47, microbatches=1) == [], "it has two values for each channel"
    assert normalized(flat.eval(), batch_size=47, microbatches=1) == []


def test_torch_s_error_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with AloneRun(seed=1) as run:
            model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
            run.track(model=model)
            for step in run.steps(data(), batch_size=47, microbatches=1, shuffle=False):
                for x, y in step:
                    F.cross_entropy(model(x), y).backward()
    assert caught.value.__notes__ == [
        "(in step 1, micro-batch 0, samples 47)",
        "(a BatchNorm in training needs two samples, and this micro-batch has one: add drop_last=True, or give another "
        "number of microbatches)",
    ]


# -- the check ---------------------------------------------------------------------------------------


SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

with unisono.Run(seed=1) as run:
    data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data, batch_size=16, microbatches=4):
        for x, y in step:
            F.cross_entropy(model(x), y, weight=torch.tensor([1.0, 2.0, 3.0])).backward()
        optimizer.step()
"""


@pytest.mark.usefixtures("nursery")
def test_the_check_fails_on_it(unisono: Unisono, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = unisono("check", str(script), "--steps", "2", "--json")
    assert command.wait() == 1
    verdict = json.loads("\n".join(command.out))
    (doubt,) = verdict["doubts"]
    assert verdict["keeps"]
    assert SCRIPT.splitlines()[doubt["line"] - 1].endswith(".backward()")
    assert "weight=w[y].sum()" in doubt["text"]
