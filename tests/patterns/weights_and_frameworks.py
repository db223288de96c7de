"""Losses whose mean is over something else than samples, beside what plain PyTorch makes of them; and the habits of
programs that were written for other libraries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, AdamW, SparseAdam
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

import unisono
from tests.patterns.corpus import (
    Indexed,
    labelled,
    learn,
    num_correct,
    pattern,
    perceptron,
    sequences,
    still,
    weights_of,
)

CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 5.0])
Loss = Callable[..., Any]


def trained(run: unisono.Run, data: Dataset[Any], loss_of: Loss, lr: float = 0.1, **options: Any) -> Tensor:
    """Two epochs in the order of the data, by `loss.backward()`: `learn` with Unisono's lines."""
    model = still(perceptron())
    optimizer = SGD(model.parameters(), lr=lr)
    run.track(model=model, optimizer=optimizer)
    for _ in run.epochs(2):
        for step in run.steps(data, batch_size=24, shuffle=False, microbatches=6, **options):
            for batch in step:
                loss_of(model, *batch).backward()
            optimizer.step()
    return weights_of(model)


def trained_by_weight(run: unisono.Run, data: Dataset[Any], loss_of: Loss, count: Callable[..., Any]) -> Tensor:
    """The same, by `step.backward(loss, weight=...)`."""
    model = still(perceptron())
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data, batch_size=24, shuffle=False, microbatches=6, epochs=2):
        for batch in step:
            step.backward(loss_of(model, *batch), weight=count(*batch))
        optimizer.step()
    return weights_of(model)


def partly_labelled() -> TensorDataset:
    """Two thirds of the labels are missing (-100), and all of the second batch."""
    x, y = labelled().tensors
    y = torch.where(torch.arange(len(y)) % 3 == 0, y, -100)
    y[24:48] = -100
    return TensorDataset(x, y)


def half_labelled() -> TensorDataset:
    """A label is missing here and there; no micro-batch is without one."""
    x, y = labelled().tensors
    return TensorDataset(x, torch.where(torch.arange(len(y)) % 5 < 2, -100, y))


# -- weights -----------------------------------------------------------------------------------------


def class_weighted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A mean over the weights of the classes."""
    return F.cross_entropy(model(x), y, weight=CLASS_WEIGHTS)


@pattern(plain=lambda: learn(still(perceptron()), class_weighted, labelled()))
def class_weights_without_a_weight(run: unisono.Run) -> Tensor:
    """Class weights in the loss, and `loss.backward()`."""
    return trained(run, labelled(), class_weighted)


@pattern(plain=lambda: learn(still(perceptron()), class_weighted, labelled()))
def class_weights_with_their_sum(run: unisono.Run) -> Tensor:
    """Class weights in the loss, whose sum is the weight."""
    return trained_by_weight(run, labelled(), class_weighted, lambda x, y: CLASS_WEIGHTS[y].sum())


def smoothed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A mean over the labels that are there, smoothed."""
    return F.cross_entropy(model(x), y, ignore_index=-100, label_smoothing=0.1)


@pattern(plain=lambda: learn(still(perceptron()), smoothed, half_labelled()))
def ignored_labels_without_a_weight(run: unisono.Run) -> Tensor:
    """Labels that are ignored, label smoothing, and `loss.backward()`."""
    return trained(run, half_labelled(), smoothed)


@pattern(plain=lambda: learn(still(perceptron()), smoothed, half_labelled()))
def ignored_labels_with_their_number(run: unisono.Run) -> Tensor:
    """Labels that are ignored, label smoothing, and the number of the others as the weight."""
    return trained_by_weight(run, half_labelled(), smoothed, lambda x, y: (y != -100).sum())


def criterion_of_the_class(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """By a module that was made beforehand, in float64."""
    criterion = nn.NLLLoss(weight=CLASS_WEIGHTS.double(), ignore_index=1)
    loss: Tensor = criterion(model(x).double().log_softmax(1), y)
    return loss


@pattern(plain=lambda: learn(still(perceptron()), criterion_of_the_class, labelled()))
def class_weights_in_a_module_for_log_probabilities(run: unisono.Run) -> Tensor:
    """`nn.NLLLoss` with class weights and an ignored class, and `loss.backward()`."""
    return trained(run, labelled(), criterion_of_the_class)


def summed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A sum over samples."""
    return F.cross_entropy(model(x), y, reduction="sum")


@pattern(plain=lambda: learn(still(perceptron()), summed, labelled(), lr=0.004))
def sums_instead_of_means(run: unisono.Run) -> Tensor:
    """`reduction="sum"` in the loss and in `run.steps`."""
    return trained(run, labelled(), summed, lr=0.004, reduction="sum")


@pattern(plain=lambda: learn(still(perceptron()), summed, labelled(), lr=0.004))
def sums_that_nobody_was_told_of(run: unisono.Run) -> Tensor:
    """`reduction="sum"` in the loss only."""
    return trained(run, labelled(), summed, lr=0.004)


class Separate:
    """A loss with one backward for each sample of a batch, as for gradients that are clipped by sample."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, divides: bool) -> None:
        self.losses = [
            F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) / (len(x) if divides else 1) for i in range(len(x))
        ]

    def backward(self) -> None:
        for loss in self.losses:
            loss.backward()


@pattern(plain=lambda: learn(still(perceptron()), lambda *batch: Separate(*batch, True), labelled()))
def backward_per_sample_of_the_mean(run: unisono.Run) -> Tensor:
    """One backward for each sample, each divided by the number of samples of the batch."""
    return trained(run, labelled(), lambda *batch: Separate(*batch, True))


@pattern(plain=lambda: learn(still(perceptron()), lambda *batch: Separate(*batch, False), labelled(), lr=0.005))
def backward_per_sample_of_the_sum(run: unisono.Run) -> Tensor:
    """One backward for each sample, not divided: the sum of their gradients."""
    return trained(run, labelled(), lambda *batch: Separate(*batch, False), lr=0.005)


def without_the_broken(samples: list[Any]) -> Any:
    """Drop the samples that are broken: of each micro-batch some are whole."""
    return default_collate([sample for sample in samples if sample[0][0] < 0.8])


def entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean over samples."""
    return F.cross_entropy(model(x), y)


@pattern(plain=lambda: learn(still(perceptron()), entropy, labelled(), collate_fn=without_the_broken))
def collate_function_that_drops_samples(run: unisono.Run) -> Tensor:
    """Leaves broken samples out of the batch in the collate function, and calls `loss.backward()`."""
    return trained(run, labelled(), entropy, collate=without_the_broken)


def attacked(model: nn.Module, x: Tensor, y: Tensor, clears: bool, by_sign: bool) -> Tensor:
    """The loss of inputs that were moved along their gradient; `backward` of the clean loss has run before."""
    x = x.clone().requires_grad_()
    F.cross_entropy(model(x), y).backward()
    assert x.grad is not None
    moved = (x + 0.1 * (x.grad.sign() if by_sign else 5 * x.grad)).detach()
    if clears:
        for parameter in model.parameters():
            parameter.grad = None
    return F.cross_entropy(model(moved), y)


@pattern(plain=lambda: learn(still(perceptron()), lambda *batch: attacked(*batch, False, True), labelled()))
def fgsm_that_keeps_the_clean_gradient(run: unisono.Run) -> Tensor:
    """Trains on clean inputs and on those of FGSM, by two calls of `backward`."""
    return trained(run, labelled(), lambda *batch: attacked(*batch, False, True))


@pattern(plain=lambda: learn(still(perceptron()), lambda *batch: attacked(*batch, False, False), labelled()))
def inputs_moved_by_the_length_of_their_gradient(run: unisono.Run) -> Tensor:
    """The same, along the gradient of the inputs and not its sign: its length is that of a mean over the batch."""
    return trained(run, labelled(), lambda *batch: attacked(*batch, False, False))


@pattern
def fgsm_with_zero_grad(run: unisono.Run) -> Tensor:
    """Computes the clean gradient, moves the inputs, clears the gradients, and trains on the moved inputs."""
    model = still(perceptron())
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, shuffle=False, microbatches=6, epochs=2):
        for x, y in step:
            x.requires_grad_()
            F.cross_entropy(model(x), y).backward()
            moved = (x + 0.1 * x.grad.sign()).detach()
            optimizer.zero_grad()
            F.cross_entropy(model(moved), y).backward()
        optimizer.step()
    return weights_of(model)


def masked(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean over the samples that have a label; 0 where there is none."""
    return F.cross_entropy(model(x), y, ignore_index=-100, reduction="sum") / (y != -100).sum().clamp(min=1)


@pattern(plain=lambda: learn(still(perceptron()), masked, partly_labelled()), legs=("replaced",))
def batches_without_any_label(run: unisono.Run) -> Tensor:
    """Semi-supervised: the weight is the number of labels, which is 0 in all micro-batches of one batch."""
    return trained_by_weight(run, partly_labelled(), masked, lambda x, y: (y != -100).sum())


@pattern(plain=lambda: learn(still(perceptron()), masked, partly_labelled()))
def backward_only_where_there_is_a_label(run: unisono.Run) -> Tensor:
    """The same, with `if mask.any()` around loss and backward."""
    model = still(perceptron())
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(partly_labelled(), batch_size=24, shuffle=False, microbatches=6, epochs=2):
        for x, y in step:
            mask = y != -100
            if mask.any():
                step.backward(F.cross_entropy(model(x[mask]), y[mask]), weight=mask.sum())
        optimizer.step()
    return weights_of(model)


@pattern(legs=("resumed",))
def momentum_over_a_batch_of_weight_nothing(run: unisono.Run) -> list[Any]:
    """AdamW with clipping and a schedule over batches of which one has no label; logs what each step says of itself."""
    model = still(perceptron())
    optimizer = AdamW(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(partly_labelled(), batch_size=24, shuffle=False, microbatches=6, epochs=2):
        for x, y in step:
            step.backward(masked(model, x, y), weight=(y != -100).sum())
        if step.has_gradient:
            step.log({"norm": nn.utils.clip_grad_norm_(model.parameters(), 0.5)})
        optimizer.step()
    return [float(state["step"]) for state in optimizer.state.values()]


def two_losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A mean over the labels, and one over all samples."""
    logits, mask = model(x), y != -100
    return F.cross_entropy(logits[mask], y[mask]) + 0.1 * logits.square().mean()


@pattern(plain=lambda: learn(still(perceptron()), two_losses, half_labelled()))
def two_losses_added_of_which_one_is_masked(run: unisono.Run) -> Tensor:
    """Adds a mean over the labels to one over samples, and calls `loss.backward()`."""
    return trained(run, half_labelled(), two_losses)


@pattern(plain=lambda: learn(still(perceptron()), two_losses, half_labelled()))
def two_losses_each_with_its_weight(run: unisono.Run) -> Tensor:
    """Two calls of `step.backward` in a micro-batch, each with what its mean is over."""
    model = still(perceptron())
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(half_labelled(), batch_size=24, shuffle=False, microbatches=6, epochs=2):
        for x, y in step:
            logits, mask = model(x), y != -100
            step.backward(F.cross_entropy(logits[mask], y[mask]), weight=mask.sum(), retain_graph=True)
            step.backward(0.1 * logits.square().mean(), weight=len(x))
        optimizer.step()
    return weights_of(model)


def contrast(embeddings: Tensor, y: Tensor) -> Tensor:
    """Samples of a class are near to each other, of all those of the batch."""
    normal = F.normalize(embeddings, dim=1)
    return F.cross_entropy(normal @ normal.T / 0.5, (y[:, None] == y[None]).float().softmax(1))


@pattern(plain=lambda: learn(still(perceptron()), lambda model, x, y, _: contrast(model(x), y), Indexed(labelled())))
def contrastive_loss_over_the_whole_batch(run: unisono.Run) -> Tensor:
    """GradCache: all embeddings of the batch in one pass, by `Carried`; their slopes in the next."""
    model = still(perceptron())
    optimizer = SGD(model.parameters(), lr=0.1)
    bank, labels = unisono.Carried(torch.zeros(56, 3)), labelled().tensors[1]
    run.track(model=model, optimizer=optimizer, bank=bank)
    for step in run.steps(labelled(), batch_size=24, shuffle=False, microbatches=6, epochs=2):
        for x, _ in step:
            bank[step.indices] = embeddings = model(x)
            step.backward(embeddings.sum(), weight=0)
        batch = torch.arange(24 * step.index, 24 * step.index + step.num_samples)
        found = bank.rows[batch].clone().requires_grad_()
        (slopes,) = torch.autograd.grad(contrast(found, labels[batch]), found)
        for x, _ in step.again():
            own = slopes[step.indices - 24 * step.index]
            step.backward((model(x) * own).sum() * step.num_samples / len(x))
        optimizer.step()
    return weights_of(model)


@pattern
def batch_norm_with_one_sample_left(run: unisono.Run) -> None:
    """57 samples: the last batch has nine, which plain PyTorch trains on; its last micro-batch has one."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(57), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()


def eight_steps() -> Tensor:
    """Two epochs of three steps, and two steps of the third: more samples, in the order in which they come."""
    x, y = labelled().tensors
    data = [TensorDataset(x[part], y[part]) for part in [slice(0, 24), slice(24, 48), slice(48, 56)] * 3][:8]
    model = still(perceptron())
    optimizer = SGD(model.parameters(), lr=0.1)
    for part in data:
        optimizer.zero_grad()
        entropy(model, *part.tensors).backward()
        optimizer.step()
    return weights_of(model)


@pattern(plain=eight_steps, legs=("resumed", "replaced"))
def steps_over_the_end_of_an_epoch(run: unisono.Run) -> Tensor:
    """`max_steps=8` over a loader of three batches."""
    model = still(perceptron())
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(DataLoader(labelled(), batch_size=24), microbatches=6, max_steps=8):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return weights_of(model)


@pattern(legs=("resumed",))
def validation_every_few_of_many_steps(run: unisono.Run) -> list[Any]:
    """`max_steps=10` over a shuffled loader of three batches, a schedule of ten steps, validation in it."""
    model = still(perceptron())
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    steps = run.steps(DataLoader(labelled(), batch_size=24, shuffle=True), microbatches=6, max_steps=10)
    assert len(steps) == 10
    found = []
    for step in steps:
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        if step.number % 4 == 3:
            found = [
                step.epoch,
                step.index,
                run.evaluate(labelled(), lambda batch: num_correct(model, batch), batch_size=10),
            ]
    return found


def in_turn() -> Tensor:
    """Plain PyTorch of the next pattern."""
    model, (x, y) = two_headed(), labelled().tensors
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(6):
        part = slice(24 * (number % 3), 24 * (number % 3) + 24)
        optimizer.zero_grad()
        task_loss(model, x[part], y[part], number).backward()
        optimizer.step()
    return weights_of(model)


def two_headed() -> nn.ModuleDict:
    """A body for two tasks."""
    return still(nn.ModuleDict({"body": nn.Linear(8, 16), "classes": nn.Linear(16, 3), "inputs": nn.Linear(16, 8)}))


def task_loss(model: nn.ModuleDict, x: Tensor, y: Tensor, number: int) -> Tensor:
    """The tasks in turn; the other's head takes no part."""
    hidden = torch.tanh(model["body"](x))
    return F.mse_loss(model["inputs"](hidden), x) if number % 2 else F.cross_entropy(model["classes"](hidden), y)


@pattern(plain=in_turn, legs=("replaced",))
def two_tasks_in_turn(run: unisono.Run) -> Tensor:
    """Trains one task in even steps and another in odd ones, with momentum: the idle head stands still."""
    model = two_headed()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, shuffle=False, microbatches=6, epochs=2):
        for x, y in step:
            task_loss(model, x, y, step.number).backward()
        optimizer.step()
    return weights_of(model)


# -- programs of others ------------------------------------------------------------------------------


@pattern
def exit_within_the_loop(run: unisono.Run) -> None:
    """Leaves by `sys.exit(0)` as soon as the loss is small, in the middle of the loop."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step.number == 3 and step.loss < 100:
            sys.exit(0)


@pattern
def exit_after_a_dry_run_in_a_with_block(run: unisono.Run) -> None:
    """`exit()` in a `with` block after the first epoch, as a script for a look at it has it."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    with torch.autograd.set_detect_anomaly(False):
        for epoch in run.epochs(2):
            for step in run.steps(labelled(), batch_size=24, microbatches=6):
                for x, y in step:
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
            if epoch == 0:
                exit()


@pattern(legs=("resumed",))
def folds_with_names(run: unisono.Run) -> dict[str, Any]:
    """Cross-validation: a model for each fold, tracked by a name of its own, and the mean of the scores."""
    data, scores = labelled(72), {}
    for fold in range(3):
        model = perceptron()
        optimizer = SGD(model.parameters(), lr=0.1)
        run.track(**{f"model_{fold}": model, f"optimizer_{fold}": optimizer})
        held_out = range(24 * fold, 24 * fold + 24)
        rest = [index for index in range(72) if index not in held_out]
        for step in run.steps(Subset(data, rest), batch_size=24, microbatches=6):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
        correct = run.total("correct")
        for x, y in run.batches(Subset(data, held_out), batch_size=10):
            correct += (model(x).argmax(1) == y).sum()
        scores[f"fold {fold}"] = correct / 24
    return scores


def is_dist() -> bool:
    """As in every repository."""
    return dist.is_available() and dist.is_initialized()


def reduced(value: Tensor) -> Tensor:
    """The mean over processes, if there are several."""
    if is_dist() and dist.get_world_size() > 1:
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value


@pattern
def helpers_that_ask_whether_there_is_a_process_group(run: unisono.Run) -> None:
    """An average of losses over processes, by helpers for DDP, decides about the learning rate."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        meter: list[Tensor] = []
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            meter.append(reduced(loss.detach().clone()))
        optimizer.step()
        scheduler.step(float(torch.stack(meter).mean()) if meter else 0.0)


def macro_f1(confusion: Any) -> float:
    """As of scikit-learn: takes whatever numpy takes for a matrix."""
    c = numpy.asarray(confusion, dtype=float)
    return float(numpy.mean(2 * c.diagonal() / numpy.maximum(c.sum(0) + c.sum(1), 1)))


@pattern(legs=("resumed", "replaced"))
def confusion_matrix_for_numpy(run: unisono.Run) -> list[Any]:
    """Counts a confusion matrix by `run.total`, prints its F1, and sets the rate by it."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.2)
    run.track(model=model, optimizer=optimizer)
    scores: list[Any] = []
    for _ in run.epochs(3):
        for step in run.steps(labelled(), batch_size=24, microbatches=6):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
        confusion = run.total("confusion")
        for x, y in run.batches(labelled(30), batch_size=10):
            confusion += torch.bincount(3 * y + model(x).argmax(1), minlength=9).view(3, 3)
        score = macro_f1(confusion)
        optimizer.param_groups[0]["lr"] = 0.2 * (1.1 - score)
        scores += [
            score,
            f"{confusion[0, 0]:.0f}",
            float(confusion[1].sum()),
            torch.as_tensor(confusion).float().trace(),
        ]
    return scores


@pattern
def totals_of_the_training_as_numbers(run: unisono.Run) -> list[str]:
    """Sums in the training loop, formatted and compared as numbers, and one that is a vector."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.2)
    run.track(model=model, optimizer=optimizer)
    lines: list[str] = []
    for epoch in run.epochs(2):
        loss_sum, per_class = run.total("loss_sum"), run.total("per_class")
        for step in run.steps(labelled(), batch_size=24, microbatches=6):
            for x, y in step:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                loss_sum += loss.detach() * len(y)
                per_class += F.one_hot(model(x).argmax(1), 3).sum(0)
            optimizer.step()
        shares = numpy.asarray(per_class, dtype=float) / 56
        lines += [
            f"{epoch}: {loss_sum / 56:.4f} {float(loss_sum):.3f} {loss_sum:.3f} {shares.round(3)} {max(per_class)}"
        ]
    return lines


@pattern(legs=("replaced",))
def predictions_gathered_by_hand(run: unisono.Run) -> list[int]:
    """All predictions by the number of the sample, over `run.all_gather`, as the page on DDP says."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    own: dict[int, int] = {}
    for x, _, numbers in run.batches(Indexed(labelled(30)), batch_size=10):
        own.update(zip(numbers.tolist(), model(x).argmax(1).tolist(), strict=True))
    predictions = {number: one for part in run.all_gather(own) for number, one in part.items()}
    return [predictions[number] for number in range(30)]


@pattern(legs=("resumed", "replaced"))
def predictions_collected(run: unisono.Run) -> list[Any]:
    """Collects predictions and labels after each epoch, and chooses a threshold by them for the next."""
    model, kept = perceptron(), {"threshold": 0.5}
    optimizer = SGD(model.parameters(), lr=0.2)
    run.track(model=model, optimizer=optimizer, kept=kept)
    for _ in run.epochs(3):
        for step in run.steps(labelled(), batch_size=24, microbatches=6):
            for x, y in step:
                logits = model(x)
                (F.cross_entropy(logits, y) + 0.1 * (logits.softmax(1) - kept["threshold"]).relu().mean()).backward()
            optimizer.step()
        for x, y in run.batches(labelled(31), batch_size=10):
            run.collect(preds=model(x).softmax(1), labels=y)
        kept["threshold"] = run.once(lambda: float(run.collected("preds").amax(1).median()))
    labels = run.collected("labels")
    assert torch.equal(labels, labelled(31).tensors[1])
    return [kept["threshold"], run.collected("preds"), labels]


@pattern
def scores_of_all_samples_in_numpy(run: unisono.Run) -> Any:
    """Collects one score a sample of a loader that leaves out its last batch, and ranks them in numpy."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step.number == 1:
            for x, _ in run.batches(DataLoader(labelled(31), batch_size=10, drop_last=True)):
                run.collect(scores=model(x)[:, 0])
    return numpy.argsort(numpy.asarray(run.collected("scores")), kind="stable").tolist()


@pattern(legs=("replaced",))
def sparse_embeddings(run: unisono.Run) -> None:
    """A bag of words with `sparse=True`, trained by SparseAdam beside SGD."""
    words, head = nn.EmbeddingBag(13, 8, sparse=True), nn.Linear(8, 2)
    sparse, dense = SparseAdam(words.parameters(), lr=0.05), SGD(head.parameters(), lr=0.1)
    run.track(words=words, head=head, sparse=sparse, dense=dense)
    for step in run.steps(sequences(), batch_size=24, microbatches=6, epochs=2):
        for (tokens,) in step:
            F.cross_entropy(head(words(tokens)), tokens[:, 0] % 2).backward()
        sparse.step()
        dense.step()


class Ragged(Dataset[Tensor]):
    """Sentences of different lengths."""

    def __len__(self) -> int:
        return 56

    def __getitem__(self, index: int) -> Tensor:
        return sequences().tensors[0][index, : 3 + index % 7]


@pattern
def compiled_model_on_lengths_that_vary(run: unisono.Run) -> None:
    """A compiled model that sees batches of other lengths: each worker meets them in another order."""
    model = nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 13))
    optimizer = AdamW(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    compiled = torch.compile(model, backend="aot_eager")

    def padded(samples: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    for step in run.steps(Ragged(), batch_size=24, microbatches=6, collate=padded):
        for tokens in step:
            logits = compiled(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)
            step.backward(loss, weight=(tokens[:, 1:] != 0).sum())
        optimizer.step()


@pattern(legs=("replaced",))
def closure_for_every_optimizer(run: unisono.Run) -> None:
    """Hands a closure to `optimizer.step`, as Lightning does: to LBFGS first, to AdamW later."""
    model = perceptron()
    optimizers = [LBFGS(model.parameters(), lr=0.1, max_iter=3), AdamW(model.parameters(), lr=0.02)]
    run.track(model=model, first=optimizers[0], second=optimizers[1])
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        optimizer = optimizers[step.number // 3]

        def closure(step: unisono.Step = step, optimizer: Any = optimizer) -> float:
            optimizer.zero_grad()
            for x, y in step.again():
                F.cross_entropy(model(x), y).backward()
            return step.loss

        optimizer.step(closure)


class NativeScaler:
    """timm's: backward, clipping and the update in one call."""

    def __call__(
        self, loss: Tensor, optimizer: Any, clip_grad: float, parameters: Any, need_update: bool = True
    ) -> None:
        loss.backward()
        if need_update:
            nn.utils.clip_grad_norm_(parameters, clip_grad)
            optimizer.step()


@pattern
def update_in_the_scaler_of_timm(run: unisono.Run) -> None:
    """Leaves timm's `loss_scaler(...)` where it was: in the batch loop."""
    model, scaler = perceptron(), NativeScaler()
    optimizer = SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(labelled(), batch_size=24, microbatches=6, epochs=2):
        for x, y in step:
            optimizer.zero_grad()
            scaler(F.cross_entropy(model(x), y), optimizer, clip_grad=1.0, parameters=model.parameters())
